"""How the learning rate follows the batch: the rules, their sources, and one function that applies them.

Batches are compared by tokens per optimizer step. With kappa = tokens now / tokens of the run the learning rate was
tuned for:

| rule | factor | source |
|---|---|---|
| `linear` | kappa | SGD: Goyal et al. 2017, arXiv 1706.02677 |
| `sqrt` | sqrt(kappa) | Adam and its family: Malladi et al. 2022, arXiv 2205.10287 |
| `auto` | `linear` for SGD, `sqrt` for adaptive optimizers | both of the above |
| `rubric` | kappa up to 32,768 tokens per step, square root of what lies above | common guides; no primary source |
| `none` | 1 | |

Only data-parallel ranks multiply the batch: tensor, pipeline and context parallel ranks work on the same tokens.
Beyond the critical batch size (McCandlish et al. 2018, arXiv 1812.06162) a larger batch does not improve the gradient
further. If one is given, every rule limits both batches to it.
"""

import math
from dataclasses import dataclass

from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError

RULES = ("auto", "linear", "sqrt", "rubric", "none")

RUBRIC_TOKENS_PER_STEP = 32_768
"""Tokens per step at which the rubric of common guides changes from linear to square root. It is a convention without
a primary source."""

RUBRIC_WARMUP_FACTOR = 5.0
"""Factor by which common guides multiply the warm-up when the batch grows. It has no primary source."""

_ADAPTIVE = (
    "adam",
    "ademamix",
    "adafactor",
    "adagrad",
    "adalomo",
    "apollo",
    "galore",
    "lamb",
    "lion",
    "muon",
    "rmsprop",
)
_PLAIN = ("sgd", "lomo")


@dataclass(frozen=True, kw_only=True)
class LRScaling:
    """Holds the result of a rule."""

    rule: str
    """The rule that was applied: `linear`, `sqrt`, `rubric` or `none` (`auto` is resolved)."""
    kappa: float
    """Ratio of tokens per optimizer step, now / base, after limiting both to the critical batch size."""
    factor: float
    """Factor of the learning rate."""
    warmup_factor: float
    """Factor of the number of warm-up steps."""
    reason: str
    """An explanation for the log."""


def scale_learning_rate(
    *,
    rule: str,
    optimizer: str,
    global_batch_size: int,
    base_global_batch_size: int | None,
    block_size: int | None = None,
    base_block_size: int | None = None,
    critical_batch_size: int | None = None,
    warmup_scale: float = 1.0,
) -> LRScaling:
    """Compute the learning-rate factor from the batch size of this run and that of the run it was tuned for.

    Args:
        rule (`str`): one of `RULES`.
        optimizer (`str`): name of the optimizer as in `TrainingArguments.optim`, of its class, or of a DeepSpeed type.
        global_batch_size (`int`): sequences per optimizer step in this run.
        base_global_batch_size (`int`, *optional*): sequences per step for which the learning rate was tuned. Without
            it the learning rate is unchanged.
        block_size, base_block_size (`int`, *optional*): tokens per sequence in this run and in the base run, which are
            equal by default.
        critical_batch_size (`int`, *optional*): critical batch size, in sequences of the current length.
        warmup_scale (`float`): factor of the warm-up steps; the rule `rubric` multiplies it by 5.

    Raises:
        ParameterError: the rule or the optimizer is unknown, a size is not positive, or a length that the rule needs
            is missing.
    """
    if rule not in RULES:
        raise ParameterError("rule", rule, f"use one of {', '.join(RULES)}")
    sizes = {
        "global_batch_size": global_batch_size,
        "base_global_batch_size": base_global_batch_size,
        "block_size": block_size,
        "base_block_size": base_block_size,
        "critical_batch_size": critical_batch_size,
        "warmup_scale": warmup_scale,
    }
    for name, size in sizes.items():
        if size is not None and size <= 0:
            raise ParameterError(name, size, "it must be greater than 0")
    if rule == "none":
        return LRScaling(
            rule="none", kappa=1.0, factor=1.0, warmup_factor=warmup_scale, reason="rule 'none'"
        )
    if base_global_batch_size is None:
        reason = "no base_global_batch_size given, so the learning rate is taken to be tuned for this batch"
        return LRScaling(
            rule="none", kappa=1.0, factor=1.0, warmup_factor=warmup_scale, reason=reason
        )

    length_ratio = _length_ratio(block_size, base_block_size)
    # Both batches are limited, in sequences of the current length: a base beyond the critical batch was tuned there.
    capped_batch = min(global_batch_size, critical_batch_size or global_batch_size)
    base_batch = base_global_batch_size / length_ratio
    kappa = capped_batch / min(base_batch, critical_batch_size or base_batch)
    batches = f"global batch {base_global_batch_size} -> {global_batch_size} sequences"
    if length_ratio != 1:
        batches += f" of {base_block_size} -> {block_size} tokens"
    if critical_batch_size and critical_batch_size < max(global_batch_size, base_batch):
        batches += f", capped at the critical batch of {critical_batch_size}"
    batches += f" (tokens per step x {kappa:.4g})"

    if rule == "rubric":
        if block_size is None:
            raise ParameterError(
                "rule", rule, f"it needs the tokens per step: give {spelled('block_size')} too"
            )
        factor = _rubric_factor(capped_batch * block_size, kappa)
        warmup = warmup_scale * (RUBRIC_WARMUP_FACTOR if kappa > 1 else 1.0)
        reason = f"{batches}, rubric: linear up to {RUBRIC_TOKENS_PER_STEP:,} tokens per step, square root beyond"
        return LRScaling(
            rule="rubric", kappa=kappa, factor=factor, warmup_factor=warmup, reason=reason
        )

    resolved = _resolve_rule(rule, optimizer)
    factor = kappa if resolved == "linear" else math.sqrt(kappa)
    reason = f"{batches}, {resolved} rule for {optimizer}"
    return LRScaling(
        rule=resolved, kappa=kappa, factor=factor, warmup_factor=warmup_scale, reason=reason
    )


def _resolve_rule(rule: str, optimizer: str) -> str:
    """The rule that `auto` stands for: `linear` for SGD and `sqrt` for adaptive optimizers; other rules as they
    are."""
    if rule != "auto":
        return rule
    name = optimizer.lower()
    if any(part in name for part in _ADAPTIVE):
        return "sqrt"
    if any(part in name for part in _PLAIN):
        return "linear"
    reason = f"no rule is known for the optimizer {optimizer!r}: use linear, sqrt, rubric or none"
    raise ParameterError("rule", rule, reason)


def _length_ratio(block_size: int | None, base_block_size: int | None) -> float:
    """Tokens per sequence of this run over those of the base run."""
    if base_block_size is None:
        return 1.0
    if block_size is None:
        raise ParameterError(
            "base_block_size", base_block_size, "it needs block_size: give both or neither"
        )
    return block_size / base_block_size


def _rubric_factor(tokens: float, kappa: float) -> float:
    """Factor that is linear below the threshold and a square root above, continuous if the runs are on different
    sides."""
    base_tokens = tokens / kappa

    def curve(tokens_per_step: float) -> float:
        ratio = tokens_per_step / RUBRIC_TOKENS_PER_STEP
        return ratio if ratio <= 1 else math.sqrt(ratio)

    return curve(tokens) / curve(base_tokens)
