"""All ranks learn at one and the same step that one of them has a notice, and no step waits for it."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hfscale.utils import distributed

EVERY_S = 0.5
"""Between two exchanges. A notice is known to all within this and two steps: half a second of the 5 that the shortest
one leaves (RunPod), at the cost of one small collective in the background."""


class OverlappedAgreement:
    """The maximum of a value over all ranks, begun at the end of one step and read at the end of the next.

    At an exchange each rank starts an `all_reduce` on the side group and goes on; one step later it has long arrived,
    and reading it costs no waiting. How many steps lie between two exchanges is part of what is exchanged (by the
    slowest rank's pace), so all begin and read at the same steps. Where steps take longer than half of `every_s` an
    exchange costs nothing beside them: then each step has one, and it is read at once.

    Args:
        every_s (`float`): seconds between two exchanges; they at most double in number of steps from one to the next,
            so a slow first step does not set the pace.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        self._interval_steps = 1
        self._steps_since = 0
        self._begun = time.monotonic()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def step(self, value: Callable[[], float]) -> float | None:
        """Call once per step on every rank: the agreed maximum where this step is one to read at, else None.

        Args:
            value: asked for this rank's value, only where an exchange begins.
        """
        self._steps_since += 1
        agreed = self._read() if self._pending is not None else None
        if self._steps_since >= self._interval_steps:
            step_s = (time.monotonic() - self._begun) / self._steps_since
            self._steps_since, self._begun = 0, time.monotonic()
            if not distributed.is_distributed():
                self._set_interval(step_s)
                return value()
            self._begin(value(), step_s)
            if self._interval_steps == 1:
                agreed = max(self._read(), agreed or 0.0)
        return agreed

    def now(self, value: float) -> float:
        """The agreed maximum at once, of `value` and of what is under way; every rank must call it at one point."""
        before = self._read() if self._pending is not None else 0.0
        return max(before, distributed.all_max([value])[0])

    def finish(self) -> None:
        """Wait for what is under way, before the process group ends."""
        if self._pending is not None:
            self._read()

    def _begin(self, value: float, step_s: float) -> None:
        tensor = torch.tensor([value, step_s], dtype=torch.float64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=distributed.side_group(), async_op=True)
        self._pending = (tensor, work)

    def _read(self) -> float:
        assert self._pending is not None
        tensor, work = self._pending
        self._pending = None
        work.wait()
        agreed, slowest_step_s = map(float, tensor.tolist())
        self._set_interval(slowest_step_s)
        return agreed

    def _set_interval(self, slowest_step_s: float) -> None:
        affordable = int(self.every_s / max(slowest_step_s, 1e-6))
        self._interval_steps = max(1, min(2 * self._interval_steps, affordable))
