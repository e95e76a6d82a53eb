"""Times the work that a rank does by itself in a step, before it waits for other ranks.

Step time says nothing about a single rank: the all-reduce makes it the same on all. What is timed instead depends on
where a strategy waits:

- DDP, a single process, ZeRO-1 and ZeRO-2: from the beginning of the forward to the gradient of the first trained
  parameter, the last one that a backward computes. ZeRO's reductions inside the backward count where they are not
  overlapped.
- FSDP2, also that of transformers itself: the forwards of the sharded layers, each after its all-gather. In the
  backward, work cannot be separated from waiting.
- ZeRO-3, tensor and expert parallelism: nothing, since every layer waits for peers.

Each step has the size of its inputs as well, since a larger batch takes longer on an equal rank.

On a CPU these are host times; on CUDA they are events, read only when they have completed, so that nothing waits for
them.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hfscale.core.clocks import HostClock, clock_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import sharded_modules

KEPT_STEPS = 32
"""Number of steps that one exchange between ranks covers."""


class StepSpans:
    """Adds up, for each step, the time between calls of `open` and `close`, and the sizes of what is computed.

    Args:
        clock (`HostClock`): the clock of the device that does the work.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._opened: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._size = 0
        self._steps: deque[tuple[list[tuple[Any, Any]], int]] = deque(maxlen=KEPT_STEPS)

    def open(self, size: int = 0) -> None:
        """Start a span.

        Args:
            size (`int`): the size of what is computed in it, in any unit; 0: it is not known.
        """
        self._opened = self._clock.now()
        self._size += size

    def close(self) -> None:
        """End the span that was opened last; without one, do nothing."""
        if self._opened is not None:
            self._spans.append((self._opened, self._clock.now()))
            self._opened = None

    def next_step(self) -> None:
        """End the current step; later spans belong to the next one."""
        self._steps.append((self._spans, self._size))
        self._opened = None
        self._spans = []
        self._size = 0

    def read(self) -> list[float]:
        """Return the seconds of each step since the last call, the newest last.

        A step is NaN if it was not timed, or if the device has not finished it yet.
        """
        times, _ = self.read_with_sizes()
        return times

    def read_with_sizes(self) -> tuple[list[float], list[float]]:
        """Return the seconds of each step as `read` does, and the size of what each computed."""
        times = []
        sizes = []
        for spans, size in self._steps:
            seconds = self._seconds(spans)
            times.append(seconds)
            sizes.append(float(size))
        self._steps.clear()
        return times, sizes

    def _seconds(self, spans: list[tuple[Any, Any]]) -> float:
        if not spans or not all(self._clock.has_passed(end) for _, end in spans):
            return math.nan
        return sum(self._clock.seconds(start, end) for start, end in spans)


class LocalTimer:
    """Times what a rank does by itself, with hooks on the model that the Trainer calls.

    Args:
        module (`torch.nn.Module`): the prepared model.
        strategy (`Strategy`): how the model is distributed.
        device (`torch.device`): the device of the model.
    """

    def __init__(self, module: nn.Module, strategy: Strategy, device: torch.device) -> None:
        self.span = StepSpans(clock_of(device))
        self._handles: list[Any] = []
        # Compiled into a layer, a hook breaks its graph, and its CUDA event becomes a part of that graph.
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)
        if not strategy.waits_in_layers:
            first = next((p for p in module.parameters() if p.requires_grad), None)
            if first is not None:
                self._handles = [
                    module.register_forward_pre_hook(begin, with_kwargs=True),
                    first.register_post_accumulate_grad_hook(end),
                ]
        elif strategy.gathers_layers:
            for layer in sharded_modules(module):
                if layer is module:
                    continue
                # FSDP's own hook is the first before the forward and the last after it, so these run inside.
                self._handles.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
                self._handles.append(layer.register_forward_hook(end, prepend=True))

    @property
    def measures(self) -> bool:
        """Whether anything can be timed under this strategy."""
        return bool(self._handles)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if module.training:
            size = _largest([*inputs, *named.values()])
            self.span.open(size)

    def _end(self, *_: Any) -> None:
        self.span.close()


def _largest(inputs: Sequence[Any]) -> int:
    """Return the number of elements of the largest tensor, such as rows x padded length of a batch; 0 without one."""
    largest = 0
    for value in inputs:
        if isinstance(value, torch.Tensor):
            largest = max(largest, value.numel())
    return largest
