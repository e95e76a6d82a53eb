"""The flags of the parallel axes, as a dataclass for `HfArgumentParser`."""

from dataclasses import dataclass

from hfscale.facts.schedules import SCHEDULES
from hfscale.utils.flags import flag, require_positive


@dataclass(kw_only=True)
class ParallelArguments:
    """Sizes of the parallel axes, where they are to differ from the launcher's config."""

    dp_replicate_size: int | None = flag("Replicas of the sharded model (HSDP).")
    dp_shard_size: int | None = flag("Ranks that share one replica; default: what the other axes leave.")
    cp_size: int | None = flag(
        "Ranks that share one sequence (FSDP2: ring attention; DeepSpeed: Ulysses; tp_pp: keys gathered)."
    )
    tp_size: int | None = flag("Ranks that share each matrix.")
    pp_size: int | None = flag("Ranks that share the layers (recipes/tp_pp).")
    sequence_parallel: bool = flag("Those of --tp_size share norms and residuals (recipes/tp_pp).", default=False)
    pipeline_schedule: str = flag(
        "Order of the stages' work: " + ", ".join(SCHEDULES) + ".", default="1F1B", choices=tuple(SCHEDULES)
    )
    virtual_stages: int | None = flag("Stages per pipeline rank, for the schedules that take several.")
    dry_run: int | None = flag(
        "Train nothing: build the program of so many ranks without weights or GPUs, print memory and schedule."
    )

    def __post_init__(self) -> None:
        require_positive(self, *(n for n in vars(self) if n not in ("pipeline_schedule", "sequence_parallel")))
