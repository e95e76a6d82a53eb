"""Predicts the FLOPs of training steps from the few steps in which they were counted."""

from collections.abc import Sequence

import numpy as np

MAX_COUNTED_STEPS = 8
"""Most steps that are counted in a training. A counted step is slower, because each operator passes through Python."""
_AGREES = 0.01
"""Counting ends when a step's FLOPs were predicted up to this relative error."""
_FITS = 0.05
"""Largest relative error of a usable fit, where FLOPs also depend on chance, such as layers that are skipped."""
_NEW_SHAPE = 0.01
"""A step is counted if this part of its work is of a kind that no counted step had."""
_WEIGHTS = np.array([0.03, 1.0, 0.1, 1.0, 0.1, 0.1, 1.0])
"""How much each size of the work is expected to explain: most FLOPs are linear in the positions. It matters only until
the counted steps tell the sizes apart."""


class FlopsFit:
    """Fits FLOPs as a linear function of the work (`TokenCounter.work`), with as few counted steps as possible.

    For steps of one shape one count is exact. For other shapes the function is a sum of terms for samples, positions,
    pairs of positions in attention and so on, which is exact for transformers with full attention.
    """

    def __init__(self) -> None:
        self._work: list[Sequence[float]] = []
        self._flops: list[tuple[float, float]] = []
        self._is_settled = False
        self._units = np.ones(len(_WEIGHTS))
        self._solution: np.ndarray | None = None
        self._explained = np.zeros((len(_WEIGHTS), len(_WEIGHTS)))

    @property
    def wants_count(self) -> bool:
        """Whether the next step should be counted."""
        return not self._is_settled and len(self._work) < MAX_COUNTED_STEPS

    @property
    def has_failed(self) -> bool:
        """Whether the counted steps cannot be explained by their shapes."""
        return not self._is_settled and len(self._work) >= MAX_COUNTED_STEPS

    def add(self, work: Sequence[float], model_flops: float, hardware_flops: float) -> None:
        """Add a counted step.

        Args:
            work (`Sequence[float]`): the increase of `TokenCounter.work` during the step, (`WORK_SIZES`,).
            model_flops (`float`): its model FLOPs.
            hardware_flops (`float`): its executed FLOPs.
        """
        predicted = self.predict(work)
        self._work.append(work)
        self._flops.append((model_flops, hardware_flops))
        self._is_settled = (
            predicted is not None and abs(predicted[0] - model_flops) <= _AGREES * model_flops
        )
        counted = np.array(self._flops)
        # Counted work is about 1 in these units
        self._units = np.maximum(np.max(self._work, axis=0), 1.0) / _WEIGHTS
        rows = np.array(self._work) / self._units
        self._solution = np.linalg.lstsq(rows, counted, rcond=1e-4)[0]
        # Projects on what the counted steps tell
        self._explained = np.linalg.pinv(rows, rcond=1e-4) @ rows
        if len(self._work) == MAX_COUNTED_STEPS:
            self._is_settled = bool(
                (np.abs(rows @ self._solution - counted) <= _FITS * counted).all()
            )

    def note(self, work: Sequence[float]) -> None:
        """Take a step into account that was not counted: if its shape is new, the next steps will be counted.

        Args:
            work (`Sequence[float]`): the increase of `TokenCounter.work` during the step.
        """
        if len(self._work) >= MAX_COUNTED_STEPS or not any(work):
            return
        row = np.array(work) / self._units
        if np.linalg.norm(row - row @ self._explained) > _NEW_SHAPE * np.linalg.norm(row):
            self._is_settled = False

    def predict(self, work: Sequence[float]) -> tuple[float, float] | None:
        """Return the model FLOPs and the executed FLOPs of some work; None before a step was counted.

        Args:
            work (`Sequence[float]`): the increase of `TokenCounter.work` during one or more steps.
        """
        if self._solution is None:
            return None
        model_flops, hardware_flops = np.array(work) / self._units @ self._solution
        return float(model_flops), float(hardware_flops)
