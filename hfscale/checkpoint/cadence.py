"""Decides at which steps `SpotCheckpointCallback` saves."""

import time

from transformers import TrainerState, TrainingArguments

from hfscale.core.run_state import ResetOnCopy

DEFAULT_EVERY_STEPS = 500
DEFAULT_EVERY_MINUTES = 15.0


class SaveCadence(ResetOnCopy):
    """Decides when a checkpoint is due: N steps or M minutes after the last save, at the same step on all ranks.

    Args:
        every_steps (`int`, *optional*): steps between saves; None: the Trainer's `save_steps`, or 500 where its
            `save_strategy` is not `steps`.
        every_minutes (`float`, *optional*): minutes between saves; None: steps only.
    """

    def __init__(self, *, every_steps: int | None, every_minutes: float | None) -> None:
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self._begin_run()

    def _begin_run(self) -> None:
        self._saved_step = 0
        self._saved_at = 0.0

    def begin(self, state: TrainerState) -> None:
        """Start counting when training begins. Every rank must call it.

        Args:
            state (`TrainerState`): the state of the Trainer; its step counts as saved.
        """
        self._begin_run()
        self.saved(state)

    def saved(self, state: TrainerState) -> None:
        """Record that this step is saved, whatever the reason for the save was.

        Args:
            state (`TrainerState`): the state of the Trainer.
        """
        self._saved_step = state.global_step
        self._saved_at = time.monotonic()

    def vote(self) -> float:
        """Return whether the minutes have passed on this rank: ranks read different clocks, but save at one step."""
        if self.every_minutes is None:
            return 0.0
        minutes = (time.monotonic() - self._saved_at) / 60
        return float(minutes >= self.every_minutes)

    def is_due(self, args: TrainingArguments, state: TrainerState, *, agreed: float) -> bool:
        """Return whether this step is to be saved. Call it once per step on every rank.

        Args:
            args (`TrainingArguments`): the training arguments, with the `save_strategy`.
            state (`TrainerState`): the state of the Trainer, with the step and `save_steps`.
            agreed (`float`): the greatest vote of all ranks; 0 where no exchange was read.
        """
        steps_are_due = state.global_step - self._saved_step >= self._steps(args, state)
        self.is_steps_of_user = steps_are_due and self.every_steps is not None
        return bool(agreed) or steps_are_due

    def _steps(self, args: TrainingArguments, state: TrainerState) -> int:
        if self.every_steps is not None:
            return self.every_steps
        # That of `args` may be a share of all steps
        by_steps = args.save_strategy == "steps" and state.save_steps > 0
        return state.save_steps if by_steps else DEFAULT_EVERY_STEPS
