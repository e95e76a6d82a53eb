"""A checkpoint as every layout on disk is seen: names, tensors that are read when they are wanted, optimizer groups.

A layout is a reader and a writer of this view, so that n layouts need 2n rooms, not n x n.

Names are those of `model.named_parameters()`. Under PEFT the optimizer keeps them as they are, while the weights are
saved without the adapter's name (`lora_A.weight`, not `lora_A.default.weight`): `saved_name` goes from one to the
other.
"""

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
    """A tensor that still lies on the disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """Brings the whole tensor into memory, on the CPU."""

    @property
    def bytes(self) -> int:
        """Length of its data."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorRef":
        """A tensor that is in memory, or mapped, already."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, read=tensor.detach)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """One of the optimizer's `param_groups`."""

    options: dict[str, Any]
    """Learning rate, weight decay, betas …, without `params`."""
    names: list[str]
    """Of its parameters, in the optimizer's order."""


@dataclass(frozen=True, kw_only=True)
class CheckpointView:
    """What training needs of a checkpoint, beside its small files."""

    weights: Mapping[str, TensorRef]
    """By saved name. Where the layout keeps fp32 masters (DeepSpeed in bf16 or fp16), these."""
    groups: list[ParameterGroup]
    state: Mapping[str, Mapping[str, TensorRef]]
    """Of the optimizer, by parameter name, then by key: `exp_avg`, `exp_avg_sq`, `step` …"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters: the second name -> the one under which `weights` has it."""

    def weight_of(self, parameter: str) -> TensorRef:
        """The weight of an optimizer's parameter.

        Raises:
            CheckpointError: there is none of that name.
        """
        for name in (parameter, saved_name(parameter), self.aliases.get(parameter, parameter)):
            if name in self.weights:
                return self.weights[name]
        raise CheckpointError(f"the checkpoint has optimizer states of '{parameter}' but no such weight")


def saved_name(parameter: str) -> str:
    """Under which name PEFT saves a parameter of the adapter `default`; the same name for all others."""
    if not parameter.startswith("base_model.model."):
        return parameter
    name = parameter.replace(".modules_to_save.default.", ".")
    name = re.sub(r"\.default(\.|$)", r"\1", name)
    return name.replace(".base_layer.", ".")


def canonical_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def check_names(names: Iterable[str]) -> None:
    """Names end in paths: each must be a plain one.

    Raises:
        CheckpointError: one is not.
    """
    for name in names:
        if not _PLAIN_NAME.fullmatch(name) or ".." in name:
            raise CheckpointError(f"the checkpoint names a tensor '{name[:80]}', which is not a parameter's name")


def check_states(view: CheckpointView) -> None:
    """Every optimizer state is a scalar, or has the shape of its weight.

    Raises:
        CheckpointError: one is neither, so names and states do not belong together (or the optimizer factors them).
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
