"""How long a rank's stages compute, and how long it is in its schedules: the rest is waiting."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from transformers import TrainerState

from hfscale.metrics.clocks import clock_of
from hfscale.metrics.records import JSONL_NAME, RankLines
from hfscale.utils import distributed

_KEPT_SCHEDULES = 64


class BusyClock:
    """Adds up how long a rank's stages compute, and how long its schedules take.

    On a GPU by events, read when `fraction` is asked for; on a CPU by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self.now = self._clock.now
        self._spans: dict[str, list[tuple[Any, Any]]] = {"busy": [], "all": []}

    def add(self, kind: str, start: Any) -> None:
        """Charge the time since `start`, a value of `now()`, to `busy` or to `all`."""
        self._spans[kind].append((start, self.now()))
        if kind == "all" and len(self._spans["all"]) > _KEPT_SCHEDULES:
            self._spans = {"busy": [], "all": []}  # nobody has asked for long: what counts is the recent past

    def read(self) -> tuple[float, float, int]:
        """Seconds computed, seconds in schedules and how many these were since the last call; waits for the GPU's last
        event."""
        spans = self._spans
        self._spans = {"busy": [], "all": []}
        for kind in spans.values():
            if kind:
                self._clock.wait_for(kind[-1][1])
        busy, in_schedules = (sum(self._clock.seconds(start, end) for start, end in spans[k]) for k in ("busy", "all"))
        return busy, in_schedules, len(spans["all"])


class StageTimes:
    """What a log says of the stages' time: the share that was waited, and to a run that is recorded (its folder has
    `scaling.jsonl`) each rank's own, for `hfscale report`: a slow stage holds all others up.

    | name | unit | meaning |
    |---|---|---|
    | `scaling/bubble_fraction` | ratio | share of the longest rank's schedule in which a rank waits, mean of all |
    | `stage_s` in `hfscale_ranks.jsonl` | s | own time of a rank's stages per schedule, one number per rank |

    Args:
        clock (`BusyClock`): of this rank's stages; what it has counted until now is left out.
        output_dir (`Path`): the run's.
    """

    def __init__(self, clock: BusyClock, output_dir: Path) -> None:
        self._clock, self._folder, self._lines = clock, output_dir, RankLines(output_dir)
        clock.read()

    def keys(self, state: TrainerState) -> dict[str, float]:
        """Of the time since the last call. Call it on every rank."""
        busy, all_, schedules = zip(*distributed.gather_rows(self._clock.read()), strict=True)
        if not sum(all_):
            return {}
        if state.is_world_process_zero and (self._folder / JSONL_NAME).exists():
            own = [seconds / number for seconds, number in zip(busy, schedules, strict=True)]
            self._lines.add(state.global_step, {"stage_s": own})
        # A rank whose own part ends early waits too, only not in its schedule: the longest counts for all.
        return {"scaling/bubble_fraction": 1 - sum(busy) / (len(busy) * max(all_))}


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
