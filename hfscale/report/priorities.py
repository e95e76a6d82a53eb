"""What to change first: the triage's cause, then what of the wall-clock time went into something else than steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hfscale.metrics.goodput import START_UP
from hfscale.metrics.triage import Measured, triage
from hfscale.report.formatting import duration
from hfscale.report.run_data import Run, restart_overhead

_OVERHEAD_WORTH_SAYING = 0.05
_KEYS = (
    "scaling/efficiency",
    "scaling/data_wait_fraction",
    "scaling/straggler_skew",
    "scaling/comm_fraction",
    "scaling/bubble_fraction",
    "scaling/mfu",
    "scaling/hfu",
    "gpu/throttled",
)


@dataclass(frozen=True, kw_only=True)
class Priority:
    """One thing to change."""

    title: str
    """The cause, in a word or two."""
    share: float | None
    """Of the time, where it is known."""
    numbers: str
    """What was measured."""
    mend: str
    """What to do."""


def priorities(run: Run) -> list[Priority]:
    """The largest first; [] where nothing calls for a change."""
    found = [*_inside_the_steps(run), *_around_the_steps(run)]
    return sorted(found, key=lambda priority: -(priority.share or 0.0))


def _inside_the_steps(run: Run) -> Sequence[Priority]:
    medians = {key: value for key in _KEYS if (value := run.median(key)) is not None}
    tokens = run.facts.get("tokens_per_gpu")
    # Only the run itself knew whether the exchange could have been hidden: its own words go before ours.
    finding = triage(Measured.of(medians, tokens_per_gpu=int(tokens) if tokens else None))
    if finding is None:
        return []
    said = next((f for f in reversed(run.findings) if f.get("cause") == "tokens per GPU too small"), None)
    if said is not None and finding.check == "exposed communication":
        return [Priority(title=said["cause"], share=finding.share, numbers=said["numbers"], mend=said["mend"])]
    return [Priority(title=finding.check, share=finding.share, numbers=finding.problem, mend=finding.fix)]


def _save_interval(run: Run) -> str:
    """Young's optimum sqrt(2 x save time x time between failures), in this run's numbers (Young 1974, CACM 17 (9))."""
    stall = run.median("checkpoint/stall_s")
    restarts = len(run.attempts) - 1
    if stall is None or restarts < 1:
        return ""
    up = sum(attempt.ended - attempt.begun for attempt in run.attempts)
    best = math.sqrt(2 * stall * up / restarts)
    return (
        f"save about every {duration(best)} (Young's optimum for a save of {duration(stall)} and such failures), and "
    )


def _around_the_steps(run: Run) -> Sequence[Priority]:
    total = sum(run.split.values())
    if total <= 0:
        return []
    saves = sum(len(attempt.saves) for attempt in run.attempts)
    restarts = len(run.attempts) - 1
    looks = (
        (
            "restarts",
            restart_overhead(run.split),
            f"{restarts} restart{'s' if restarts != 1 else ''}: work done twice, and time until the relaunch",
            f"{_save_interval(run)}relaunch by a supervisor",
        ),
        (
            "start-up",
            run.split.get(START_UP, 0.0),
            "imports, loading and preparation before the first step",
            "prepare the text beforehand and keep its cache; it weighs less the longer the run",
        ),
        (
            "saves",
            run.split.get("save", 0.0),
            f"training stood still for {saves} save{'s' if saves != 1 else ''}",
            "save less often, to a faster disk, or asynchronously",
        ),
        (
            "evaluation",
            run.split.get("evaluate", 0.0),
            "evaluations during the training",
            "evaluate less often, or on fewer sequences (--max_eval_samples)",
        ),
    )
    return [
        Priority(title=title, share=seconds / total, numbers=numbers, mend=mend)
        for title, seconds, numbers, mend in looks
        if seconds / total > _OVERHEAD_WORTH_SAYING
    ]
