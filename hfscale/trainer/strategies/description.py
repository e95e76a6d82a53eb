"""Describes a run for the rules of `hfscale.facts.support`: each property of a `Combination` is computed here, once.

| function | adds what this says | it needs |
|---|---|---|
| `describe_request` | the launcher and the arguments | no model: recipes ask before they load anything |
| `describe_config` | the config of a model | no weights |
| `with_deepspeed` | DeepSpeed's config | |
| `with_axes` | the sizes that Accelerate has | |
| `with_model` | a model with its adapters | |
| `with_trainer` | what a Trainer was given and has set up | its Accelerator |

`Strategy.combination` puts them together. Recipes and `ParallelTrainer` add what only their own flags say, such as the
packing of documents, by `dataclasses.replace`.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DynamoBackend
from torch import nn
from transformers import PreTrainedModel

from hfscale.core.spelling import current_speaker, speaking
from hfscale.core.versions import is_peft_model, recomputation_options
from hfscale.facts.experts import DISPATCH_STYLE, spreads_experts
from hfscale.facts.support import Combination, find_rule
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.state import model_of, requested_optimizer, unwrap_compiled
from hfscale.trainer.strategies.requested import (
    compiles_full_model,
    deepspeed_config,
    gradient_compression,
    launched_size,
    requested,
    stage_of,
)

if TYPE_CHECKING:
    from accelerate import ParallelismConfig
    from transformers import PreTrainedConfig, Trainer, TrainingArguments

_TASKS_OF_TRL = {"SFTTrainer": "sft", "DPOTrainer": "dpo", "GRPOTrainer": "grpo"}
_OPTIMIZERS = {"Muon": "muon", "Adafactor": "adafactor"}
"""Class of an optimizer -> the name by which rules know it; that of others is their class."""
_LIGER = "liger_kernel"
_BY_LAUNCHER = frozenset({"tp", "cp", "launcher_attention"})
"""Properties that the launcher's config can give."""


# ---- what is requested, before there is a model


def describe_request(
    args: "TrainingArguments", environ: Mapping[str, str] = os.environ
) -> Combination:
    """Describe what the launcher and the arguments of a training ask for.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.
    """
    facts = requested(args, environ)
    sequence_axis = "cp"
    attention = "sdpa"
    if facts.by_deepspeed:
        sequence_axis = "sp"
        attention = environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sdpa")
    asked = Combination(
        engine="trainer",
        recipe=is_from_recipe(args),
        strategy=facts.name,
        tp=_size("tp", environ),
        cp=_size(sequence_axis, environ),
        launcher_attention=attention,
    )
    asked = _with_arguments(asked, args)
    asked = _with_numerics(asked, args, environ)
    if args.parallelism_config is not None:
        asked = with_axes(asked, args.parallelism_config)
    if facts.by_deepspeed:
        asked = with_deepspeed(asked, deepspeed_config(args.deepspeed_plugin))
    return asked


def _size(axis: str, environ: Mapping[str, str]) -> int:
    """Return the size of an axis in the launcher's config; 1 if it has none."""
    return launched_size(axis, environ) or 1


def _with_arguments(asked: Combination, args: "TrainingArguments") -> Combination:
    """Add the arguments that say what is trained on, logged and saved."""
    schedule = args.lr_scheduler_type
    return replace(
        asked,
        saves=args.save_strategy != "no",
        average_tokens_across_devices=bool(args.average_tokens_across_devices),
        auto_find_batch_size=bool(args.auto_find_batch_size),
        neftune=args.neftune_noise_alpha,
        tokens_seen=str(args.include_num_input_tokens_seen),
        lr_scheduler=str(getattr(schedule, "value", schedule)),
    )


def _with_numerics(
    asked: Combination, args: "TrainingArguments", environ: Mapping[str, str]
) -> Combination:
    """Add the arguments that say where and how a step is computed."""
    loss = _fused_loss(args)
    return replace(
        asked,
        precision=_requested_precision(args, environ),
        compile=bool(args.torch_compile),
        compile_full=compiles_full_model(args, environ),
        recompute=_recompute(args),
        fused_loss=loss != "none",
        liger=_layers_of_liger(args),
        optimizer=requested_optimizer(args),
        compression=gradient_compression(args),
        device=_device(is_cpu=args.use_cpu),
        has_cuda=torch.cuda.is_available(),
    )


def _device(*, is_cpu: bool) -> str:
    if is_cpu:
        return "cpu"
    return "gpu"


def is_from_recipe(args: "TrainingArguments") -> bool:
    """Return whether the arguments are the flags of a recipe.

    Args:
        args (`TrainingArguments`): the training arguments.
    """
    return bool(getattr(args, "is_from_flags", False))


def _requested_precision(args: "TrainingArguments", environ: Mapping[str, str]) -> str:
    if args.fp16:
        return "fp16"
    if args.bf16:
        return "bf16"
    by_launcher = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return _precision(by_launcher)


