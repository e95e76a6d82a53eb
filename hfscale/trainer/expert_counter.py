"""Counts the tokens of each expert of a mixture.

Each module of experts is called with the experts that the router has chosen for every token (transformers from 5.0:
`experts(hidden_states, top_k_index, top_k_weights)`; under expert parallelism too, with the numbers of all experts).
A hook adds these choices up on the device, so nothing waits for a GPU.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfscale.core.replaying import is_replaying
from hfscale.trainer.parallel_trainer import is_parallel_trainer
from hfscale.trainer.state import model_of

if TYPE_CHECKING:
    from transformers import Trainer

CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""Names that transformers gives to the second argument of a module of experts."""


class ExpertCounter:
    """Counts the tokens of each expert in training, by layer, on the device.

    Forwards without gradients, in evaluation mode and in a replay (`hfscale.core.replaying`) do not count. Layers that
    activation checkpointing computes twice count twice, which changes none of the ratios of a layer, unless
    `is_counted` tells the second time from the first.

    Args:
        model (`nn.Module`): the model that is trained, with or without wrappers.
        device (`torch.device`): where its hidden states are.
        layers (`Mapping[str, int]`, *optional*): the layers of the whole model, as `expert_layers` returns them, where
            this rank has only some of them; the counts of the others stay 0.
        is_counted (`callable`, *optional*): `is_counted()`, whether the forward that is running counts.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        layers: Mapping[str, int] | None = None,
        is_counted: Callable[[], bool] | None = None,
    ) -> None:
        modules = modules_of_experts(model)
        layers = expert_layers(model) if layers is None else layers
        self.layers = list(layers)
        """The names of all layers with experts."""
        self.counts = [torch.zeros(experts + 1, dtype=torch.int64, device=device) for experts in layers.values()]
        """For each layer, the tokens of each expert since `reset`, and last the choices that name no expert."""
        self._is_counted = is_counted or torch.is_grad_enabled
        own = dict(zip(self.layers, self.counts, strict=True))
        self._handles = [
            module.register_forward_pre_hook(self._counting(own[name]), with_kwargs=True)
            for name, module in modules.items()
        ]

    def _counting(self, counts: torch.Tensor) -> Callable[..., None]:
        """Return a hook of a module of experts that adds the experts that the router has chosen to the counts."""

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (module.training and self._is_counted()) or is_replaying():
                return
            chosen = args[1] if len(args) > 1 else next(kwargs[name] for name in CHOICES if name in kwargs)
            none = len(counts) - 1
            experts = chosen.detach().reshape(-1).to(torch.int64)
            experts = torch.where((experts >= 0) & (experts < none), experts, none)
            # The counts are an input of a compiled layer, and must keep their version until it is computed again:
            # `.data` has one of its own.
            counts.data.scatter_add_(0, experts, torch.ones_like(experts))

        return count

    def reset(self) -> None:
        """Count from 0 again."""
        for counts in self.counts:
            counts.zero_()

    def detach(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def counter_of(trainer: "Trainer") -> ExpertCounter:
    """Return a counter for the experts of a Trainer's model; with a pipeline, for those of all stages.

    Args:
        trainer (`Trainer`): prepared for training.
    """
    if not is_parallel_trainer(trainer):
        return ExpertCounter(model_of(trainer), trainer.args.device)
    parallelized = trainer.parallelized
    is_first = trainer.mesh.tp_rank == 0  # the routers of all tensor parallel ranks see the same tokens
    return ExpertCounter(
        parallelized.model,
        trainer.args.device,
        layers=parallelized.expert_layers,
        is_counted=lambda: is_first and parallelized.computes_micro_batch(),
    )


def modules_of_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of experts by name.

    Args:
        model (`nn.Module`): a model, with or without wrappers.
    """
    return {name: module for name, module in model.named_modules() if _is_experts(module)}


def expert_layers(model: nn.Module) -> dict[str, int]:
    """Return the number of experts of each module of experts, by name.

    Args:
        model (`nn.Module`): a model, with or without wrappers.
    """
    return {name: number_of_experts(module) for name, module in modules_of_experts(model).items()}


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
