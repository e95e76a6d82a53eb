"""Where the wall-clock time of a training loop goes, by charging each stretch between two events to one phase."""

import time
from collections.abc import Callable


class PhaseClock:
    """Adds the time since the previous event to the phase that ends now.

    Trainer fetches the batches of a step before `on_step_begin`, and logs, evaluates and saves after `on_step_end`
    (transformers 5.23), so its events cut a step into phases without a gap: a batch's arrival ends the wait for data,
    `on_step_end` the computation, `on_evaluate` an evaluation, `on_save` a save.

    Args:
        now (`Callable[[], float]`): a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self.seconds: dict[str, float] = {}
        """Seconds charged to each phase since the last `take` or `restart`."""

    def end(self, phase: str) -> float:
        """Charge the time since the previous event to `phase`; returns that time."""
        now = self._now()
        stretch, self._last = now - self._last, now
        self.seconds[phase] = self.seconds.get(phase, 0.0) + stretch
        return stretch

    def take(self) -> dict[str, float]:
        """What was charged; the next window begins where the last event was, so that no time falls between."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def restart(self) -> None:
        """Forget what was charged, and begin a new window now."""
        self.seconds = {}
        self._last = self._now()
