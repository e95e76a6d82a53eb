"""Measures how well the planner predicts peak memory, for sources that the fit has not seen.

The bytes of states, of what autograd saves, of logits and of gathered parameters are counted, not fitted
(test_planner_memory.py, test_planner_tracker.py). Two constants are fitted for all frameworks together:
`fragmentation`, what the allocator reserves in addition to those bytes where they are not states, and `group_gib`,
NCCL's buffers of a group of ranks.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from benchmarks.planner_runs import Constants, Run
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.memory import allocated_gib, memory_of

FITTED = {"fragmentation": (1.07, 0.02), "group_gib": (0.5, 0.15)}
"""Fitted constants with mean and standard deviation of their priors."""
STEP = 0.05
"""Change of `fragmentation` with which its effect is measured."""
HUBER = 0.05
"""Error, in logarithm, from which the absolute value, not the square, is minimised."""


def stated(runs: Sequence[Run]) -> list[Run]:
    """The runs whose peak memory was published and is not doubted."""
    return [run for run in runs if run.memory_gib and not run.is_memory_doubted]


def only_ran(runs: Sequence[Run]) -> list[Run]:
    """The runs of which only the speed was published: they ran, so the device's memory is an upper bound of their
    peak."""
    return [run for run in runs if run.tokens_per_s_per_gpu and not run.memory_gib and not run.is_doubted]


def error(run: Run, constants: Constants) -> float:
    """Relative error of the predicted peak; if the source gives allocated memory, the allocated part is compared.

    For a run that gives no peak it is what is predicted to be needed relative to the device's memory.
    """
    shared = constants["shared"]
    stack = constants[run.job.stack]
    memory = memory_of(run.job, stack, shared)
    if run.memory_gib is None:
        return memory.needed / run.job.gpu.memory_gib - 1
    return (allocated_gib(memory, shared) if run.is_allocated else memory.total) / run.memory_gib - 1


def with_values(
    constants: Constants, fragmentation: float, group_gib: float
) -> dict[str, Framework | SharedConstants]:
    shared = replace(constants["shared"], fragmentation=fragmentation, group_gib=group_gib)
    return {**constants, "shared": shared}


def fit_peaks(runs: Sequence[Run], constants: Constants) -> dict[str, Framework | SharedConstants]:
    """The constants that predict the runs' peaks best; a source's weight is the square root of its number of rows.

    Of runs that give no peak only an error above 0 counts.
    """
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        counts[run.source] += 1
    weight = np.array([counts[run.source] ** -0.5 for run in runs])
    lowest = np.array([-np.inf if run.memory_gib else 0.0 for run in runs])
    # Peaks are linear in both constants while what is cached has room, so three evaluations of each run are enough.
    once, allocator, groups = (
        np.array([error(run, with_values(constants, *values)) for run in runs])
        for values in ((1, 0), (1 + STEP, 0), (1, 1))
    )

    def loss(values: tuple[float, float]) -> float:
        errors = once + (values[0] - 1) / STEP * (allocator - once) + values[1] * (groups - once)
        size = np.abs(np.log1p(np.maximum(errors, lowest)))
        robust = np.minimum(size, HUBER) * (2 * size - np.minimum(size, HUBER)) / HUBER**2
        pull = sum(((v - at) / spread) ** 2 for v, (at, spread) in zip(values, FITTED.values(), strict=True))
        return float((weight * robust).sum() + pull)

    grid = product((1 + step / 500 for step in range(61)), (step / 50 for step in range(51)))
    return with_values(constants, *min(grid, key=loss))


def figures(errors: Sequence[tuple[Run, float]]) -> dict[str, object]:
    """Errors over all rows and by source, the worst source first."""
    by_source = defaultdict(list)
    for run, value in errors:
        by_source[run.source].append(value)
    sources = {
        name: {
            "rows": len(values),
            "median_error": round(statistics.median(map(abs, values)), 4),
            "bias": round(statistics.median(values), 4),
        }
        for name, values in by_source.items()
    }
    return {
        "rows": len(errors),
        "median_error": round(statistics.median(abs(value) for _, value in errors), 4),
        "median_of_sources": round(statistics.median(row["median_error"] for row in sources.values()), 4),
        "sources": dict(sorted(sources.items(), key=lambda item: -item[1]["median_error"])),
    }


def leave_one_out(runs: Sequence[Run], constants: Constants) -> list[tuple[Run, float]]:
    """Errors of each source's rows with constants fitted to the other sources."""
    errors = []
    for source in sorted({run.source for run in stated(runs)}):
        fitted = fit_peaks([run for run in runs if run.source != source], constants)
        errors += [(run, error(run, fitted)) for run in stated(runs) if run.source == source]
    return errors


def rejected(runs: Sequence[Run], constants: Constants) -> dict[str, object]:
    """How many of the runs that give no peak are predicted to need more memory than their device has, by source."""
    too_large = [run for run in runs if error(run, constants) > 0]
    by_source: dict[str, int] = defaultdict(int)
    for run in too_large:
        by_source[run.source] += 1
    return {"rows": len(runs), "predicted_not_to_fit": len(too_large), "sources": dict(by_source)}
