"""Finds ranks whose own work (`local_time`) is slower than that of others, and ranks that alone wait for data."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hfscale.core.findings import Finding

WINDOW = 50
"""Number of steps that are judged."""
MIN_STEPS = 20
"""Number of steps below which nothing is judged."""
RATIO = 1.3
"""Local time over the median rank's from which a rank is a straggler; between the 1.1 of ordinary spread and the 1.5
that must be found."""
RECOVERED_RATIO = 1.15
"""Ratio below which a reported straggler has recovered. It is lower than `RATIO`, so that a rank near the limit is not
reported at every other log."""
Z_SCORE = 4.0
"""Robust z-score (Iglewicz & Hoaglin, 1993, with 1.4826 x MAD for the standard deviation) of a straggler."""
ROTATING_RATIO = 1.4
"""Slowest over second slowest rank from which a slowness that changes ranks is reported: higher than `RATIO`, since
noise changes ranks too."""
MIN_ROTATING_STEPS = 40
"""Number of steps below which such a slowness is not reported."""
_MIN_SPREAD = 0.03
Numbers = npt.NDArray[np.float64]
WAIT_SHARE = 0.1
"""Part of its time that a rank may wait for data before it is reported; below half of it, it has recovered."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Holds the result for a window of steps."""

    skew: float | None
    """Slowest over median rank, in the median step; None where nothing was timed."""
    own_s: Sequence[float]
    """Seconds of own work in the median of the new steps, by rank; empty where nothing was timed."""
    findings: tuple[Finding, ...]
    """Stragglers, each reported once until it has recovered."""


class StragglerJudge:
    """Keeps the last steps of all ranks and finds those that are slow.

    Rank 0 judges all ranks while they wait, so the work is done in NumPy: a few milliseconds for 16,384 ranks.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._steps: Numbers = np.empty((0, len(hosts)))
        """Seconds of the last steps, (steps, ranks)."""
        self._reported: set[int] = set()
        self._has_reported_rotation = False

    def add(self, rows: npt.ArrayLike) -> Judgement:
        """Add new steps and judge the window.

        Args:
            rows (`ArrayLike`): seconds of each step by rank, (ranks, steps); NaN if a rank was not timed. Only steps
                that were timed on every rank count.

        Returns:
            `Judgement`: the skew and the own work of the new steps, and the stragglers of the window.
        """
        new = np.asarray(rows, dtype=np.float64).T
        new = new[(new > 0).all(axis=1)]
        self._steps = np.concatenate([self._steps, new])[-WINDOW:]
        findings = tuple(self._judge())
        if not len(new):
            return Judgement(skew=None, own_s=[], findings=findings)
        skew = (
            float(np.median(new.max(axis=1) / _median_low(new))) if len(self._hosts) > 1 else None
        )
        return Judgement(skew=skew, own_s=_median_by_rank(new).tolist(), findings=findings)

    def _judge(self) -> list[Finding]:
        if len(self._steps) < MIN_STEPS or len(self._hosts) < 2:
            return []
        usual = _median_by_rank(self._steps)
        ratios = _median_by_rank(self._steps / _median_low(self._steps)[:, None])
        slow = set(np.flatnonzero((ratios >= RATIO) & (z_scores(usual) >= Z_SCORE)).tolist())
        found = [
            self._straggler(rank, float(ratios[rank]), usual)
            for rank in sorted(slow - self._reported)
        ]
        self._reported = slow | {rank for rank in self._reported if ratios[rank] >= RECOVERED_RATIO}
        return found if slow else self._judge_rotation()

    def _straggler(self, rank: int, ratio: float, usual: Numbers) -> Finding:
        return Finding(
            level="warning",
            check="straggler",
            problem=f"is a straggler: its own forward and backward take {ratio:.2f}x the median rank's "
            f"({usual[rank] * 1e3:.1f} ms, median {_median_low(usual) * 1e3:.1f} ms, last "
            f"{len(self._steps)} steps), and every step waits for it",
            fix="check its clocks, its cooling and what else runs on its node",
            ranks=(rank,),
            host=self._hosts[rank],
        )

    def _judge_rotation(self) -> list[Finding]:
        """Find a slowness that moves from rank to rank, and is no single rank's fault."""
        second, first = np.partition(self._steps, -2, axis=1)[:, -2:].T
        lead = float(np.median(first / second))
        rotates = self._rotates(lead)
        was_reported = self._has_reported_rotation
        self._has_reported_rotation = rotates or (was_reported and lead >= RECOVERED_RATIO)
        if was_reported or not rotates:
            return []
        problem = (
            f"the slowest rank is another at each step ({lead:.2f}x the second slowest): batches are uneven, or the "
            "nodes have other work"
        )
        return [
            Finding(
                level="warning",
                check="straggler",
                problem=problem,
                fix="sort sequences by length or pack them",
            )
        ]

    def _rotates(self, lead: float) -> bool:
        if len(self._steps) < MIN_ROTATING_STEPS or lead < ROTATING_RATIO:
            return False
        slowest = np.bincount(self._steps.argmax(axis=1))
        return bool(slowest.max() < 0.75 * len(self._steps))


