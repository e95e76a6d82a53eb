"""Measures goodput and cost: how the time since the first launch was spent, over every restart, and what it cost.

    goodput = seconds inside optimizer steps that the training kept / seconds since the first launch, without pauses

The times are kept in a dictionary in `trainer_state.json`, so that each checkpoint contains them. Resuming from a
checkpoint restores its times, and what was done after that checkpoint is then not in them: lost steps count as lost
without further bookkeeping. Of the launches after it the timeline knows how long each lived, and on how many
processes (`hfscale.core.lives`). The ratio is that of Google's ML Goodput (arXiv 2502.06982), with evaluations
counted as overhead.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfscale.core.lives import PAUSED, Life, spent_between
from hfscale.core.phases import COMPUTE
from hfscale.facts.hardware import match_device_name
from hfscale.facts.prices import all_prices, prices_of

USEFUL_PHASE = COMPUTE
"""The phase that counts as useful, in steps that were kept."""
START_UP = "start_up"
"""The phase from the launch to the beginning of the training loop."""


class GoodputTracker:
    """Adds up how the time was spent, launch after launch.

    Args:
        saved (`dict[str, Any]`): the dictionary that keeps the times: empty in a fresh run, and as the checkpoint had
            it in a resumed run. It is updated in place.
        now (`Callable[[], float]`): returns the Unix time in seconds.
    """

    def __init__(self, saved: dict[str, Any], *, now: Callable[[], float] = time.time) -> None:
        self._saved = saved
        self._now = now
        self._base: dict[str, float] = {}
        self._base_gpu_seconds = 0.0

    def begin(
        self,
        *,
        launched_at: float,
        world_size: int,
        lives: Sequence[Life] = (),
        step: int = 0,
        save: tuple[float, float] | None = None,
    ) -> None:
        """Start to account for this launch.

        Args:
            launched_at (`float`): Unix time at which the process of this launch started.
            world_size (`int`): number of processes of this launch.
            lives (`Sequence[Life]`): the launches before, as far as their files are left, oldest first. All those
                after the checkpoint count, each with its own processes.
            step (`int`): the step that is resumed from.
            save (`tuple[float, float]`, *optional*): the Unix time at which the save of the checkpoint that is resumed
                from ended, and its duration in seconds. The times in the checkpoint are from before its save.
        """
        saved = self._saved
        now = self._now()
        seconds: dict[str, float] = dict(saved.get("seconds", {}))
        first_launch = min([life.begun for life in lives[:1]] + [launched_at])
        begun = saved.setdefault("first_launch", first_launch)
        as_of = saved.get("as_of", begun)
        previous_world_size = saved.get("world_size", world_size)
        gpu_seconds: float = saved.get("gpu_seconds", 0.0)
        if save is not None and as_of <= save[0] <= launched_at:
            seconds["save"] = seconds.get("save", 0.0) + min(save[1], save[0] - as_of)
            gpu_seconds += (save[0] - as_of) * previous_world_size
            as_of = save[0]
        # A launch that died before its first checkpoint kept no times: all of it was lost.
        spent = spent_between(lives, as_of, launched_at, step=step, world_size=previous_world_size)
        added = {START_UP: max(now - launched_at, 0.0)}
        added |= {phase: added_s for phase, added_s in spent.phases.items() if added_s > 0}
        for phase, added_s in added.items():
            seconds[phase] = seconds.get(phase, 0.0) + added_s
        self._base = seconds
        self._base_gpu_seconds = gpu_seconds + spent.gpu_seconds
        self._launched_at = launched_at
        saved.update(seconds=dict(seconds), as_of=now, world_size=world_size)
        saved["gpu_seconds"] = self._gpu_seconds(now)

    def update(self, window: Mapping[str, float]) -> None:
        """Set the saved times to those at the last `fold` (at first those at `begin`), plus those of a window.

        Args:
            window (`Mapping[str, float]`): seconds of each phase since the last `fold`.
        """
        now = self._now()
        seconds = self._saved["seconds"]
        for phase, s in window.items():
            seconds[phase] = self._base.get(phase, 0.0) + s
        self._saved["as_of"] = now
        self._saved["gpu_seconds"] = self._gpu_seconds(now)

    def fold(self, window: Mapping[str, float]) -> None:
        """Update the saved times, and start a new window from them.

        Args:
            window (`Mapping[str, float]`): seconds of each phase since the last `fold`.
        """
        self.update(window)
        self._base = dict(self._saved["seconds"])

    def goodput(self) -> float | None:
        """Return useful seconds over seconds since the first launch, without pauses; None if no time has passed."""
        seconds = self._saved["seconds"]
        wall_s = self._saved["as_of"] - self._saved["first_launch"] - seconds.get(PAUSED, 0.0)
        return seconds.get(USEFUL_PHASE, 0.0) / wall_s if wall_s > 0 else None

    def gpu_hours(self) -> float:
        """Return the GPU-hours of all processes; lost work counts, the time between launches does not."""
        return float(self._saved["gpu_seconds"]) / 3600

    def _gpu_seconds(self, now: float) -> float:
        return self._base_gpu_seconds + (now - self._launched_at) * float(self._saved["world_size"])


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Holds the price of a GPU and its source."""

    usd_per_gpu_hour: float
    """USD per GPU and hour."""
    source: str
    """`as given`, or the provider, the kind of price and the date."""


def rate(
    device_name: str, usd_per_gpu_hour: float | None, *, prices: Path | None = None
) -> Rate | None:
    """Return the price of one device per hour.

    Of several offers the cheapest on-demand one is taken: it is the least that the run costs without a contract.

    Args:
        device_name (`str`): the name that `torch.cuda.get_device_name()` returns.
        usd_per_gpu_hour (`float`, *optional*): the price that the user gave; it takes precedence.
        prices (`Path`, *optional*): a price list; by default the shipped one, with the rows of the user's own file.

    Returns:
        `Rate | None`: the price, or None if the user gave none and the price list does not have the device.

    Raises:
        ConfigFileError: the price list cannot be read, or a row of it is wrong.
    """
    if usd_per_gpu_hour is not None:
        return Rate(usd_per_gpu_hour=usd_per_gpu_hour, source="as given")
    gpu = match_device_name(device_name)
    offers = prices_of(gpu, all_prices(prices)) if gpu is not None else ()
    for offer in offers:
        if offer.on_demand_usd is not None:
            region = f" {offer.region}" if offer.region else ""
            return Rate(
                usd_per_gpu_hour=offer.on_demand_usd,
                source=f"{offer.provider}{region} on demand, read {offer.date.isoformat()}",
            )
    return None
