"""Computes how long a run still takes and what it costs to its end, from the speed of its newest logs."""

from dataclasses import dataclass

from hfscale.report.run_data import Run

NEWEST_LOGS = 50
"""Number of logs whose speed is assumed for the rest of the run; the time of saves and evaluations is in it."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Holds what is left of a run."""

    seconds_left: float
    """Seconds to the last step, at the speed of the newest logs."""
    usd_to_end: float | None
    """USD that the rest costs; None without a price."""
    usd_total: float | None
    """USD of the whole run; None where the cost so far is unknown."""


def forecast(run: Run) -> Forecast | None:
    """Return what is left of a run; None if it is complete, or if its speed or its last step is unknown.

    Args:
        run (`Run`): the data of the run.
    """
    if run.status == "completed" or run.max_steps is None or not run.attempts:
        return None
    launch = run.attempts[-1]
    logs = [record for record in run.records if record.get("time", 0.0) >= launch.begun][
        -NEWEST_LOGS:
    ]
    if len(logs) < 2:
        return None
    key = "step"
    end: float | None = run.max_steps
    if "scaling/global_batch" in logs[-1]:
        # Its steps take longer and longer as it grows; a pass does not
        key = "epoch"
        end = run.passes
    begun = logs[0].get(key, 0.0)
    reached = logs[-1].get(key, 0.0)
    if end is None or reached <= begun:
        return None
    seconds = max(logs[-1]["time"] - logs[0]["time"], 0.0)
    seconds_left = max(end - reached, 0) * seconds / (reached - begun)
    price = run.facts.get("usd_per_gpu_hour")
    gpus = launch.world_size or run.facts.get("world_size")
    to_end = None
    if isinstance(price, int | float) and isinstance(gpus, int | float):
        to_end = seconds_left / 3600 * price * gpus
    spent = run.last("scaling/usd")
    total = spent + to_end if spent is not None and to_end is not None else None
    return Forecast(seconds_left=seconds_left, usd_to_end=to_end, usd_total=total)
