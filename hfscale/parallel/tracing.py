"""Which modules a decoder runs before and after its layers, found by running it once without them.

The order in which a model declares its modules is not the order in which it runs them: BART declares the norm of its
embeddings after its layers. The run needs no values: for a model on the meta device it is made on the CPU, with zeros
that take no memory. It also finds what makes a split wrong: layers that get the embeddings again, modules with
parameters that run on both sides of the layers, and decoders that are no sequence of layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from hfscale.core.spelling import spelled
from hfscale.core.torch_internals import version_of
from hfscale.errors import UnsupportedModelError
from hfscale.parallel.partition import (
    IdentityStage,
    ModelStructure,
    has_parameters,
    replace_embeddings,
    view_with_layers,
)

_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class _LayerCall:
    """A call of one layer."""

    number: int
    """The layer's number."""
    hidden: Any
    """The first argument."""
    others: list[Any]
    """All tensors of the other arguments."""


class _TracedLayer(IdentityStage):
    """Takes the place of a layer, and records its calls."""

    def __init__(self, layer: nn.Module, number: int, calls: list[Any]) -> None:
        super().__init__(layer)
        self._number = number
        self._calls = calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        hidden = super().forward(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf is not hidden]
        self._calls.append(_LayerCall(number=self._number, hidden=hidden, others=others))
        return hidden


def trace_structure(model: PreTrainedModel, structure: ModelStructure) -> ModelStructure:
    """Find the modules before and after the layers of an unsplit model in the order in which it runs them.

    Args:
        model (`PreTrainedModel`): the unsplit model, on any device; it is not changed.
        structure (`ModelStructure`): names of its parts, by their declaration.

    Returns:
        The structure by which the model can be split.

    Raises:
        UnsupportedModelError: stages of this model would not compute what the model does; the message says why.
    """
    _check_layerdrop(model, structure)
    calls: list[Any] = []
    view = view_with_layers(model, structure, _traced_layers(model, structure, calls))
    ids = torch.ones((1, _TOKENS), dtype=torch.long, device=_device_of(model))
    parts = dict(_parts_outside(model, structure))
    with _recorded(model, structure, parts, calls):
        _run(model, view, structure, input_ids=ids)
    _check_calls(model, structure, calls, ids)
    # What runs between two layers, or on both sides of them, would have to be in several stages
    of_layers = [place for place, call in enumerate(calls) if isinstance(call, _LayerCall)]
    first = of_layers[0]
    last = of_layers[-1]
    before = set(calls[:first])
    between = [call for call in calls[first:last] if isinstance(call, str)]
    after = list(dict.fromkeys(calls[last + 1 :]))
    twice = [name for name in after if name in before]
    for name in between + twice:
        raise _unsupported(model, f"it runs {name} more than once, or between its layers")
    after += [name for name in parts if name not in before and name not in after]
    traced = replace(
        structure,
        before=tuple(name for name in parts if name in before),
        after=tuple(after),
    )
    _check_later_stage(model, traced)
    return traced


def _check_layerdrop(model: PreTrainedModel, structure: ModelStructure) -> None:
    """Refuse decoders that leave out layers at random: one that is left out would not pass on hidden states."""
    layerdrop = getattr(model.get_submodule(structure.decoder), "layerdrop", 0.0)
    if layerdrop:
        raise UnsupportedModelError(
            f"{type(model).__name__} leaves out layers at random (layerdrop is {layerdrop}), which pipeline stages "
            f"cannot; set it to 0 in the model's config, or set {spelled('pp_size', 1)}"
        )


