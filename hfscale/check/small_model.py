"""Makes every transformers model of a process small and its weights random: fewer and narrower layers, same classes.

Only the processes that `hfscale check` starts call this. No weights are read; the vocabulary stays, so that the user's
data fits.
"""

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
)
_MAX_LAYERS = 2
_MAX_HEADS = 4
_SCALE = 0.02
"""Standard deviation of the random weights, that of most configs (`initializer_range`)."""


def make_models_small(module: Any) -> None:
    """Change all models that are made later.

    Args:
        module (`module`): `transformers.modeling_utils`.
    """
    init = module.PreTrainedModel.__init__

    @functools.wraps(init)
    def small(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        make_config_small(config)
        init(self, config, *arguments, **options)

    @classmethod  # type: ignore[misc]
    def from_pretrained(cls: Any, path: Any, *_: Any, config: Any = None, **options: Any) -> Any:
        if config is None:
            names = (
                "revision",
                "cache_dir",
                "token",
                "local_files_only",
                "trust_remote_code",
                "subfolder",
            )
            config = cls.config_class.from_pretrained(
                path, **{k: v for k, v in options.items() if k in names}
            )
        return cls(config)  # not by `_from_config`, which shards it under ZeRO-3

    module.PreTrainedModel.__init__ = small
    module.PreTrainedModel.from_pretrained = from_pretrained


def make_config_small(config: Any) -> None:
    """Reduce the layers, heads and widths of a config in place.

    Narrower are only the layers of models of one modality: the widths of several have to fit to each other.

    Args:
        config (`PreTrainedConfig`): the config of a model.
    """
    parts = [
        getattr(config, name)
        for name in getattr(config, "sub_configs", {})
        if getattr(config, name, None)
    ]
    for part in (config, *parts):
        _fewer_layers(part)
    if not parts:
        _narrower(config)


def _fewer_layers(config: Any) -> None:
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    layers = max(_MAX_LAYERS, len(kinds))
    for name in _LAYERS:
        number = getattr(config, name, None)
        if isinstance(number, int) and number > layers:
            setattr(config, name, layers)
            if kinds:
                config.layer_types = (kinds * layers)[:layers]


def _narrower(config: Any) -> None:
    heads, hidden = (
        getattr(config, "num_attention_heads", None),
        getattr(config, "hidden_size", None),
    )
    if (
        not isinstance(heads, int)
        or not isinstance(hidden, int)
        or heads <= _MAX_HEADS
        or hidden % heads
    ):
        return
    groups = getattr(config, "num_key_value_heads", None)
    fewer = next(number for number in range(_MAX_HEADS, heads + 1) if heads % number == 0)
    config.num_attention_heads = fewer
    if isinstance(groups, int):
        config.num_key_value_heads = max(1, fewer * groups // heads)
    config.hidden_size = hidden // heads * fewer
    for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"):
        width = getattr(config, name, None)
        if isinstance(width, int) and width > 2 * config.hidden_size:
            setattr(config, name, 2 * config.hidden_size)


def start_equally(model: nn.Module) -> None:
    """Give a model weights that depend on the names of its parameters only, and switch dropout off.

    Args:
        model (`nn.Module`): a model that is not sharded yet.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or (
                parameter.numel() and bool((parameter != parameter[..., :1]).any())
            ):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _SCALE)
    for owner, name in _dropouts(model):
        setattr(owner, name, 0.0)


def _dropouts(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield each module or config with a probability of dropout, and the attribute's name."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            yield module, "p"
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(value, float) and "drop" in name:
                    yield owner, name
