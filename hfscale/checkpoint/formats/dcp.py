"""Torch distributed checkpoints (DCP), read and written without a process group of their own.

`pickles.read_dcp_metadata` reads the metadata, which says what is stored where; each piece of a tensor is a torch
archive of its own. `tensor_ref` and `save_refs` serve every format that is based on DCP.

FSDP2's format, as Accelerate writes it, is two distributed checkpoints in one folder: `pytorch_model_fsdp_0` holds
{"model": {name: tensor}}, `optimizer_0` holds {"optimizer": {"state": {name: {key: tensor}}, "param_groups": [{…,
"params": [names]}]}}. DCP flattens both to names joined by dots.
"""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hfscale.checkpoint.formats.format import Format, Origin
from hfscale.checkpoint.formats.pieces import PieceLoadPlanner, Pieces, PieceSavePlanner
from hfscale.checkpoint.formats.view import (
    CheckpointView,
    ParameterGroup,
    TensorRef,
    check_names,
    saved_name,
)
from hfscale.checkpoint.pickles import Chunk, Entry, read_dcp_metadata
from hfscale.core import distributed
from hfscale.core.collectives import Channel
from hfscale.core.disk_errors import PROGRAM_ERRORS
from hfscale.errors import CheckpointError

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."


# ---- Any distributed checkpoint


def _read_value(folder: Path, chunk: Chunk) -> Any:
    """Read one stored piece: a part of a tensor, on the CPU, or a value that is not a tensor."""
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        stored = file.read(chunk.length)
    try:
        return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive raises exceptions of any type
        raise CheckpointError(
            f"{folder / chunk.file} cannot be read: {str(error).splitlines()[0][:200]}"
        ) from None


