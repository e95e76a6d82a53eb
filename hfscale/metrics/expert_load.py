"""How evenly a mixture of experts uses its experts: keys of each log, and a warning about experts without tokens.

The tokens are counted on the device (hfscale/trainer/expert_counter.py) and read at the next log, so that nothing
waits for a GPU in between.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import TrainerState

from hfscale.core.logging import get_logger
from hfscale.trainer.collector import Arrays
from hfscale.trainer.expert_counter import NOTHING_COUNTED, ExpertCounter, counter_of

if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

DEAD_AFTER_TOKENS = 1000.0
"""An expert is reported if it has received no token while the average expert of its layer has received so many. With
a balanced router a chosen expert stays without one of 1,000 expected tokens with a probability of exp(-1000)."""


class ExpertLoad:
    """Exchanges the tokens of each expert in training at each log (`LogPart`).

    Rank 0 adds up the counts of all ranks (`judge`); they are 8 bytes per expert, layer and rank at each log.

    Args:
        counter (`ExpertCounter`): counts the tokens on this rank, with the same layers on every rank.
    """

    def __init__(self, counter: ExpertCounter) -> None:
        self._counter = counter
        self._layers = self._counter.layers
        self._counts = self._counter.counts
        self._without_tokens = [np.zeros(len(counts) - 1) for counts in self._counts]
        """On rank 0: tokens that the average expert has received since each expert received its last one."""
        self._reported: set[tuple[int, int]] = set()
        self._warned_of_padding = False
        self._has_trained = False
        self._has_been_judged = False

    def __bool__(self) -> bool:
        """Whether the model has experts whose tokens can be counted."""
        return bool(self._layers)

    def detach(self) -> None:
        """Stop counting."""
        self._counter.detach()

    def numbers(
        self, state: TrainerState, logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the tokens of each expert of each layer since the last call, and the choices that name no expert.

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
            seconds (`Mapping[str, float]`): seconds of each phase since the previous log.
        """
        self._has_trained = "loss" in logs
        counts = torch.cat(self._counts).tolist()
        self._counter.reset()
        unknown = self._counter.unknown_mask
        if unknown and state.is_world_process_zero and not self._warned_of_padding:
            self._warned_of_padding = True
            logger.warning(
                "experts: an attention mask %s does not tell which tokens are padding, so that padding counts "
                "in moe/max_load and moe/entropy: have the data collator give one of (batch, sequence)",
                unknown,
            )
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
        if self._has_trained and not self._has_been_judged:
            self._has_been_judged = True
            if not totals.any():
                logger.warning(
                    "experts: moe/max_load and moe/entropy are not logged: %s", NOTHING_COUNTED
                )
        self._warn_about_dead_experts([layer[:-1] for layer in layers])
        return keys_of(
            [layer[:-1] for layer in layers], unassigned=sum(layer[-1] for layer in layers)
        )

    def keys(
        self, exchanged: Any, state: TrainerState, logs: Mapping[str, float]
    ) -> dict[str, float]:
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
    load = ExpertLoad(counter_of(trainer))
    return load if load else None
