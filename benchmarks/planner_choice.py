"""Measures whether the planner would have chosen well: of the layouts that a source measured for one model on the same
GPUs, how fast is the one that the planner ranks first, compared with the fastest?

A group consists of the runs of a source with the same model, GPU, number of GPUs, sequence length, batch and
precision; of a layout measured several times the median is used. Groups of fewer than `LEAST` layouts are ignored.
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
"""Least number of layouts in a group."""
GOOD = 0.95
"""Fraction of the best measured throughput that a good choice reaches."""


@dataclass(frozen=True)
class Group:
    """A source's measurements of one model on one machine: each job once, with its tokens/s/GPU."""

    source: str
    name: str
    measured: dict[Job, float]
    predicted: dict[Job, float]

    @property
    def reached(self) -> float:
        """Measured throughput of the job that the planner ranks first, relative to that of the fastest."""
        chosen = max(self.predicted, key=lambda job: self.predicted[job])
        return self.measured[chosen] / max(self.measured.values())


def groups(runs: Iterable[Run], errors: Iterable[float]) -> list[Group]:
    """The groups among `runs`, in their order.

    Args:
        runs (`Iterable[Run]`): The runs.
        errors (`Iterable[float]`): For every run the logarithm of predicted over measured tokens/s/GPU.
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
    """The job with only what is given to a planner; what a planner chooses is set to a fixed value."""
    return replace(
        job,
        layout=ParallelLayout(dp_replicate=job.layout.world_size),
        micro_batch=1,
        zero=0,
        activation_checkpointing="none",
        virtual_stages=1,
        sequence_parallel=False,
        loss_parallel=False,
        compile=False,
        reshard=True,
        expert_parallel=1,
        overlapped_experts=False,
        pure_bf16=False,
        rowwise_fp8=False,
    )


def _name(common: Job) -> str:
    shape = common.shape
    gpu = common.gpu
    return (
        f"{shape.layers} layers of {shape.hidden}, {shape.attention.heads} heads, on {common.layout.world_size} "
        f"{gpu.name}, {common.global_batch} x {common.seq_len}, {common.precision}"
    )


def figures(runs: Iterable[Run], errors: Iterable[float]) -> dict[str, object]:
    """The number of groups with a good choice, and the other groups, worst first; arguments as in `groups`."""
    found = groups(runs, errors)
    others = sorted((group for group in found if group.reached < GOOD), key=lambda group: group.reached)
    return {
        "groups": len(found),
        "within_5_percent": len(found) - len(others),
        "median_reached": round(statistics.median(group.reached for group in found), 4),
        "others": [{"source": g.source, "group": g.name, "reached": round(g.reached, 4)} for g in others],
    }
