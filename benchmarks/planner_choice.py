"""Whether the planner would have chosen right: of the layouts that a source tried for one model on the same GPUs, how
fast is the one that the planner ranks first, against the fastest?

A group is the runs of a source that share model, GPU, number of GPUs, sequence length, batch and precision; a layout
measured more than once counts by its median. Groups of fewer than `LEAST` layouts say nothing.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hfscale.facts.layout import ParallelLayout
from hfscale.planner.job import Job
from hfscale.planner.model_view import view_of
from hfscale.planner.stacks import Shared, Stack
from hfscale.planner.throughput import step_time

if TYPE_CHECKING:
    from benchmarks.planner_fit import Run

LEAST = 3
"""Layouts that make a group."""
GOOD = 0.95
"""Part of the best measured throughput that a good choice has."""


@dataclass(frozen=True)
class Group:
    """What a source measured of one model on one machine: each job once, with its median tokens/s/GPU."""

    source: str
    name: str
    measured: dict[Job, float]

    def chosen(self, constants: Mapping[str, Stack | Shared]) -> Job:
        """The job that the planner takes for the fastest."""
        return min(self.measured, key=lambda job: _seconds(job, constants))

    def reached(self, constants: Mapping[str, Stack | Shared]) -> float:
        """Measured throughput of the chosen job over that of the best."""
        return self.measured[self.chosen(constants)] / max(self.measured.values())


def _seconds(job: Job, constants: Mapping[str, Stack | Shared]) -> float:
    shared = constants["shared"]
    assert isinstance(shared, Shared)
    stack = constants[job.stack]
    assert isinstance(stack, Stack)
    return step_time(view_of(job.shape), job, stack, shared).total


def groups(runs: "list[Run]") -> list[Group]:
    """The groups among `runs`, in their order."""
    found: dict[tuple[str, Job], dict[Job, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.tokens_per_s_per_gpu:
            found[run.source, _without_layout(run.job)][run.job].append(run.tokens_per_s_per_gpu)
    made = []
    for (source, common), jobs in found.items():
        if len(jobs) >= LEAST:
            shape, world = common.shape, next(iter(jobs)).layout.world_size
            name = (
                f"{shape.layers} layers of {shape.hidden}, {shape.attention.heads} heads, on {world} "
                f"{common.gpu.name}, {common.global_batch} x {common.seq_len}, {common.precision}"
            )
            measured = {job: statistics.median(values) for job, values in jobs.items()}
            made.append(Group(source, name, measured))
    return made


def _without_layout(job: Job) -> Job:
    """What is given; all else, the planner chooses."""
    return replace(
        job, layout=ParallelLayout(dp_replicate=job.layout.world_size), micro_batch=1, zero=0, recompute="none",
        virtual_stages=1, sequence_parallel=False, loss_parallel=False, compile=False, reshard=True,
        expert_parallel=1, pure=False, rowwise_fp8=False, stack=job.stack,
    )  # fmt: skip


def figures(runs: "list[Run]", constants: Mapping[str, Stack | Shared]) -> dict[str, object]:
    """How many groups are chosen well, and the others, worst first."""
    found = groups(runs)
    reached = {index: group.reached(constants) for index, group in enumerate(found)}
    worst = sorted((index for index in reached if reached[index] < GOOD), key=lambda index: reached[index])
    return {
        "groups": len(found),
        "within_5_percent": len(found) - len(worst),
        "median_reached": round(statistics.median(reached.values()), 4),
        "others": [
            {"source": found[i].source, "group": found[i].name, "reached": round(reached[i], 4)} for i in worst
        ],
    }
