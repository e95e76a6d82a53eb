"""The protocol of a meter.

A meter sees the beginning and the end of each step. At each log it gives a few named numbers of its rank, and makes
metric keys from the numbers of all ranks. One exchange carries the numbers of all meters. An unknown number is NaN in
the exchange, and has no metric key.
"""

import math
from dataclasses import dataclass

from transformers import Trainer, TrainerState

from hfscale.trainer.collector import Columns


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of a run between two logs, over all ranks."""

    steps: int
    """Optimizer steps."""
    seconds: float
    """Seconds of training on the rank that took longest."""
    tokens: float
    """Tokens trained on; 0 if the model has no token sequences."""
    tokens_seen: int
    """Tokens trained on since step 0."""
    tokens_per_s_per_gpu: float
    """Tokens / seconds / processes."""
    sequence_length: int
    """Tokens per sequence, mean over tokens; 0 without tokens."""
    grad_norm: float | None = None
    """Gradient norm that Trainer logs; None: it logs none."""


class Meter:
    """Defines the methods of a meter; this base class measures nothing."""

    watches_steps = False
    """Whether `step_begin`, `substep_end` and `step_end` must be called; it is set by `begin`."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Prepare for a training. It is called on every rank when training begins.

        Args:
            trainer (`Trainer`): the Trainer that trains, with its model prepared.
            state (`TrainerState`): the state of the Trainer.

        Raises:
            ConfigFileError: a file that the meter needs (baselines, prices) cannot be read.
        """

    def step_begin(self, state: TrainerState) -> None:
        """Start to measure a step, before its first forward.

        Args:
            state (`TrainerState`): the state of the Trainer; the step is number `state.global_step + 1`.
        """

    def substep_end(self, state: TrainerState) -> None:
        """Note the end of a micro-batch that is not the last one of its step.

        Args:
            state (`TrainerState`): the state of the Trainer; the step is number `state.global_step + 1`.
        """

    def step_end(self, state: TrainerState) -> None:
        """Stop measuring a step, after its optimizer step.

        Args:
            state (`TrainerState`): the state of the Trainer; the step is number `state.global_step`.
        """

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return the numbers of this rank in the window that ends now.

        Args:
            state (`TrainerState`): the state of the Trainer.

        Returns:
            `dict[str, float]`: the numbers by name; NaN for an unknown one. No other meter uses these names, and they
            are the same on every rank and at every log.
        """
        return {}

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the metric keys of this meter, computed from the numbers of all ranks.

        Args:
            columns (`Mapping[str, Sequence[float]]`): the numbers of every rank, by name.
            window (`Window`): the window that ends now.
            state (`TrainerState`): the state of the Trainer.

        Returns:
            `dict[str, float]`: the metric keys that are known.
        """
        return {}

    def end(self) -> None:
        """Release the resources that `begin` has acquired. It is called when training ends."""


def or_nan(value: float | None) -> float:
    """Return the number to exchange: NaN for None.

    Args:
        value (`float`, *optional*): the number; None: it is unknown.
    """
    return math.nan if value is None else value
