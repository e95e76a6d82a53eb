"""Sizes of the mesh axes of a run, and how its batch is divided among them."""

from dataclasses import dataclass, fields
from typing import ClassVar

from hfscale.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Holds the sizes of the five mesh axes. Their product is the number of processes.

    Raises:
        LayoutError: a size is not an integer of at least 1.
    """

    dp_replicate: int = 1
    """Replicas of the parameters, each of which `dp_shard` ranks may shard: DDP, or the outer axis of HSDP."""
    dp_shard: int = 1
    """Ranks that shard one replica's parameters: FSDP2, ZeRO."""
    cp: int = 1
    """Ranks that share one sequence (context parallelism)."""
    tp: int = 1
    """Ranks that share each matrix (tensor parallelism)."""
    pp: int = 1
    """Ranks that share the layers, each holding consecutive ones (pipeline parallelism)."""

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(
                    f"{axis.name} is {size!r}: it must be an integer of at least 1, which turns the axis off"
                )

    @property
    def world_size(self) -> int:
        """Number of processes, one per accelerator."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples, and thus the factor of the global batch.

        CP, TP and PP ranks work on the same samples as each other.
        """
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that work on the same sample: `cp x tp x pp`."""
        return self.cp * self.tp * self.pp

    def __str__(self) -> str:
        return " x ".join(
            f"{axis.name}={getattr(self, axis.name)}" for axis in fields(ParallelLayout)
        )

    @property
    def summary(self) -> str:
        """The axes of more than one rank, such as `replicate 2 shard 8`; `one GPU` if there are none."""
        names = {
            "dp_replicate": "replicate",
            "dp_shard": "shard",
            "cp": "cp",
            "tp": "tp",
            "pp": "pp",
        }
        sizes = {name: getattr(self, axis) for axis, name in names.items()}
        return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"

    @property
    def words(self) -> str:
        """The earlier name of `summary`."""
        return self.summary

    def check_world_size(self, world_size: int) -> None:
        """Check that the layout uses exactly the processes that were started.

        Args:
            world_size (`int`): number of processes that the launcher started.

        Raises:
            LayoutError: the product of the sizes is another number; the message gives a `dp_shard` or a number of
                processes that fits.
        """
        if self.world_size == world_size:
            return
        shards, left_over = divmod(world_size, self.dp_replicate * self.ranks_per_replica)
        fix = f"start {self.world_size} processes"
        if left_over == 0 and shards >= 1:
            fix += f" or set dp_shard={shards}"
        raise LayoutError(
            f"{self} needs {self.world_size} processes, but the world has {world_size}: {fix}"
        )


@dataclass(frozen=True, kw_only=True)
class ExpertLayout(ParallelLayout):
    """Holds the sizes of a mixture of experts whose experts are spread over the ranks of a stage.

    Raises:
        LayoutError: a size is not an integer of at least 1.
    """

    ep: int = 1
    """Ranks that share the experts of a layer. They are among the ranks of the other axes: the world has no factor of
    them."""

    spans_replicas: ClassVar[bool] = True
    """Whether the ranks that share experts may be those of several replicas."""

    @property
    def ranks_of_replica(self) -> int:
        """Ranks of a stage that hold one replica of the parameters."""
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts of a replica, and shard them; 1 where `ep` spans replicas."""
        return max(1, self.ranks_of_replica // self.ep)

    @property
    def expert_replicas(self) -> int:
        """Replicas of the experts of a stage: `dp_replicate`, or fewer where `ep` spans replicas."""
        return self.dp_replicate * self.ranks_of_replica // (self.ep * self.efsdp)

    def check_experts(self) -> None:
        """Check that groups of `ep` ranks are complete in a stage of a replica, or consist of complete ones.

        Raises:
            LayoutError: they are not; the message names the sizes that fit.
        """
        ranks = self.ranks_of_replica
        fitting = [size for size in range(self.tp, ranks + 1, self.tp) if ranks % size == 0]
        if self.spans_replicas:
            fitting += [
                ranks * n for n in range(2, self.dp_replicate + 1) if self.dp_replicate % n == 0
            ]
        if self.ep == 1 or self.ep in fitting:
            return
        # The rule has a part for each axis, and only those of the axes in use help.
        rule = f"divide the {ranks} ranks of one replica"
        if self.pp > 1:
            rule += " in a stage"
        if self.tp > 1:
            rule += f" and be a multiple of tp_size {self.tp}"
        if self.spans_replicas and self.dp_replicate > 1:
            rule += ", or be those of several"
        raise LayoutError(
            f"ep_size {self.ep} must {rule}: choose one of {', '.join(map(str, fitting))}"
        )

    @property
    def summary(self) -> str:
        """The axes of more than one rank, such as `shard 8 pp 2 ep 4`; `one GPU` if there are none."""
        sizes = super().summary
        return f"{sizes} ep {self.ep}" if self.ep > 1 else sizes

    def __str__(self) -> str:
        sizes = super().__str__()
        return f"{sizes}, experts over {self.ep} ranks" if self.ep > 1 else sizes


def split_batch(global_batch_size: int, ranks: int, per_device: int) -> tuple[int, int] | None:
    """Divide a global batch into a per-device batch and gradient-accumulation steps.

    Args:
        global_batch_size (`int`): sequences per optimizer step.
        ranks (`int`): data-parallel ranks.
        per_device (`int`): the largest per-device batch, in sequences.

    Returns:
        `tuple[int, int] | None`: The largest per-device batch that fits and the accumulation steps, or None if the
            global batch is not a multiple of `ranks`.
    """
    per_rank, left_over = divmod(global_batch_size, ranks)
    if left_over or per_rank == 0:
        return None
    while per_rank % per_device:
        per_device -= 1
    return per_device, per_rank // per_device
