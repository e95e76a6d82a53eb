"""What the forward pass of a family does that its parameters do not show, found by running parts of it on a CPU."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfscale.errors import UnsupportedModelError
from hfscale.trainer.small_model import make_config_small

_TOKENS = 64
_TOLERANCE = 0.1
"""How far a measured power of the width may be from 0 or 1/2."""


class _ReachedError(Exception):
    """The first layer has been reached, with these hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def embedding_factor(kind: type[PreTrainedModel], narrow: Any, wide: Any) -> float:
    """Return the power of the width by which a model multiplies its embeddings: 0, or 1/2 for Gemma.

    Args:
        kind (`type`): the class of the model.
        narrow (`PreTrainedConfig`): its config at the base width.
        wide (`PreTrainedConfig`): its config at its own width.

    Raises:
        UnsupportedModelError: it is another power, or the first layer cannot be found.
    """
    sizes = [_size_before_layers(kind, config) for config in (narrow, wide)]
    power = math.log(sizes[1] / sizes[0]) / math.log(wide.hidden_size / narrow.hidden_size)
    for known in (0.0, 0.5):
        if abs(power - known) < _TOLERANCE:
            return known
    raise UnsupportedModelError(
        f"{wide.model_type} multiplies its embeddings by the width to the power of {power:.2g}, for which no rule is "
        "known: train without a base width"
    )


@torch.no_grad()
def _size_before_layers(kind: type[PreTrainedModel], config: Any) -> float:
    """Return the mean absolute value of the first layer's input where the embeddings are drawn from N(0, 1).

    Only what stands outside of the layers has memory.
    """
    config = copy.deepcopy(config)
    config.vocab_size = _TOKENS
    config.pad_token_id = None
    with torch.device("meta"):
        model: Any = kind(config)
    layers = layers_of(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    for module in outside:
        module.to_empty(device="cpu", recurse=False)
    embedding = model.get_input_embeddings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.init_weights()  # computes the buffers too, such as Gemma's factor
        for module in outside:
            if isinstance(module, nn.Embedding):
                module.weight.zero_()  # those of positions
        embedding.weight.normal_()
    layers[0].register_forward_pre_hook(_stop, with_kwargs=True)
    try:
        model(input_ids=torch.arange(_TOKENS).view(1, -1), use_cache=False)
    except _ReachedError as reached:
        return float(reached.hidden.float().abs().mean())
    raise UnsupportedModelError(_no_layers(config))


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = args[0] if args else kwargs["hidden_states"]
    raise _ReachedError(hidden)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a model's layers.

    Args:
        model (`PreTrainedModel`): a causal language model.

    Raises:
        UnsupportedModelError: it has no such list.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise UnsupportedModelError(_no_layers(model.config))


def _no_layers(config: Any) -> str:
    return (
        f"{config.model_type} has no list of num_hidden_layers layers: train without a base width"
    )


# ---- the norm before a tied head


@dataclass(frozen=True, kw_only=True)
class NormBeforeHead:
    """The norm whose output is what the head gets."""

    parameters: Sequence[str]
    """Names of its parameters in the model."""
    adds_one: bool
    """Whether it multiplies by 1 + its weight."""


@torch.no_grad()
def norm_before_head(kind: type[PreTrainedModel], config: Any) -> NormBeforeHead:
    """Find the norm before the head, and how its parameters scale its output.

    Args:
        kind (`type`): the class of the model.
        config (`PreTrainedConfig`): its config; a small model of it is run.

    Raises:
        UnsupportedModelError: no norm with parameters gives the head its input, or they do not scale it.
    """
    small = copy.deepcopy(config)
    make_config_small(small)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(small).eval()
        name = _last_before_head(model)
        norm = model.get_submodule(name) if name is not None else None
        parameters = [] if norm is None else [own for own, _ in norm.named_parameters()]
        if norm is not None and parameters:
            for adds_one in (False, True):
                if _scales(norm, small.hidden_size, adds_one=adds_one):
                    names = [f"{name}.{own}" for own in parameters]
                    return NormBeforeHead(parameters=names, adds_one=adds_one)
    found = name or "what the head gets"
    raise UnsupportedModelError(
        f"the head of this {config.model_type} is its embedding, and {found} is no norm whose parameters scale its "
        "output: set tie_word_embeddings to false, or train without a base width"
    )


def _last_before_head(model: PreTrainedModel) -> str | None:
    """Return the name of the last module without children whose output the head gets; None if there is none."""
    outputs: list[tuple[str, torch.Tensor]] = []
    inputs: list[torch.Tensor] = []
    head: Any = model.get_output_embeddings()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                outputs.append((name, output))

        return hook

    for name, module in model.named_modules():
        if module is not head and not any(True for _ in module.children()):
            module.register_forward_hook(note(name))
    head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(input_ids=torch.arange(min(8, model.config.vocab_size)).view(1, -1), use_cache=False)
    for name, output in reversed(outputs):
        if output.shape == inputs[0].shape and torch.equal(output, inputs[0]):
            return name
    return None


def _scales(norm: nn.Module, width: int, *, adds_one: bool, factor: float = 0.25) -> bool:
    """Return whether the output of a norm is multiplied by what its parameters are multiplied by."""
    for parameter in norm.parameters():
        parameter.normal_()
    hidden = torch.randn(4, width)
    before = norm(hidden)
    scaled = copy.deepcopy(norm)
    for parameter in scaled.parameters():
        scale_values(parameter, factor, adds_one=adds_one)
    return torch.allclose(scaled(hidden), before * factor, rtol=1e-4, atol=1e-6)


def scale_values(values: torch.Tensor, factor: float, *, adds_one: bool) -> None:
    """Multiply values in place, or, where a module adds 1 to them, the sum.

    Args:
        values (`torch.Tensor`): the values of a parameter.
        factor (`float`): the factor.
        adds_one (`bool`): whether the module adds 1.
    """
    if adds_one:
        values.add_(1).mul_(factor).sub_(1)
    else:
        values.mul_(factor)
