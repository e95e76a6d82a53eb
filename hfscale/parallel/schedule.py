"""Runs stages over micro-batches: torch's schedules behind one face, for training and evaluation."""

from collections import OrderedDict
from collections.abc import Sequence
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

from hfscale.facts.schedules import SCHEDULES as PLACEMENTS
from hfscale.parallel.clock import BusyClock, ClockedStage
from hfscale.parallel.partition import Stage
from hfscale.parallel.stages import StagePlan

_KEPT_SHAPES = 4

SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
"""torch's schedule for each name of `hfscale.facts.schedules.SCHEDULES`."""


class Pipeline:
    """Runs a rank's stages over micro-batches, forward and backward or forward only.

    Args:
        stages (`Sequence[Stage]`): this rank's, in the order of `plan.stages_of`.
        plan (`StagePlan`): all stages.
        group (`ProcessGroup`): the pipeline's ranks.
        device (`torch.device`): where the stages are.
        hidden_size (`int`): width of what passes from stage to stage.
        dtype (`torch.dtype`): its type.
        sequence_parts (`int`): into how many parts sequence parallelism cuts what passes; 1 without.
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
        sequence_parts: int = 1,
    ) -> None:
        self.stages, self.plan, self.group, self.device = list(stages), plan, group, device
        self.hidden_size, self.dtype, self.sequence_parts = hidden_size, dtype, sequence_parts
        self.clock = BusyClock(device)
        self._schedules: OrderedDict[tuple[int, int, int], Any] = OrderedDict()

    def train(self, micro_batches: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward of a whole step.

        Args:
            micro_batches (`int`): how many.
            inputs: the model's keywords, each (micro-batches x batch, …), `input_ids` and `labels` among them.

        Returns:
            The sum of the micro-batches' losses on the rank of the last stage; on the others 0, or what their routers
            add.
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
                    first = torch.empty(self._passed(*tokens.shape), dtype=self.dtype, device=self.device)
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
        losses = [*losses, *(loss for stage in self.stages for loss in stage.take_balance_losses())]
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
            self._schedules[key] = SCHEDULES[self.plan.schedule](
                stages[0] if PLACEMENTS[self.plan.schedule] == "line" else stages,
                n_microbatches=micro_batches,
                loss_fn=lambda output, target: output,
                scale_grads=False,  # the loss is normalised by the tokens of the whole step
            )
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _passed(self, rows: int, length: int) -> tuple[int, int, int]:
        """The shape of what one stage sends to the next."""
        return rows, length // self.sequence_parts, self.hidden_size

    def _torch_stage(self, stage: Stage, rows: int, length: int) -> PipelineStage:
        """Shapes are given, so that torch need not run the model to find them out."""
        hidden = torch.empty(self._passed(rows, length), dtype=self.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        made = ClockedStage(
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
