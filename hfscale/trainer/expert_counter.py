"""Counts the tokens of each expert of a mixture.

Each module of experts is called with the experts that the router has chosen for every token (transformers from 5.0:
`experts(hidden_states, top_k_index, top_k_weights)`; under expert parallelism too, with the numbers of all experts).
A hook adds these choices up on the device, so nothing waits for a GPU. Other hooks note which forward is running and
which of its positions are padding, whose choices do not count.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfscale.core.replaying import is_replaying
from hfscale.trainer.batches import (
    NOT_PADDING,
    TOKENS,
    BatchEntry,
    batch_entries,
    batch_entry,
    runs_a_method,
    token_mask,
)
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import full_shape

if TYPE_CHECKING:
    from transformers import Trainer

CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""Names that transformers gives to the second argument of a module of experts."""
NOTHING_COUNTED = (
    "no token of the experts was counted, as where the model is compiled in place as a whole: compile its layers one "
    "by one (use_regional_compilation of Accelerate), or not at all"
)
"""What is said where a step has counted nothing."""


class _RunningForward(threading.local):
    """The forward that is running in a thread; that of a pair may run while another thread recomputes activations."""

    outermost: nn.Module | None = None
    """The module through which the batch has entered; None between forwards, also while activations are recomputed."""
    is_counted = False
    token_mask: torch.Tensor | None = None
    """Which positions are tokens and not padding, of the shape of the attention mask; None if all are."""
    is_misfit = False
    """Whether the mask does not have one value for each token."""


class ExpertCounter:
    """Counts the tokens of each expert in training, by layer, on the device, without those of padding.

    Forwards without gradients, in evaluation mode and in a replay (`hfscale.core.replaying`) do not count, nor do
    layers that activation checkpointing computes again. What is padding is known from the attention mask, and from
    the positions of packed sequences; a batch with neither has none. A model that `compile()` compiles in place as a
    whole, without a wrapper, is not counted, because its hooks are compiled too.

    Args:
        model (`nn.Module`): the model that is trained, with or without wrappers.
        device (`torch.device`): where its hidden states are.
        entries (`Sequence[BatchEntry]`): the modules through which a batch can enter it; of nested ones the outermost
            tells what is padding.
        layers (`Mapping[str, int]`, *optional*): the layers of the whole model, as `expert_layers` returns them, where
            this rank has only some of them; the counts of the others stay 0.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        entries: Sequence[BatchEntry],
        layers: Mapping[str, int] | None = None,
    ) -> None:
        modules = modules_of_experts(model)
        layers = expert_layers(model) if layers is None else layers
        self.layers = list(layers)
        """The names of all layers with experts."""
        self.counts = [
            torch.zeros(experts + 1, dtype=torch.int64, device=device)
            for experts in layers.values()
        ]
        """For each layer, the tokens of each expert since `reset`, and last the choices that name no expert."""
        self.unknown_mask = ""
        """What is wrong with an attention mask that does not tell which tokens are padding; then padding counts."""
        self._entries = list(entries) if modules else []
        self._running = _RunningForward()
        own = dict(zip(self.layers, self.counts, strict=True))
        self._handles = [
            module.register_forward_pre_hook(self._counting(own[name]), with_kwargs=True)
            for name, module in modules.items()
        ]
        for entry in self._entries:
            enter = partial(self._enter, entry)
            self._handles.append(entry.module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(entry.module.register_forward_hook(self._leave, always_call=True))

    def _enter(
        self, entry: BatchEntry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note which positions of a batch are padding, and whether its tokens count."""
        running = self._running
        if torch.compiler.is_compiling() or running.outermost is not None or runs_a_method(args):
            return
        batch = _batch_in({**dict(zip(entry.names, args, strict=False)), **kwargs})
        if entry.is_encoder_decoder or (batch is None and entry is not self._entries[-1]):
            return  # the models inside it get the masks
        running.outermost = module
        running.is_counted = module.training and torch.is_grad_enabled() and not is_replaying()
        if batch is None:
            return
        running.token_mask = batch[NOT_PADDING] if NOT_PADDING in batch else token_mask(batch)
        mask = batch.get("attention_mask")
        if not (mask is None or isinstance(mask, torch.Tensor)):
            self.unknown_mask = f"of type {type(mask).__name__}"

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running = self._running
        if torch.compiler.is_compiling() or running.outermost is not module:
            return
        if running.is_misfit and running.token_mask is not None:
            self.unknown_mask = f"of shape {tuple(running.token_mask.shape)}"
        running.outermost = None
        running.is_counted = False
        running.token_mask = None
        running.is_misfit = False

    def _counting(self, counts: torch.Tensor) -> Callable[..., None]:
        """Return a hook of a module of experts that adds the experts that the router has chosen to the counts."""

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._running.is_counted:
                return
            chosen = (
                args[1]
                if len(args) > 1
                else next(kwargs[name] for name in CHOICES if name in kwargs)
            )
            none = len(counts) - 1
            experts = chosen.detach().to(torch.int64)
            experts = torch.where((experts >= 0) & (experts < none), experts, none)
            counted = torch.ones_like(experts)
            mask = self._running.token_mask
            if (
                mask is not None
                and mask.ndim == 2
                and mask.numel() * experts.shape[-1] == experts.numel()
            ):
                counted = counted * mask.reshape(*experts.shape[:-1], 1)
            elif mask is not None:
                self._running.is_misfit = True
            # The counts are an input of a compiled layer, and must keep their version until it is computed again:
            # `.data` has one of its own.
            counts.data.scatter_add_(0, experts.flatten(), counted.flatten())

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


def _batch_in(named: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the inputs of a forward if they are those of a model, else the dictionary of such inputs among them."""
    for inputs in (named, *named.values()):
        if isinstance(inputs, Mapping) and any(name in inputs for name in (*TOKENS, NOT_PADDING)):
            return inputs
    return None


def counter_of(trainer: "Trainer") -> ExpertCounter:
    """Return a counter for the experts of a Trainer's model; with a pipeline, for those of all stages.

    Args:
        trainer (`Trainer`): prepared for training.
    """
    strategy = Strategy.of(trainer)
    model = strategy.staged_model()
    device = trainer.args.device
    stages = strategy.stages()
    if stages is None:
        return ExpertCounter(model, device, entries=batch_entries(trainer))
    # The routers of all tensor parallel ranks see the same tokens, which the first rank counts
    *_, tp_rank = strategy.part_of_model()
    counted = stages if tp_rank == 0 else ()
    entries = [batch_entry(stage, counts_nested=True) for stage in counted]
    return ExpertCounter(model, device, entries=entries, layers=strategy.expert_layers())


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
    return full_shape(weight)[0]
