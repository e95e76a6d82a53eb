"""When a checkpoint is due: every N steps or M minutes, whichever comes first, at the same step on all ranks."""

import time

from transformers import TrainerState, TrainingArguments

from hfscale.errors import UsageError
from hfscale.utils import distributed

DEFAULT_EVERY_STEPS = 500
DEFAULT_EVERY_MINUTES = 15.0
_AGREEMENT_EVERY_S = 5.0


class SaveCadence:
    """Counts steps and minutes since the last save.

    Args:
        every_steps (`int`, *optional*): steps between saves; absent: the Trainer's `save_steps`, or 500 where its
            `save_strategy` is not `steps`.
        every_minutes (`float`, *optional*): minutes between saves; None: steps only.

    Raises:
        UsageError: one of them is not positive.
    """

    def __init__(self, *, every_steps: int | None, every_minutes: float | None) -> None:
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            if value is not None and value <= 0:
                raise UsageError(f"{name} is {value}: it must be greater than 0, or None")
        self.every_steps = every_steps
        self.every_minutes = every_minutes

    def begin(self, state: TrainerState) -> None:
        """When training begins, on every rank: what it begins at is saved already."""
        self._agreement = distributed.StepAgreement(every_s=_AGREEMENT_EVERY_S)
        self.saved(state)

    def saved(self, state: TrainerState) -> None:
        """A checkpoint of now is written, whoever asked for it."""
        self._saved_step, self._saved_at = state.global_step, time.monotonic()

    def is_due(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Whether this step is to be saved. Call it once per step on every rank."""
        minutes = (time.monotonic() - self._saved_at) / 60
        overdue = self.every_minutes is not None and minutes >= self.every_minutes
        # Ranks read different clocks; the step at which they save must be one and the same.
        agreed = self._agreement.step(lambda: float(overdue)) if self.every_minutes is not None else 0.0
        return bool(agreed) or state.global_step - self._saved_step >= self._steps(args, state)

    def _steps(self, args: TrainingArguments, state: TrainerState) -> int:
        if self.every_steps is not None:
            return self.every_steps
        by_steps = args.save_strategy == "steps" and state.save_steps > 0  # of `args`, it may be a share of all steps
        return state.save_steps if by_steps else DEFAULT_EVERY_STEPS
