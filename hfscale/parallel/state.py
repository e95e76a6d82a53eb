"""Checkpoints that any layout can read: torch's distributed checkpoint, under the names of the Hugging Face model.

A checkpoint's folder `dcp` holds `model.<parameter>` and `optimizer.<parameter>.<state>` (`exp_avg`, `step`, …), each
tensor whole in its meaning and in pieces on the disk, as the ranks held it. What depends on the layout is not in it:
no parameter groups, no rank numbers, no second copy of tied weights.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hfscale.checkpoint.formats.parallel import FOLDER, PART
from hfscale.errors import CheckpointError
from hfscale.parallel.model import ParallelizedModel
from hfscale.parallel.shards import local_tensor, reshard, write_local_part
from hfscale.parallel.tensor import Packed


def model_tensors(parallelized: ParallelizedModel) -> dict[str, torch.Tensor]:
    """This rank's parameters and persistent buffers by canonical name, sharing their memory; of a model with adapters
    what is trained alone."""
    reshard_all(parallelized)
    if parallelized.is_adapted:
        return {name: p.data for name, p in parallelized.model.named_parameters() if p.requires_grad}
    tensors = {_canonical(parallelized, name): p.data for name, p in parallelized.model.named_parameters()}
    persistent = parallelized.model.state_dict().keys()
    return tensors | {name: b for name, b in parallelized.model.named_buffers() if name in persistent}


def reshard_all(parallelized: ParallelizedModel) -> None:
    """See `hfscale.parallel.shards.reshard`."""
    for stage in parallelized.stages:
        reshard(stage)


def stored_tensors(
    parallelized: ParallelizedModel, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """What this rank writes into a checkpoint's `dcp`: of the model and, where given, of its optimizer's state.

    Each is one rectangle of a whole and shares its memory, so that what it shows changes with the next step.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(parallelized).items()}
    if optimizer is not None:
        for name, parameter in _stepped(parallelized, optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return dict(_unpacked(parallelized, tensors))


def load_model(checkpoint: Path, parallelized: ParallelizedModel) -> None:
    """Read this rank's part of the model, in place, whatever layout wrote it.

    Raises:
        CheckpointError: a parameter is missing, or of another shape.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(parallelized).items()}
    _read(checkpoint, parallelized, tensors)
    if parallelized.tied is not None:
        parallelized.tied.equalize()


def load_optimizer(checkpoint: Path, parallelized: ParallelizedModel, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's part of the optimizer's state, whatever layout wrote it.

    Raises:
        CheckpointError: as for `load_model`, or a state that is neither one number nor of its parameter's shape.
    """
    shapes = _shapes(checkpoint)
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    states: dict[nn.Parameter, dict[str, Any]] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, parameter in _stepped(parallelized, optimizer):
        prefix = f"optimizer.{name}."
        keys = {key.removeprefix(prefix).split(PART)[0] for key in shapes if key.startswith(prefix)}
        states[parameter] = {}
        for key in sorted(keys):
            whole = shapes.get(prefix + key)
            if whole is not None and len(whole) == 0:
                state = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            elif whole is None or whole == parameter.shape:
                state = torch.zeros_like(parameter.data)
            else:
                raise CheckpointError(
                    f"{checkpoint}: {prefix}{key} has shape {tuple(whole)}, its parameter {tuple(parameter.shape)}: "
                    "the state of this optimizer cannot be cut"
                )
            states[parameter][key] = wanted.setdefault(prefix + key, state)
    _read(checkpoint, parallelized, wanted)
    for parameter, state in states.items():
        # Both copies of a tied weight on one rank have read the same tensors; each steps its own.
        optimizer.state[parameter] = {key: tensor.clone() for key, tensor in state.items()}


def _read(checkpoint: Path, parallelized: ParallelizedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors`. A conversion has written packed matrices in one piece: of these each rank reads one after the
    other whole, into host memory, and keeps its part."""
    shapes = _shapes(checkpoint)
    whole = {name for name, tensor in tensors.items() if name in shapes and _packed(parallelized, name, tensor)}
    apart = {name: tensor for name, tensor in tensors.items() if name not in whole}
    try:
        dcp.load(dict(_unpacked(parallelized, apart)), checkpoint_id=checkpoint / FOLDER)
        for name in sorted(whole):
            read = torch.empty(shapes[name], dtype=tensors[name].dtype)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant here
                dcp.load({name: read}, checkpoint_id=checkpoint / FOLDER, no_dist=True)
            write_local_part(tensors[name], read)
    except Exception as error:
        cause = error.__cause__ or error
        raise CheckpointError(f"{checkpoint} does not hold this model: {cause}") from error


def _shapes(checkpoint: Path) -> dict[str, torch.Size]:
    stored = FileSystemReader(checkpoint / FOLDER).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in stored.items() if hasattr(entry, "size")}


def _stepped(parallelized: ParallelizedModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parallelized.model.named_parameters():
        if id(parameter) in mine:
            yield _canonical(parallelized, name), parameter


def _canonical(parallelized: ParallelizedModel, name: str) -> str:
    """The name under which a model in one piece would know a parameter: a tied head's is the embedding's."""
    if parallelized.structure.tied and name == f"{parallelized.structure.head}.weight":
        return f"{parallelized.structure.token_embedding}.weight"
    return name


def _unpacked(parallelized: ParallelizedModel, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor as one rectangle of a whole: a packed matrix as its parts, sharing its memory."""
    for name, tensor in tensors.items():
        packed = _packed(parallelized, name, tensor)
        if packed is None:
            yield name, tensor
        else:
            yield from ((f"{name}{PART}{number}", part) for number, part in enumerate(_parts(tensor, packed)))


def _packed(parallelized: ParallelizedModel, name: str, tensor: torch.Tensor) -> Packed | None:
    if tensor.ndim == 0:
        return None
    return next((p for own, p in parallelized.packed.items() if f".{own}." in f".{name}."), None)


def _parts(tensor: torch.Tensor, packed: Packed) -> list[torch.Tensor]:
    pieces = local_tensor(tensor).chunk(packed.parts, dim=packed.dim)
    if not isinstance(tensor, DTensor):
        return list(pieces)
    shape = list(tensor.shape)
    shape[packed.dim] //= packed.parts
    stride = torch.empty(shape, device="meta").stride()
    placements = [
        Shard(p.dim) if isinstance(p, _StridedShard) and p.dim == packed.dim else p for p in tensor.placements
    ]
    return [
        DTensor.from_local(
            piece, tensor.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        for piece in pieces
    ]


def restore_position(scheduler: Any, saved: dict[str, Any]) -> None:
    """Put a scheduler where it was: its learning rates follow from its position and its base learning rate."""
    if len(set(saved["base_lrs"])) == 1:
        scheduler.base_lrs = saved["base_lrs"][:1] * len(scheduler.base_lrs)
        for group in scheduler.optimizer.param_groups:
            group["initial_lr"] = saved["base_lrs"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has taken no step before the scheduler's
        for _ in range(saved["last_epoch"]):
            scheduler.step()
