"""The order in which stages work on micro-batches: torch's schedules behind one face, for training and evaluation.

| name | stages per rank | source |
|---|---|---|
| GPipe | 1 | Huang et al., arXiv 1811.06965 |
| 1F1B | 1 | Narayanan et al., arXiv 2006.09503 |
| Interleaved1F1B | `virtual_stages` | Narayanan et al., arXiv 2104.04473 |
| InterleavedZeroBubble | `virtual_stages` | ZB1P of Qi et al., arXiv 2401.10241 |
| ZBV | 2, in a V | section 6 of the same |
| DualPipeV | 2, in a V | DeepSeek-V3, arXiv 2412.19437; V-shaped by Qi et al. |
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hfscale.errors import LayoutError, UsageError
from hfscale.parallel.partition import Stage

_KEPT_SHAPES = 4


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a schedule needs to know of itself."""

    schedule: Any
    """torch's class."""
    shape: str
    """`line`: one stage per rank; `loop`: several, dealt round; `v`: two, there and back."""


KINDS = {
    "GPipe": Kind(schedule=ScheduleGPipe, shape="line"),
    "1F1B": Kind(schedule=Schedule1F1B, shape="line"),
    "Interleaved1F1B": Kind(schedule=ScheduleInterleaved1F1B, shape="loop"),
    "InterleavedZeroBubble": Kind(schedule=ScheduleInterleavedZeroBubble, shape="loop"),
    "ZBV": Kind(schedule=ScheduleZBVZeroBubble, shape="v"),
    "DualPipeV": Kind(schedule=ScheduleDualPipeV, shape="v"),
}
"""Every schedule by its name in `--pipeline_schedule`."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """How many stages there are, and which rank holds which.

    Raises:
        UsageError: a schedule of another name, or another number of stages per rank than it takes.
    """

    schedule: str = "1F1B"
    """One of `KINDS`."""
    pp: int = 1
    """Pipeline ranks."""
    virtual_stages: int | None = None
    """Stages per rank; absent: as few as the schedule takes."""

    def __post_init__(self) -> None:
        if self.schedule not in KINDS:
            raise UsageError(f"--pipeline_schedule {self.schedule} is none of {', '.join(KINDS)}")
        shape, asked = KINDS[self.schedule].shape, self.virtual_stages
        if asked is not None and ((shape == "line" and asked != 1) or (shape == "v" and asked != 2) or asked < 1):
            mend = "use Interleaved1F1B for several" if shape == "line" else "leave it out"
            takes = {"line": "one stage", "v": "two stages", "loop": "one or more stages"}[shape]
            raise UsageError(f"--virtual_stages {asked}: {self.schedule} has {takes} per rank; {mend}")

    @property
    def per_rank(self) -> int:
        """Stages that each rank holds."""
        return 1 if KINDS[self.schedule].shape == "line" or self.pp == 1 else self.virtual_stages or 2

    @property
    def stages(self) -> int:
        """Stages in all."""
        return self.pp * self.per_rank

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        if KINDS[self.schedule].shape == "v" and stage >= self.pp:
            return self.stages - 1 - stage
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in their order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def takes(self, micro_batches: int) -> bool:
        """Whether the schedule can run so many micro-batches in a step."""
        if self.pp == 1:
            return True
        if self.schedule == "DualPipeV":
            return micro_batches >= self.stages
        rounds = max(1, micro_batches // self.pp) if KINDS[self.schedule].shape == "loop" else 1
        return micro_batches >= self.pp and micro_batches % rounds == 0

    def micro_batches_for(self, wanted: int) -> int:
        """The least number of micro-batches from `wanted` on that the schedule can run."""
        return next(number for number in range(wanted, wanted + 4 * self.stages + 1) if self.takes(number))

    def check_micro_batches(self, micro_batches: int) -> None:
        """Make sure that the schedule can run so many micro-batches (`gradient_accumulation_steps`) a step.

        Raises:
            LayoutError: it cannot; the message names the nearest number that it can.
        """
        if self.takes(micro_batches):
            return
        above = self.micro_batches_for(micro_batches)
        below = next((number for number in range(micro_batches - 1, 0, -1) if self.takes(number)), above)
        nearest = min(above, below, key=lambda number: abs(number - micro_batches))
        raise LayoutError(
            f"{micro_batches} micro-batches per step do not keep {self.schedule} on {self.pp} pipeline ranks going: "
            f"set --gradient_accumulation_steps {nearest}"
        )

    def in_flight(self, rank: int, micro_batches: int) -> float:
        """Micro-batches whose activations a pipeline rank holds at once, counted in its share of the layers.

        GPipe: all; 1F1B: as many as ranks from there on; interleaved: p(1 + (p-1)/(pv)) at most; ZBV p; DualPipeV
        p + 1/2. Sources: the table of this module.
        """
        if self.pp == 1:
            return 1.0
        held = {
            "GPipe": micro_batches,
            "1F1B": self.pp - rank,
            "Interleaved1F1B": self.pp + (self.pp - 1) / self.per_rank,
            "InterleavedZeroBubble": self.pp + (self.pp - 1) / self.per_rank,
            "ZBV": self.pp,
            "DualPipeV": self.pp + 0.5,
        }[self.schedule]
        return min(float(held), float(micro_batches))

    def idle_fraction(self, micro_batches: int) -> float:
        """Share of the schedule's time that a rank waits, by the schedule's formula with a backward of twice the
        forward (input and weight gradients alike), equal stages and free communication.

        Idle time over p ranks, m micro-batches, v stages per rank, with F = I = W = 1 and B = 2: (p-1)(F+B) for GPipe
        and 1F1B, by v for the interleaved ones, (p-1)(F+I-W)/v for InterleavedZeroBubble, (p-1)max(F,I)/2 for ZBV
        and (p-1)/2 for DualPipeV; work m(F+B). Sources: the table of this module.
        """
        ranks, stages = self.pp - 1, self.per_rank
        idle = {
            "GPipe": ranks * 3.0,
            "1F1B": ranks * 3.0,
            "Interleaved1F1B": ranks * 3.0 / stages,
            "InterleavedZeroBubble": ranks * 1.0 / stages,
            "ZBV": ranks * 0.5,
            "DualPipeV": ranks * 0.5,
        }[self.schedule]
        return idle / (idle + 3.0 * micro_batches)


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


class _ClockedStage(PipelineStage):
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


class Pipeline:
    """Runs a rank's stages over micro-batches, forward and backward or forward only.

    Args:
        stages (`Sequence[Stage]`): this rank's, in the order of `plan.stages_of`.
        plan (`StagePlan`): all stages.
        group (`ProcessGroup`): the pipeline's ranks.
        device (`torch.device`): where the stages are.
        hidden_size (`int`): width of what passes from stage to stage.
        dtype (`torch.dtype`): its type.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        plan: StagePlan,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.stages, self.plan, self.group, self.device = list(stages), plan, group, device
        self.hidden_size, self.dtype = hidden_size, dtype
        self.clock = BusyClock(device)
        self._schedules: OrderedDict[tuple[int, int, int], Any] = OrderedDict()

    def train(self, micro_batches: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward of a whole step.

        Args:
            micro_batches (`int`): how many.
            inputs: the model's keywords, each (micro-batches x batch, …), `input_ids` and `labels` among them.

        Returns:
            The sum of the micro-batches' losses on the rank of the last stage, 0 on the others.
        """
        if self.plan.pp == 1:
            return self._train_alone(micro_batches, inputs)
        inputs = dict(inputs)
        tokens = inputs.pop("input_ids")
        schedule = self._schedule(micro_batches, tokens.shape[0] // micro_batches, tokens.shape[1])
        losses: list[torch.Tensor] = []
        has = {stage.cut.index for stage in self.stages}
        start = self.clock.now()
        schedule.step(
            *([tokens] if 0 in has else []),
            target=tokens if self.plan.stages - 1 in has else None,  # unused: the last stage's output is the loss
            losses=losses if self.plan.stages - 1 in has else None,
            return_outputs=False,
            **inputs,
        )
        self.clock.add("all", start)
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward only, for every schedule alike; arguments and result as for `train`.

        Each of a rank's stages takes all micro-batches before its next one does. torch's own `eval` does not know
        the V-shaped schedules (2.13).
        """
        parts = _split(inputs, micro_batches)
        local: dict[tuple[int, int], torch.Tensor] = {}
        sent, losses = [], []
        for stage in self.stages:
            index = stage.cut.index
            for number, part in enumerate(parts):
                part = dict(part)
                tokens = part.pop("input_ids")
                if index == 0:
                    first = tokens
                elif (index - 1, number) in local:
                    first = local.pop((index - 1, number))
                else:
                    first = torch.empty(*tokens.shape, self.hidden_size, dtype=self.dtype, device=self.device)
                    dist.recv(first, group_src=self.plan.rank_of(index - 1), group=self.group)
                output = stage(first, **part)
                if stage.cut.is_last:
                    losses.append(output)
                elif self.plan.rank_of(index + 1) == self.plan.rank_of(index):
                    local[index, number] = output
                else:
                    peer = self.plan.rank_of(index + 1)
                    sent.append(dist.isend(output.contiguous(), group_dst=peer, group=self.group))
        for work in sent:
            work.wait()
        return self._sum(losses)

    def _train_alone(self, micro_batches: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """One stage: plain gradient accumulation, with the data parallel reduction after the last backward."""
        (stage,) = self.stages
        losses = []
        for number, part in enumerate(_split(inputs, micro_batches), 1):
            if isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(number == micro_batches)
            loss = stage(part.pop("input_ids"), **part)
            loss.backward()
            losses.append(loss)
        return self._sum(losses)

    def _sum(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach().float() for loss in losses]).sum()

    def _schedule(self, micro_batches: int, rows: int, length: int) -> Any:
        """torch's schedule for micro-batches of that shape; the last few are kept, with their receive buffers."""
        key = (micro_batches, rows, length)
        if key not in self._schedules:
            self.plan.check_micro_batches(micro_batches)
            if len(self._schedules) == _KEPT_SHAPES:
                self._schedules.popitem(last=False)
            stages = [self._torch_stage(stage, rows, length) for stage in self.stages]
            kind = KINDS[self.plan.schedule]
            self._schedules[key] = kind.schedule(
                stages[0] if kind.shape == "line" else stages,
                n_microbatches=micro_batches,
                loss_fn=lambda output, target: output,
                scale_grads=False,  # the loss is normalised by the tokens of the whole step
            )
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _torch_stage(self, stage: Stage, rows: int, length: int) -> PipelineStage:
        """Shapes are given, so that torch need not run the model to find them out."""
        hidden = torch.empty(rows, length, self.hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        made = _ClockedStage(
            stage,
            stage.cut.index,
            self.plan.stages,
            self.device,
            input_args=tokens if stage.cut.is_first else hidden,
            output_args=loss if stage.cut.is_last else hidden,
            group=self.group,
        )
        made.clock = self.clock
        return made


def _split(inputs: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    columns = [value.tensor_split(parts) for value in inputs.values()]
    return [dict(zip(inputs, values, strict=True)) for values in zip(*columns, strict=True)]
