"""Profiles a few micro-batches of a step, and computes how long communication is exposed in the whole step.

    exposed = |union of communication intervals minus union of compute intervals|

The micro-batches of a step do the same work, except for the last one, with which gradients may be reduced and the
optimizer steps. So the last two are profiled, each by itself, and in a step of n micro-batches

    exposed = (n - 1) x exposed of the last but one + exposed of the last

This holds where ranks communicate in every micro-batch (FSDP2 and ZeRO-3, which gather weights; ZeRO-2, which reduces
gradients; tensor parallelism), where they do so with the last one only (the reduction of FSDP2 and ZeRO-1), and for
`ParallelTrainer`, which runs all micro-batches when it has the last one.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hfscale.core.logging import get_logger

logger = get_logger(__name__)

Interval = tuple[int, int]
"""Start and end in nanoseconds."""
SAMPLE_EVERY_STEPS = 1000
FIRST_SAMPLE_STEP = 15
"""By this step the allocator, the caches and the compiler have warmed up."""


class ProfiledEvent(Protocol):
    """An event as Kineto records it: a tenth of the time and memory of torch's `FunctionEvent`, made from it."""

    def name(self) -> str: ...
    def device_type(self) -> DeviceType: ...
    def is_user_annotation(self) -> bool: ...
    def start_thread_id(self) -> int: ...
    def start_ns(self) -> int: ...
    def end_ns(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Holds the measured communication of one step on one rank."""

    seconds: float
    """Seconds of communication that no computation hides."""
    comm_over_backward: float | None = None
    """Communication time over the time of the backward that can hide it."""
    step_s: float | None = None
    """Seconds of the measured step; None if it was as long as any other."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Holds when a rank communicated and when it computed, in a part of a step."""

    communication: Sequence[Interval]
    """Intervals in any order, which may overlap."""
    computation: Sequence[Interval]
    """The same."""

    @classmethod
    def of_gpu(cls, events: Iterable[ProfiledEvent]) -> "Timeline":
        """Sort the kernels of a profile of a GPU; its other events are calls of the CUDA runtime.

        Args:
            events (`Iterable`): the events of the profiler.
        """
        kernels: tuple[list[Interval], list[Interval]] = ([], [])
        for event in events:
            # Annotations such as "FSDP::all_gather" are on the GPU's timeline too, and span whatever runs meanwhile.
            if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
                kernels["nccl" in event.name().lower()].append((event.start_ns(), event.end_ns()))
        computation, communication = kernels
        return cls(communication=communication, computation=computation)

    @classmethod
    def of_cpu(cls, events: Iterable[ProfiledEvent]) -> "Timeline":
        """Sort the operators of a profile of a CPU.

        gloo copies and adds on its own threads: operators there are not computation of the model.

        Args:
            events (`Iterable`): the events of the profiler.
        """
        communication: list[Interval] = []
        operators: dict[int, list[Interval]] = defaultdict(list)
        gloo_threads: set[int] = set()
        for event in events:
            name = event.name()
            if name.startswith("gloo:"):
                communication.append((event.start_ns(), event.end_ns()))
                gloo_threads.add(event.start_thread_id())
            elif name.startswith("aten::"):
                operators[event.start_thread_id()].append((event.start_ns(), event.end_ns()))
        computation = [
            interval for thread in operators.keys() - gloo_threads for interval in operators[thread]
        ]
        return cls(communication=communication, computation=computation)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that no computation hides."""
        return subtracted_length(union(self.communication), union(self.computation)) * 1e-9

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the first interval to the end of the last one."""
        intervals = [*self.communication, *self.computation]
        if not intervals:
            return 0.0
        return (max(end for _, end in intervals) - min(start for start, _ in intervals)) * 1e-9


def exposed_of_step(
    parts: Sequence[Timeline], *, micro_batches: int = 1, before_s: float = 0.0
) -> Exposed | None:
    """Compute the exposed communication of a step from the micro-batches of it that were profiled.

    Args:
        parts (`Sequence[Timeline]`): the last micro-batch with the optimizer step, and before it the last but one, if
            the step has more than one.
        micro_batches (`int`): micro-batches of the step.
        before_s (`float`): seconds that the micro-batches before those of `parts` took.

    Returns:
        `Exposed | None`: the communication of the step, or None if it has no communication or no computation.
    """
    if not any(part.communication for part in parts) or not any(part.computation for part in parts):
        return None
    *others, last = parts
    exposed_s = last.exposed_s + sum((micro_batches - 1) * other.exposed_s for other in others)
    return Exposed(seconds=exposed_s, step_s=before_s + sum(part.seconds for part in parts))


class SampledSteps:
    """Profiles the last two micro-batches of one step in `every` on this rank, and keeps the last result.

    Where another profiler runs in that step, the next one is profiled instead.

    Args:
        device (`torch.device`): the device that trains.
        every (`int`): optimizer steps from one sample to the next.
        first (`int`): the first step to profile, counted from 1 at the beginning of this launch.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        every: int = SAMPLE_EVERY_STEPS,
        first: int = FIRST_SAMPLE_STEP,
    ) -> None:
        self.every = every
        self.last: Exposed | None = None
        """The communication of the last profiled step."""
        self._on_gpu = device.type == "cuda"
        self._next = first
        self._steps = 0
        self._micro_batches = 0  # of the step that is sampled; 0: none is
        self._left = 0  # of them, those that have not ended
        self._begun_s = 0.0
        self._before_s = 0.0
        self._running: profile | None = None
        self._profiles: list[profile] = []

    def step_begin(self, micro_batches: int) -> None:
        """Begin a sample if it is time for one. Call it before the first forward of a step.

        Args:
            micro_batches (`int`): micro-batches of the step.
        """
        self.stop()
        self._steps += 1
        if self._steps < self._next or torch.autograd._profiler_enabled():
            return
        self._micro_batches = micro_batches
        self._left = micro_batches
        self._synchronize()
        self._begun_s = time.perf_counter()
        self._profile_if_wanted()

    def substep_end(self) -> None:
        """Note that a micro-batch has ended which is not the last one of the step."""
        if self._micro_batches:
            self._end_profile()
            self._left -= 1
            self._profile_if_wanted()

    def step_end(self) -> None:
        """Evaluate the sample if there is one. Call it after the optimizer step."""
        if not self._micro_batches:
            return
        self._end_profile()
        self._next = self._steps + self.every
        read = Timeline.of_gpu if self._on_gpu else Timeline.of_cpu
        parts = [read(_events(done)) for done in self._profiles]
        self.last = exposed_of_step(
            parts, micro_batches=self._micro_batches, before_s=self._before_s
        )
        self.stop()

    def stop(self) -> None:
        """Discard a sample that has begun."""
        self._end_profile()
        self._micro_batches = 0
        self._profiles = []

    def _profile_if_wanted(self) -> None:
        """Start a profile if one of the last two micro-batches begins."""
        if self._left > 2:
            return
        if torch.autograd._profiler_enabled():
            self.stop()
            return
        self._synchronize()  # kernels of the micro-batch before are not part of this one
        if not self._profiles:
            self._before_s = time.perf_counter() - self._begun_s
        # Otherwise its first start writes lines to standard error
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        started = profile(
            activities=[ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU]
        )
        try:
            started.start()
        except RuntimeError as error:
            logger.info(
                "scaling/comm_fraction is not logged: the profiler does not start here: %s", error
            )
            self.stop()
            self._next = sys.maxsize
            return
        self._running = started

    def _end_profile(self) -> None:
        """Stop the profile if one runs. The GPU has then executed all that was launched in it."""
        if self._running is not None:
            self._running.stop()
            self._profiles.append(self._running)
            self._running = None

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def _events(done: profile) -> list[Any]:
    """Return the events of a profile as Kineto records them."""
    assert done.profiler is not None
    assert done.profiler.kineto_results is not None
    events: list[Any] = done.profiler.kineto_results.events()
    return events


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


def subtracted_length(of: Sequence[Interval], without: Sequence[Interval]) -> int:
    """Return the length of the time that is in `of` and not in `without`, in their unit.

    Args:
        of (`Sequence[Interval]`): disjoint intervals in order, as `union` returns them.
        without (`Sequence[Interval]`): disjoint intervals in order.
    """
    length = 0
    first = 0
    for start, end in of:
        while first < len(without) and without[first][1] <= start:
            first += 1
        covered = 0
        at = first
        while at < len(without) and without[at][0] < end:
            covered += min(end, without[at][1]) - max(start, without[at][0])
            at += 1
        length += end - start - covered
    return length
