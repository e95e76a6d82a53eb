"""Small versions of a model: a config with fewer and narrower layers of the same kinds, and equal weights everywhere.

The vocabulary stays, so that the user's data fits.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from hfscale.core.versions import sizes_of_layers

_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
)
WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner")
"""Names that configs have for the widths inside a layer."""
_MAX_LAYERS = 2
_MAX_HEADS = 4


def make_config_small(config: Any, *, layers: int = _MAX_LAYERS, heads_divide_by: int = 1) -> None:
    """Reduce the layers, heads and widths of a config in place.

    Narrower are only the layers of models of one modality: the widths of several have to fit to each other.

    Args:
        config (`PreTrainedConfig`): the config of a model.
        layers (`int`): layers that are left, or one for each kind of layer where there are more kinds.
        heads_divide_by (`int`): a number by which the heads that are left can be divided, where all heads can.
    """
    parts = [
        getattr(config, name)
        for name in getattr(config, "sub_configs", {})
        if getattr(config, name, None)
    ]
    for part in (config, *parts):
        _fewer_layers(part, layers)
    if not parts:
        _narrower(config, heads_divide_by)


def _fewer_layers(config: Any, wanted: int) -> None:
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    layers = max(wanted, len(kinds))
    for name in _LAYERS:
        number = getattr(config, name, None)
        if not isinstance(number, int) or number <= layers:
            continue
        setattr(config, name, layers)
        # Other lists with an element for each layer, such as `mlp_layer_types`
        for field, value in list(vars(config).items()):
            if not isinstance(value, list) or len(value) != number:
                continue
            distinct = []
            for each in value:
                if each not in distinct:
                    distinct.append(each)
            setattr(config, field, (distinct * layers)[:layers])


def _narrower(config: Any, divisor: int) -> None:
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    if heads <= _MAX_HEADS or hidden % heads:
        return
    sizes = sizes_of_layers(config, "num_key_value_heads")
    if len(sizes) > 1:  # no number of heads suits all layers
        return
    groups = sizes[0] if sizes else None
    fewer = heads
    for number in range(_MAX_HEADS, heads):
        if heads % number == 0 and _divides_alike(number, heads, groups, divisor):
            fewer = number
            break
    config.num_attention_heads = fewer
    if isinstance(groups, int):
        config.num_key_value_heads = max(1, fewer * groups // heads)
    config.hidden_size = hidden // heads * fewer
    for name in WIDTHS:
        width = getattr(config, name, None)
        if isinstance(width, int) and width > 2 * config.hidden_size:
            setattr(config, name, 2 * config.hidden_size)


def _divides_alike(fewer: int, heads: int, groups: Any, divisor: int) -> bool:
    """Return whether a smaller number of heads, and its key-value heads, divide by a number where all heads do."""
    if heads % divisor == 0 and fewer % divisor:
        return False
    if not isinstance(groups, int) or groups % divisor:
        return True
    return fewer * groups // heads % divisor == 0 and fewer * groups >= heads


def switch_dropout_off(model: nn.Module) -> None:
    """Set every probability of dropout in a model and its configs to 0.

    Args:
        model (`nn.Module`): the model.
    """
    for owner, name in _dropouts(model):
        setattr(owner, name, 0.0)


def _dropouts(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield each module or config with a probability of dropout, and the attribute's name."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            yield module, "p"
        config = getattr(module, "config", None)
        for owner in (module, config):
            attributes = dict(getattr(owner, "__dict__", {}))
            for name, value in attributes.items():
                if isinstance(value, float) and "drop" in name:
                    yield owner, name
