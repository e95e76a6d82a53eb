"""Finds the modules through which a batch can enter the model of a Trainer."""

import inspect

from torch import nn
from transformers import PreTrainedModel, Trainer

from hfscale.metrics.tokens import BatchEntry
from hfscale.trainer.parallel_trainer import is_parallel_trainer
from hfscale.trainer.state import model_of
from hfscale.trainer.strategy import unwrap_compiled


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
    if is_parallel_trainer(trainer) or isinstance(wrapped, nn.DataParallel):
        return [_batch_entry(wrapped, counts_nested=True)]
    wrappers = []
    module: nn.Module = wrapped
    while module is not model and (inner := getattr(module, "module", unwrap_compiled(module))) is not module:
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
        *(_batch_entry(wrapper, counts_nested=True) for wrapper in wrappers if compiled),
        _batch_entry(model, counts_nested=compiled or not inside),
        *(_batch_entry(part, counts_nested=True) for part in inside),
    ]


def _holds_transformer(module: nn.Module) -> bool:
    # sentence-transformers calls the forward of the model as a method, which does not run the hooks of the model.
    return any(isinstance(child, PreTrainedModel) for child in module.children())


def _batch_entry(module: nn.Module, *, counts_nested: bool) -> BatchEntry:
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
