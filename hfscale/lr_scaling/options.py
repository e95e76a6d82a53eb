"""The options of `LRScalingCallback`."""

from dataclasses import dataclass

from hfscale.core.options import Options, option, positive
from hfscale.facts.lr_rules import RULES


@dataclass(frozen=True, kw_only=True)
class LRScalingOptions(Options):
    """The options of `LRScalingCallback`."""

    rule: str = option(
        "auto",
        flag="lr_scaling_rule",
        choices=RULES,
        help=f"How the learning rate follows the global batch: {', '.join(RULES)}",
        details="See `hfscale.facts.lr_rules`.",
    )
    base_global_batch_size: int | None = option(
        None,
        check=positive,
        help="Sequences per step for which the given learning rate was tuned",
        unset="the learning rate is not changed",
    )
    block_size: int | None = option(
        None,
        check=positive,
        no_flag="it is the length of the data, --block_size or TRL's --max_length",
        help="Tokens per sequence in this run",
    )
    base_block_size: int | None = option(
        None,
        check=positive,
        help="Tokens per sequence for which the learning rate was tuned, if that was another length",
    )
    critical_batch_size: int | None = option(
        None,
        check=positive,
        help="Sequences per step above which the learning rate stops growing",
    )
    warmup_scale: float = option(1.0, check=positive, help="Factor on the number of warm-up steps")
