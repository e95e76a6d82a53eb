"""Initial values of adapters on the meta device, by PEFT's own rules, and a check that no tensor is without a value.

An adapter's rule may read the weights that it adapts (DoRA's magnitude, PiSSA, trained tokens, copies of modules), so
adapters get their values after the base model has been drawn or read. PEFT initialises a layer when it puts it around
a module. Here it does so once more, for one module at a time, whose full weights are then in host memory: with a
generator that is seeded by the run's seed and the module's name, so that all layouts give the same values.
"""

import contextlib
import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hfscale.core.versions import is_auxiliary_wrapper, is_lora_layer, is_tuner_layer
from hfscale.errors import UsageError
from hfscale.parallel.adapters import ADAPTER_NAME, trains_tokens, wrapped_module
from hfscale.parallel.mesh import copy_local_shard, local_tensor
from hfscale.parallel.weights import full_on_host, needs_host_copies, seed_of
from hfscale.trainer.expert_adapters import is_wrapped_parameter

_NOT_FOR_ONE_MODULE = (
    "modules_to_save",
    "trainable_token_indices",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)
"""Options of PEFT's configs that choose among the modules of a model."""


@torch.no_grad()
def draw_adapters(model: nn.Module, *, seed: int) -> None:
    """Give every parameter and buffer of a model's adapters its initial value. Call it on every rank of a stage.

    Args:
        model (`nn.Module`): the base model with its adapters, on a real device; its own weights have their values.
        seed (`int`): the run's seed.

    Raises:
        UsageError: PEFT makes other tensors for a module by itself than for the model.
    """
    for name, module in _adapter_modules(model, ""):
        if is_tuner_layer(module):
            own = f"{name}.{module.parameter_name}" if is_wrapped_parameter(module) else name
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(seed, f"{own}.lora"))
                _draw_layer(model, module, name)
        elif not trains_tokens(module):
            _copy_saved_modules(module)