def tensor_ref(folder: Path, name: str, entry: Entry) -> TensorRef:
    """Return a reference to the tensor `name`, which is assembled from its pieces when it is read.

    Args:
        folder (`Path`): folder of the distributed checkpoint.
        name (`str`): name of the tensor, for error messages.
        entry (`Entry`): its entry in the metadata; it must be that of a tensor.

    Returns:
        `TensorRef`: the reference. Its `read` raises a `CheckpointError` if a piece is broken, has another shape than
            the metadata says, or is missing.
    """
    shape = entry.shape
    dtype = entry.dtype
    assert shape is not None
    assert dtype is not None

    def read() -> torch.Tensor:
        full = torch.empty(shape, dtype=dtype)
        covered = 0
        for chunk in entry.chunks:
            piece = _read_value(folder, chunk)
            if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != chunk.sizes:
                raise CheckpointError(
                    f"{folder / chunk.file}: '{name}' is not the piece that the metadata describes"
                )
            slices = tuple(
                slice(begin, begin + size)
                for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            full[slices] = piece
            covered += piece.numel()
        if covered != full.numel():
            raise CheckpointError(
                f"{folder}: {covered} of the {full.numel()} elements of '{name}' are stored"
            )
        return full

    return TensorRef(shape=shape, dtype=dtype, read=read)


@contextmanager
def dcp_errors() -> Iterator[None]:
    """Raise the error of the lowest failed rank, on every rank, in place of DCP's `CheckpointException`.

    DCP collects the errors of all ranks in a `CheckpointException`, which is a `BaseException` (torch 2.13), so that
    `except Exception` does not see that a disk was full.
    """
    try:
        yield
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise cause from None


def save_shards(
    state: Mapping[str, Any], folder: Path, channel: Channel, *, ranks_per_node: int | None = None
) -> None:
    """Write a distributed checkpoint of what all ranks hold, as `torch.distributed.checkpoint.save` writes it.

    torch's function exchanges the ranks' plans over one process group, in which gloo connects each rank with every
    other one. This calls torch's planner and storage writer in the same order (`torch.distributed.checkpoint.planner`)
    and exchanges the same objects over a channel.

    Args:
        state (`Mapping[str, Any]`): this rank's part: nested dictionaries of tensors, DTensors and plain values.
        folder (`Path`): the new checkpoint.
        channel (`Channel`): connects the ranks. Every rank must call it.
        ranks_per_node (`int`, *optional*): `folder` is another one on each node, and a node has so many ranks. If each
            node holds the same (HSDP with one replica per node), each writes all of it, in files of the same names and
            content; the first one has the metadata.

    Raises:
        Exception: as `Channel.agreed`, on all ranks: a file cannot be written, for example.
    """
    is_first = distributed.rank() == 0
    planner = PieceSavePlanner()
    # Copies tensors one by one. Otherwise torch copies ahead on the current stream wherever there is a GPU, and waits
    # for that stream, which is the training's, once per 10 MB even if all tensors are in host memory.
    storage = filesystem.FileSystemWriter(folder, per_thread_copy_ahead=0)
    metadata: Metadata | None = None
    writers: int | None = None  # ranks that together write everything; None: all
    with channel.agreed("save: plan"):
        planner.set_up_planner(dict(state), storage.storage_meta(), is_first)
        storage.set_up_storage_writer(is_first)
        own = storage.prepare_local_plan(planner.create_local_plan())

    def plan_of_each_rank(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata, writers
        if ranks_per_node is not None and _are_repeated(plans, ranks_per_node):
            writers = ranks_per_node
        copies = len(plans) // writers if writers else 1
        plans, metadata = planner.create_global_plan(plans[:writers])
        return storage.prepare_global_plan(plans) * copies

    plan = channel.distribute("save: plans", own, plan_of_each_rank)
    with channel.agreed("save: shards"):
        written = storage.write_data(planner.finish_plan(plan), planner).wait()

    def finish(results: list[list[WriteResult]]) -> list[None]:
        assert metadata is not None
        storage.finish(metadata, results[:writers])
        return [None] * len(results)

    channel.distribute("save: metadata", written, finish)


def _are_repeated(plans: list[SavePlan], period: int) -> bool:
    """Return whether each rank holds what the rank `period` before it holds."""
    held = [{item.index for item in plan.items} for plan in plans]
    return len(held) % period == 0 and held[period:] == held[:-period]


def load_pieces(folder: Path, wanted: Mapping[str, Pieces]) -> None:
    """Read what this rank holds of tensors, in place, from a distributed checkpoint of any layout.

    The ranks exchange nothing. Read the metadata with `read_dcp_metadata` before: here torch unpickles it.

    Args:
        folder (`Path`): the distributed checkpoint.
        wanted (`Mapping[str, Pieces]`): where the values go, by name in the checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    reader = FileSystemReader(folder)
    planner = PieceLoadPlanner(wanted)
    try:
        metadata = reader.read_metadata()
        planner.set_up_planner({}, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()
    except PROGRAM_ERRORS:
        raise
    except Exception as error:  # a broken archive raises exceptions of any type
        raise CheckpointError(
            f"{folder} cannot be read: {str(error).splitlines()[0][:200]}"
        ) from error


def save_refs(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write `tree` as a distributed checkpoint, reading one tensor at a time.

    Args:
        folder (`Path`): the new checkpoint.
        tree (`Mapping`): nested dictionaries of `TensorRef` and plain values; names are joined by dots.

    Raises:
        CheckpointError: a tensor of the source cannot be read.
        OSError: the disk is full or read-only.
    """
    with warnings.catch_warnings(), dcp_errors():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is intended here
        state_dict_saver.save(
            _without_data(tree),
            storage_writer=filesystem.FileSystemWriter(folder),
            planner=_ReadingPlanner(dict(_flatten(tree, ""))),
            no_dist=True,
        )


def _without_data(tree: Any) -> Any:
    """Return the tree with tensors on the meta device, which take no memory; DCP plans the files from it."""
    if isinstance(tree, TensorRef):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    return (
        {key: _without_data(value) for key, value in tree.items()}
        if isinstance(tree, Mapping)
        else tree
    )


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(tree, TensorRef):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor only when DCP is about to write it."""

    def __init__(self, refs: Mapping[str, TensorRef]) -> None:
        super().__init__()
        self._refs = refs

    def lookup_object(self, index: MetadataIndex) -> Any:
        ref = self._refs.get(index.fqn)
        return super().lookup_object(index) if ref is None else ref.read()


# ---- FSDP2


def read_fsdp2(checkpoint: Path) -> CheckpointView:
    """Return the view of an `fsdp2` checkpoint of any number of ranks, HSDP included.

    Raises:
        CheckpointError: a file is missing, broken or would have to be unpickled.
    """
    optimizer = checkpoint / OPTIMIZER_FOLDER
    weights = read_fsdp2_weights(checkpoint)
    entries = read_dcp_metadata(optimizer)
    groups = _groups(optimizer, entries)
    state: dict[str, dict[str, TensorRef]] = {}
    known = {name for group in groups for name in group.names}
    for name, entry in entries.items():
        if not name.startswith(_STATE):
            continue
        parameter, _, key = name.removeprefix(_STATE).rpartition(".")
        if parameter not in known:
            raise CheckpointError(
                f"{optimizer} has states of '{parameter}', which is in none of its groups"
            )
        if entry.shape is None:
            value = torch.tensor(float(_read_value(optimizer, entry.chunks[0])))
            state.setdefault(parameter, {})[key] = TensorRef.of(value)
        else:
            state.setdefault(parameter, {})[key] = tensor_ref(optimizer, name, entry)
    check_names([*weights, *known])
    return CheckpointView(weights=weights, groups=groups, state=state)


def read_fsdp2_weights(checkpoint: Path) -> dict[str, TensorRef]:
    """Return the weights of an `fsdp2` checkpoint, which may have no optimizer.

    Raises:
        CheckpointError: a file is missing, broken or would have to be unpickled.
    """
    model = checkpoint / MODEL_FOLDER
    return {
        name.removeprefix("model."): tensor_ref(model, name, entry)
        for name, entry in read_dcp_metadata(model).items()
        if entry.shape is not None
    }


def _groups(folder: Path, entries: Mapping[str, Entry]) -> list[ParameterGroup]:
    found: dict[int, dict[str, Any]] = {}
    for name, entry in entries.items():
        if name.startswith(_GROUPS):
            number, _, key = name.removeprefix(_GROUPS).partition(".")
            if entry.shape is None:
                found.setdefault(int(number), {})[key] = _read_value(folder, entry.chunks[0])
            else:  # a learning rate that is a tensor
                found.setdefault(int(number), {})[key] = tensor_ref(folder, name, entry).read()
    if not found or any("params" not in group for group in found.values()):
        raise CheckpointError(f"{folder} does not say which parameters its groups hold")
    return [ParameterGroup.of(group, group["params"]) for _, group in sorted(found.items())]


def write_fsdp2(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write the two distributed checkpoints that Accelerate loads under FSDP2, on any number of ranks.

    Args:
        view (`CheckpointView`): what is written.
        folder (`Path`): folder of the new checkpoint.
    """
    weights = dict(view.weights)
    for alias, name in view.aliases.items():  # FSDP2 asks for both names of a tied weight
        # Adapter checkpoints do not contain the base model's weights
        if saved_name(name) in view.weights:
            weights.setdefault(alias, view.weights[saved_name(name)])
    save_refs(folder / MODEL_FOLDER, {"model": weights})
    groups = [_with_defaults(group) | {"params": list(group.names)} for group in view.groups]
    save_refs(
        folder / OPTIMIZER_FOLDER, {"optimizer": {"state": view.state, "param_groups": groups}}
    )


def _with_defaults(group: ParameterGroup) -> dict[str, Any]:
    """Add AdamW's defaults: DCP asks for every option of the optimizer, and DeepSpeed's have fewer than torch's."""
    if "betas" not in group.options:
        return group.options
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    return {
        name: value for name, value in defaults.items() if name not in group.options
    } | group.options


def _wrote(checkpoint: Path) -> bool:
    return (checkpoint / MODEL_FOLDER).is_dir()


def _origin(checkpoint: Path, world_size: int) -> Origin:
    return Origin(strategy="fsdp2")


FORMAT = Format(
    name="fsdp2",
    label="FSDP",
    wrote=_wrote,
    origin=_origin,
    read=read_fsdp2,
    write=write_fsdp2,
)
