"""Describes a run for the rules of `hfscale.facts.support`: each property of a `Combination` is computed in one place.

| function | adds what this says | it needs |
|---|---|---|
| `describe_request` | the launcher and the arguments | no model: recipes ask before they load anything |
| `with_deepspeed` | DeepSpeed's config | |
| `with_model` | a model with its adapters | |
| `with_trainer` | what a Trainer was given and has set up | its Accelerator |

`Strategy.combination` puts them together. `hfscale/parallel/descriptions.py` has what is asked about before there is a
Trainer, and recipes and `ParallelTrainer` add what only their own rules ask about.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import DynamoBackend
from torch import nn
from transformers import PreTrainedModel

from hfscale.core.spelling import current_speaker, speaking
from hfscale.core.versions import is_lora_layer, is_peft_model
from hfscale.facts.deepspeed import unshown_setting
from hfscale.facts.support import Combination, check_support, find_rule
from hfscale.trainer.state import (
    model_of,
    requested_optimizer,
    stepped_optimizer,
    unwrap_compiled,
)
from hfscale.trainer.strategies.requested import (
    deepspeed_config,
    gradient_compression,
    launched_size,
    requested,
    stage_of,
)

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

_TASKS_OF_TRL = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "GRPOTrainer": "grpo",
    "DistillationTrainer": "distillation",
}
_OPTIMIZERS = {"Muon": "muon", "Adafactor": "adafactor"}
"""Class of an optimizer -> the name by which rules know it; that of others is their class."""
_LIGER = "liger_kernel"
_BY_LAUNCHER = frozenset({"tp", "cp"})
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
    asked = Combination(
        engine="trainer",
        recipe=bool(getattr(args, "is_of_recipe", False)),
        strategy=facts.name,
        saves=args.save_strategy != "no",
        liger=_layers_of_liger(args),
        compression=gradient_compression(args),
    )
    if not facts.by_deepspeed:
        return asked
    return with_deepspeed(asked, deepspeed_config(args.deepspeed_plugin))


def _layers_of_liger(args: "TrainingArguments") -> bool:
    """Return whether Liger Kernel is to compute the matrices of the layers, which its config can leave out."""
    if vars(args).get("fused_loss") == "liger":
        return True
    chosen = args.liger_kernel_config or {}
    return bool(args.use_liger_kernel) and chosen.get("swiglu", True)


def with_deepspeed(asked: Combination, config: Mapping[str, Any]) -> Combination:
    """Add what DeepSpeed's config says.

    Args:
        asked (`Combination`): what is known so far.
        config (`Mapping[str, Any]`): the config of DeepSpeed; of one that names an optimizer, Trainer makes none.
    """
    optimizer = config.get("optimizer") or {}
    tensor_parallel = config.get("tensor_parallel") or {}
    data_types = config.get("data_types") or {}
    zero = config.get("zero_optimization") or {}
    return replace(
        asked,
        zero=stage_of(config),
        deepspeed_setting=unshown_setting(config),
        deepspeed_optimizer=str(optimizer.get("type", "")),
        autotp=tensor_parallel.get("autotp_size", 1),
        fp32_accumulation=data_types.get("grad_accum_dtype") == "fp32",
        round_robin=bool(zero.get("round_robin_gradients")),
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


# ---- the model


def with_model(asked: Combination, model: nn.Module) -> Combination:
    """Add what a model says: its family, its weights and its adapters.

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
        asked = replace(asked, family=base.config.model_type)
    asked = replace(asked, quantized=bool(getattr(base, "is_quantized", False)))
    if any(_is_of_liger(module) for module in base.modules()):
        asked = replace(asked, liger=True)
    return asked


def _with_adapters(asked: Combination, model: Any) -> Combination:
    """Add how a model of PEFT is adapted."""
    method = "lora"
    if getattr(model.get_base_model(), "is_loaded_in_4bit", False):
        method = "qlora"
    config = model.peft_config[model.active_adapter]
    kind = str(config.peft_type.value).lower()
    has_frozen = _has_frozen_matrices(model)
    return replace(asked, method=method, adapter=kind, frozen_adapter=has_frozen)


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
    active = set(model.active_adapters)
    for layer in model.modules():
        if not is_lora_layer(layer):
            continue
        base = set(layer.base_layer.parameters())
        for name, parameter in layer.named_parameters():
            is_frozen = not parameter.requires_grad and parameter not in base
            if is_frozen and not active.isdisjoint(name.split(".")):
                return True
    return False


# ---- the Trainer


def with_trainer(asked: Combination, trainer: "Trainer") -> Combination:
    """Add what a Trainer was given, and what its Accelerator has set up.

    Args:
        asked (`Combination`): what is known so far.
        trainer (`Trainer`): a Trainer or a subclass of it, before or after its model is prepared.
    """
    dynamo: Any = trainer.accelerator.state.dynamo_plugin
    is_compiled = dynamo.backend != DynamoBackend.NO
    asked = with_model(asked, unwrap_compiled(model_of(trainer)))
    if not asked.deepspeed_optimizer:
        asked = replace(asked, optimizer=_optimizer_of(trainer))
    return replace(
        asked,
        task=task_of(trainer),
        precision=trainer.accelerator.mixed_precision,
        compile=is_compiled,
        compile_full=is_compiled and not dynamo.use_regional_compilation,
        device=trainer.args.device.type,
    )


def task_of(trainer: "Trainer") -> str | None:
    """Return the task of a Trainer of TRL, or of a subclass of one; None for others."""
    for kind in type(trainer).__mro__:
        if kind.__module__.startswith("trl."):
            return _TASKS_OF_TRL.get(kind.__name__)
    return None


def _optimizer_of(trainer: "Trainer") -> str:
    """Return Trainer's name of the optimizer that it will make, or the class of one that is there or was given."""
    if trainer.optimizer is not None:
        optimizer = stepped_optimizer(trainer.optimizer)
        kind = type(optimizer)
    elif trainer.optimizer_cls_and_kwargs is not None:
        kind = trainer.optimizer_cls_and_kwargs[0]
    else:
        return requested_optimizer(trainer.args)
    return _OPTIMIZERS.get(kind.__name__, kind.__name__)


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
    sizes = [launched_size(axis, environ) or 1 for axis in ("tp", "cp", "sp")]
    is_launched = args.parallelism_config is None and max(sizes) > 1
    if current_speaker() == "python" and is_launched and _BY_LAUNCHER & rule.properties:
        with speaking("launcher"):
            check_support(asked)
    check_support(asked)
