"""A config of the same model with a smaller width, for learning rates that are tuned there."""

import copy
import math
from typing import Any

from hfscale.core.versions import sizes_of_layers
from hfscale.errors import ParameterError
from hfscale.trainer.small_model import WIDTHS

_WITH_THE_WIDTH = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    *WIDTHS,
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ffn_hidden_size",
    "word_embed_proj_dim",
)
"""Names that configs have for what grows with the width of a model whose heads keep their size."""


def config_at_width(config: Any, width: int, *, named: str = "base_width") -> Any:
    """Return a copy of a config for a narrower model: fewer heads of the same size, and all widths divided alike.

    Args:
        config (`PreTrainedConfig`): the config of a causal language model.
        width (`int`): the `hidden_size` of the copy.
        named (`str`): the parameter that gave it, for the message.

    Raises:
        ParameterError: the sizes of the config cannot be divided by the same number.
    """
    hidden = config.hidden_size
    sizes = {}
    for name in _WITH_THE_WIDTH:
        values = sizes_of_layers(config, name)
        if len(values) > 1:
            rule = f"the {name} of its layers differ ({', '.join(map(str, values))}), and no width is tuned at"
            raise ParameterError(named, width, rule)
        size = values[0] if values else None
        # A single key-value head serves all heads at every width
        if isinstance(size, int) and not (name == "num_key_value_heads" and size == 1):
            sizes[name] = size
    step = hidden // math.gcd(*sizes.values())
    if width % step or not 0 < width <= hidden:
        rule = (
            f"it must be a multiple of {step} up to {hidden}, by which the heads and widths of this "
            f"{config.model_type} can be divided"
        )
        raise ParameterError(named, width, rule)
    narrow = copy.deepcopy(config)
    for name, size in sizes.items():
        setattr(narrow, name, size * width // hidden)
    return narrow
