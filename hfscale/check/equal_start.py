"""Gives a model the same weights in every launch, under every layout."""

import zlib

import torch
from torch import nn

from hfscale.trainer.small_model import switch_dropout_off

_SCALE = 0.02
"""Standard deviation of the random weights, that of most configs (`initializer_range`)."""


def start_equally(model: nn.Module) -> None:
    """Give a model weights that depend on the names of its parameters only, and switch dropout off.

    Args:
        model (`nn.Module`): a model that is not sharded yet.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() <= 1 and _is_constant(parameter):
                continue
            seed = zlib.crc32(name.encode())
            generator = torch.Generator()
            generator.manual_seed(seed)
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * _SCALE)
    switch_dropout_off(model)


def _is_constant(parameter: torch.Tensor) -> bool:
    """Return whether all elements are equal, as those of a norm or a bias that was not trained."""
    if parameter.numel() <= 1:
        return True
    differs = parameter != parameter[..., :1]
    return not differs.any()
