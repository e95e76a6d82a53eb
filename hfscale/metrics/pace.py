"""How much slower steps are while something happens beside them."""

import statistics
import time
from collections import deque
from collections.abc import Callable

_REMEMBERED = 50


class StepPace:
    """Compares the steps that fall wholly into a disturbance with the undisturbed ones before and after.

    Args:
        now (`Callable[[], float]`): a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._begun: float | None = None
        self._was_disturbed = False
        self._quiet_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._disturbed_s: list[float] = []

    def begin(self, disturbed: bool) -> None:
        """A step begins, in a disturbance or not."""
        self._begun, self._was_disturbed = self._now(), disturbed

    def end(self, disturbed: bool) -> None:
        """The step ends. One that a disturbance began or ended in counts for neither side."""
        if self._begun is None:
            return
        seconds, self._begun = self._now() - self._begun, None
        if disturbed and self._was_disturbed:
            self._disturbed_s.append(seconds)
        elif not disturbed and not self._was_disturbed:
            self._quiet_s.append(seconds)

    def take_slowdown(self) -> float | None:
        """Median of the disturbed steps since the last call / median of the last quiet ones; None if unknown."""
        disturbed_s, self._disturbed_s = self._disturbed_s, []
        if not disturbed_s or not self._quiet_s:
            return None
        return statistics.median(disturbed_s) / statistics.median(self._quiet_s)
