"""What a rank holds of a tensor, however a strategy distributes it."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hfscale.core.torch_internals import is_traceable_wrapper_subclass


def kept_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank keeps between two steps in the place of a parameter.

    Args:
        tensor (`torch.Tensor`): a parameter or any other tensor.

    Returns:
        `torch.Tensor`: the shard that ZeRO-3 keeps beside an empty parameter; otherwise the tensor itself.
    """
    kept: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return kept


def own_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what this rank holds of a tensor, in the memory of the tensor and without its history.

    Args:
        tensor (`torch.Tensor`): an ordinary tensor, a DTensor, a parameter, or a tensor that wraps others.

    Returns:
        `torch.Tensor` or `None`: the part of this rank, once the collective that computes it has completed; None for
            a tensor without bits of its own, such as a quantized one, and for complex numbers.
    """
    held: Any = kept_of(tensor)
    if isinstance(held, DTensor):
        held = held.to_local()
        # The collective of an asynchronous redistribution, as in torch's styles of tensor parallelism, may still run
        wait = getattr(held, "wait", None)
        if wait is not None:
            held = wait()
    if is_traceable_wrapper_subclass(held) or held.is_complex():
        return None
    plain: torch.Tensor = held.detach()
    return plain


def full_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of a parameter on all ranks together.

    Args:
        parameter (`torch.Tensor`): a parameter; of one that ZeRO-3 has partitioned, the tensor itself is empty.
    """
    return int(getattr(parameter, "ds_numel", parameter.numel()))