def _precision(mixed: str) -> str:
    """Return the format of the matrix products, from Accelerate's name of it."""
    if mixed == "no":
        return "fp32"
    return mixed


def _recompute(args: "TrainingArguments") -> str:
    """Return what is computed again: with a context of the caller's choice, not all of a layer."""
    options = recomputation_options(args)
    if options is None:
        return "none"
    if "context_fn" in options:
        return "selective"
    return "full"


def _fused_loss(args: "TrainingArguments") -> str:
    """Return how a loss without all logits is computed: `none`, `chunked` (by a recipe) or `liger`."""
    asked: str = vars(args).get("fused_loss", "none")
    if asked in ("chunked", "liger"):
        return asked
    if args.use_liger_kernel:
        return "liger"
    return "none"


def _layers_of_liger(args: "TrainingArguments") -> bool:
    """Return whether Liger Kernel is to compute the matrices of the layers, which its config can leave out."""
    if vars(args).get("fused_loss") == "liger":
        return True
    if not args.use_liger_kernel:
        return False
    chosen = args.liger_kernel_config or {}
    return bool(chosen.get("swiglu", True))


def with_deepspeed(asked: Combination, config: Mapping[str, Any]) -> Combination:
    """Add what DeepSpeed's config says.

    Args:
        asked (`Combination`): what is known so far.
        config (`Mapping[str, Any]`): the config of DeepSpeed; of one that names an optimizer, Trainer makes none.
    """
    zero = config.get("zero_optimization", {})
    optimizer = config.get("optimizer", {})
    tensor_parallel = config.get("tensor_parallel", {})
    data_types = config.get("data_types", {})
    if optimizer:
        asked = replace(asked, optimizer=None)
    return replace(
        asked,
        zero=stage_of(config),
        deepspeed_optimizer=str(optimizer.get("type", "")),
        autotp=tensor_parallel.get("autotp_size", 1),
        fp32_accumulation=data_types.get("grad_accum_dtype") == "fp32",
        gathers_weights=bool(zero.get("stage3_gather_16bit_weights_on_model_save")),
        param_device=offload_device(config, "param"),
    )


def offload_device(config: Mapping[str, Any], part: str) -> str:
    """Return where DeepSpeed offloads a part of the state: `none`, `cpu` or `nvme`.

    Args:
        config (`Mapping[str, Any]`): the config of DeepSpeed.
        part (`str`): `optimizer` or `param`.
    """
    zero = config.get("zero_optimization", {})
    offload = zero.get(f"offload_{part}") or {}
    return str(offload.get("device", "none"))


def with_axes(asked: Combination, config: "ParallelismConfig") -> Combination:
    """Add the sizes of the axes that Accelerate has.

    Args:
        asked (`Combination`): what is known so far.
        config (`ParallelismConfig`): Accelerate's sizes.
    """
    ulysses: Any = config.sp_handler
    if ulysses is not None:
        asked = replace(asked, launcher_attention=ulysses.sp_attn_implementation)
    ranks = max(config.cp_size, config.sp_size)
    return replace(asked, tp=config.tp_size, cp=ranks)


# ---- the model


def describe_config(config: "PreTrainedConfig") -> Combination:
    """Describe a model by its config.

    Args:
        config (`PreTrainedConfig`): the config of a model, or of a checkpoint whose weights have not been read.
    """
    text = config.get_text_config()
    of_text = Combination(
        tp_plan=bool(text.base_model_tp_plan),
        ep_plan=spreads_experts(text),
        rope_type=_rope_type(text),
        quantized=quantization_of(config) is not None,
    )
    return _with_family(of_text, config)


def _with_family(asked: Combination, config: "PreTrainedConfig") -> Combination:
    """Add what the config of every model has, also of one with several language models."""
    # A bare config, from which no model has been made, names no attention
    attention = attention_implementation(config)
    return replace(asked, family=config.model_type, attention=attention)


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


def with_model(asked: Combination, model: nn.Module) -> Combination:
    """Add what a model says: its family, its attention, its weights and its adapters.

    Args:
        asked (`Combination`): what is known so far.
        model (`nn.Module`): the model without wrappers; that of another library has no family.
    """
    base: Any = model
    if is_peft_model(model):
        base = model.get_base_model()
        asked = _with_adapters(asked, model)
    else:
        asked = replace(asked, method="full")
    if isinstance(base, PreTrainedModel):
        asked = _with_family(asked, base.config)
    is_quantized = getattr(base, "is_quantized", False)
    asked = replace(asked, quantized=bool(is_quantized))
    if any(_is_of_liger(module) for module in base.modules()):
        asked = replace(asked, liger=True)
    return asked


