"""How evenly a mixture of experts uses its experts: keys of each log, and a warning about experts without tokens.

Each module of experts is called with the experts that the router has chosen for every token (transformers from 5.0:
`experts(hidden_states, top_k_index, top_k_weights)`; under expert parallelism too, with the numbers of all experts).
A hook adds these choices up on the device; they are read at the next log, so nothing waits for a GPU in between.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import TrainerState

from hfscale.core.logging import get_logger
from hfscale.trainer.collector import Arrays
from hfscale.trainer.parallel_trainer import is_parallel_trainer
from hfscale.trainer.state import model_of

if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

CHOICES = ("top_k_index", "router_indices", "selected_experts")
"""Names that transformers gives to the second argument of a module of experts."""
DEAD_AFTER_TOKENS = 1000.0
"""An expert is reported if it has received no token while the average expert of its layer has received so many. With
a balanced router a chosen expert stays without one of 1,000 expected tokens with a probability of exp(-1000)."""


class ExpertLoad:
    """Counts the tokens of each expert in training, as a part of the exchange at each log (`LogPart`).

    Rank 0 adds up the counts of all ranks (`judge`); they are 8 bytes per expert, layer and rank at each log. Forwards
    without gradients and in evaluation mode do not count. Layers that activation checkpointing computes twice count
    twice, which changes none of the ratios.

    Args:
        model (`nn.Module`): the model that is trained, with or without wrappers.
        device (`torch.device`): where its hidden states are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers = {name: module for name, module in model.named_modules() if _is_experts(module)}
        # One more than there are experts, for choices that name none.
        self._counts = [
            torch.zeros(_number_of_experts(module) + 1, dtype=torch.int64, device=device)
            for module in self._layers.values()
        ]
        self._without_tokens = [np.zeros(len(counts) - 1) for counts in self._counts]
        """On rank 0: tokens that the average expert has received since each expert received its last one."""
        self._reported: set[tuple[int, int]] = set()
        self._handles = [
            module.register_forward_pre_hook(partial(_count, counts), with_kwargs=True)
            for module, counts in zip(self._layers.values(), self._counts, strict=True)
        ]

    def __bool__(self) -> bool:
        """Whether the model has experts whose tokens can be counted."""
        return bool(self._layers)

    def detach(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def numbers(
        self, state: TrainerState, logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the tokens of each expert of each layer since the last call, and the choices that name no expert.

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
            seconds (`Mapping[str, float]`): seconds of each phase since the previous log.
        """
        counts = torch.cat(self._counts).tolist()
        for tensor in self._counts:
            tensor.zero_()
        return {f"experts_{index}": float(count) for index, count in enumerate(counts)}

    def judge(self, numbers: Arrays, state: TrainerState) -> dict[str, float]:
        """Compute the metric keys from the counts of all ranks, and warn about experts without tokens.

        Args:
            numbers (`Mapping[str, npt.NDArray[np.float64]]`): what `numbers` returned on every rank, (ranks,) each.
            state (`TrainerState`): the state of the Trainer.

        Returns:
            `dict[str, float]`: the values that are known, by metric key.
        """
        totals = np.array([column.sum() for column in numbers.values()])
        ends = np.cumsum([len(counts) for counts in self._counts])[:-1]
        layers = np.split(totals, ends)
        self._warn_about_dead_experts([layer[:-1] for layer in layers])
        return keys_of([layer[:-1] for layer in layers], unassigned=sum(layer[-1] for layer in layers))

    def keys(self, exchanged: Any, state: TrainerState, logs: Mapping[str, float]) -> dict[str, float]:
        """Return the metric keys that rank 0 has computed. It is called on every rank.

        Args:
            exchanged (`dict[str, float]`): what `judge` returned.
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
        """
        return dict(exchanged)

    def _warn_about_dead_experts(self, layers: Sequence[npt.NDArray[np.float64]]) -> None:
        for number, (name, tokens) in enumerate(zip(self._layers, layers, strict=True)):
            waited = self._without_tokens[number]
            waited += tokens.mean()
            waited[tokens > 0] = 0.0
            dead = [int(expert) for expert in np.flatnonzero(waited >= DEAD_AFTER_TOKENS)]
            if any((number, expert) not in self._reported for expert in dead):
                self._reported.update((number, expert) for expert in dead)
                logger.warning(
                    "experts: %d of the %d experts of %s receive no tokens (%s), the average one has received %d: "
                    "raise the coefficient of the router's auxiliary loss, or lower the learning rate",
                    len(dead),
                    len(tokens),
                    name,
                    ", ".join(map(str, dead[:8])) + (", …" if len(dead) > 8 else ""),
                    int(waited[dead].min()),
                )


def keys_of(layers: Sequence[npt.NDArray[np.float64]], *, unassigned: float) -> dict[str, float]:
    """Return the metric keys of the load of experts.

    Args:
        layers (`Sequence[npt.NDArray[np.float64]]`): for each layer, the tokens of each expert, (experts,).
        unassigned (`float`): choices of the router that name no expert, in all layers.

    Returns:
        `dict[str, float]`: `moe/max_load`, `moe/entropy` and `moe/dropped_fraction`; empty without tokens.
    """
    used = [tokens / tokens.sum() for tokens in layers if tokens.sum() > 0]
    if not used:
        return {}
    assigned = float(sum(tokens.sum() for tokens in layers))
    return {
        "moe/max_load": max(float(shares.max()) * len(shares) for shares in used),
        "moe/entropy": min(_relative_entropy(shares) for shares in used),
        "moe/dropped_fraction": unassigned / (assigned + unassigned),
    }


def _relative_entropy(shares: npt.NDArray[np.float64]) -> float:
    """Return the entropy (Shannon 1948) of a distribution over its largest value: 1 if all shares are equal."""
    if len(shares) == 1:
        return 1.0
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum() / np.log(len(shares)))


def expert_load_of(trainer: "Trainer") -> ExpertLoad | None:
    """Return a counter for the experts of a Trainer's model, or None if it has none that can be counted.

    Args:
        trainer (`Trainer`): prepared for training.
    """
    if is_parallel_trainer(trainer) and trainer.layout.pp > 1:
        return None  # the stages have different layers, and all ranks exchange the same numbers
    load = ExpertLoad(model_of(trainer), trainer.args.device)
    return load if load else None


def _is_experts(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    arguments = list(inspect.signature(type(module).forward).parameters)
    return len(arguments) == 4 and arguments[2] in CHOICES


def _number_of_experts(module: nn.Module) -> int:
    """Return the number of all experts of a module; `num_experts` is that of one rank under expert parallelism."""
    weight = next(module.parameters(recurse=False), None)
    if weight is None:
        return int(module.num_experts)  # type: ignore[arg-type]
    return int(getattr(weight, "ds_shape", weight.shape)[0])  # ZeRO-3 keeps the shape there; a DTensor's is global


def _count(counts: torch.Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add the experts that a router has chosen to the counts: a hook of a module of experts."""
    if not (module.training and torch.is_grad_enabled()):
        return
    chosen = args[1] if len(args) > 1 else next(kwargs[name] for name in CHOICES if name in kwargs)
    none = len(counts) - 1
    experts = chosen.detach().reshape(-1).to(torch.int64)
    experts = torch.where((experts >= 0) & (experts < none), experts, none)
    # The counts are an input of a compiled layer, and must keep their version until it is computed again: `.data`
    # has one of its own.
    counts.data.scatter_add_(0, experts, torch.ones_like(experts))
