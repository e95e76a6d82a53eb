"""What a rank does by itself in a step, before it waits for others.

Step time tells nothing about a rank: the all-reduce makes it the same on all. What is timed instead depends on where a
strategy waits:

- DDP, a single process, ZeRO-1 and ZeRO-2: from the beginning of the forward to the gradient of the first trained
  parameter, the last that a backward makes. ZeRO's reductions inside the backward count where they are not overlapped.
- FSDP2: the forwards of the sharded layers, each after its all-gather. The backward is not told from its waiting.
- ZeRO-3 and tensor parallelism: nothing, for every matrix product waits for peers.

On a CPU these are host times; on CUDA they are events, read only when they have completed, so nothing waits for them.
"""

import math
import time
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

KEPT_STEPS = 32
"""Steps of one exchange between ranks."""


class HostSpan:
    """Seconds of the host inside `open` … `close`, summed over a step."""

    def __init__(self) -> None:
        self._opened: float | None = None
        self._sum, self._closed = 0.0, False
        self._steps: deque[float] = deque(maxlen=KEPT_STEPS)

    def open(self) -> None:
        self._opened = time.perf_counter()

    def close(self) -> None:
        if self._opened is not None:
            self._sum += time.perf_counter() - self._opened
            self._opened, self._closed = None, True

    def next_step(self) -> None:
        """The step is over."""
        self._steps.append(self._sum if self._closed else math.nan)
        self._opened, self._sum, self._closed = None, 0.0, False

    def read(self) -> list[float]:
        """Seconds of each step since the last call, the newest last; NaN where a step was not timed."""
        steps = list(self._steps)
        self._steps.clear()
        return steps


class DeviceSpan:
    """The same on the current CUDA stream, by events that are read when they have completed."""

    def __init__(self) -> None:
        self._opened: torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._steps: deque[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = deque(maxlen=KEPT_STEPS)

    def open(self) -> None:
        self._opened = self._now()

    def close(self) -> None:
        if self._opened is not None:
            self._pairs.append((self._opened, self._now()))
            self._opened = None

    def next_step(self) -> None:
        """The step is over."""
        self._steps.append(self._pairs)
        self._opened, self._pairs = None, []

    def read(self) -> list[float]:
        """Seconds of each step since the last call; NaN where the GPU has not come so far."""
        steps = [
            sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
            if pairs and all(end.query() for _, end in pairs)
            else math.nan
            for pairs in self._steps
        ]
        self._steps.clear()
        return steps

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class LocalTimer:
    """Times what a rank does by itself, by hooks on the model that the Trainer calls.

    Args:
        module (`torch.nn.Module`): the prepared model.
        strategy (`str`): as `hfscale.integrations.strategy.running_strategy` names it.
        device (`torch.device`): where it computes.
    """

    def __init__(self, module: nn.Module, strategy: str, device: torch.device) -> None:
        self.span = DeviceSpan() if device.type == "cuda" else HostSpan()
        self._handles: list[Any] = []
        if strategy in ("single", "ddp", "zero0", "zero1", "zero2"):
            first = next((p for p in module.parameters() if p.requires_grad), None)
            if first is not None:
                self._handles = [
                    module.register_forward_pre_hook(self._begin),
                    first.register_post_accumulate_grad_hook(self._end),
                ]
        elif strategy == "fsdp2":
            for layer in (m for m in module.modules() if isinstance(m, FSDPModule) and m is not module):
                # FSDP's own hooks: before the forward it is the first, after it the last, so these stand inside.
                self._handles.append(layer.register_forward_pre_hook(self._begin))
                self._handles.append(layer.register_forward_hook(self._end, prepend=True))

    @property
    def measures(self) -> bool:
        """Whether this strategy leaves anything local to time."""
        return bool(self._handles)

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, module: nn.Module, *_: Any) -> None:
        if module.training:
            self.span.open()

    def _end(self, *_: Any) -> None:
        self.span.close()
