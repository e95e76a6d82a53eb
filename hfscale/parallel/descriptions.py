"""Describes arguments and configs for the rules of `hfscale.facts.support`, before there is a Trainer."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.experts import spreads_experts
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import Combination
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.state import requested_optimizer
from hfscale.trainer.strategies.description import describe_request
from hfscale.trainer.strategies.requested import is_set

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, TrainingArguments


def describe_arguments(
    args: "TrainingArguments", environ: Mapping[str, str] = os.environ
) -> Combination:
    """Describe what the launcher and all arguments of a training ask for.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.
    """
    asked = describe_request(args, environ)
    if not asked.deepspeed_optimizer:  # of a config that names one Trainer makes none
        asked = replace(asked, optimizer=requested_optimizer(args))
    device = "cpu" if args.use_cpu else "gpu"
    return replace(
        asked,
        compile=bool(args.torch_compile),
        compile_full=compiles_full_model(args, environ),
        device=device,
        images=getattr(args, "reads_images", None),
    )


def compiles_full_model(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch.compile compiles the full model, and not each of its layers.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, from which Accelerate reads it.
    """
    return bool(args.torch_compile) and not is_set(
        environ, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
    )


def describe_config(config: "PreTrainedConfig") -> Combination:
    """Describe a model by its config.

    Args:
        config (`PreTrainedConfig`): the config of a model, or of a checkpoint whose weights have not been read.
    """
    text = config.get_text_config()
    return Combination(
        family=config.model_type,
        tp_plan=bool(text.base_model_tp_plan),
        ep_plan=spreads_experts(text),
        rope_type=_rope_type(text),
        quantized=quantization_of(config) is not None,
        checkpoint_format=quantization_of(config) or "none",
        # A bare config, from which no model has been made, names none
        attention=attention_implementation(config),
    )


def describe_split(
    config: "PreTrainedConfig", layout: ParallelLayout, *, sequence_parallel: bool
) -> Combination:
    """Describe a model that `ParallelTrainer` splits over a layout.

    Args:
        config (`PreTrainedConfig`): the config of the model.
        layout (`ParallelLayout`): sizes of the axes.
        sequence_parallel (`bool`): whether the tensor parallel ranks split sequences between blocks.
    """
    return replace(
        describe_config(config),
        engine="parallel_trainer",
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        expert_parallel=layout.ep if isinstance(layout, ExpertLayout) else 1,
        sequence_parallel=sequence_parallel,
    )


def quantization_of(config: "PreTrainedConfig") -> str | None:
    """Return the method by which the weights of a checkpoint are quantised, such as `mxfp4`; None if they are not.

    Args:
        config (`PreTrainedConfig`): the config of the checkpoint.
    """
    found: Any = getattr(config, "quantization_config", None)
    if not found:
        return None
    if isinstance(found, dict):
        method = found.get("quant_method")
    else:
        method = getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def _rope_type(text: "PreTrainedConfig") -> str | None:
    """Return how a model computes rotary angles, of which some depend on the longest position; None if unknown."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = []
    for part in (rope, *rope.values()):  # one for each kind of layers, or one for all
        if isinstance(part, dict) and part.get("rope_type") is not None:
            kinds.append(part["rope_type"])
    for kind in ("dynamic", "longrope"):
        if kind in kinds:
            return kind
    return min(kinds, default=None)
