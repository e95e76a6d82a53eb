"""When a failed launch is started again, how soon, and when a run is given up."""

import time
from dataclasses import dataclass, field
from typing import Any

_WINDOW_S = 24 * 3600.0  # in which restarts are counted
_SAME_STEP_LIMIT = 3
_SHOWN_RANKS = 4
_SHOWN_SAMPLES = 32
_BACK_OFF_S = 1.0
_MAX_BACK_OFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one launch failed; the next launch reports it."""

    failed_at: float
    """Unix time at which the first rank ended, or at which the launcher did."""
    ended_at: float
    """Unix time at which the last process had ended."""
    rank: int | None
    """Global rank that ended first; None if it is not known."""
    reason: str
    """What is known of the reason, in one line."""
    begun_step: int
    """The last optimizer step that a rank of this node had begun; 0 if there was none."""
    completed_step: int
    """The last optimizer step that a rank of this node had completed."""
    is_consequence: bool = False
    """Whether this node was stopped because another one had failed."""
    samples: dict[str, list[Any]] = field(default_factory=dict)
    """The dataset indices of `begun_step` by rank, if it was not completed; without the ranks that do not know."""
    errors: list[str] = field(default_factory=list)
    """The errors that have ended ranks before the first step of the launch (`final_errors.recurring_error`)."""

    def __str__(self) -> str:
        return self.reason if self.rank is None else f"rank {self.rank}: {self.reason}"

    @classmethod
    def merged(cls, failures: list[dict[str, Any]]) -> "Failure":
        """Return the failure of a launch on several nodes: its first cause, and the steps of all.

        Args:
            failures (`list[dict]`): the fields of the failures that the nodes report, at least one.
        """
        first = dict(
            min(failures, key=lambda failure: (failure["is_consequence"], failure["failed_at"]))
        )
        first |= {"errors": sorted({error for f in failures for error in f.get("errors", [])})}
        first.pop("samples")
        last = {
            name: max(f[name] for f in failures)
            for name in ("ended_at", "begun_step", "completed_step")
        }
        samples = [
            f["samples"]
            for f in failures
            if f["begun_step"] == last["begun_step"] > last["completed_step"]
        ]
        return cls(
            **(first | last),
            samples={rank: read for of_node in samples for rank, read in of_node.items()},
        )


class RestartPolicy:
    """Counts the failures of a run.

    Args:
        max_restarts (`int`): restarts in any 24 hours after which the run is given up.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarted_at: list[float] = []
        self._failed_steps: list[int] = []
        # Of all launches so far
        self._errors: set[str] = set()
        self._furthest = 0

    @property
    def failures(self) -> int:
        """How many launches have failed."""
        return len(self._failed_steps)

    def why_give_up(self, failure: Failure) -> str | None:
        """Count a failure, and return why the run is given up; None if it is started again.

        Failures in the same step are given up soon, since the data of that step may be the cause. A start that fails
        (a file system or hub that is away) is tried again, less and less often, up to the limit of restarts.

        Args:
            failure (`Failure`): the failure of the last launch.
        """
        is_first = not self._failed_steps
        self._failed_steps.append(failure.begun_step)
        self._errors = set(failure.errors) if is_first else self._errors & set(failure.errors)
        if self._errors and not is_first:
            return f"the same error has ended both launches before the first step: {failure}"
        now = time.monotonic()
        self._restarted_at = [at for at in self._restarted_at if now - at < _WINDOW_S]
        same = self._failed_steps[-_SAME_STEP_LIMIT:]
        if failure.begun_step and len(same) == _SAME_STEP_LIMIT and len(set(same)) == 1:
            return f"{_SAME_STEP_LIMIT} failures in a row {_where(failure)}: {failure}{_samples(failure)}"
        if len(self._restarted_at) >= self._max_restarts:
            return (
                f"{self._max_restarts} restarts in 24 hours (--max-restarts); the last failure was "
                f"{_where(failure)}: {failure}"
            )
        return None

    def next_restart(self, failure: Failure) -> tuple[float, str]:
        """Return how long to wait before the restart, and a line that says so.

        It is longer after each failure without progress; a run that has made progress is restarted at once.

        Args:
            failure (`Failure`): what `why_give_up` was called with.

        Returns:
            `tuple[float, str]`: the seconds, and the line.
        """
        made_progress = failure.completed_step > self._furthest
        self._furthest = max(self._furthest, failure.completed_step)
        without = 0
        for step in reversed(self._failed_steps):
            if step != failure.begun_step:
                break
            without += 1
        wait_s = 0.0 if made_progress else back_off_s(without)
        self._restarted_at.append(time.monotonic())
        soon = f"in {wait_s:.0f} s" if wait_s else "now"
        counted = f"restart {len(self._restarted_at)} of {self._max_restarts} in 24 hours"
        return wait_s, f"{failure} ({_where(failure)}); {counted}, {soon}"


def back_off_s(attempt: int) -> float:
    """Return the seconds to wait after an attempt that has failed.

    Args:
        attempt (`int`): how many have failed in a row, from 1.
    """
    return float(min(_BACK_OFF_S * 2 ** (attempt - 1), _MAX_BACK_OFF_S))


def _where(failure: Failure) -> str:
    return f"in step {failure.begun_step}" if failure.begun_step else "before the first step"


def _samples(failure: Failure) -> str:
    """Return the samples of the failed step, of the failed rank if it is known; the log has all of them."""
    own = {rank: indices for rank, indices in failure.samples.items() if rank == str(failure.rank)}
    ranks = [
        f"rank {rank}: {_listed(indices)}" for rank, indices in (own or failure.samples).items()
    ]
    return f"; dataset indices of this step: {'; '.join(ranks[:_SHOWN_RANKS])}" if ranks else ""


def _listed(indices: list[Any]) -> str:
    more = f" and {len(indices) - _SHOWN_SAMPLES} more" if len(indices) > _SHOWN_SAMPLES else ""
    return ", ".join(map(str, indices[:_SHOWN_SAMPLES])) + more
