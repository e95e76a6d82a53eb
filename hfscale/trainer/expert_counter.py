"""Counts the tokens of each expert of a mixture.

Each module of experts is called with the experts that the router has chosen for every token (transformers from 5.0:
`experts(hidden_states, top_k_index, top_k_weights)`; under expert parallelism too, with the numbers of all experts).
A hook adds these choices up on the device, so nothing waits for a GPU.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from hfscale.core.replaying import is_replaying

CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""Names that transformers gives to the second argument of a module of experts."""


class ExpertCounter:
    """Counts the tokens of each expert in training, by layer, on the device.

    Forwards without gradients, in evaluation mode and in a replay (`hfscale.core.replaying`) do not count. Layers that
    activation checkpointing computes twice count twice, which changes none of the ratios of a layer.

    Args:
        model (`nn.Module`): the model that is trained, with or without wrappers.
        device (`torch.device`): where its hidden states are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.layers = {name: module for name, module in model.named_modules() if _is_experts(module)}
        """The modules of experts by name."""
        self.counts = [
            torch.zeros(number_of_experts(module) + 1, dtype=torch.int64, device=device)
            for module in self.layers.values()
        ]
        """For each layer, the tokens of each expert since `reset`, and last the choices that name no expert."""
        self._handles = [
            module.register_forward_pre_hook(partial(_count, counts), with_kwargs=True)
            for module, counts in zip(self.layers.values(), self.counts, strict=True)
        ]

    def reset(self) -> None:
        """Count from 0 again."""
        for counts in self.counts:
            counts.zero_()

    def detach(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _is_experts(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    arguments = list(inspect.signature(type(module).forward).parameters)
    return len(arguments) == 4 and arguments[2] in CHOICES


def number_of_experts(module: nn.Module) -> int:
    """Return the number of all experts of a module; `num_experts` is that of one rank under expert parallelism.

    Args:
        module (`nn.Module`): a module of experts.
    """
    weight = next(module.parameters(recurse=False), None)
    if weight is None:
        return int(module.num_experts)  # type: ignore[arg-type]
    return int(getattr(weight, "ds_shape", weight.shape)[0])  # ZeRO-3 keeps the shape there; a DTensor's is global


def _count(counts: torch.Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add the experts that a router has chosen to the counts: a hook of a module of experts."""
    if not (module.training and torch.is_grad_enabled()) or is_replaying():
        return
    chosen = args[1] if len(args) > 1 else next(kwargs[name] for name in CHOICES if name in kwargs)
    none = len(counts) - 1
    experts = chosen.detach().reshape(-1).to(torch.int64)
    experts = torch.where((experts >= 0) & (experts < none), experts, none)
    # The counts are an input of a compiled layer, and must keep their version until it is computed again: `.data`
    # has one of its own.
    counts.data.scatter_add_(0, experts, torch.ones_like(experts))
