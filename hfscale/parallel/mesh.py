"""The device mesh of a run, and each rank's shard of a tensor on it.

Ranks count fastest along `tp`, then `cp`, `dp_shard`, `dp_replicate`, and slowest along `pp`. The ranks of a tensor
parallel group exchange activations in every layer, so they are neighbours inside a node; only the hidden states that
one stage sends to the next cross the slowest links (Narayanan et al. 2021, arXiv 2104.04473, takeaway #1). Parameters
are sharded over `dp_shard` and `cp` together, as one axis `dp_shard_cp`: ranks that share a sequence hold the same
parameters. With expert parallelism a second mesh over the same ranks has the axes `ep`, which counts fastest, and
`efsdp` in place of `tp` and `dp_shard_cp`. Where `ep` spans replicas of the other parameters, experts have fewer.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard

from hfscale.core.torch_internals import StridedShard
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.layout import ParallelLayout

AXES = ("pp", "dp_replicate", "dp_shard_cp", "tp")
"""Names of the mesh axes over which parameters are sharded or replicated, slowest first."""
_AXES_WITH_CP = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")
"""Names of the mesh axes over which experts are sharded or replicated, slowest first."""
FSDP_AXES = ("efsdp", "dp_shard_cp")
"""Names of the mesh axes over which FSDP2 shards: experts that are spread, and everything else."""
_SHARDING_ORDER = ("ep", "tp", *FSDP_AXES)  # FSDP2 shards what the first two have sharded before


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """All ranks along the axes of a layout, and this rank's position and process groups."""

    layout: ParallelLayout
    """Sizes of the axes."""
    device_mesh: DeviceMesh
    """All ranks, by `AXES`."""
    cp_mesh: DeviceMesh | None = None
    """The ranks that share this rank's sequences, in the order of their parts; None without context parallelism."""
    expert_mesh: DeviceMesh | None = None
    """All ranks, by `EXPERT_AXES`; None without expert parallelism."""

    @property
    def pp_rank(self) -> int:
        """The index of this pipeline rank, from 0."""
        return self.device_mesh["pp"].get_local_rank()

    @property
    def tp_rank(self) -> int:
        """The index of the shard of each matrix that this rank holds, from 0."""
        return self.device_mesh["tp"].get_local_rank()

    @property
    def cp_rank(self) -> int:
        """The index of the part of each sequence that this rank holds, from 0."""
        return self.device_mesh["dp_shard_cp"].get_local_rank() % self.layout.cp

    @property
    def data_rank(self) -> int:
        """The index of the share of the samples that this rank reads, from 0; ranks that work on the same samples have
        the same index."""
        replica = self.device_mesh["dp_replicate"].get_local_rank()
        return (
            replica * self.layout.dp_shard
            + self.device_mesh["dp_shard_cp"].get_local_rank() // self.layout.cp
        )

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the stages of this rank's replica."""
        return self.device_mesh["pp"].get_group()

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that share matrices with this one."""
        return self.device_mesh["tp"].get_group()

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: one axis for FSDP2, two for HSDP; DDP is HSDP with one rank on the shard
        axis."""
        if self.layout.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "dp_shard_cp"]
        return self.device_mesh["dp_shard_cp"]

    @property
    def efsdp(self) -> int:
        """The number of ranks of a replica that hold the same experts as this one, and shard them."""
        assert self.expert_mesh is not None  # expert parallelism is asked for
        return self.expert_mesh["efsdp"].size()

    @property
    def expert_data_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard` of experts, as `data_mesh` for everything else."""
        assert self.expert_mesh is not None  # expert parallelism is asked for
        if self.expert_mesh["dp_replicate"].size() > 1:
            return self.expert_mesh["dp_replicate", "efsdp"]
        return self.expert_mesh["efsdp"]


def make_mesh(layout: ParallelLayout, device_type: str) -> ParallelMesh:
    """Make the mesh of a layout over the default process group. Call it on every rank.

    Args:
        layout (`ParallelLayout`): sizes of the axes.
        device_type (`str`): `cuda` or `cpu`.

    Returns:
        The mesh.

    Raises:
        LayoutError: the layout has another number of ranks than the world.
    """
    if not dist.is_initialized() and layout.world_size == 1:
        # A device mesh requires a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout.check_world_size(dist.get_world_size())
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    cp_mesh = None
    if layout.cp > 1:
        sizes_with_cp = tuple(getattr(layout, axis) for axis in _AXES_WITH_CP)
        cp_mesh = init_device_mesh(device_type, sizes_with_cp, mesh_dim_names=_AXES_WITH_CP)["cp"]
    expert_mesh = None
    if isinstance(layout, ExpertLayout) and layout.ep > 1:
        expert_sizes = (layout.pp, layout.expert_replicas, layout.efsdp, layout.ep)
        expert_mesh = init_device_mesh(device_type, expert_sizes, mesh_dim_names=EXPERT_AXES)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    return ParallelMesh(
        layout=layout, device_mesh=device_mesh, cp_mesh=cp_mesh, expert_mesh=expert_mesh
    )


# --- shards of tensors -----------------------------------------------------------------------------------------------


def shard_dim(placement: Placement) -> int | None:
    """Return the dim that a placement shards, strided shards of packed matrices included; None if it shards none."""
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def _local_shard(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a full tensor that this rank holds of a parameter, without communication.

    It is a view of `full` where it is contiguous, else a copy. `parameter` is a `DTensor` over axes of `AXES` or of
    `EXPERT_AXES`, or a tensor of which every rank holds all.
    """
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None  # those of `AXES` or `EXPERT_AXES`
    for axis in _SHARDING_ORDER:
        if axis not in names:
            continue
        position = names.index(axis)
        placement = parameter.placements[position]
        size = mesh.size(position)
        rank = mesh.get_local_rank(position)
        if axis == "tp" and isinstance(placement, StridedShard):
            # A packed parameter (gate and up in one): each of its matrices is sharded by itself.
            matrices = full.chunk(int(placement.split_factor), dim=placement.dim)
            full = torch.cat(
                [_chunk(matrix, placement.dim, size, rank) for matrix in matrices],
                dim=placement.dim,
            )
        elif (dim := shard_dim(placement)) is not None:
            full = _chunk(full, dim, size, rank)
    return full


def _chunk(tensor: torch.Tensor, dim: int, chunks: int, index: int) -> torch.Tensor:
    """Return the chunk `index` of those that `torch.chunk` makes; it is empty where torch makes fewer."""
    made = tensor.chunk(chunks, dim=dim)
    return made[index] if index < len(made) else tensor.narrow(dim, 0, 0)


@torch.no_grad()
def copy_local_shard(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Set a parameter to the values of a full tensor: each rank copies its own shard.

    Args:
        parameter (`torch.Tensor`): a `DTensor` over axes of `AXES` or `EXPERT_AXES`, or a plain tensor; changed in
            place.
        full (`torch.Tensor`): values of the parameter's full shape.
    """
    local_tensor(parameter).copy_(_local_shard(full, parameter))


def shard_like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a full tensor that is sharded as a parameter is, without communication.

    Args:
        full (`torch.Tensor`): a tensor of as many dims as the parameter; each sharded dim is a multiple of the ranks.
        parameter (`torch.Tensor`): a `DTensor` over axes of `AXES` or `EXPERT_AXES`, or a plain tensor.
    """
    local = _local_shard(full, parameter).clone()
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a `DTensor`, which shares its memory; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Make FSDP2 free every gathered parameter of `model`.

    After a forward without a backward pass, parameters may still be gathered, and `parameters()` then returns other
    tensors than those that the optimizer updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