def _with_adapters(asked: Combination, model: Any) -> Combination:
    """Add how a model of PEFT is adapted."""
    method = "lora"
    if getattr(model.get_base_model(), "is_loaded_in_4bit", False):
        method = "qlora"
    config = model.peft_config[model.active_adapter]
    kind = str(config.peft_type.value)
    has_frozen = _has_frozen_matrices(model)
    return replace(asked, method=method, adapter=kind.lower(), frozen_adapter=has_frozen)


def _is_of_liger(module: nn.Module) -> bool:
    """Return whether Liger Kernel computes the matrices of a module; the loss of a whole model does not count."""
    if isinstance(module, PreTrainedModel):
        return False
    of_class = type(module).__module__
    of_forward = getattr(module.forward, "__module__", "")
    if not (of_class.startswith(_LIGER) or of_forward.startswith(_LIGER)):
        return False
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _has_frozen_matrices(model: Any) -> bool:
    """Return whether a LoRA matrix of an adapter in use does not train, as the A matrices of LoRA-FA."""
    in_use = [f".{name}." for name in model.active_adapters]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or "lora_" not in name:
            continue
        if any(adapter in f"{name}." for adapter in in_use):
            return True
    return False


def with_plans(asked: Combination, model: PreTrainedModel) -> Combination:
    """Add whether transformers has plans by which it splits a model, whose class may have one that its config has not.

    Args:
        asked (`Combination`): what is known so far.
        model (`PreTrainedModel`): the model, without adapters.
    """
    has_dispatch = DISPATCH_STYLE in (model.ep_plan or {}).values()
    return replace(asked, tp_plan=bool(model.tp_plan), ep_plan=has_dispatch)


# ---- the Trainer


def with_trainer(asked: Combination, trainer: "Trainer") -> Combination:
    """Add what a Trainer was given, and what its Accelerator has set up.

    Args:
        asked (`Combination`): what is known so far.
        trainer (`Trainer`): a Trainer or a subclass of it, before or after its model is prepared.
    """
    accelerator = trainer.accelerator
    dynamo: Any = accelerator.state.dynamo_plugin
    is_compiled = dynamo.backend != DynamoBackend.NO
    model = unwrap_compiled(model_of(trainer))
    asked = _with_task(with_model(asked, model), trainer)
    if not asked.deepspeed_optimizer:
        asked = replace(asked, optimizer=_optimizer_of(trainer))
    asked = replace(
        asked,
        precision=_precision(accelerator.mixed_precision),
        compile=is_compiled,
        compile_full=is_compiled and not dynamo.use_regional_compilation,
        device=_device(is_cpu=trainer.args.device.type == "cpu"),
        compute_metrics=trainer.compute_metrics is not None,
        compute_loss_func=trainer.compute_loss_func is not None,
        model_init=trainer.model_init is not None,
    )
    axes = accelerator.parallelism_config
    if axes is None:
        return asked
    return with_axes(asked, axes)


def _with_task(asked: Combination, trainer: "Trainer") -> Combination:
    """Add the task of a Trainer of TRL, or of a subclass of one."""
    of_trl = [kind.__name__ for kind in type(trainer).__mro__ if _is_of_trl(kind)]
    asked = replace(asked, trl=bool(of_trl))
    for name in of_trl:
        if name in _TASKS_OF_TRL:
            return replace(asked, task=_TASKS_OF_TRL[name])
    return asked


def _is_of_trl(kind: type) -> bool:
    package = kind.__module__.split(".")[0]
    return package == "trl"


def _optimizer_of(trainer: "Trainer") -> str:
    """Return Trainer's name of the optimizer that it will make, or the class of one that is there or was given."""
    if trainer.optimizer is not None:
        optimizer: Any = trainer.optimizer
        while hasattr(optimizer, "optimizer"):  # those of Accelerate and DeepSpeed
            optimizer = optimizer.optimizer
        kind = type(optimizer)
    elif trainer.optimizer_cls_and_kwargs is not None:
        kind = trainer.optimizer_cls_and_kwargs[0]
    else:
        return requested_optimizer(trainer.args)
    name = kind.__name__
    return _OPTIMIZERS.get(name, name)


# ---- the check


def check_described(
    asked: Combination, args: "TrainingArguments", environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse a run that does not work, with parameters as its program, its flags or its launcher's config write them.

    Args:
        asked (`Combination`): the run.
        args (`TrainingArguments`): its arguments.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Raises:
        HfScaleError: it does not work; the class is that of the rule, most often `UsageError`.
    """
    rule = find_rule(asked)
    if rule is None:
        return
    sizes = [_size(axis, environ) for axis in ("tp", "cp", "sp")]
    is_launched = args.parallelism_config is None and max(sizes) > 1
    is_about_sizes = bool(_BY_LAUNCHER & rule.properties)
    if current_speaker() == "python" and is_launched and is_about_sizes:
        with speaking("launcher"):
            raise rule.refusal(asked)
    raise rule.refusal(asked)
