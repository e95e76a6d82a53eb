"""`LogCollector`: the one clock of a training, and the one exchange between its ranks at each log.

Health, metrics and the pipeline each compare the ranks at Trainer's own log. They are parts of one collector: it
measures the phases of the training once, gathers the numbers of all parts in one vector, and hands each part those of
all ranks. `TrainerAdapter.collect` adds a part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.core.clocks import PhaseClock
from hfscale.core.collectives import TRAINING
from hfscale.core.phases import COMPUTE, DATA_WAIT, EVALUATE, OTHER, SAVE

EXCHANGE = "log"
"""The name of the exchange at each log."""

Columns = Mapping[str, Sequence[float]]
"""The exchanged numbers of a part: for each name the number of every rank, in rank order, (ranks,)."""
Arrays = Mapping[str, npt.NDArray[np.float64]]
"""The same as arrays, for a judge."""
Judge = Callable[[Arrays, TrainerState], Any]


class LogPart(Protocol):
    """What a part does at each log of Trainer's own, which all ranks make at the same step."""

    def numbers(
        self, state: TrainerState, logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return the numbers of this rank in the window that ends now.

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
            seconds (`Mapping[str, float]`): seconds of each phase (`hfscale.core.phases`) since the previous log.

        Returns:
            `Mapping[str, float]`: the numbers by name, NaN for an unknown one; the names are the same on every rank
            and at every log.
        """

    def keys(
        self, exchanged: Any, state: TrainerState, logs: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metric keys of the log. It is called on every rank.

        Args:
            exchanged (`Any`): the numbers of all ranks (`Columns`); for a part with a judge, what the judge returned.
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.

        Returns:
            `dict[str, float]`: the values that are known, by metric key.
        """


@dataclass(frozen=True, kw_only=True)
class _Member:
    part: LogPart
    judge: Judge | None


class LogCollector(TrainerCallback):
    """Measures the phases of a training and, at each log, exchanges the numbers of its parts.

    It is a callback behind all others of its Trainer, so that their time at an event belongs to the phase that the
    event ends. Trainer fetches the batches of a step before `on_step_begin`, and logs, evaluates and saves after
    `on_step_end` (transformers 5.23), so the events divide a step without gaps.

    Every rank gets the numbers of a part without a judge. A part with many numbers per rank has a judge: rank 0 alone
    gets the numbers and compares them, and every rank gets the judgement, whose size does not depend on the number of
    ranks.
    """

    def __init__(self) -> None:
        self.clock = PhaseClock()
        """Seconds of each phase since the previous log."""
        self._members: list[_Member] = []

    def add(self, part: LogPart, judge: Judge | None = None) -> None:
        """Add a part; adding it twice has no effect. Every rank must add the same parts in the same order.

        Args:
            part (`LogPart`): takes part in the exchange of each log.
            judge (`Callable`, *optional*): called on rank 0 only, with the part's numbers as arrays and the state;
                returns what JSON can represent. None: every rank gets the numbers.
        """
        if not any(member.part is part for member in self._members):
            self._members.append(_Member(part=part, judge=judge))

    def keys(self, state: TrainerState, logs: Mapping[str, float]) -> dict[str, float]:
        """Make the exchange, and return the metric keys of all parts. Every rank must call it at the same step.

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.

        Returns:
            `dict[str, float]`: values by metric key.
        """
        self.clock.end(COMPUTE)  # Trainer has just waited for the loss, which means for the device
        seconds = self.clock.take()
        numbers = [member.part.numbers(state, logs, seconds) for member in self._members]
        exchanged = _exchange([member.judge for member in self._members], numbers, state)
        keys: dict[str, float] = {}
        for member, of_part in zip(self._members, exchanged, strict=True):
            keys |= member.part.keys(of_part, state, logs)
        return keys

    # --- the events that end a phase --------------------------------------------------------------------------------

    def batch_fetched(self) -> None:
        """End the wait for a batch."""
        self.clock.end(DATA_WAIT)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.end(OTHER)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.end(COMPUTE)  # ranks that had their batches have waited here for the other ranks

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.end(COMPUTE)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        # Trainer logs the metrics of an evaluation before it calls `on_evaluate`.
        is_of_evaluation = any(key.startswith("eval_") for key in logs or ())
        self.clock.end(EVALUATE if is_of_evaluation else OTHER)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.end(EVALUATE)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.end(SAVE)


def _exchange(
    judges: Sequence[Judge | None], numbers: Sequence[Mapping[str, float]], state: TrainerState
) -> list[Columns | Any]:
    """Exchange the numbers of all parts at once.

    Args:
        judges (`Sequence[Callable | None]`): the judge of each part.
        numbers (`Sequence[Mapping[str, float]]`): the numbers of each part on this rank.
        state (`TrainerState`): the state of the Trainer.

    Returns:
        `list`: for each part the numbers of all ranks, or the judgement.
    """
    shared = [index for index, judge in enumerate(judges) if judge is None]
    judged = [index for index, judge in enumerate(judges) if judge is not None]
    names = [(index, name) for index in (*shared, *judged) for name in numbers[index]]
    shared_width = sum(len(numbers[index]) for index in shared)

    def judge_all(table: torch.Tensor) -> list[Any]:
        arrays: dict[int, dict[str, npt.NDArray[np.float64]]] = {index: {} for index in judged}
        columns = table[:, shared_width:].T.contiguous().numpy()
        for (index, name), column in zip(names[shared_width:], columns, strict=True):
            arrays[index][name] = column
        return [
            judge(arrays[index], state) for index, judge in enumerate(judges) if judge is not None
        ]

    row = [numbers[index][name] for index, name in names]
    table, judgements = TRAINING.combine_numbers(EXCHANGE, row, judge_all, shared=shared_width)
    exchanged: dict[int, Any] = {index: {} for index in shared}
    for (index, name), column in zip(names[:shared_width], table.T.tolist(), strict=True):
        exchanged[index][name] = column
    exchanged.update(zip(judged, judgements, strict=True))
    return [exchanged[index] for index in range(len(judges))]
