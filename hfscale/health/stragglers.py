"""Finds ranks whose own work (`local_time`) is slower than that of others, and ranks that alone wait for data.

A rank is a straggler only if its own spread over the steps cannot explain that it is slower: on batches of uneven
lengths each rank has a different time in each step, and their medians differ without any fault. In each step the
logarithm of a rank's time is compared with the mean over all ranks, corrected by the size of its batch where sizes
differ, and the mean of these differences is compared with its standard error (Student's t).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hfscale.core.findings import UNEVEN_BATCHES_FIX, Finding

WINDOW = 50
"""Number of steps that are judged."""
LONG_WINDOW = 200
"""Number of steps that are judged as well, since uneven batches hide a slow rank for longer."""
MIN_STEPS = 40
"""Number of steps below which nothing is judged; the first steps of a run are uneven on healthy ranks too."""
RATIO = 1.25
"""Own time over the other ranks' from which a rank is a straggler; between the 1.1 of ordinary spread and the 1.3 that
must be found."""
RECOVERED_RATIO = 1.15
"""Ratio below which a reported straggler has recovered. It is lower than `RATIO`, so that a rank near the limit is not
reported at every other log."""
ERRORS = 3.5
"""Standard errors that the own spread of a straggler cannot explain, with one rank and many steps. Simulated runs of
200 steps with equal ranks on log-normal lengths then accuse a rank in at most 1% (docs/health.md)."""
ERRORS_PER_LOG_RANK = 0.45
"""What is added to them for each factor e of ranks: of more ranks, more are slow by chance."""
Z_SCORE = 3.0
"""Robust z-score (Iglewicz & Hoaglin, 1993, with 1.4826 x MAD for the standard deviation) of a straggler among the
ranks."""
MIN_INDEPENDENT_STEPS = 20
"""Independent steps that are needed for a judgement: of fewer, their spread is not known."""
ROTATING_RATIO = 1.4
"""Slowest over second slowest rank from which a slowness that changes ranks is reported: higher than `RATIO`, since
noise changes ranks too."""
MIN_ROTATING_STEPS = 40
"""Number of steps below which such a slowness is not reported."""
_MIN_SPREAD = 0.03
_MIN_STEP_SPREAD = 0.02
"""Least standard deviation of the logarithm of a rank's time over the steps that is assumed."""
Numbers = npt.NDArray[np.float64]
WAIT_SHARE = 0.1
"""Part of its time that a rank may wait for data before it is reported; below half of it, it has recovered."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Holds the result for a window of steps."""

    skew: float | None
    """Slowest over median rank, in the median step; None where nothing was timed. It is large where one rank is slow,
    and where another is at each step."""
    slow_ratio: float | None
    """Own work of the slowest straggler over that of the median rank; 1 where no rank is one, None where there are
    too few steps to tell."""
    own_s: Sequence[float]
    """Seconds of own work in the median of the new steps, by rank; empty where nothing was timed."""
    findings: tuple[Finding, ...]
    """Stragglers, each reported once until it has recovered."""
    withdrawn: tuple[Finding, ...] = ()
    """The same of ranks that were reported and are no stragglers any more."""


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Compares each rank with the others over a window of steps."""

    lead: Numbers
    """Mean logarithm of its own time over the median rank's, (ranks,)."""
    error: Numbers
    """Standard error of it, (ranks,); infinite for ranks that are not slower by `RECOVERED_RATIO`."""
    steps: Numbers
    """Number of independent steps that it is the mean of, (ranks,)."""

    @property
    def slow(self) -> set[int]:
        """The ranks that are slower than their own spread and that of the ranks can explain."""
        errors = ERRORS + ERRORS_PER_LOG_RANK * math.log(len(self.lead))
        # Student's t instead of the normal distribution (Cornish and Fisher, 1960)
        of_few_steps = errors + (errors**3 + errors) / (4 * self.steps)
        is_slow = (self.lead >= math.log(RATIO)) & (self.lead >= of_few_steps * self.error)
        is_slow &= self.steps >= MIN_INDEPENDENT_STEPS
        if not is_slow.any():
            return set()
        return set(np.flatnonzero(is_slow & (z_scores(np.exp(self.lead)) >= Z_SCORE)).tolist())

    def excludes(self, rank: int) -> bool:
        """Return whether a rank is not slow in this window."""
        return bool(self.lead[rank] < math.log(RECOVERED_RATIO))


