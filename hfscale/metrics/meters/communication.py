"""Measures exposed communication: the part of a step in which ranks communicate and compute nothing.

Under DDP, DDP's own counters measure it; only the steps that they sample cost anything. For FSDP, ZeRO and tensor
parallelism, one step in about a thousand is profiled on a few ranks:

    exposed = |union of communication intervals minus union of compute intervals|

On every fast rank, waiting for a slow rank looks like communication. Of several ranks, the smallest number is
therefore the time of the network, and the rest is skew.
"""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger
from hfscale.metrics.meters.meter import Meter, Window, or_nan
from hfscale.trainer.collector import Columns
from hfscale.trainer.strategy import unwrap_compiled

logger = get_logger(__name__)

Interval = tuple[float, float]
"""Start and end in any unit."""
SAMPLE_EVERY_STEPS = 1000
FIRST_SAMPLE_STEP = 15
"""By this step the allocator, the caches and the compiler have warmed up."""
DDP_SAMPLE_EVERY_STEPS = 20
"""In each sampled step, DDP waits for the GPU events of the previous step."""


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Holds the measured communication of one step on one rank."""

    seconds: float
    """Seconds of communication that no computation hides."""
    comm_over_backward: float | None = None
    """Communication time over the time of the backward that can hide it."""
    step_s: float | None = None
    """Seconds of the measured step; None if it was as long as any other."""


class CommunicationMeter(Meter):
    """Measures `scaling/comm_fraction`, by DDP's counters or by profiled steps on the first and the last rank."""

    def __init__(self) -> None:
        self.comm_over_backward: float | None = None
        """Communication time over backward time, where DDP measures it."""
        self.shares: list[float] = []
        """Share of its time that each rank communicates or waits; empty unless every rank has measured it."""
        self._ddp: DdpCounters | None = None
        self._sampled: SampledSteps | None = None

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """With several ranks, use DDP's counters, or else profile steps on the first and the last rank."""
        self._ddp = None
        self._sampled = None
        if trainer.args.world_size > 1:
            self._ddp = DdpCounters.find(unwrap_compiled(trainer.model_wrapped))
            if self._ddp is None and trainer.args.process_index in (0, trainer.args.world_size - 1):
                self._sampled = SampledSteps()
        self.watches_steps = self._sampled is not None

    def step_begin(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.step_begin()

    def step_end(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.step_end()

    def end(self) -> None:
        """Discard a profiled step that has begun."""
        if self._sampled is not None:
            self._sampled.stop()

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return the exposed communication in seconds, the length of the measured step in seconds, and a ratio.

        The ratio is communication time over the time of the backward that can hide it.
        """
        exposed: Exposed | None = None
        if self._ddp is not None:
            exposed = self._ddp.read()
        elif self._sampled is not None:
            exposed = self._sampled.last
        return {
            "exposed_comm_s": or_nan(exposed.seconds if exposed is not None else None),
            "exposed_comm_step_s": or_nan(exposed.step_s if exposed is not None else None),
            "comm_over_backward": or_nan(exposed.comm_over_backward if exposed is not None else None),
        }

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the smallest share of the ranks: the other ranks also wait for slower ones in their collectives."""
        mean_step_s = window.seconds / window.steps
        shares = [
            min(exposed_s / (mean_step_s if math.isnan(step_s) else step_s), 1.0)
            for exposed_s, step_s in zip(columns["exposed_comm_s"], columns["exposed_comm_step_s"], strict=True)
            if not math.isnan(exposed_s)
        ]
        self.shares = shares if len(shares) == len(columns["exposed_comm_s"]) else []
        known = [ratio for ratio in columns["comm_over_backward"] if not math.isnan(ratio)]
        self.comm_over_backward = min(known, default=None)
        return {"scaling/comm_fraction": min(shares)} if shares else {}


class DdpCounters:
    """Reads DDP's own measurements of its communication.

    DDP has no public methods for it: the two with a leading underscore are called here and nowhere else.
    `tests/metrics/test_communication.py` fails if they change.

    Args:
        ddp (`DistributedDataParallel`): the wrapper; it is set to measure one step in `DDP_SAMPLE_EVERY_STEPS`.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        ddp._set_ddp_runtime_logging_sample_rate(DDP_SAMPLE_EVERY_STEPS)

    @classmethod
    def find(cls, module: object) -> "DdpCounters | None":
        """Return the counters of a module if it is a DDP wrapper (not compiled), else None.

        Args:
            module (`object`): the module that the Trainer calls.
        """
        return cls(module) if isinstance(module, DistributedDataParallel) else None

    def read(self) -> Exposed | None:
        """Return the communication of the last sampled step, or None if there was none yet."""
        data = self._ddp._get_ddp_logging_data()
        comm_s = data.get("backward_comm_time", 0) * 1e-9
        overlap_s = data.get("backward_compute_comm_overlap_time", 0) * 1e-9
        backward_s = data.get("backward_compute_time", 0) * 1e-9
        if comm_s <= 0 or backward_s <= 0:
            return None
        return Exposed(seconds=max(comm_s - overlap_s, 0.0), comm_over_backward=comm_s / backward_s)


class SampledSteps:
    """Profiles one step in `every` on this rank, and keeps the result of the last one.

    Args:
        every (`int`): optimizer steps from one sample to the next.
        first (`int`): the first step to profile, counted from 1 at the beginning of this launch.
    """

    def __init__(self, *, every: int = SAMPLE_EVERY_STEPS, first: int = FIRST_SAMPLE_STEP) -> None:
        self.every = every
        self.first = first
        self.last: Exposed | None = None
        """The communication of the last profiled step."""
        self._steps = 0
        self._profile: profile | None = None

    def step_begin(self) -> None:
        """Start the profiler if this step is to be profiled. Call it before the forward."""
        self._steps += 1
        if self._steps < self.first or (self._steps - self.first) % self.every:
            return
        if torch.autograd._profiler_enabled():
            return  # another profiler already traces this step
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise its first start writes lines to standard error
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        running = profile(activities=activities)
        try:
            running.start()
        except RuntimeError as error:
            logger.info("scaling/comm_fraction is not logged: the profiler does not start here: %s", error)
            self.first = sys.maxsize
            return
        self._profile = running

    def step_end(self) -> None:
        """Stop the profiler if it runs, and evaluate the step. Call it after the optimizer step."""
        if self._profile is None:
            return
        running = self._profile
        self._profile = None
        running.stop()
        self.last = exposed_communication(running.events())

    def stop(self) -> None:
        """Discard a sample that has begun."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def exposed_communication(events: Iterable[FunctionEvent]) -> Exposed | None:
    """Measure the exposed communication of a profiled step.

    Args:
        events (`Iterable[FunctionEvent]`): the events of the profiler. On a GPU its kernels are compared, and without
            a GPU the host operators.

    Returns:
        `Exposed | None`: the communication of the step, or None if it has no communication or no computation.
    """
    all_events = list(events)
    kernels = [event for event in all_events if event.device_type == torch.autograd.DeviceType.CUDA]
    if kernels:
        # Annotations such as "FSDP::all_gather" are on the GPU's timeline too, and span whatever runs meanwhile.
        kernels = [event for event in kernels if not event.is_user_annotation]
        comm_events = [event for event in kernels if "nccl" in event.name.lower()]
        compute_events = [event for event in kernels if "nccl" not in event.name.lower()]
    else:
        comm_events = [event for event in all_events if event.name.startswith("gloo:")]
        # gloo copies and adds on its own threads: operators there are not computation of the model.
        gloo_threads = {event.thread for event in comm_events}
        compute_events = [e for e in all_events if e.name.startswith("aten::") and e.thread not in gloo_threads]
    comm = _intervals(comm_events)
    compute = _intervals(compute_events)
    if not comm or not compute:
        return None
    begun_us = min(start for start, _ in comm + compute)
    ended_us = max(end for _, end in comm + compute)
    exposed_us = subtracted_length(union(comm), union(compute))
    return Exposed(seconds=exposed_us * 1e-6, step_s=(ended_us - begun_us) * 1e-6)


def _intervals(events: Iterable[FunctionEvent]) -> list[Interval]:
    return [(event.time_range.start, event.time_range.end) for event in events]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the same time as disjoint intervals in order.

    Args:
        intervals (`Sequence[Interval]`): intervals in any order, which may overlap.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtracted_length(of: Sequence[Interval], without: Sequence[Interval]) -> float:
    """Return the length of the time that is in `of` and not in `without`, in their unit.

    Args:
        of (`Sequence[Interval]`): disjoint intervals in order, as `union` returns them.
        without (`Sequence[Interval]`): disjoint intervals in order.
    """
    length = 0.0
    first = 0
    for start, end in of:
        while first < len(without) and without[first][1] <= start:
            first += 1
        covered = 0.0
        at = first
        while at < len(without) and without[at][0] < end:
            covered += min(end, without[at][1]) - max(start, without[at][0])
            at += 1
        length += end - start - covered
    return length
