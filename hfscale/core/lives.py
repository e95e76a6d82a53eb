"""The launches of a run, as its timeline has them, and how the time between a checkpoint and a later launch was spent.

Goodput and cost during a run, and the report after it, are computed from the same launches.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hfscale.core.phases import OTHER

STOP_FILE = "stop file"
"""The source of a stop by a file that a user has made."""
LOST = "lost"
"""The phase after the checkpoint that the next launch resumed from."""
DOWN = "down"
"""The phase between two launches."""
PAUSED = "paused"
"""The phase between two launches where the first was completed, or was stopped by hand."""
_BY_THE_USER = (signal.SIGINT.name, STOP_FILE)
"""Reasons of a stop that a user has asked for."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """Describes one launch."""

    begun: float
    """Unix seconds of its start."""
    ended: float
    """Unix seconds of its last record."""
    first_step: int
    """The optimizer step that it started from."""
    world_size: int | None
    """Number of processes; None if it is unknown."""
    end_step: int | None
    """The step at which its training ended in order; None if the process ended without that."""
    is_pause: bool
    """Whether the time after it is a pause of the user: the training was completed, or stopped by hand."""
    saves: Sequence[tuple[int, float]]
    """Step and Unix seconds of each save."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Holds how the time between two moments was spent, outside the launch that follows."""

    lost_s: float = 0.0
    """Seconds of work that no checkpoint has kept."""
    other_s: float = 0.0
    """Seconds after the last step of trainings that ended in order."""
    down_s: float = 0.0
    """Seconds between launches."""
    paused_s: float = 0.0
    """Seconds between launches after a training that was completed or stopped by hand."""
    gpu_seconds: float = 0.0
    """Seconds of the launches times their processes."""

    @property
    def phases(self) -> dict[str, float]:
        """The seconds by phase, as in the times of a run."""
        return {
            LOST: self.lost_s,
            OTHER: self.other_s,
            DOWN: self.down_s,
            PAUSED: self.paused_s,
        }


def lives_of(events: Sequence[Mapping[str, Any]], last_record: float | None = None) -> list[Life]:
    """Return the launches of a timeline, oldest first; each reaches to the next one.

    Args:
        events (`Sequence[Mapping[str, Any]]`): the events of the timeline.
        last_record (`float`, *optional*): Unix seconds of the last record of the last launch, in any file.
    """
    starts = [index for index, event in enumerate(events) if event["event"] == "launch"]
    lives = []
    for start, stop in pairwise([*starts, len(events)]):
        if stop < len(events):
            # The measurements after the checkpoint are removed at a resume; the launch notes when the last one was
            last_alive = events[stop].get("previous_alive")
        else:
            last_alive = last_record
        lives.append(_life(events[start], events[start + 1 : stop], last_alive))
    return lives


def _life(
    launch: Mapping[str, Any], own: Sequence[Mapping[str, Any]], last_alive: float | None
) -> Life:
    times = [event["time"] for event in own]
    if last_alive is not None:
        times.append(last_alive)
    end = next((event for event in reversed(own) if event["event"] == "end"), None)
    world_size = launch.get("world_size")
    return Life(
        begun=launch["time"],
        ended=max([launch["time"], *times]),
        first_step=int(launch["step"]),
        world_size=None if world_size is None else int(world_size),
        end_step=None if end is None else int(end["step"]),
        is_pause=end is not None and _is_pause(launch, end),
        saves=[(int(event["step"]), event["time"]) for event in own if event["event"] == "save"],
    )


def _is_pause(launch: Mapping[str, Any], end: Mapping[str, Any]) -> bool:
    status = end.get("status")
    if status is None:  # of an earlier version
        return bool(end["step"] >= launch.get("max_steps", float("inf")))
    return status == "completed" or str(end.get("reason")).startswith(_BY_THE_USER)


def spent_between(
    lives: Sequence[Life], since: float, until: float, *, step: int, world_size: int
) -> Spent:
    """Return how the time from a checkpoint to a later launch was spent.

    Args:
        lives (`Sequence[Life]`): the launches before, oldest first; those that ended before the checkpoint do not
            count.
        since (`float`): Unix seconds of the checkpoint.
        until (`float`): Unix seconds of the later launch.
        step (`int`): the step of the checkpoint.
        world_size (`int`): number of processes of launches that have not recorded it.
    """
    lost_s = 0.0
    other_s = 0.0
    gaps = {False: 0.0, True: 0.0}
    gpu_seconds = 0.0
    alive_until = since
    is_pause = False
    for life in lives:
        begun = max(life.begun, alive_until)
        ended = min(life.ended, until)
        if ended <= alive_until:
            is_pause = life.is_pause
            continue
        gaps[is_pause] += begun - alive_until
        up_s = ended - begun
        if life.end_step is not None and life.end_step <= step:
            other_s += up_s
        else:
            lost_s += up_s
        gpu_seconds += up_s * (life.world_size or world_size)
        alive_until = ended
        is_pause = life.is_pause
    gaps[is_pause] += max(until - alive_until, 0.0)
    return Spent(
        lost_s=lost_s,
        other_s=other_s,
        down_s=gaps[False],
        paused_s=gaps[True],
        gpu_seconds=gpu_seconds,
    )
