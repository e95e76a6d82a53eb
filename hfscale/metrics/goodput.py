"""Goodput: which part of the time since the first launch went into steps that count, over every restart.

    goodput = seconds inside optimizer steps that the training kept / seconds since the first launch

The ledger is a dictionary in `trainer_state.json`, so it travels with each checkpoint. Going back to a checkpoint goes
back to its ledger, and what was done after it is then no longer in it: lost steps count as lost without further
bookkeeping. The share is that of Google's ML Goodput (arXiv 2502.06982), with evaluations on the side of the overhead.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

USEFUL_PHASE = "compute"
START_UP, LOST, DOWN = "start_up", "lost", "down"


class GoodputTracker:
    """Adds up where the time went, attempt after attempt.

    Args:
        saved (`dict[str, Any]`): where it is kept; empty in a fresh run, as a checkpoint had it in a resumed one.
        now (`Callable[[], float]`): Unix time in seconds.
    """

    def __init__(self, saved: dict[str, Any], *, now: Callable[[], float] = time.time) -> None:
        self._saved = saved
        self._now = now
        self._base: dict[str, float] = {}

    def begin(
        self,
        *,
        launched_at: float,
        world_size: int,
        last_alive: float | None = None,
        first_launch: float | None = None,
        save: tuple[float, float] | None = None,
    ) -> None:
        """Open this attempt.

        Args:
            launched_at (`float`): when its process started, Unix seconds.
            world_size (`int`): its processes.
            last_alive (`float`, *optional*): last sign of life of the attempt before it; None where there was none.
            first_launch (`float`, *optional*): when the first attempt started, for a ledger that no checkpoint has
                kept; None: this is it.
            save (`tuple[float, float]`, *optional*): when the save of the checkpoint that is gone on from ended, and
                the seconds it took: the ledger in it is from before.
        """
        saved, now = self._saved, self._now()
        seconds: dict[str, float] = dict(saved.get("seconds", {}))
        is_first = "first_launch" not in saved
        begun = saved.setdefault("first_launch", min(first_launch or launched_at, launched_at))
        as_of = saved.get("as_of", begun)
        if save is not None and as_of <= save[0] <= launched_at:
            seconds["save"] = seconds.get("save", 0.0) + min(save[1], save[0] - as_of)
            saved["gpu_seconds"] = saved.get("gpu_seconds", 0.0) + (save[0] - as_of) * saved.get(
                "world_size", world_size
            )
            as_of = save[0]
        # An attempt that died before its first checkpoint left no ledger: all of it was lost.
        alive = min(max(last_alive if last_alive is not None else as_of, as_of), launched_at)
        if not is_first or alive > begun:
            seconds[LOST] = seconds.get(LOST, 0.0) + alive - as_of
            seconds[DOWN] = seconds.get(DOWN, 0.0) + max(launched_at - alive, 0.0)
        gpu_seconds = saved.get("gpu_seconds", 0.0) + (alive - as_of) * saved.get("world_size", world_size)
        seconds[START_UP] = seconds.get(START_UP, 0.0) + max(now - launched_at, 0.0)
        self._base, self._base_gpu_seconds, self._launched_at = seconds, gpu_seconds, launched_at
        saved.update(seconds=dict(seconds), as_of=now, world_size=world_size)
        saved["gpu_seconds"] = self._gpu_seconds(now)

    def update(self, window: Mapping[str, float]) -> None:
        """Bring what is kept up to now: the attempt's phases so far, and since then those of `window`."""
        now, seconds = self._now(), self._saved["seconds"]
        for phase, s in window.items():
            seconds[phase] = self._base.get(phase, 0.0) + s
        self._saved["as_of"] = now
        self._saved["gpu_seconds"] = self._gpu_seconds(now)

    def fold(self, window: Mapping[str, float]) -> None:
        """`update`, and begin a new window."""
        self.update(window)
        self._base = dict(self._saved["seconds"])

    def goodput(self) -> float | None:
        """Useful seconds / seconds since the first launch; None at that very moment."""
        wall = self._saved["as_of"] - self._saved["first_launch"]
        return self._saved["seconds"].get(USEFUL_PHASE, 0.0) / wall if wall > 0 else None

    def gpu_hours(self) -> float:
        """Processes x hours that they were up, lost attempts included, time between attempts not."""
        return float(self._saved["gpu_seconds"]) / 3600

    def _gpu_seconds(self, now: float) -> float:
        return float(self._base_gpu_seconds + (now - self._launched_at) * self._saved["world_size"])
