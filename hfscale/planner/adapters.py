"""Bytes of adapters that no token causes: what is formed from weights, and what their options add.

The factors are in `hfscale/facts/adapters.toml`. All byte counts are those of one layer and micro-batch on one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hfscale.core.spelling import spelled
from hfscale.core.tables import read_table
from hfscale.errors import UsageError
from hfscale.facts.activations import Regime
from hfscale.planner.experts import layer_parameters
from hfscale.planner.job import Job, strategy_of

_TABLE: dict[str, dict[str, Any]] = read_table("facts/adapters.toml")

Modules = Iterable[str] | Literal["all-linear"]
"""The modules with adapters, as PEFT takes them."""


@dataclass(frozen=True, kw_only=True)
class FormedBytes:
    """Holds the bytes of a layer that do not depend on how many tokens it has, and those of options of adapters."""

    kept: float = 0.0
    """Kept until the backward pass, unless the layer is recomputed."""
    kept_by_selective: float = 0.0
    """Kept until the backward pass by selective recomputation."""
    working: float = 0.0
    """In addition while the layer's backward pass runs."""


def target_modules(job: Job) -> Modules:
    """Return the modules that get adapters.

    Where transformers spreads experts over ranks, and no modules are named, they are those of the attention alone.

    Args:
        job (`Job`): the run.

    Raises:
        UsageError: no name is given.
    """
    if job.lora_target_modules is not None:
        names = tuple(name.strip() for name in job.lora_target_modules.split(",") if name.strip())
        if not names:
            given = spelled("lora_target_modules", job.lora_target_modules)
            raise UsageError(f"{given} has no name: give some such as q_proj,v_proj")
        return "all-linear" if names == ("all-linear",) else names
    return job.shape.attention_modules if job.is_native else "all-linear"


def has_merged_experts(job: Job) -> bool:
    """Return whether PEFT adapts the experts, and so computes with a merged copy of them.

    Args:
        job (`Job`): the run.
    """
    moe = job.shape.moe
    if job.method == "full" or moe is None:
        return False
    return moe.adapted and target_modules(job) == "all-linear"


def keeps_merged_experts(job: Job) -> bool:
    """Return whether autograd keeps the merged copy of experts until the backward pass.

    It does under DeepSpeed, where PEFT adds the adapters; elsewhere `hfscale.trainer.expert_adapters` does.

    Args:
        job (`Job`): the run.
    """
    return has_merged_experts(job) and strategy_of(job).startswith("zero")


def formed_bytes(job: Job, regime: Regime) -> FormedBytes:
    """Compute what the adapters of an average layer need in addition to what `activations.csv` counts.

    Args:
        job (`Job`): the run.
        regime (`Regime`): the formats in which the layers compute.
    """
    if job.method == "full":
        return FormedBytes()
    shape = job.shape
    modules = target_modules(job)
    if not isinstance(modules, str):
        # The layers of a moment may be those of one kind; the names were checked for all layers together
        modules = shape.modules_here(modules)
    in_layers = shape.lora_parameters(job.lora_rank, modules) / shape.layers
    kept = _TABLE["lora"]["kept_per_adapter"][regime] * in_layers
    working = by_selective = 0.0
    inputs, outputs, weights, largest = shape.adapted_widths(modules)
    if job.lora_dropout > 0:
        kept += job.tokens * _TABLE["lora"]["dropout_per_input"][regime] * inputs
    if job.use_dora:
        kept += job.tokens * _TABLE["dora"]["kept_per_output"] * outputs
        working = _TABLE["dora"]["working_per_weight"][regime] * largest
        by_selective = _TABLE["dora"]["selective_per_weight"] * weights
    if has_merged_experts(job) and shape.moe is not None:
        experts = layer_parameters(job)[1]
        matrices = [one.parameters for one in shape.moe.linears if one.copies > 1]
        factors = _TABLE["experts_of_peft" if keeps_merged_experts(job) else "experts"]
        kept += factors["kept_per_weight"] * experts
        # What is kept is freed before the last matrix is reached; what is formed again is largest for the largest one
        matrix = min(matrices) if factors["kept_per_weight"] else max(matrices)
        working = max(working, factors["working_per_weight"] * matrix / sum(matrices) * experts)
    return FormedBytes(kept=kept, kept_by_selective=by_selective, working=working)
