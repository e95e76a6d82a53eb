"""The phases into which the wall-clock time of a training is divided.

`PhaseClock` measures them. The goodput and the judgement of waits for data are computed from them, and the timeline
and the report name them. The phases of a launch outside its training loop are in `hfscale.metrics.goodput`.
"""

from collections.abc import Mapping

DATA_WAIT = "data_wait"
"""Until this rank has fetched its batches."""
COMPUTE = "compute"
"""Forward, backward and optimizer, the wait for the batches of other ranks, and at a log the wait for the device."""
EVALUATE = "evaluate"
"""An evaluation or a generation, with its log."""
SAVE = "save"
"""A save, as long as training waits for it."""
OTHER = "other"
"""Logs, and the beginning of an epoch."""


def step_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of steps: fetching batches and computing.

    Args:
        seconds (`Mapping[str, float]`): seconds of each phase.
    """
    return seconds.get(DATA_WAIT, 0.0) + seconds.get(COMPUTE, 0.0)


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of all phases except evaluations and saves.

    Args:
        seconds (`Mapping[str, float]`): seconds of each phase.
    """
    return sum(s for phase, s in seconds.items() if phase not in (EVALUATE, SAVE))
