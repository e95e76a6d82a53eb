"""Which parameters of a model are matrices whose sides grow with its width, and what μTransfer does to each of them.

The rules are those of Yang et al., Tensor Programs V (arXiv 2203.03466), table 3, for Adam, relative to a base width
at which nothing changes. With m = width / base width:

| role | which parameters | initial values | learning rate |
|---|---|---|---|
| `hidden` | matrices with two sides that grow | / sqrt(m) | / m |
| `output` | matrices of which only the side of the input grows: head, routers | / m | / m |
| `vector` | embeddings, biases, norms: one side grows, and no sum runs over it | unchanged | unchanged |
| `scalar` | nothing grows | unchanged | unchanged |

Two changes follow for models whose forward pass has other factors. An embedding whose output is multiplied by the
square root of the width (Gemma) has values and learning rate divided by sqrt(m), so that its product is as at the base
width. A head that is the embedding itself cannot be divided by m: the factor goes into the norm before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hfscale.core.versions import sizes_of_layers
from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.facts.experts import number_of_experts
from hfscale.lr_scaling.narrow_config import config_at_width
from hfscale.lr_scaling.width_probes import embedding_factor, norm_before_head

KEY = "hfscale_base_width"
"""The entry of a model's config with the width for which it was initialised."""


@dataclass(frozen=True, kw_only=True)
class WidthRule:
    """What μTransfer does to one parameter."""

    role: str
    """`hidden`, `output`, `vector` or `scalar`."""
    initial: float = 1.0
    """Factor on the initial values."""
    rate: float = 1.0
    """Factor on the learning rate."""
    adds_one: bool = False
    """Whether the module multiplies by 1 + the value, so that the factor on the values holds for the sum."""


def width_rules(model: Any, base_width: int) -> Mapping[str, WidthRule]:
    """Return the rule for each parameter of a model.

    Args:
        model (`PreTrainedModel`): a causal language model; its parameters may be sharded, only its class and its
            config are read.
        base_width (`int`): the `hidden_size` at which nothing is changed.

    Returns:
        `Mapping[str, WidthRule]`: name -> rule, for the names of `named_parameters()`.

    Raises:
        ParameterError: the sizes of the model cannot be divided to this width.
        UnsupportedModelError: the rules for a module of this family are not known.
    """
    check_family(model)
    config = plain_config(model)
    narrow_config = config_at_width(config, base_width)
    wide = shapes_of(type(model), config)
    narrow = shapes_of(type(model), narrow_config)
    ratio = Fraction(config.hidden_size, base_width)
    m = float(ratio)
    rules = dict(_roles(wide, narrow, ratio))
    if ratio == 1:
        return {name: WidthRule(role=role) for name, role in rules.items()}
    factors = {"hidden": (m**-0.5, 1 / m), "output": (1 / m, 1 / m)}
    found = {}
    for name, role in rules.items():
        initial, rate = factors.get(role, (1.0, 1.0))
        found[name] = WidthRule(role=role, initial=initial, rate=rate)
    power = embedding_factor(type(model), narrow_config, config)
    embedding = wide.get_input_embeddings().weight
    [name] = [name for name, parameter in wide.named_parameters() if parameter is embedding]
    found[name] = WidthRule(role="vector", initial=m**-power, rate=m**-power)
    head: Any = wide.get_output_embeddings()
    if head is not None and head.weight is embedding:
        found |= _rules_before_tied_head(type(model), config, m ** (power - 1))
    return found


def check_family(model: Any) -> None:
    """Check that a model is a causal language model of transformers, of text alone and without adapters.

    Args:
        model (`nn.Module`): the model.

    Raises:
        UsageError: it is another kind of model.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise UsageError(
            f"{type(model).__name__} is not a causal language model of transformers without adapters: the learning "
            "rate cannot be transferred to its width"
        )
    if model.config.get_text_config() is not model.config:
        raise UnsupportedModelError(
            f"{model.config.model_type} has parts beside its text model, whose widths do not grow together: train "
            "its text model alone, or without a base width"
        )


def plain_config(model: PreTrainedModel) -> Any:
    """Return a copy of a model's config, without the base width and with the default attention, which runs on a CPU.

    Args:
        model (`PreTrainedModel`): the model.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    if hasattr(config, KEY):
        delattr(config, KEY)
    return config


