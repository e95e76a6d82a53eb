"""Whether the planner would have chosen right: of the layouts that a source tried for one model on the same GPUs, how
fast is the one that the planner ranks first, against the fastest?

A group is the runs of a source that share model, GPU, number of GPUs, sequence length, batch and precision; a layout
measured more than once counts by its median. Groups of fewer than `LEAST` layouts say nothing.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.planner_runs import Run
from hfscale.facts.layout import ParallelLayout
from hfscale.planner.job import Job

LEAST = 3
"""Layouts that make a group."""
GOOD = 0.95
"""Part of the best measured throughput that a good choice has."""


@dataclass(frozen=True)
class Group:
    """What a source measured of one model on one machine: each job once, with its tokens/s/GPU."""

    source: str
    name: str
    measured: dict[Job, float]
    predicted: dict[Job, float]

    @property
    def reached(self) -> float:
        """Measured throughput of the job that the planner takes for the fastest, over that of the fastest."""
        chosen = max(self.predicted, key=lambda job: self.predicted[job])
        return self.measured[chosen] / max(self.measured.values())


def groups(runs: Iterable[Run], errors: Iterable[float]) -> list[Group]:
    """The groups among `runs`, in their order.

    Args:
        errors (`Iterable[float]`): Logarithm of predicted over measured tokens/s/GPU, of every run.
    """
    found: dict[tuple[str, Job], dict[Job, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for run, error in zip(runs, errors, strict=True):
        rate = run.tokens_per_s_per_gpu
        assert rate is not None
        found[run.source, _without_layout(run.job)][run.job].append((rate, rate * math.exp(error)))
    made = []
    for (source, common), jobs in found.items():
        if len(jobs) >= LEAST:
            measured, predicted = (
                {job: statistics.median(pair[which] for pair in pairs) for job, pairs in jobs.items()}
                for which in (0, 1)
            )
            made.append(Group(source, _name(common), measured, predicted))
    return made


def _without_layout(job: Job) -> Job:
    """What is given; all else, a planner chooses."""
    return replace(
        job,
        layout=ParallelLayout(dp_replicate=job.layout.world_size),
        micro_batch=1,
        zero=0,
        recompute="none",
        virtual_stages=1,
        sequence_parallel=False,
        loss_parallel=False,
        compile=False,
        reshard=True,
        expert_parallel=1,
        overlapped_experts=False,
        pure=False,
        rowwise_fp8=False,
    )


def _name(common: Job) -> str:
    shape, gpu = common.shape, common.gpu
    return (
        f"{shape.layers} layers of {shape.hidden}, {shape.attention.heads} heads, on {common.layout.world_size} "
        f"{gpu.name}, {common.global_batch} x {common.seq_len}, {common.precision}"
    )


def figures(runs: Iterable[Run], errors: Iterable[float]) -> dict[str, object]:
    """How many groups are chosen well, and the others, worst first; arguments as in `groups`."""
    found = groups(runs, errors)
    others = sorted((group for group in found if group.reached < GOOD), key=lambda group: group.reached)
    return {
        "groups": len(found),
        "within_5_percent": len(found) - len(others),
        "median_reached": round(statistics.median(group.reached for group in found), 4),
        "others": [{"source": g.source, "group": g.name, "reached": round(g.reached, 4)} for g in others],
    }
