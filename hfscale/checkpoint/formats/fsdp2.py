"""FSDP2's sharded files, as Accelerate lays them out: two distributed checkpoints (torch DCP) in one folder.

`pytorch_model_fsdp_0` holds {"model": {name: tensor}}, `optimizer_0` {"optimizer": {"state": {name: {key: tensor}},
"param_groups": [{…, "params": [names]}]}}; DCP flattens both to names joined by dots. It is read and written here
without a process group, piece by piece.
"""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from hfscale.checkpoint.dcp_metadata import Chunk, Entry, read_dcp_metadata
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, TensorRef, check_names, saved_name
from hfscale.errors import CheckpointError

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups."


def read_fsdp2(checkpoint: Path) -> CheckpointView:
    """The view of a checkpoint of `fsdp2`, of any number of ranks, HSDP included.

    Raises:
        CheckpointError: a file is missing, broken or would have to be unpickled.
    """
    model, optimizer = checkpoint / MODEL_FOLDER, checkpoint / OPTIMIZER_FOLDER
    weights = {
        name.removeprefix("model."): _tensor(model, name, entry)
        for name, entry in read_dcp_metadata(model).items()
        if entry.shape is not None
    }
    entries = read_dcp_metadata(optimizer)
    groups = _groups(optimizer, entries)
    state: dict[str, dict[str, TensorRef]] = {}
    known = {name for group in groups for name in group.names}
    for name, entry in entries.items():
        if not name.startswith(_STATE):
            continue
        parameter, _, key = name.removeprefix(_STATE).rpartition(".")
        if parameter not in known:
            raise CheckpointError(f"{optimizer} has states of '{parameter}', which stands in none of its groups")
        if entry.shape is None:
            value = torch.tensor(float(_value(optimizer, entry.chunks[0])))
            state.setdefault(parameter, {})[key] = TensorRef.of(value)
        else:
            state.setdefault(parameter, {})[key] = _tensor(optimizer, name, entry)
    check_names([*weights, *known])
    return CheckpointView(weights=weights, groups=groups, state=state)


def _groups(folder: Path, entries: Mapping[str, Entry]) -> list[ParameterGroup]:
    found: dict[int, dict[str, Any]] = {}
    for name, entry in entries.items():
        if name.startswith(_GROUPS):
            number, _, key = name.removeprefix(_GROUPS).partition(".")
            if entry.shape is None:
                found.setdefault(int(number), {})[key] = _value(folder, entry.chunks[0])
            else:  # a learning rate that is a tensor
                found.setdefault(int(number), {})[key] = _tensor(folder, name, entry).read()
    if not found or any("params" not in group for group in found.values()):
        raise CheckpointError(f"{folder} does not say which parameters its groups hold")
    return [
        ParameterGroup(options={k: v for k, v in group.items() if k != "params"}, names=list(group["params"]))
        for _, group in sorted(found.items())
    ]


def _value(folder: Path, chunk: Chunk) -> Any:
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        stored = file.read(chunk.length)
    try:
        return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive raises anything
        raise CheckpointError(f"{folder / chunk.file} cannot be read: {str(error).splitlines()[0][:200]}") from None


def _tensor(folder: Path, name: str, entry: Entry) -> TensorRef:
    shape, dtype = entry.shape, entry.dtype
    assert shape is not None
    assert dtype is not None

    def read() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for chunk in entry.chunks:
            piece = _value(folder, chunk)
            if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != chunk.sizes:
                raise CheckpointError(f"{folder / chunk.file}: '{name}' is not the piece that the metadata describes")
            place = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = piece
            covered += piece.numel()
        if covered != whole.numel():
            raise CheckpointError(f"{folder}: {covered} of the {whole.numel()} elements of '{name}' are stored")
        return whole

    return TensorRef(shape=shape, dtype=dtype, read=read)


def write_fsdp2(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write the two distributed checkpoints that Accelerate loads under FSDP2, on any number of ranks."""
    weights = dict(view.weights)
    for alias, name in view.aliases.items():  # FSDP2 asks for both names of a tied weight
        weights.setdefault(alias, view.weights[saved_name(name)])
    _save(folder / MODEL_FOLDER, {"model": weights})
    groups = [_with_defaults(group) | {"params": list(group.names)} for group in view.groups]
    _save(folder / OPTIMIZER_FOLDER, {"optimizer": {"state": view.state, "param_groups": groups}})


def _with_defaults(group: ParameterGroup) -> dict[str, Any]:
    """DCP asks for every option that the optimizer has, and DeepSpeed's optimizers have fewer than torch's."""
    if "betas" not in group.options:
        return group.options
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    return {name: value for name, value in defaults.items() if name not in group.options} | group.options


def _save(folder: Path, tree: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant here
        state_dict_saver.save(
            _without_data(tree),
            storage_writer=filesystem.FileSystemWriter(folder),
            planner=_ReadingPlanner(dict(_flatten(tree, ""))),
            no_dist=True,
        )


def _without_data(tree: Any) -> Any:
    """The same tree with tensors that take no memory, from which DCP plans what to write."""
    if isinstance(tree, TensorRef):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    return {key: _without_data(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _flatten(tree: Any, prefix: str) -> Any:
    if isinstance(tree, TensorRef):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor when its turn to be written has come."""

    def __init__(self, refs: Mapping[str, TensorRef]) -> None:
        super().__init__()
        self._refs = refs

    def lookup_object(self, index: MetadataIndex) -> Any:
        ref = self._refs.get(index.fqn)
        return super().lookup_object(index) if ref is None else ref.read()
