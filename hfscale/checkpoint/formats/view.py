"""The representation of a checkpoint that is common to all formats: weights, optimizer groups and optimizer states.

Each format has a reader that returns a `CheckpointView` and a writer that takes one, so n formats need 2n functions
and not n x n. Tensors are references (`TensorRef`) that are read when they are needed.

Names are those of `model.named_parameters()`. Under PEFT the optimizer uses them as they are, while weights are saved
without the adapter's name (`lora_A.weight`, not `lora_A.default.weight`): `saved_name` converts one to the other.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hfscale.errors import CheckpointError

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, kw_only=True)
class TensorRef:
    """A reference to a tensor on disk."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: torch.dtype
    """Its data type."""
    read: Callable[[], torch.Tensor]
    """Reads the full tensor into CPU memory."""

    @property
    def bytes(self) -> int:
        """Length of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorRef":
        """Return a reference to a tensor that is already in memory or memory-mapped."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, read=tensor.detach)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """One of the optimizer's `param_groups`."""

    options: dict[str, Any]
    """Learning rate, weight decay, betas …, without `params`."""
    names: list[str]
    """Names of its parameters, in the optimizer's order."""

    @classmethod
    def of(cls, group: Mapping[str, Any], names: Iterable[str]) -> "ParameterGroup":
        """Return the group for an entry of an optimizer's `param_groups`, whose `params` are replaced by names."""
        return cls(
            options={key: value for key, value in group.items() if key != "params"},
            names=list(names),
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointView:
    """What training needs from a checkpoint, besides its small files."""

    weights: Mapping[str, TensorRef]
    """Weights by saved name; the fp32 master weights if the format has them (DeepSpeed in bf16 or fp16)."""
    groups: list[ParameterGroup]
    """The optimizer's parameter groups."""
    state: Mapping[str, Mapping[str, TensorRef]]
    """Optimizer states by parameter name, then by key: `exp_avg`, `exp_avg_sq`, `step` …"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters: the second name -> the name under which `weights` has it."""

    def weight_of(self, parameter: str) -> TensorRef:
        """Return the weight of an optimizer's parameter.

        Raises:
            CheckpointError: there is no weight of that name.
        """
        for name in (*saved_names(parameter), self.aliases.get(parameter, parameter)):
            if name in self.weights:
                return self.weights[name]
        raise CheckpointError(
            f"the checkpoint has optimizer states of '{parameter}' but no such weight"
        )


def saved_name(parameter: str) -> str:
    """Return the name under which PEFT saves a parameter of the adapter `default`; other names stay as they are."""
    if not parameter.startswith("base_model.model."):
        return parameter
    name = parameter.replace(".modules_to_save.default.", ".")
    name = re.sub(r"\.default(\.|$)", r"\1", name)
    return name.replace(".base_layer.", ".")


def saved_names(parameter: str) -> tuple[str, ...]:
    """Return the names under which the weight of an optimizer's parameter may be saved, most likely first.

    PEFT keeps `base_layer` in the name of a trained bias, and leaves `weight` out of that of DoRA's magnitude.

    Args:
        parameter (`str`): the parameter's name.
    """
    usual = saved_name(parameter)
    if usual == parameter:
        return (parameter,)
    with_base_layer = re.sub(r"\.default(\.|$)", r"\1", parameter)
    return parameter, usual, with_base_layer, usual.removesuffix(".weight")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile, FSDP and activation checkpointing insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def check_names(names: Iterable[str]) -> None:
    """Check that each name is a plain one, since names become parts of paths.

    Raises:
        CheckpointError: a name is not plain.
    """
    for name in names:
        if not _PLAIN_NAME.fullmatch(name) or ".." in name:
            raise CheckpointError(
                f"the checkpoint names a tensor '{name[:80]}', which is not a parameter's name"
            )


def check_states(view: CheckpointView) -> None:
    """Check that every optimizer state is a scalar or has the shape of its weight.

    Raises:
        CheckpointError: a state is neither, so names and states do not match, or the optimizer factors its states.
    """
    for group in view.groups:
        for name in group.names:
            shape = view.weight_of(name).shape
            for key, ref in view.state.get(name, {}).items():
                if ref.shape not in ((), shape):
                    raise CheckpointError(
                        f"the optimizer's {key} of '{name}' has the shape {list(ref.shape)} and the weight "
                        f"{list(shape)}: only optimizers whose states have the shape of their parameter (AdamW, SGD, "
                        "Lion …) can be converted"
                    )