def _median_by_rank(steps: Numbers) -> Numbers:
    """Return the median step of each rank, (ranks,), of `steps`, (steps, ranks); the rows of a copy sort fastest."""
    ordered = np.sort(np.ascontiguousarray(steps.T), axis=1)
    middle = len(steps) // 2
    return (
        ordered[:, middle] if len(steps) % 2 else (ordered[:, middle - 1] + ordered[:, middle]) / 2
    )


def _median_low(values: Numbers) -> Numbers:
    """Return the lower median along the last dimension, as `statistics.median_low`."""
    middle = (values.shape[-1] - 1) // 2
    return np.partition(values, middle, axis=-1)[..., middle]


def z_scores(values: npt.ArrayLike) -> Numbers:
    """Return robust z-scores: the distance to the median over 1.4826 x MAD.

    The divisor is at least 3% of the median: among ranks that agree within one percent, a rank that differs by two
    percent is not a straggler.

    Args:
        values (`ArrayLike`): a number per rank, (ranks,).

    Returns:
        `ndarray`: the z-scores, (ranks,); 0 if the divisor is 0.
    """
    distances = np.asarray(values, dtype=np.float64)
    median = _median_low(distances)
    distances = distances - median
    scale = max(1.4826 * float(_median_low(abs(distances))), _MIN_SPREAD * float(median))
    return distances / scale if scale > 0 else np.zeros_like(distances)


class DataWaitJudge:
    """Finds ranks that wait for data while others do not.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._windows: deque[Numbers] = deque(maxlen=3)
        self._reported: set[int] = set()

    def add(self, waits_s: npt.ArrayLike, windows_s: npt.ArrayLike) -> list[Finding]:
        """Add a window and judge the last three.

        Args:
            waits_s (`ArrayLike`): seconds that each rank waited for data, (ranks,).
            windows_s (`ArrayLike`): seconds of the window on each rank, (ranks,).

        Returns:
            `list[Finding]`: a warning for each rank that waits; a rank is reported once until it has recovered.
        """
        waits = np.asarray(waits_s, dtype=np.float64)
        windows = np.asarray(windows_s, dtype=np.float64)
        self._windows.append(np.divide(waits, windows, out=np.zeros_like(waits), where=windows > 0))
        if len(self._windows) < 3 or len(self._hosts) < 2:
            return []
        shares = np.min(self._windows, axis=0)
        median = float(_median_low(shares))
        starved = set(np.flatnonzero((shares > WAIT_SHARE) & (shares > 2 * median)).tolist())
        found = [
            Finding(
                level="warning",
                check="data wait",
                problem=f"waits for data {shares[rank]:.0%} of its time, the median rank {median:.0%}",
                fix="give its data loader more workers, or check the storage that its node reads from",
                ranks=(rank,),
                host=self._hosts[rank],
            )
            for rank in sorted(starved - self._reported)
        ]
        self._reported = starved | {
            rank for rank in self._reported if shares[rank] > WAIT_SHARE / 2
        }
        return found