def shapes_of(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Return a model without memory.

    Args:
        kind (`type`): the class of the model.
        config (`PreTrainedConfig`): its config.
    """
    # Not `from_config`, which would shard the model under ZeRO-3
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    return model


def _rules_before_tied_head(
    kind: type[PreTrainedModel], config: Any, factor: float
) -> Mapping[str, WidthRule]:
    """Return the rules of the norm before a head that is the embedding: its output is to be multiplied."""
    norm = norm_before_head(kind, config)
    return {
        name: WidthRule(role="vector", initial=factor, rate=factor, adds_one=norm.adds_one)
        for name in norm.parameters
    }


# ---- roles


def _roles(
    wide: PreTrainedModel, narrow: PreTrainedModel, ratio: Fraction
) -> Iterator[tuple[str, str]]:
    """Yield the name and the role of each parameter."""
    sizes = dict(narrow.named_parameters())
    names = {id(parameter): name for name, parameter in wide.named_parameters()}
    experts = number_of_experts(wide.config)
    done: set[int] = set()
    for place, module in wide.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            name = names[id(parameter)]
            grows = _growing_sides(name, parameter.shape, sizes[name].shape, ratio)
            role = _role(module, parameter, grows, experts, wide)
            if role is None:
                raise UnsupportedModelError(
                    f"{wide.config.model_type}: it is not known how {place}.{own_name} ({type(module).__name__}, "
                    f"{' x '.join(map(str, parameter.shape))}) grows with the width: train without a base width"
                )
            yield name, role


def _growing_sides(
    name: str, wide: torch.Size, narrow: torch.Size, ratio: Fraction
) -> tuple[bool, ...]:
    """Return which sides of a parameter grow with the width."""
    sides = []
    for size, base in zip(wide, narrow, strict=True):
        if size != base and Fraction(size, base) != ratio:
            raise UnsupportedModelError(
                f"{name} is {' x '.join(map(str, wide))}, and {' x '.join(map(str, narrow))} in the narrow copy: a "
                f"side neither stays nor grows by {float(ratio):g}; train without a base width"
            )
        sides.append(size != base)
    return tuple(sides)


def _role(
    module: nn.Module,
    parameter: torch.Tensor,
    grows: tuple[bool, ...],
    experts: int | None,
    model: PreTrainedModel,
) -> str | None:
    """Return the role of a parameter; None where it is not known."""
    # Nothing sums over the one side of a bias or of a norm
    if parameter.dim() < 2:
        return "vector" if any(grows) else "scalar"
    if not any(grows):
        return "scalar"
    if isinstance(module, nn.Embedding):
        return "vector" if grows == (False, True) else None
    if isinstance(module, nn.Linear | Conv1D):
        return _role_of_linear(module, parameter, grows, experts, model)
    if parameter.dim() == 3:  # a stack of matrices, one for each expert
        return "hidden" if grows == (False, True, True) else None
    if grows != (False, True) or parameter.shape[0] != experts:
        return None
    # (experts, width) is a stack of biases beside a stack of matrices, and else the matrix of a router
    has_stack = any(other.dim() == 3 for other in module.parameters(recurse=False))
    return "vector" if has_stack else "output"


def _role_of_linear(
    module: nn.Module,
    weight: torch.Tensor,
    grows: tuple[bool, ...],
    experts: int | None,
    model: PreTrainedModel,
) -> str | None:
    if all(grows):
        return "hidden"
    from_first = isinstance(module, Conv1D)  # (input, output); that of nn.Linear is (output, input)
    input_grows = grows[0] if from_first else grows[1]
    if not input_grows:
        return None
    outputs = weight.shape[1] if from_first else weight.shape[0]
    # Another side that stays is one whose name in the config is not known, and which should grow
    head_dims = sizes_of_layers(model.config, "head_dim")
    if not head_dims:
        head_dims = (model.config.hidden_size // model.config.num_attention_heads,)
    known = {1, experts, *head_dims}
    is_output = module is model.get_output_embeddings() or outputs in known
    return "output" if is_output else None