def _adapter_modules(module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the modules of PEFT with the names that what they are around has without adapters, inner ones first."""
    wrapped = wrapped_module(module)
    if wrapped is not None:
        yield from _adapter_modules(wrapped[1], name)
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _adapter_modules(child, f"{name}.{child_name}" if name else child_name)


def _draw_layer(model: Any, layer: Any, name: str) -> None:
    config = model.peft_config[ADAPTER_NAME]
    is_plain = is_lora_layer(layer) and config.init_lora_weights is True and not layer.lora_variant
    if is_plain:
        _reset_lora(layer)
        return
    with _base_on_host(layer) as base:
        if trains_rows(layer):
            made = type(layer)(base, ADAPTER_NAME)
            starts_as_base = getattr(config, "init_weights", True)
            made.update_layer(
                ADAPTER_NAME,
                token_indices=layer.token_indices[ADAPTER_NAME],
                init_weights=starts_as_base,
            )
        else:
            made = _adapt_module(base, name, config)
        _copy_tensors(made, layer, name)


def trains_rows(layer: Any) -> bool:
    """Return whether a layer is PEFT's of single trained rows of an embedding.

    Args:
        layer (`BaseTunerLayer`): a layer of adapters.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    return isinstance(layer, TrainableTokensLayer)


def _reset_lora(layer: Any) -> None:
    """Draw the matrices of LoRA by PEFT's own rule (one half random, the other zero)."""
    halves = (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B)
    with contextlib.ExitStack() as stack:
        for half in halves:
            for part in (half, *half.children()):
                if needs_host_copies(part.parameters(recurse=False)):
                    stack.enter_context(full_on_host(part))
        layer.reset_lora_parameters(ADAPTER_NAME, True)


def _adapt_module(base: nn.Module, name: str, config: Any) -> nn.Module:
    """Let PEFT put its layer around a module that has the name that it has in the model, and nothing around it."""
    from peft import inject_adapter_in_model

    root = nn.Module()
    parent = root
    *path, last = name.split(".")
    for part in path:
        parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(last, base)
    own = copy.deepcopy(config)
    own.target_modules = [name]
    for option in _NOT_FOR_ONE_MODULE:
        if hasattr(own, option):
            setattr(own, option, None)
    inject_adapter_in_model(own, root, adapter_name=ADAPTER_NAME)
    return root.get_submodule(name)


@contextlib.contextmanager
def _base_on_host(layer: Any) -> Iterator[nn.Module]:
    """Inside this context, the module that an adapter is around has its full weights in host memory. What PEFT then
    changes of them, as PiSSA does, each rank keeps its shard of."""
    base: nn.Module = layer.get_base_layer()
    originals = [
        (part, name, parameter)
        for part in base.modules()
        for name, parameter in part.named_parameters(recurse=False)
    ]
    values = []
    for part, name, parameter in originals:
        # All ranks of a stage are here for the same layer: gathering is a collective
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        value = full.detach().cpu()
        values.append(value)
        setattr(part, name, nn.Parameter(value.clone(), requires_grad=False))
    try:
        yield base
    finally:
        for (part, name, parameter), value in zip(originals, values, strict=True):
            changed = getattr(part, name)
            setattr(part, name, parameter)
            if not torch.equal(changed, value):
                copy_local_shard(parameter, changed.detach())


def _own_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of an adapter by name, without those of the module that it is around."""
    tensors = chain(layer.named_parameters(), layer.named_buffers())
    return {name: tensor for name, tensor in tensors if not name.startswith("base_layer.")}


def _copy_tensors(made: Any, layer: Any, name: str) -> None:
    values = _own_tensors(made)
    own = _own_tensors(layer)
    for tensor_name in values.keys() ^ own.keys():
        raise UsageError(
            f"the adapter of {name} has not the tensors ({tensor_name}) that PEFT makes for this module alone: build "
            "the model with real weights instead of on the meta device"
        )
    for tensor_name, tensor in own.items():
        value = values[tensor_name]
        if value.shape != tensor.shape:
            raise UsageError(
                f"{tensor_name} of the adapter of {name} has the shape {list(tensor.shape)}, and PEFT makes "
                f"{list(value.shape)} for this module alone: build the model with real weights instead of on the meta "
                "device"
            )
        copy_local_shard(tensor, value.detach())


def _copy_saved_modules(wrapper: Any) -> None:
    """Give the trained copies of a module the values of the module."""
    assert is_auxiliary_wrapper(wrapper)  # the only other modules of PEFT in a model
    original = wrapper.original_module
    sources = dict(chain(original.named_parameters(), original.named_buffers()))
    for copied in wrapper.modules_to_save.values():
        for name, tensor in chain(copied.named_parameters(), copied.named_buffers()):
            source = sources[name]
            if _placements(source) == _placements(tensor):
                local_tensor(tensor).copy_(local_tensor(source))
                continue
            full = source.full_tensor() if isinstance(source, DTensor) else source
            copy_local_shard(tensor, full)


def _placements(tensor: torch.Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None


# --- no tensor is without a value ------------------------------------------------------------------------------------


@torch.no_grad()
def mark_memory(model: nn.Module) -> None:
    """Fill the memory of a model with values by which `check_written` recognises what nobody has written.

    Args:
        model (`nn.Module`): a model that has just been given its memory.
    """
    for _, tensor in _tensors(model):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


@torch.no_grad()
def check_written(model: nn.Module) -> None:
    """Make sure that every element of a model that `mark_memory` has marked got a value.

    Integers are checked as a tensor: one that holds nothing but the mark was not written.

    Args:
        model (`nn.Module`): the model, when everything has been drawn or read.

    Raises:
        UsageError: a tensor has no value, or is NaN in the checkpoint that it was read from.
    """
    names = []
    is_marked = []
    for name, tensor in _tensors(model):
        if tensor.numel() == 0 or tensor.dtype == torch.bool:
            continue
        names.append(name)
        if tensor.is_floating_point() or tensor.is_complex():
            is_marked.append(tensor.isnan().any())
        else:
            is_marked.append((tensor == torch.iinfo(tensor.dtype).min).all())
    if not names:
        return
    # One transfer from the device for all tensors
    found = torch.stack(is_marked).tolist()
    for name, is_without in zip(names, found, strict=True):
        if is_without:
            raise UsageError(
                f"{name} of {type(model).__name__} was neither drawn nor read (or it is NaN in the checkpoint): build "
                "the model with real weights instead of on the meta device"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parts of all parameters and buffers that this rank holds."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        yield name, local_tensor(tensor.detach())
