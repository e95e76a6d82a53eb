"""How long a rank's stages compute, and how long it is in its schedules: the rest is waiting."""

import time
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

_KEPT_SCHEDULES = 64


class BusyClock:
    """Adds up how long a rank's stages compute, and how long its schedules take.

    On a GPU by events, read when `fraction` is asked for; on a CPU by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = {"busy": [], "all": []}

    def now(self) -> Any:
        """A point in time, as the device sees it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, kind: str, start: Any) -> None:
        """Charge the time since `start` to `busy` or to `all`."""
        self._spans[kind].append((start, self.now()))
        if kind == "all" and len(self._spans["all"]) > _KEPT_SCHEDULES:
            self._spans = {"busy": [], "all": []}  # nobody has asked for long: what counts is the recent past

    def read(self) -> tuple[float, float]:
        """Seconds computed and seconds in schedules since the last call; waits for the GPU's last event."""
        totals = []
        for kind in ("busy", "all"):
            spans, self._spans[kind] = self._spans[kind], []
            if self._cuda and spans:
                spans[-1][1].synchronize()
                totals.append(sum(start.elapsed_time(end) for start, end in spans) / 1000)
            else:
                totals.append(sum(end - start for start, end in spans))
        return totals[0], totals[1]


class ClockedStage(PipelineStage):
    """A stage whose computation is timed: all but waiting for its neighbours."""

    clock: BusyClock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        start = self.clock.now()
        output = super().forward_one_chunk(*args, **kwargs)
        self.clock.add("busy", start)
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        start = self.clock.now()
        super().backward_one_chunk(*args, **kwargs)
        self.clock.add("busy", start)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        start = self.clock.now()
        super().backward_weight_one_chunk(*args, **kwargs)
        self.clock.add("busy", start)
