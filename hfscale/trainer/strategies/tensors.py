"""What a rank holds of a tensor, however a strategy distributes it."""

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hfscale.core.torch_internals import is_traceable_wrapper_subclass


def kept_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank keeps between two steps in the place of a parameter.

    Args:
        tensor (`torch.Tensor`): a parameter or any other tensor.

    Returns:
        `torch.Tensor`: the shard that ZeRO-3 keeps beside an empty parameter; otherwise the tensor itself.
    """
    return getattr(tensor, "ds_tensor", tensor)


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
    held = stored_tensor(held)
    if is_traceable_wrapper_subclass(held) or held.is_complex():
        return None
    return held.detach()  # type: ignore[no-any-return]


def stored_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the values of one that only changes how they are multiplied or gathered.

    torchao wraps the weights of FP8 trainings so (`WeightWithDynamicFloat8CastTensor`, which FSDP2 gathers in 8 bits):
    the wrapper has no storage of its own, and a file that holds it can be read with torchao only.

    Args:
        tensor (`torch.Tensor`): any tensor; of a DTensor, the local part is looked at.

    Returns:
        `torch.Tensor`: what is wrapped, in the same memory, or the tensor itself where there is no wrapper or where
            it holds something else, such as the integers and scales of a quantized weight.
    """
    if is_distributed_tensor(tensor):
        return _with_stored_part(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]
    # A scale that a wrapper keeps beside the values is a scalar
    arrays = [each for each in held if each.dim() > 0]
    if len(arrays) != 1:
        return tensor
    values = arrays[0]
    is_same = values.shape == tensor.shape and values.dtype == tensor.dtype
    return stored_tensor(values) if is_same else tensor


def _with_stored_part(tensor: DTensor) -> DTensor:
    local = tensor.to_local().detach()
    stored = stored_tensor(local)
    if stored is local:
        return tensor
    return DTensor.from_local(
        stored,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a part of a distributed tensor is: the mesh, and on each of its axes the placement and the rank's index.

    An axis on which the tensor is replicated says nothing about the part.
    """

    mesh: tuple[int, ...]
    """The ranks of the mesh."""
    axes: tuple[tuple[str, int] | None, ...]
    """For each axis the placement, such as `Shard(dim=0)`, and the index; None where the tensor is replicated."""

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks hold this part."""
        return None in self.axes


def place_of(tensor: torch.Tensor) -> Place | None:
    """Return where this rank's part of a tensor is; None if the rank holds all of it, or has no part.

    Args:
        tensor (`torch.Tensor`): a parameter.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    indices = mesh.get_coordinate()
    if indices is None:
        return None
    axes = []
    for placement, index in zip(tensor.placements, indices, strict=True):
        axes.append(None if placement.is_replicate() else (str(placement), index))
    return Place(mesh=tuple(mesh.mesh.flatten().tolist()), axes=tuple(axes))


def is_distributed_tensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor: of several ranks, each may hold a part of it.

    Args:
        tensor (`torch.Tensor`): any tensor.
    """
    return isinstance(tensor, DTensor)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules to which `fully_shard` has been applied, the outermost first.

    Args:
        model (`nn.Module`): a model.

    Returns:
        `list[Any]`: instances of `FSDPModule`, which are modules too; types cannot say both.
    """
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter on all ranks together; that of a DTensor always is.

    Args:
        parameter (`torch.Tensor`): a parameter; of one that ZeRO-3 has partitioned, the tensor itself is empty.
    """
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of a parameter on all ranks together.

    Args:
        parameter (`torch.Tensor`): a parameter; of one that ZeRO-3 has partitioned, the tensor itself is empty.
    """
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def class_without_shards(module: nn.Module) -> Any:
    """Return the class that a module had before FSDP2 sharded it; its own where nothing has.

    Args:
        module (`nn.Module`): any module.
    """
    kinds = type(module).__mro__
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))


def unsharded_twin(model: Any) -> Any:
    """Return a model of the class and config of one that transformers has sharded, without weights.

    A forward pass of a part of the sharded one would begin FSDP2's own initialisation there.

    Args:
        model (`PreTrainedModel`): any model.
    """
    plain = class_without_shards(model)
    config = model.config
    with torch.device("meta"):
        return plain(config)
