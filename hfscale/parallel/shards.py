"""A rank's part of a whole tensor, without communication, and whole tensors cut into it."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what transformers' packed styles and FSDP2 use

_ORDER = ("tp", "dp_shard_cp")  # FSDP2 cuts what tensor parallelism has cut


def local_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of `whole` that this rank holds of `parameter`: a view where it is contiguous, else a copy.

    Args:
        whole (`torch.Tensor`): of the parameter's full shape.
        parameter (`torch.Tensor`): a `DTensor` over axes of `hfscale.parallel.mesh.AXES`, or a plain tensor, of which
            every rank holds all.
    """
    if not isinstance(parameter, DTensor):
        return whole
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names
    for axis in _ORDER:
        if axis not in names:
            continue
        number = names.index(axis)
        placement, size, rank = parameter.placements[number], mesh.size(number), mesh.get_local_rank(number)
        if axis == "tp" and isinstance(placement, _StridedShard):
            # Packed matrices (gate and up in one): each of them is cut by itself.
            groups = whole.chunk(placement.split_factor, dim=placement.dim)
            whole = torch.cat([_chunk(group, placement.dim, size, rank) for group in groups], dim=placement.dim)
        elif isinstance(placement, Shard | _StridedShard):
            whole = _chunk(whole, placement.dim, size, rank)
    return whole


def _chunk(tensor: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
    """The `part`-th of `parts` chunks as `torch.chunk` makes them, empty where it makes fewer."""
    chunks = tensor.chunk(parts, dim=dim)
    return chunks[part] if part < len(chunks) else tensor.narrow(dim, 0, 0)


@torch.no_grad()
def write_local_part(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Make `parameter` what `whole` says, each rank its part."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    local.copy_(local_part(whole, parameter))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a `DTensor`, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Have FSDP2 put every parameter of `model` back into its shards: after a forward without backward they may be
    whole, and what `parameters()` then shows is not what the optimizer steps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
