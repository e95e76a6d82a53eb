"""Which rank is slower than its peers by its own work (`local_time`), and which alone waits for data."""

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hfscale.utils.findings import Finding

WINDOW = 50
"""Steps that a judgement looks at."""
LEAST = 20
"""Steps below which there is none."""
RATIO = 1.3
"""Local time over the median's above which a rank is a straggler; between the 1.1 of ordinary spread and the 1.5 that
must be found."""
RECOVERED_RATIO = 1.15
"""Below which one that was named counts as well again, or a rank about the limit would be named at every other log."""
Z_SCORE = 4.0
"""Robust z-score (Iglewicz & Hoaglin, 1993, with 1.4826 x MAD for the standard deviation) that it needs too."""
ROTATING_RATIO = 1.4
"""Slowest over next slowest rank, above which a slowness that goes round is told: more, for noise goes round too."""
ROTATING_LEAST = 40
"""Steps below which it is not."""
_LEAST_SPREAD = 0.03
WAIT_SHARE = 0.1
"""Part of its time that a rank may wait for data before it is told; below half of it, it counts as well again."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a window of steps says."""

    skew: float | None
    """Slowest over median rank, the median step's; None where nothing was timed."""
    own_s: Sequence[float]
    """Seconds of its own work in the median step of the new ones, by rank; empty where nothing was timed."""
    findings: tuple[Finding, ...]
    """Stragglers, each told once until it has recovered."""


class StragglerJudge:
    """Keeps the last steps of all ranks and names those that are slow.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._steps: deque[list[float]] = deque(maxlen=WINDOW)  # of all ranks, each
        self._told: set[int] = set()
        self._told_of_rotation = False

    def add(self, rows: Sequence[Sequence[float]]) -> Judgement:
        """Take the new steps.

        Args:
            rows: seconds of each step by rank, (ranks, steps); NaN where a rank was not timed.
        """
        new = [list(step) for step in zip(*rows, strict=True) if all(value > 0 for value in step)]
        self._steps.extend(new)
        skew = statistics.median(max(step) / statistics.median_low(step) for step in new) if new else None
        own = [statistics.median(times) for times in zip(*new, strict=True)]
        return Judgement(skew=skew if len(self._hosts) > 1 else None, own_s=own, findings=tuple(self._judge()))

    def _judge(self) -> list[Finding]:
        if len(self._steps) < LEAST or len(self._hosts) < 2:
            return []
        usual = [statistics.median(times) for times in zip(*self._steps, strict=True)]
        ratios = [
            statistics.median(step[rank] / statistics.median_low(step) for step in self._steps)
            for rank in range(len(self._hosts))
        ]
        slow = {r for r in range(len(usual)) if ratios[r] >= RATIO and z_scores(usual)[r] >= Z_SCORE}
        found = []
        for rank in sorted(slow - self._told):
            text = (
                f"is a straggler: its own forward and backward take {ratios[rank]:.2f}x the median rank's "
                f"({usual[rank] * 1e3:.1f} ms, median {statistics.median_low(usual) * 1e3:.1f} ms, last "
                f"{len(self._steps)} steps), and every step waits for it: look at its clocks, its cooling and what "
                "else runs there"
            )
            found.append(
                Finding(level="warning", check="straggler", problem=text, ranks=(rank,), host=self._hosts[rank])
            )
        self._told = slow | {rank for rank in self._told if ratios[rank] >= RECOVERED_RATIO}
        return [*found, *self._judge_rotation()] if not slow else found

    def _judge_rotation(self) -> list[Finding]:
        lead, was_told = self._lead(), self._told_of_rotation
        rotates = self._rotates(lead)
        self._told_of_rotation = rotates or (was_told and lead >= RECOVERED_RATIO)
        if was_told or not rotates:
            return []
        text = (
            f"the slow rank is another at each step ({lead:.2f}x the next slowest): uneven batches, or other work on "
            "the nodes; sort sequences by length or pack them"
        )
        return [Finding(level="warning", check="straggler", problem=text)]

    def _lead(self) -> float:
        """The slowest rank over the next slowest, in the median step."""
        return statistics.median(sorted(step)[-1] / sorted(step)[-2] for step in self._steps)

    def _rotates(self, lead: float) -> bool:
        slowest = Counter(step.index(max(step)) for step in self._steps)
        if len(self._steps) < ROTATING_LEAST or lead < ROTATING_RATIO:
            return False
        return slowest.most_common(1)[0][1] < 0.75 * len(self._steps)


def z_scores(values: Sequence[float]) -> list[float]:
    """Robust z-scores, (ranks,): distance to the median over 1.4826 x MAD, or over 3% of the median where that is
    more, so that ranks which agree to a percent do not make a straggler of one that differs by two."""
    median = statistics.median_low(values)
    spread = 1.4826 * statistics.median_low([abs(value - median) for value in values])
    scale = max(spread, _LEAST_SPREAD * median)
    return [(value - median) / scale if scale > 0 else 0.0 for value in values]


class DataWaitJudge:
    """Names ranks that wait for data while others do not.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._windows: deque[list[float]] = deque(maxlen=3)
        self._told: set[int] = set()

    def add(self, waits_s: Sequence[float], windows_s: Sequence[float]) -> list[Finding]:
        """Take the seconds that each rank waited in a window of so many seconds."""
        self._windows.append([w / t if t > 0 else 0.0 for w, t in zip(waits_s, windows_s, strict=True)])
        if len(self._windows) < 3 or len(self._hosts) < 2:
            return []
        shares = [min(window[rank] for window in self._windows) for rank in range(len(self._hosts))]
        median = statistics.median_low(shares)
        starved = {rank for rank, share in enumerate(shares) if share > WAIT_SHARE and share > 2 * median}
        found = [
            Finding(
                level="warning",
                check="data wait",
                ranks=(rank,),
                host=self._hosts[rank],
                problem=f"waits for data {shares[rank]:.0%} of its time, the median rank {median:.0%}: give its data "
                "loader more workers, or look at the storage its node reads from",
            )
            for rank in sorted(starved - self._told)
        ]
        self._told = starved | {rank for rank in self._told if shares[rank] > WAIT_SHARE / 2}
        return found