def _check_calls(
    model: PreTrainedModel, structure: ModelStructure, calls: list[Any], ids: torch.Tensor
) -> None:
    """Make sure that hidden states pass all layers in turn, and that nothing else of the tokens reaches a layer."""
    of_layers = [call for call in calls if isinstance(call, _LayerCall)]
    order = [call.number for call in of_layers]
    if order != list(range(structure.depth)):
        raise _unsupported(model, "it does not run its layers one after the other")
    # Layers stand for themselves here and return what they get, so another shape means that the decoder takes more of
    # their output than hidden states. A stage receives hidden states only.
    shape = of_layers[0].hidden.shape
    for call in of_layers:
        if getattr(call.hidden, "shape", None) != shape:
            raise _unsupported(model, "its layers return more than hidden states")
        depends = [other for other in call.others if other.requires_grad or other is ids]
        if depends:
            raise _unsupported(
                model,
                "its layers get the tokens, their embeddings or trained values besides hidden states",
            )
    width = model.config.get_text_config().hidden_size
    if shape != (1, _TOKENS, width):
        raise _unsupported(model, "its layers pass on something else than hidden states")


def _check_later_stage(model: PreTrainedModel, structure: ModelStructure) -> None:
    """Make sure that the decoder runs on hidden states without its embeddings, as in every stage but the first."""
    calls: list[Any] = []
    view = view_with_layers(model, structure, _traced_layers(model, structure, calls))
    replace_embeddings(view, structure)
    width = model.config.get_text_config().hidden_size
    hidden = torch.ones((1, _TOKENS, width), dtype=model.dtype, device=_device_of(model))
    version = version_of(hidden)
    _run(model, view, structure, inputs_embeds=hidden)
    if version_of(hidden) != version:
        # They are what the stage before has sent: its backward pass, and the first layer, would get other values
        raise _unsupported(model, "it changes the hidden states that it is given, in place")
    _check_calls(model, structure, calls, hidden.new_empty(0))


def _run(
    model: PreTrainedModel, view: PreTrainedModel, structure: ModelStructure, **inputs: Any
) -> None:
    """Run a view's decoder; random numbers of the process are not used, since it runs in evaluation mode."""
    decoder = getattr(view, structure.decoder.split(".")[0])
    modes = [(module, module.training) for module in view.modules()]
    view.eval()
    # Decoders read masks and positions, which tensors on the meta device do not allow
    tensors = {name: _zeros_like(tensor) for name, tensor in _meta_tensors(decoder)}
    try:
        with torch.enable_grad():
            functional_call(decoder, tensors, kwargs=inputs | {"use_cache": False})
    # Any error in the code of a model means the same here: it has not been written for hidden states only
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise _unsupported(
            model, f"it does not run on hidden states only: {type(error).__name__}: {first_line}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _recorded(
    model: PreTrainedModel, structure: ModelStructure, parts: dict[str, nn.Module], calls: list[Any]
) -> Iterator[None]:
    """Inside this context, calls of the parts are recorded by name, and what parts and embeddings return needs a
    gradient, by which it is recognised in the arguments of layers."""

    def marked(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.requires_grad:
            return tensor
        return tensor.detach().requires_grad_().clone()  # some decoders change it in place

    def mark_output(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, marked, output)

    handles = []
    for name, part in parts.items():
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: calls.append(name)))
        handles.append(part.register_forward_hook(mark_output))
    embedding = model.get_submodule(structure.token_embedding)
    handles.append(embedding.register_forward_hook(mark_output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts_outside(
    model: PreTrainedModel, structure: ModelStructure
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules with parameters that hold neither layers nor the token embedding, and their names."""
    inner = (structure.layers, structure.token_embedding)

    def visit(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in inner:
                continue
            if any(other.startswith(f"{path}.") for other in inner):
                yield from visit(child, f"{path}.")
            elif has_parameters(child):
                yield path, child

    yield from visit(model, "")


def _traced_layers(
    model: PreTrainedModel, structure: ModelStructure, calls: list[Any]
) -> list[nn.Module]:
    return [
        _TracedLayer(layer, number, calls)
        for number, layer in enumerate(structure.layers_of(model))
    ]


def _meta_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            yield name, tensor


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros on the CPU, in the memory of one number."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _device_of(model: PreTrainedModel) -> torch.device:
    """Return where the decoder runs."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return torch.device("cpu")
    return device


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"stages of {type(model).__name__} would not compute what the model does ({reason}): set "
        f"{spelled('pp_size', 1)}"
    )
