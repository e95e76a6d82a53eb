"""Clocks that measure the phases of a training loop, the time of work on a device, and the slowdown of steps.

None of them synchronizes with a GPU while a step runs.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_REMEMBERED_STEPS = 50


class PhaseClock:
    """Divides wall-clock time into phases: each event charges the time since the previous event to one phase.

    `hfscale.core.phases` names the phases, and `hfscale.trainer.collector` says which event ends which.

    Args:
        now (`Callable[[], float]`): a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self.seconds: dict[str, float] = {}
        """Seconds charged to each phase since the last call of `take` or `restart`."""

    def end(self, phase: str) -> float:
        """Charge the time since the previous event to a phase.

        Args:
            phase (`str`): the name of the phase that ends now.

        Returns:
            `float`: the time that was charged, in seconds.
        """
        now = self._now()
        elapsed = now - self._last
        self._last = now
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed
        return elapsed

    def elapsed(self) -> float:
        """Return the seconds since the previous event, which are not charged yet."""
        return self._now() - self._last

    def seconds_until_now(self, phase: str) -> dict[str, float]:
        """Return the seconds of each phase with those since the previous event, without charging them.

        Args:
            phase (`str`): the phase to which the time since the previous event belongs.
        """
        return self.seconds | {phase: self.seconds.get(phase, 0.0) + self.elapsed()}

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase and start a new window at the last event, so that no time is lost."""
        seconds = self.seconds
        self.seconds = {}
        return seconds

    def restart(self) -> None:
        """Discard what was charged, and start a new window now."""
        self.seconds = {}
        self._last = self._now()


class StepPace:
    """Compares the duration of steps during a disturbance (a background save) with that of undisturbed steps.

    Args:
        now (`Callable[[], float]`): a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._begun: float | None = None
        self._was_disturbed = False
        self._quiet_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._disturbed_s: list[float] = []

    def begin(self, disturbed: bool) -> None:
        """Start timing a step.

        Args:
            disturbed (`bool`): whether the disturbance is active now.
        """
        self._begun = self._now()
        self._was_disturbed = disturbed

    def end(self, disturbed: bool) -> None:
        """Stop timing the step. A step in which the disturbance began or ended is not counted.

        Args:
            disturbed (`bool`): whether the disturbance is active now.
        """
        if self._begun is None:
            return
        seconds = self._now() - self._begun
        self._begun = None
        if disturbed and self._was_disturbed:
            self._disturbed_s.append(seconds)
        elif not disturbed and not self._was_disturbed:
            self._quiet_s.append(seconds)

    def take_slowdown(self) -> float | None:
        """Return the median disturbed step since the last call over the median quiet step, or None if unknown."""
        disturbed_s = self._disturbed_s
        self._disturbed_s = []
        if not disturbed_s or not self._quiet_s:
            return None
        return statistics.median(disturbed_s) / statistics.median(self._quiet_s)


class HostClock:
    """Takes points in time on the host, for work that runs on a CPU."""

    now = staticmethod(time.perf_counter)
    """Return the current point in time."""

    def has_passed(self, point: Any) -> bool:
        """Return whether the device has reached `point`, a result of `now`, without waiting for it."""
        return True

    def wait_for(self, point: Any) -> None:
        """Block until the device has reached `point`, a result of `now`."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two points that the device has reached.

        Args:
            start (`Any`): the earlier result of `now`.
            end (`Any`): the later result of `now`.
        """
        return float(end - start)


class CudaClock(HostClock):
    """Takes points in time on the current CUDA stream: events that are recorded now and read once completed."""

    @staticmethod
    def now() -> Any:
        """Record an event on the current stream, and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, point: Any) -> bool:
        return bool(point.query())

    def wait_for(self, point: Any) -> None:
        point.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> HostClock:
    """Return the clock that times work on a device.

    Args:
        device (`torch.device`): the device; every device but a CUDA device gets a `HostClock`.
    """
    return CudaClock() if device.type == "cuda" else HostClock()