class StragglerJudge:
    """Keeps the last steps of all ranks and finds those that are slow.

    Rank 0 judges all ranks while they wait, so the work is done in NumPy: a few milliseconds for 16,384 ranks.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._steps: Numbers = np.empty((0, len(hosts)))
        """Seconds of the last `WINDOW` steps, (steps, ranks)."""
        self._times: Numbers = np.empty((0, len(hosts)))
        """Logarithms of the seconds, relative to their mean in each step, of the last `LONG_WINDOW` steps."""
        self._sizes: Numbers = np.empty((0, len(hosts)))
        """The same of the sizes of the batches."""
        self._reported: dict[int, Finding] = {}
        self._has_reported_rotation = False

    def add(self, rows: npt.ArrayLike, sizes: npt.ArrayLike | None = None) -> Judgement:
        """Add new steps and judge the window.

        Args:
            rows (`ArrayLike`): seconds of each step by rank, (ranks, steps); NaN if a rank was not timed. Only steps
                that were timed on every rank count.
            sizes (`ArrayLike`, *optional*): the size of the batch of each step by rank, such as its tokens, (ranks,
                steps), in any unit; None, NaN or 0: it is not known.

        Returns:
            `Judgement`: the skew and the own work of the new steps, and the stragglers of the window.
        """
        new = np.asarray(rows, dtype=np.float64).T
        new_sizes = np.ones_like(new) if sizes is None else np.asarray(sizes, dtype=np.float64).T
        is_timed = (new > 0).all(axis=1)
        new, new_sizes = new[is_timed], new_sizes[is_timed]
        new_sizes[~(new_sizes > 0).all(axis=1)] = 1.0
        self._steps = np.concatenate([self._steps, new])[-WINDOW:]
        self._times = np.concatenate([self._times, _relative_logs(new)])[-LONG_WINDOW:]
        self._sizes = np.concatenate([self._sizes, _relative_logs(new_sizes)])[-LONG_WINDOW:]
        findings, withdrawn, slow_ratio = self._judge()
        if not len(new):
            return Judgement(
                skew=None, slow_ratio=None, own_s=[], findings=findings, withdrawn=withdrawn
            )
        skew = None
        if len(self._hosts) > 1:
            skew = float(np.median(new.max(axis=1) / _median_low(new)))
        own_s = _median_by_rank(new).tolist()
        return Judgement(
            skew=skew, slow_ratio=slow_ratio, own_s=own_s, findings=findings, withdrawn=withdrawn
        )

    def _judge(self) -> tuple[tuple[Finding, ...], tuple[Finding, ...], float | None]:
        """Return what is new, what is withdrawn, and the ratio of the slowest straggler."""
        if len(self._steps) < MIN_STEPS or len(self._hosts) < 2:
            return (), (), None
        recent = self._compare(WINDOW)
        slow = recent.slow
        ratios = np.exp(recent.lead)
        if len(self._times) > WINDOW:
            long = self._compare(LONG_WINDOW)
            for rank in long.slow - slow:
                # A rank that was slow and is so no more has recovered
                if not recent.excludes(rank):
                    slow.add(rank)
                    ratios[rank] = math.exp(long.lead[rank])
        found = {
            rank: self._straggler(rank, float(ratios[rank]))
            for rank in sorted(slow - self._reported.keys())
        }
        over = [rank for rank in self._reported if rank not in slow and recent.excludes(rank)]
        withdrawn = tuple(self._reported.pop(rank) for rank in over)
        self._reported |= found
        slow_ratio = max((float(ratios[rank]) for rank in self._reported), default=1.0)
        findings = tuple(found.values()) if self._reported else tuple(self._judge_rotation())
        return findings, withdrawn, slow_ratio

    def _compare(self, window: int) -> _Comparison:
        """Compare each rank with the others over the last steps."""
        times = self._times
        sizes = self._sizes
        if sizes.any():
            times = times - _time_per_size(times[-window:], sizes[-window:]) * sizes
        recent = times[-window:]
        steps, ranks = recent.shape
        means = recent.mean(axis=0)
        lead = means - _median_of_the_faster(means)
        error = np.full(ranks, np.inf)
        independent = np.full(ranks, float(steps))
        for rank in np.flatnonzero(lead >= math.log(RECOVERED_RATIO)):
            # The mean over all ranks contains the rank itself
            own = times[:, rank] * ranks / (ranks - 1)
            # A rank may have become slow at any time before, so each window has a mean of its own
            ends = range(len(own), 0, -window)
            parts = [own[max(end - window, 0) : end] for end in ends]
            differences = np.concatenate([part - part.mean() for part in reversed(parts)])
            independent[rank] = max(steps / _correlated_steps(differences), 1.0)
            deviation = max(float(differences.std(ddof=1)), _MIN_STEP_SPREAD)
            error[rank] = deviation / math.sqrt(independent[rank])
        return _Comparison(lead=lead, error=error, steps=independent)

    def _straggler(self, rank: int, ratio: float) -> Finding:
        return Finding(
            level="warning",
            check="straggler",
            problem=f"is a straggler: its own forward and backward take {ratio:.2f}x the median rank's, more than the "
            f"spread of the last {len(self._times)} steps can explain, and every step waits for it",
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
                fix=UNEVEN_BATCHES_FIX,
            )
        ]

    def _rotates(self, lead: float) -> bool:
        if len(self._steps) < MIN_ROTATING_STEPS or lead < ROTATING_RATIO:
            return False
        slowest = np.bincount(self._steps.argmax(axis=1))
        return bool(slowest.max() < 0.75 * len(self._steps))


def _relative_logs(values: Numbers) -> Numbers:
    """Return logarithms minus their mean over the ranks, (steps, ranks)."""
    logs = np.log(values)
    return np.asarray(logs - logs.mean(axis=1, keepdims=True))


def _time_per_size(times: Numbers, sizes: Numbers) -> float:
    """Return the exponent with which the time grows with the size of a batch, the same for all ranks.

    It is fitted to the changes of each rank over the steps, which a slow rank does not affect. Without any, the time
    is assumed to be proportional.
    """
    steps = len(times)
    mean_times = times.mean(axis=0)
    mean_sizes = sizes.mean(axis=0)
    both = float(np.vdot(times, sizes) - steps * np.vdot(mean_times, mean_sizes))
    own = float(np.vdot(sizes, sizes) - steps * np.vdot(mean_sizes, mean_sizes))
    exponent = both / own if own > 1e-9 * sizes.size else 1.0
    return min(max(exponent, 0.0), 2.0)  # attention is quadratic


def _correlated_steps(differences: Numbers) -> float:
    """Return how many of these steps, (steps,), whose mean is 0, are worth as much as an independent one, at least 1.

    What disturbs a rank does so for many steps in a row, such as another rank on the same core. The correlations are
    summed in pairs of distances up to the first pair that is not positive (Geyer, 1992, initial positive sequence).
    """
    steps = len(differences)
    squares = float(differences @ differences)
    if squares <= 0:
        return 1.0
    products = np.correlate(differences, differences, mode="full")[steps - 1 :]
    correlations = products[: steps // 2] / squares
    if correlations[1] < 2 / math.sqrt(steps):  # independent steps have that by chance
        return 1.0
    pairs = correlations[: len(correlations) // 2 * 2].reshape(-1, 2).sum(axis=1)
    is_over = pairs <= 0
    pairs = pairs[: int(is_over.argmax())] if is_over.any() else pairs
    return max(2 * float(pairs.sum()) - 1, 1.0)


def _median_of_the_faster(values: Numbers) -> float:
    """Return the median over the ranks without the slowest one, of values (ranks,)."""
    faster = np.sort(values)[:-1]
    return float(np.median(faster))


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
