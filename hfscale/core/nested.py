"""Tensors in the arguments and results of operators."""

from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists, tuples and dicts, in their order.

    Args:
        value (`Any`): what an operator takes or returns; a tensor is itself its only one, and other values have none.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]
