"""Exposed communication: the part of a step in which ranks exchange and compute nothing.

Under DDP its own counters say it, at no cost but on the steps it samples. For FSDP, ZeRO and tensor parallelism one
step in about a thousand is profiled on a few ranks:

    exposed = |union of communication intervals minus union of compute intervals|

Waiting for a slow rank looks like communication on every other one, so of several ranks the smallest number is the
network's and the rest is skew.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

Interval = tuple[float, float]
SAMPLE_EVERY_STEPS = 1000
FIRST_SAMPLE_STEP = 15
"""After the allocator, the caches and the compiler have warmed up."""
DDP_SAMPLE_EVERY_STEPS = 20
"""A sampled step costs DDP a wait for its GPU events of the step before."""


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """One step's exchange, of one rank."""

    seconds: float
    """In which nothing else went on."""
    hides: float | None = None
    """Communication time / time of the backward that it can hide behind."""
    step_s: float | None = None
    """Length of the step that was looked at; None: as long as any other."""


class DdpCounters:
    """Reads what DDP measures of itself.

    Its methods have a leading underscore and there are no others; `tests/test_communication.py` fails where they move.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        ddp._set_ddp_runtime_logging_sample_rate(DDP_SAMPLE_EVERY_STEPS)

    def read(self) -> Exposed | None:
        """Of the last sampled step; None before there is one, or where nothing was exchanged."""
        data = self._ddp._get_ddp_logging_data()
        comm = data.get("backward_comm_time", 0) * 1e-9
        overlap = data.get("backward_compute_comm_overlap_time", 0) * 1e-9
        backward = data.get("backward_compute_time", 0) * 1e-9
        if comm <= 0 or backward <= 0:
            return None
        return Exposed(seconds=max(comm - overlap, 0.0), hides=comm / backward)


class SampledSteps:
    """Profiles one step in `every` on this rank, and keeps what the last one showed.

    Args:
        every (`int`): optimizer steps between two samples.
        first (`int`): number of the first step to be looked at, counted from where the run begins.
    """

    def __init__(self, *, every: int = SAMPLE_EVERY_STEPS, first: int = FIRST_SAMPLE_STEP) -> None:
        self.every, self.first = every, first
        self.last: Exposed | None = None
        self._steps = 0
        self._profile: profile | None = None

    def step_begin(self) -> None:
        """Before the forward."""
        self._steps += 1
        if self._steps < self.first or (self._steps - self.first) % self.every:
            return
        if torch.autograd._profiler_enabled():
            return  # somebody is tracing this step already
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or its first start writes lines to standard error
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        running = profile(activities=activities)
        try:
            running.start()
        except RuntimeError as error:
            logger.info("scaling/comm_fraction is left out: no step can be profiled here: %s", error)
            self.first = sys.maxsize
            return
        self._profile = running

    def step_end(self) -> None:
        """After the optimizer."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        self.last = exposed_communication(running.events())

    def stop(self) -> None:
        """Give up a sample that was begun."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def exposed_communication(events: Iterable[FunctionEvent]) -> Exposed | None:
    """From the events of a profiled step: kernels where there is a GPU, host operators where there is none."""
    every = list(events)
    kernels = [event for event in every if event.device_type == torch.autograd.DeviceType.CUDA]
    if kernels:
        # Annotations such as "FSDP::all_gather" stand on the GPU's timeline too, across whatever runs meanwhile.
        kernels = [event for event in kernels if not event.is_user_annotation]
        exchange = [event for event in kernels if "nccl" in event.name.lower()]
        work = [event for event in kernels if "nccl" not in event.name.lower()]
    else:
        exchange = [event for event in every if event.name.startswith("gloo:")]
        # gloo copies and adds on threads of its own: what happens there is not the model's work.
        theirs = {event.thread for event in exchange}
        work = [event for event in every if event.name.startswith("aten::") and event.thread not in theirs]
    comm, compute = _intervals(exchange), _intervals(work)
    if not comm or not compute:
        return None
    begun, ended = min(start for start, _ in comm + compute), max(end for _, end in comm + compute)
    seconds = subtracted_length(union(comm), union(compute)) * 1e-6
    return Exposed(seconds=seconds, step_s=(ended - begun) * 1e-6)


def _intervals(events: Iterable[FunctionEvent]) -> list[Interval]:
    return [(event.time_range.start, event.time_range.end) for event in events]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtracted_length(of: Sequence[Interval], without: Sequence[Interval]) -> float:
    """Length of what lies in `of` and not in `without`; both disjoint and in order."""
    length, at = 0.0, 0
    for start, end in of:
        covered = 0.0
        while at < len(without) and without[at][1] <= start:
            at += 1
        look = at
        while look < len(without) and without[look][0] < end:
            covered += min(end, without[look][1]) - max(start, without[look][0])
            look += 1
        length += end - start - covered
    return length


def find_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper, also inside a compiled module."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, DistributedDataParallel) else None
