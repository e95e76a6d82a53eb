"""Checks of a model's config against a layout, made before a model is built or a process group exists."""

import math

from transformers import PreTrainedConfig

from hfscale.core.logging import get_logger
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.parallel_families import (
    CONTEXT_PARALLEL_TESTED,
    CONTEXT_PARALLEL_UNSUPPORTED,
    PIPELINE_TESTED,
    PIPELINE_UNSUPPORTED,
    SEQUENCE_PARALLEL_TESTED,
    TENSOR_PARALLEL_UNSUPPORTED,
)
from hfscale.parallel.context import check_attention_implementation
from hfscale.parallel.stages import StagePlan
from hfscale.trainer.attention import attention_implementation

logger = get_logger(__name__)

_FAMILIES_FILE = "hfscale/facts/parallel_families.toml"


def check_config(
    config: PreTrainedConfig, layout: ParallelLayout, plan: StagePlan, *, sequence_parallel: bool = False
) -> None:
    """Make sure that a model can be parallelized over a layout.

    Args:
        config (`PreTrainedConfig`): the model's config.
        layout (`ParallelLayout`): sizes of the axes.
        plan (`StagePlan`): the pipeline stages.
        sequence_parallel (`bool`): whether the tensor parallel ranks split sequences between blocks.

    Raises:
        LayoutError: heads, vocabulary or layers do not divide over the axes; the message names the nearest sizes.
        UsageError: the weights are quantised, or the model's family or its attention implementation does not support
            one of the axes.
    """
    if plan.stages > 1:
        check_pipeline_family(config.model_type)
    text = config.get_text_config()
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"the {config.model_type} checkpoint has quantised weights, which cannot be sharded over ranks: give a "
            "checkpoint in bf16 or fp32, or train it with recipes/sharded and --load_in_4bit"
        )
    if text.num_hidden_layers < plan.stages:
        possible = text.num_hidden_layers // plan.per_rank
        raise LayoutError(
            f"--pp_size is {plan.pp}: with {plan.per_rank} stages per rank it makes {plan.stages} stages, but the "
            f"model has {text.num_hidden_layers} layers: set --pp_size {max(1, possible)}"
        )
    check_tensor_family(config.model_type, layout.tp)
    if layout.cp > 1:
        check_context_family(config, layout.cp)
        implementation = attention_implementation(config)
        if implementation is not None:  # a bare config, which no model has been made from, names none
            check_attention_implementation(implementation, layout.cp)
    if sequence_parallel:
        check_sequence_family(config.model_type, layout.tp)
    if layout.tp > 1:
        _check_tensor_sizes(config, layout.tp)


def _check_tensor_sizes(config: PreTrainedConfig, tp: int) -> None:
    text = config.get_text_config()
    if not text.base_model_tp_plan:
        raise UsageError(
            f"--tp_size is {tp}: transformers has no tensor-parallel plan for {config.model_type}; set --tp_size 1"
        )
    heads = text.num_attention_heads
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(text, "num_key_value_heads", None) or heads,
        "vocabulary entries": text.vocab_size,
    }
    for what, count in counts.items():
        if count % tp:
            common = math.gcd(*counts.values())
            legal = [n for n in range(1, common + 1) if common % n == 0]
            nearest = min(legal, key=lambda n: abs(n - tp))
            raise LayoutError(
                f"--tp_size is {tp}, which does not divide the model's {count} {what}: set --tp_size {nearest} "
                f"(one of {', '.join(map(str, legal[:12]))})"
            )


def check_pipeline_family(model_type: str) -> None:
    """Make sure that a model family can be split into pipeline stages; warn where no test has compared it.

    Args:
        model_type (`str`): the family, `model_type` of the model's config.

    Raises:
        UsageError: the family is known not to compute the same in stages.
    """
    if model_type in PIPELINE_UNSUPPORTED:
        raise UsageError(
            f"{model_type} cannot be split into pipeline stages ({PIPELINE_UNSUPPORTED[model_type]}): set --pp_size 1"
        )
    if model_type not in PIPELINE_TESTED:
        logger.warning(
            "no test has compared the pipeline stages of a %s model with the unsplit model: compare the first losses "
            "with those of a run with --pp_size 1",
            model_type,
        )


def check_tensor_family(model_type: str, tp: int) -> None:
    """Make sure that the matrices of a model family can be sharded over `tp` ranks.

    Args:
        model_type (`str`): the family, `model_type` of the model's config.
        tp (`int`): ranks that share each matrix.

    Raises:
        UsageError: transformers' tensor-parallel plan for the family is known to be wrong.
    """
    if tp > 1 and model_type in TENSOR_PARALLEL_UNSUPPORTED:
        raise UsageError(
            f"--tp_size is {tp}: tensor parallelism does not work with {model_type} "
            f"({TENSOR_PARALLEL_UNSUPPORTED[model_type]}); set --tp_size 1"
        )


def check_sequence_family(model_type: str, tp: int) -> None:
    """Make sure that sequence parallelism works for a model family.

    Args:
        model_type (`str`): the family, `model_type` of the model's config.
        tp (`int`): ranks that share each matrix.

    Raises:
        UsageError: there is one tensor parallel rank only, or no test has shown that the family computes the same.
    """
    if tp == 1:
        raise UsageError(
            "--sequence_parallel is true: it splits sequences over the ranks of --tp_size, which is 1; leave the flag "
            "out"
        )
    if model_type not in SEQUENCE_PARALLEL_TESTED:
        raise UsageError(
            f"--sequence_parallel is true: it was not tested with {model_type}; leave the flag out (tested: "
            f"{', '.join(sorted(SEQUENCE_PARALLEL_TESTED)[:12])} ...: {_FAMILIES_FILE})"
        )


def check_context_family(config: PreTrainedConfig, cp: int) -> None:
    """Make sure that a model computes the same when each rank has a part of every sequence.

    Args:
        config (`PreTrainedConfig`): the model's config.
        cp (`int`): ranks that share one sequence.

    Raises:
        UsageError: the model's family has not been tested, or its rotary angles depend on the longest position that a
            rank sees.
    """
    if config.model_type in CONTEXT_PARALLEL_UNSUPPORTED:
        reason = CONTEXT_PARALLEL_UNSUPPORTED[config.model_type]
        raise UsageError(
            f"--cp_size is {cp}: context parallelism does not work with {config.model_type} ({reason}); set "
            "--cp_size 1"
        )
    if config.model_type not in CONTEXT_PARALLEL_TESTED:
        raise UsageError(
            f"--cp_size is {cp}: context parallelism was not tested with {config.model_type}; set --cp_size 1 "
            f"(tested: {', '.join(sorted(CONTEXT_PARALLEL_TESTED)[:12])} ...: {_FAMILIES_FILE})"
        )
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    for kind in sorted(kinds & {"dynamic", "longrope"}):
        raise UsageError(
            f"--cp_size is {cp}: rope_type {kind} depends on the longest position, which only one rank of a sequence "
            "has; set --cp_size 1"
        )
