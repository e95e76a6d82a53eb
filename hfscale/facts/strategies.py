"""What is known of a strategy by its name alone, as a checkpoint's manifest or a request has it; no torch.

`hfscale.trainer.strategies` has an object for the strategy that runs. This table is for those who have only the name:
readers of checkpoints, reports, and what is decided before there is a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
"""What a strategy can shard over the ranks that read different samples."""


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """Holds what the name of a strategy says."""

    name: str
    """As a manifest has it, such as `zero2`."""
    family: str
    """The name without version and stage: `single`, `ddp`, `fsdp`, `zero`, `native` or `parallel`."""
    file_format: str
    """How checkpoints are written: `unsharded`, `fsdp2`, `zero` or `parallel`; one reader and writer for each."""
    file_layout: str
    """Strategies with the same one read each other's files: ZeRO's files are those of their stage."""
    shards: frozenset[str] = frozenset()
    """Which of `WEIGHTS`, `GRADIENTS` and `OPTIMIZER` no rank holds completely."""
    is_set_by_script: bool = False
    """Whether a script distributes its model so, which neither the launcher nor the arguments know."""
    is_convertible: bool = True
    """Whether hfscale converts its checkpoints from and to those of other strategies."""
    is_for_one_process: bool = False
    """Whether it is the strategy of a single process, and has another name on several."""
    reads_any_world_size: bool = False
    """Whether its checkpoints are read on another number of ranks than wrote them, without a conversion."""

    @property
    def is_replicated(self) -> bool:
        """Whether neither DeepSpeed nor FSDP is asked for: one process, or DDP."""
        return self.file_layout == "unsharded"

    @property
    def by_fsdp(self) -> bool:
        """Whether Accelerate's FSDP shards the model."""
        return self.family == "fsdp"

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine holds the optimizer."""
        return self.family == "zero"

    @property
    def zero(self) -> int:
        """The stage of ZeRO that shards the same: 0 to 3 (Rajbhandari et al., arXiv 1910.02054, section 3)."""
        return len(self.shards)


_STAGES = (
    frozenset[str](),
    frozenset({OPTIMIZER}),
    frozenset({OPTIMIZER, GRADIENTS}),
    frozenset({OPTIMIZER, GRADIENTS, WEIGHTS}),
)


def _zero(stage: int) -> StrategyFacts:
    name = f"zero{stage}"
    return StrategyFacts(
        name=name,
        family="zero",
        file_format="zero",
        file_layout=name,
        shards=_STAGES[stage],
        # DeepSpeed writes no partitions under stage 0, of which its universal checkpoints are made
        is_convertible=stage > 0,
    )


_ALL = (
    StrategyFacts(
        name="single",
        family="single",
        file_format="unsharded",
        file_layout="unsharded",
        is_for_one_process=True,
    ),
    StrategyFacts(name="ddp", family="ddp", file_format="unsharded", file_layout="unsharded"),
    StrategyFacts(
        name="fsdp1",
        family="fsdp",
        file_format="fsdp1",
        file_layout="fsdp1",
        shards=_STAGES[3],
        is_convertible=False,  # the support table refuses to train under it
    ),
    StrategyFacts(
        name="fsdp2", family="fsdp", file_format="fsdp2", file_layout="fsdp2", shards=_STAGES[3]
    ),
    *map(_zero, range(4)),
    StrategyFacts(
        name="parallel",
        family="parallel",
        file_format="parallel",
        file_layout="parallel",
        shards=_STAGES[3],
        is_set_by_script=True,
        reads_any_world_size=True,
    ),
    StrategyFacts(
        name="native",
        family="native",
        file_format="parallel",
        file_layout="parallel",
        shards=_STAGES[3],
        is_set_by_script=True,
        reads_any_world_size=True,
    ),
)

STRATEGIES: Mapping[str, StrategyFacts] = {facts.name: facts for facts in _ALL}
"""All strategies under which hfscale can find a Trainer, by name."""

CONVERTIBLE: tuple[str, ...] = tuple(facts.name for facts in _ALL if facts.is_convertible)
"""Names of the strategies whose checkpoints hfscale converts."""


def facts_of(name: str) -> StrategyFacts:
    """Return what is known of a strategy, of which another version of hfscale may have written the name.

    Args:
        name (`str`): the name of a strategy in a manifest.

    Returns:
        `StrategyFacts`: for an unknown name, those of a strategy that has nothing in common with any other.
    """
    unknown = StrategyFacts(
        name=name, family=name, file_format=name, file_layout=name, is_convertible=False
    )
    return STRATEGIES.get(name, unknown)
