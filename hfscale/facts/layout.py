"""Sizes of the mesh axes of a run, and how its batch is divided among them."""

from dataclasses import dataclass, fields

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
