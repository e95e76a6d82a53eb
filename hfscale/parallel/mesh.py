"""One world of processes, seen along five axes.

Ranks count fastest along `tp`, then `cp`, `dp_shard`, `dp_replicate`, slowest along `pp`: so the ranks of a tensor
parallel group, which exchange activations in every layer, are neighbours inside a node, and only what passes from one
stage to the next crosses the slowest links (Narayanan et al. 2021, arXiv 2104.04473, takeaway #1). `dp_shard` and `cp`
are one axis, `dp_shard_cp`, where parameters are cut: ranks that share a sequence hold the same ones.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hfscale.facts.layout import ParallelLayout

AXES = ("pp", "dp_replicate", "dp_shard_cp", "tp")
"""Names of the mesh axes along which parameters are cut or repeated, slowest first."""
_APART = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """Where this rank stands, and its groups."""

    layout: ParallelLayout
    """Sizes of the axes."""
    device_mesh: DeviceMesh
    """All ranks, by `AXES`."""
    cp_mesh: DeviceMesh | None = None
    """The ranks that share this one's sequences, in the order of their parts; None where each has its own."""

    @property
    def pp_rank(self) -> int:
        """Which pipeline rank this is, from 0."""
        return self.device_mesh["pp"].get_local_rank()

    @property
    def tp_rank(self) -> int:
        """Which part of each matrix this rank holds, from 0."""
        return self.device_mesh["tp"].get_local_rank()

    @property
    def cp_rank(self) -> int:
        """Which part of each sequence this rank holds, from 0."""
        return self.device_mesh["dp_shard_cp"].get_local_rank() % self.layout.cp

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank reads, from 0; equal on all ranks that work on the same."""
        replica = self.device_mesh["dp_replicate"].get_local_rank()
        return replica * self.layout.dp_shard + self.device_mesh["dp_shard_cp"].get_local_rank() // self.layout.cp

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
        """What `fully_shard` takes: one axis for FSDP2, two for HSDP; DDP is HSDP whose shard axis has one rank."""
        if self.layout.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "dp_shard_cp"]
        return self.device_mesh["dp_shard_cp"]


def make_mesh(layout: ParallelLayout, device_type: str) -> ParallelMesh:
    """The mesh of `layout` over the default process group, whose size it must be.

    Raises:
        LayoutError: the layout has another number of ranks than the world.
    """
    if not dist.is_initialized() and layout.world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # meshes ask for one
    layout.check_world_size(dist.get_world_size())
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
    cp_mesh = None
    if layout.cp > 1:
        apart = tuple(getattr(layout, axis) for axis in _APART)
        cp_mesh = init_device_mesh(device_type, apart, mesh_dim_names=_APART)["cp"]
    return ParallelMesh(
        layout=layout, device_mesh=init_device_mesh(device_type, sizes, mesh_dim_names=AXES), cp_mesh=cp_mesh
    )
