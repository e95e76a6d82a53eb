"""The options of the callbacks that a recipe adds: alerts and generations, and the profiler, which lives apart."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from hfscale.core.options import Options, as_option, from_0, option, positive
from hfscale.errors import ParameterError
from hfscale.metrics.options import ProfilerOptions
from hfscale.metrics.prompts import Prompt, read_prompts
from hfscale.metrics.webhook import Webhook

__all__ = ["AlertOptions", "ProfilerOptions", "SampleOptions"]


def a_web_address(name: str, value: Any) -> None:
    """Check that a value is a URL with http or https, without naming it: it may be a secret."""
    try:
        Webhook(value)
    except ValueError as error:
        scheme = str(value).strip().partition(":")[0].lower()
        shown = f"{scheme}:…" if scheme in ("http", "https") else "…"
        rule = f"{error}: give a URL that begins with https:// or http://"
        raise ParameterError(name, shown, rule) from None


@dataclass(frozen=True, repr=False)
class AlertOptions(Options):
    """The options of `AlertCallback`."""

    webhook: str = field(
        metadata=as_option(
            flag="alert_webhook",
            check=a_web_address,
            help="URL to which hangs, restarts, the end of the run and so on are posted as JSON",
            details="It is a secret where it has a token in it.",
        )
    )


def a_list_of_prompts(name: str, value: Any) -> None:
    """Check that there is a list with prompts."""
    if isinstance(value, str) or not value:
        raise ParameterError(name, value, "give a list with one prompt or more")


@dataclass(frozen=True)
class SampleOptions(Options):
    """The options of `SampleGenerationCallback`."""

    prompts: Sequence[Prompt] = field(
        metadata=as_option(
            flag="sample_prompts",
            flag_type=str,
            read=read_prompts,
            check=a_list_of_prompts,
            help="Prompts from which the model generates during training; on the command line a file of them: .txt, "
            "one per line, or .jsonl with messages",
            details="A text is continued as it is; to a conversation, a mapping with `messages`, the tokenizer's chat "
            "template is applied.",
        )
    )
    _: KW_ONLY
    every_steps: int = option(
        500,
        flag="sample_steps",
        check=positive,
        help="Optimizer steps between two generations from the prompts",
    )
    max_new_tokens: int = option(
        128,
        flag="sample_max_new_tokens",
        check=positive,
        help="Most tokens of a generation; fewer where the model's positions end before",
    )
    temperature: float = option(
        0.0,
        flag="sample_temperature",
        check=from_0,
        help="Temperature of the generations: 0 takes the most likely token each time, a greater value samples",
    )
    seed: int = option(
        0,
        flag="sample_seed",
        check=from_0,
        help="Seed of the sampling, which is the same for each generation",
    )
