"""What is an adapter in a model, which adapters `ParallelTrainer` trains, and under which names PEFT saves them.

PEFT's own classes answer: `BaseTunerLayer` is a layer of adapters around a module, `AuxiliaryTrainingWrapper` a module
that trains next to them. `get_peft_model_state_dict` says what is saved, and under which name. No parameter is
recognised by its name. The lists of the kinds that were compared with one process are in hfscale/facts/support.toml;
`adapter_weights.py` gives adapters on the meta device their values.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfscale.core.versions import (
    is_auxiliary_wrapper,
    is_lora_layer,
    is_peft_model,
    is_tuner_layer,
)
from hfscale.errors import UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import check_support
from hfscale.parallel.descriptions import describe_split

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_NAME = "default"
"""PEFT's name of the adapter of a model that has one."""


# --- what belongs to adapters, and what to the base model ------------------------------------------------------------


def wrapped_module(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the module that PEFT has put this one around.

    Args:
        module (`nn.Module`): a module of a model.

    Returns:
        Its name in this module, and the module; None if this module is not one of PEFT.
    """
    if is_tuner_layer(module):
        return "base_layer", module.base_layer
    if not is_auxiliary_wrapper(module):
        return None
    if trains_tokens(module):
        return "token_adapter", module.token_adapter
    return "original_module", module.original_module


def trains_tokens(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper of an embedding of which some rows train.

    Args:
        module (`nn.Module`): a module of a model.
    """
    return is_auxiliary_wrapper(module) and "token_adapter" in dict(module.named_children())


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has a module of PEFT.

    Args:
        model (`nn.Module`): the model, with or without PEFT's wrapper around it.
    """
    return any(wrapped_module(module) is not None for module in model.modules())


def base_names(model: nn.Module) -> dict[str, str]:
    """Return the names of the base model's parameters and buffers.

    Args:
        model (`nn.Module`): the base model, with its adapters if it has any.

    Returns:
        Name in this model -> name that it has without adapters.
    """
    return dict(_names(model, "", ""))


def _names(module: nn.Module, own: str, plain: str) -> Iterator[tuple[str, str]]:
    wrapped = wrapped_module(module)
    if wrapped is not None:
        name, inner = wrapped
        yield from _names(inner, f"{own}{name}.", plain)
        return
    parameters = module.named_parameters(recurse=False)
    for name, _ in chain(parameters, module.named_buffers(recurse=False)):
        yield f"{own}{name}", f"{plain}{name}"
    for name, child in module.named_children():
        yield from _names(child, f"{own}{name}.", f"{plain}{name}.")


# --- which adapters are trained --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdapterParts:
    """What a model of PEFT has been given, besides the kind of its adapters."""

    kind: str
    """PEFT's `peft_type`, in lower case."""
    parts: frozenset[str]
    """The options of its config, as PEFT spells them, that change what a layer computes or which modules train."""
    init: str
    """How LoRA's matrices begin: the `init_lora_weights` of its config, in lower case."""

    @classmethod
    def of(cls, model: "PeftModel") -> "AdapterParts":
        """Inspect a model.

        Args:
            model (`PeftModel`): the model, with one adapter.
        """
        config: Any = model.peft_config[ADAPTER_NAME]
        modules = list(model.modules())
        parts = set(_variants(config))
        if not parts and any(getattr(module, "lora_variant", None) for module in modules):
            parts.add("another variant of LoRA")
        # What a wrapper of a module is for decides, and not the option by which it came to be
        wrappers = [module for module in modules if is_auxiliary_wrapper(module)]
        for wrapper in wrappers:
            parts.add("trainable_token_indices" if trains_tokens(wrapper) else "modules_to_save")
        for name in ("layer_replication", "ensure_weight_tying", "megatron_config"):
            if getattr(config, name, None):
                parts.add(name)
        if getattr(config, "bias", "none") != "none":
            parts.add("bias")
        init = str(getattr(config, "init_lora_weights", True)).lower()
        return cls(kind=str(config.peft_type.value).lower(), parts=frozenset(parts), init=init)


def _variants(config: Any) -> Iterator[str]:
    """Yield the options of a config that PEFT itself marks as variants of LoRA, such as `use_dora`."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("is_lora_variant") and value:
            yield field.name
        if value in field.metadata.get("lora_variants", ()):
            yield str(value)


def check_adapters(
    model: nn.Module, layout: ParallelLayout, *, sequence_parallel: bool = False
) -> None:
    """Refuse adapters that no test has compared with one process under such a layout.

    Args:
        model (`PreTrainedModel` or `PeftModel`): the unsplit model; one without adapters is not refused.
        layout (`ParallelLayout`): sizes of the axes.
        sequence_parallel (`bool`): whether the tensor parallel ranks split sequences between blocks.

    Raises:
        UsageError: the model has several adapters, or such ones.
    """
    if not is_peft_model(model):
        if has_adapters(model):
            raise UsageError(
                f"{type(model).__name__} has adapters that it was given without PEFT's model around it, and "
                "ParallelTrainer would save them as a part of the model: use peft.get_peft_model(model, config)"
            )
        return
    names = list(model.peft_config)
    if names != [ADAPTER_NAME]:
        raise UsageError(
            f"the model has the adapters {', '.join(map(repr, names))}: ParallelTrainer trains and saves a single one "
            f"with the name {ADAPTER_NAME!r}, which peft.get_peft_model(model, config) gives it"
        )
    found = AdapterParts.of(model)
    base: Any = model.get_base_model()
    asked = replace(
        describe_split(base.config, layout, sequence_parallel=sequence_parallel),
        adapter=found.kind,
        adapter_init=found.init,
        on_meta=is_on_meta(model),
        tied_adapters=_separates_tied_weights(base),
    )
    for part in ("none", *sorted(found.parts)):
        check_support(replace(asked, adapter_part=part))


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter of a model has no memory yet.

    Args:
        model (`nn.Module`): the model.
    """
    return any(parameter.is_meta for parameter in model.parameters())


def _separates_tied_weights(model: PreTrainedModel) -> bool:
    """Return whether the adapters change embedding or head of a model whose head has the embedding's weight."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if None in ends:
        return False
    embedding, head = (_innermost(module) for module in ends)
    is_tied = getattr(embedding, "weight", None) is getattr(head, "weight", None)
    return is_tied and (embedding is not ends[0] or head is not ends[1])


def _innermost(module: nn.Module) -> nn.Module:
    """Return the module of the base model that PEFT's modules are around."""
    wrapped = wrapped_module(module)
    return module if wrapped is None else _innermost(wrapped[1])


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def plan_of_adapters(model: nn.Module, plan: dict[str, str]) -> None:
    """Move the tensor-parallel style of each module that PEFT has wrapped to the module inside, in place.

    With LoRA, the half of an adapter next to the sharded side of its linear layer is sharded in the same way: the rows
    of B for colwise layers, the columns of A for rowwise layers. A copy of a module has the style of the module.

    Args:
        model (`nn.Module`): the unsplit model.
        plan (`dict`): name of a module or parameter -> style; changed.
    """
    for name, module in model.named_modules():
        wrapped = wrapped_module(module)
        style = plan.get(name)
        if wrapped is None or style is None:
            continue
        del plan[name]
        for part in (wrapped[0], *_parts_with_style(module, style)):
            inner = f"{name}.{part}"
            plan[inner] = style
            for own, _ in model.get_submodule(inner).named_parameters(recurse=False):
                plan[f"{inner}.{own}"] = style


def _parts_with_style(module: Any, style: str) -> list[str]:
    """Return the names of the parts of an adapter that are sharded as the module that it is around."""
    if is_lora_layer(module):
        half = "lora_B" if style.startswith("colwise") else "lora_A"
        return [f"{half}.{adapter}" for adapter in getattr(module, half)]
    if is_auxiliary_wrapper(module) and not trains_tokens(module):
        return [f"modules_to_save.{adapter}" for adapter in module.modules_to_save]
    return []


# --- what PEFT saves -------------------------------------------------------------------------------------------------


def saved_names(model: "PeftModel") -> dict[str, str]:
    """Return what PEFT saves of an adapter, by asking its `get_peft_model_state_dict`.

    Args:
        model (`PeftModel`): the unsplit model, on any device.

    Returns:
        Name of a parameter or buffer of the base model with its adapters -> name in PEFT's file.

    Raises:
        UsageError: PEFT computes what it saves from the parameters, or does not save one that is trained.
    """
    from peft import get_peft_model_state_dict

    base = model.get_base_model()
    prefix = next(f"{name}." for name, module in model.named_modules() if module is base)
    state: Mapping[str, torch.Tensor] = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    saved = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=ADAPTER_NAME)
    found = {}
    for name, tensor in saved.items():
        # PEFT renames tensors and does not copy them, so that they are recognised by their identity
        own = names.get(id(tensor))
        if own is None or not own.startswith(prefix):
            kind = AdapterParts.of(model).kind
            raise UsageError(
                f"adapters of type {kind}: PEFT computes {name} when it saves them, from parameters that several "
                "ranks hold; use LoRA, or train with DDP"
            )
        found[own.removeprefix(prefix)] = name
    unsaved = _trained_names(base) - found.keys()
    if unsaved:
        raise UsageError(
            f"{min(unsaved)} is trained next to the adapters, and PEFT does not save it with them: name its module in "
            "modules_to_save of the adapter's config, or set its requires_grad to False"
        )
    return found


def _trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
