"""Finds the modules through which a batch can enter the model of a Trainer, and the padding in a batch."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from hfscale.trainer.state import model_of, unwrap_compiled
from hfscale.trainer.strategies import Strategy

TOKENS = ("input_ids", "inputs_embeds")
"""Names of the inputs that hold the tokens of a batch."""
NOT_PADDING = "not_padding"
"""An input of the stages of `ParallelTrainer`: which of their positions are tokens and not padding, (rows, sequence)
as booleans. The attention mask does not tell it there: it may be absent although sequences were padded."""


@dataclass(frozen=True, kw_only=True)
class BatchEntry:
    """Describes a module through which a batch can enter a model."""

    module: nn.Module
    """The module."""
    names: Sequence[str]
    """Names of the arguments of its forward, in order."""
    is_encoder_decoder: bool
    """Whether it passes a batch to an encoder and to a decoder."""
    counts_nested: bool
    """Whether it counts a batch in a dictionary; if not, the models inside it count what they get of it."""


def runs_a_method(args: Sequence[Any]) -> bool:
    """Return whether a call of a module runs a method of a trainer in the place of its forward.

    TRL does so in a distillation, for the hooks of wrappers to run (`_ForwardRedirection`). The method gets the model,
    which it then calls with a batch.

    Args:
        args (`Sequence`): the positional arguments of the call.
    """
    return any(isinstance(value, nn.Module) for value in args)


def packed_padding(positions: torch.Tensor) -> torch.Tensor:
    """Return which positions of packed sequences are padding: sequences of one token (hfscale.recipe.packing).

    Nothing is trained on them.

    Args:
        positions (`torch.Tensor`): `position_ids`, (rows, sequence), which start from 0 in each sequence.
    """
    starts = positions == 0
    return starts & nn.functional.pad(starts[..., 1:], (0, 1), value=True)


def token_mask(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which positions of a batch are tokens and not padding, as booleans of the shape of its attention mask.

    Args:
        batch (`Mapping[str, Any]`): the inputs of a model by name.

    Returns:
        None if the batch has neither an attention mask nor the positions of packed sequences: all are tokens.
    """
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return mask != 0
    positions = batch.get("position_ids")
    shape = next(
        (batch[name].shape[:2] for name in TOKENS if isinstance(batch.get(name), torch.Tensor)),
        None,
    )
    if isinstance(positions, torch.Tensor) and positions.shape == shape:
        return ~packed_padding(positions)
    return None


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` compiles the calls of a module, as its wrapper or in place (`module.compile()`).

    Args:
        module (`nn.Module`): a module; the modules that a compiled one contains count as not compiled.
    """
    return unwrap_compiled(module) is not module or module._compiled_call_impl is not None


def batch_entries(trainer: Trainer) -> list[BatchEntry]:
    """Return the modules through which a batch can enter the model in training, the outermost first.

    They are the model, each transformers model inside it, and the module that holds such a model, since trainers also
    call the model without its wrapper or without its head. Of the wrappers, only those count whose inside is compiled,
    where hooks would be compiled too.

    Args:
        trainer (`Trainer`): prepared for training.
    """
    wrapped: nn.Module = trainer.model_wrapped
    model = model_of(trainer)
    if Strategy.of(trainer).runs_stages or isinstance(wrapped, nn.DataParallel):
        return [batch_entry(wrapped, counts_nested=True)]
    wrappers = []
    module: nn.Module = wrapped
    while (
        module is not model
        and (inner := getattr(module, "module", unwrap_compiled(module))) is not module
    ):
        wrappers.append(module)
        module = inner
    inside = [
        part
        for root in {id(root): root for root in (module, unwrap_compiled(model))}.values()
        for part in root.modules()
        if part is not model and (isinstance(part, PreTrainedModel) or _holds_transformer(part))
    ]
    compiled = any(is_compiled(part) for part in (*wrappers, model))
    return [
        *(batch_entry(wrapper, counts_nested=True) for wrapper in wrappers if compiled),
        batch_entry(model, counts_nested=compiled or not inside),
        *(batch_entry(part, counts_nested=True) for part in inside),
    ]


def _holds_transformer(module: nn.Module) -> bool:
    # sentence-transformers calls the forward of the model as a method, which does not run the hooks of the model.
    return any(isinstance(child, PreTrainedModel) for child in module.children())


def batch_entry(module: nn.Module, *, counts_nested: bool) -> BatchEntry:
    """Describe a module through which a batch can enter a model.

    Args:
        module (`nn.Module`): the module, with or without wrappers.
        counts_nested (`bool`): whether it counts a batch in a dictionary.
    """
    inner = unwrap_compiled(module)
    while isinstance(wrapped := getattr(inner, "module", None), nn.Module):
        inner = unwrap_compiled(wrapped)
    names = tuple(inspect.signature(inner.forward).parameters)
    has_decoder = "decoder_input_ids" in names or "args" in names  # PEFT passes any arguments on
    config = getattr(inner, "config", None)
    return BatchEntry(
        module=module,
        names=names,
        is_encoder_decoder=has_decoder and bool(getattr(config, "is_encoder_decoder", False)),
        counts_nested=counts_nested,
    )
