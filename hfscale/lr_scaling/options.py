"""The options of `LRScalingCallback`."""

from dataclasses import dataclass
from typing import Any

from hfscale.core.options import Options, option, positive
from hfscale.errors import ParameterError
from hfscale.facts.batch_schedule import parse_batch_schedule
from hfscale.facts.lr_rules import RULES


def _schedule(name: str, value: Any) -> None:
    """Check that a batch schedule can be read."""
    if not isinstance(value, str):
        raise ParameterError(name, value, "write it as text, such as '256@0,512@1B'")
    parse_batch_schedule(value)


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
    batch_schedule: str | None = option(
        None,
        check=_schedule,
        help="Global batch in sequences @ tokens seen, such as 256@0,512@1B, or auto:256..4096",
        details="Gradient accumulation is the lever; the given learning rate is that of the first batch, unless "
        "`base_global_batch_size` is given. See docs/growing_batch.md.",
        unset="the batch is constant",
    )
    lr_clock: str = option(
        "tokens",
        choices=("tokens", "steps"),
        help="What the learning rate schedule counts while the batch grows: tokens or optimizer steps",
        details="With `tokens`, numbers of steps, such as `warmup_steps`, are steps of the first batch.",
    )
    base_width: int | None = option(
        None,
        check=positive,
        help="hidden_size at which the learning rate was tuned; the model was initialised for it",
        details="See `hfscale.initialize_at_width` and docs/width_transfer.md.",
        unset="the learning rate does not follow the width",
    )
