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
from hfscale.facts.layer_shape import AttentionShape, Linear
from hfscale.facts.model_shape import LayerKind, ModelShape
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
    kept = 0.0
    if not isinstance(modules, str):
        # The layers of a moment may be those of one kind; the names were checked for all layers together
        modules = shape.modules_here(modules)
        kept = -job.tokens * _unadapted_bytes(job, modules, regime)
    in_layers = shape.lora_parameters(job.lora_rank, modules) / shape.layers
    kept += _TABLE["lora"]["kept_per_adapter"][regime] * in_layers
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


def _unadapted_bytes(job: Job, modules: Iterable[str], regime: Regime) -> float:
    """Bytes per token that an average layer keeps less than with adapters on all matrices, which `activations.csv`
    counts: the outputs of the adapters' first matrices, and the inputs that adapters alone need.

    Adapters in fp32 have a copy of the input each. Those in bf16 share one with the other matrices that read it, and
    that of the output projection is kept by attention itself. Names never choose the experts of a mixture, whose
    inputs are kept for the gradients of their merged copies alone.
    """
    shape = job.shape
    width: float = _TABLE["lora"]["kept_per_input"]
    fewer = 0.0
    for kind in shape.layer_kinds:
        adapted, others = shape.unadapted(modules, kind)
        ranks = job.lora_rank * len(others)
        if regime == "lora":
            inputs = sum(one.inputs for one in others)
        else:
            inputs = _unread_inputs(shape, kind, adapted, others)
        routed = [one for one in kind.linears if one.copies > 1]
        # The table's experts are merged copies, whose gradients need their inputs
        if shape.moe is not None and shape.moe.adapted and routed:
            inputs += shape.hidden
            inputs += sum(one.used * one.inputs for one in routed)
        fewer += kind.share * width * (ranks + inputs)
    return fewer


def _unread_inputs(
    shape: ModelShape, kind: LayerKind, adapted: Iterable[Linear], others: Iterable[Linear]
) -> int:
    """Widths of the inputs that no adapted matrix reads, and that nothing else keeps."""
    last = _last_of_blocks(kind.linears)
    is_parallel = bool(shape.parallel_residual)
    read = {_source(one, last, is_parallel) for one in adapted}
    kept = _attention_output(kind)
    if kept is not None:
        read.add(kept)
    unread = {_source(one, last, is_parallel) for one in others}
    return sum(size for _, size in unread - read)


def _last_of_blocks(linears: Iterable[Linear]) -> set[str]:
    """Paths of the last matrix of each block, such as attention or MLP, whose input the block itself makes."""
    last: dict[str, str] = {}
    for one in linears:
        block = one.path.rpartition(".")[0]
        if one.copies == 1:
            last[block] = one.path
    return set(last.values())


def _source(linear: Linear, last: set[str], is_parallel: bool) -> tuple[str, int]:
    """What a matrix reads, and its width: what the block makes if it is the last one, otherwise the block's input,
    which attention and MLP share where they run in parallel."""
    if linear.path in last:
        return linear.path, linear.inputs
    block = "" if is_parallel else linear.path.rpartition(".")[0]
    return block, linear.inputs


def _attention_output(kind: LayerKind) -> tuple[str, int] | None:
    """What the output projection of attention reads, which attention keeps; None without attention."""
    if not isinstance(kind.mixer, AttentionShape):
        return None
    output = kind.mixer.linears[-1]
    return output.path, output.inputs
