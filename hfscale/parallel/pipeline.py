"""A rank's pipeline stages, run over the micro-batches of a step by torch's schedules, and how long they wait."""

import statistics
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from transformers import PreTrainedModel, TrainerState

from hfscale.core.clocks import clock_of
from hfscale.core.records import RankLines
from hfscale.core.run_files import JSONL_NAME
from hfscale.errors import UsageError
from hfscale.facts.schedules import SCHEDULES
from hfscale.parallel.context import ContextParallel
from hfscale.parallel.losses import IGNORED_LABEL, AttachLoss, RouterBalanceLoss
from hfscale.parallel.overlap import Deferred, Pairs, Turns, value_of
from hfscale.parallel.own_loss import OF_OWN_LOSS
from hfscale.parallel.partition import ModelStructure, StageEntry, StageExit, StageSpec
from hfscale.parallel.receiving import ReceivingStage
from hfscale.parallel.stages import StagePlan
from hfscale.trainer.batches import NOT_PADDING, token_mask
from hfscale.trainer.collector import Columns

TORCH_SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
"""torch's schedule for each name of `hfscale.facts.schedules.SCHEDULES`."""
_LayerT = TypeVar("_LayerT", bound=nn.Module)
_CACHED_SCHEDULES = 4
_TIMED_SCHEDULES = 64
_PADDING = {"labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}

# Shapes below: rows = sequences of a micro-batch, sequence = tokens of a sequence that a rank's stages are given,
# hidden = the model's width.


# --- the micro-batches of a step -------------------------------------------------------------------------------------


def stack_batches(
    batches: list[dict[str, Any]], micro_batches: int, *, extra: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Concatenate the micro-batches of a step along the batch dim, all padded to the same shape.

    Args:
        batches (`list[dict]`): inputs of the model, each tensor (rows, sequence) of any size.
        micro_batches (`int`): number that the pipeline needs. Where there are fewer batches, copies of the last one
            follow, whose labels are all ignored.
        extra (`Collection[str]`): inputs that only a loss of the user's reads; they may be (rows), such as weights of
            samples, or (rows, sequence, …).

    Returns:
        Tensors of (micro-batches x rows, sequence); the labels of padding are ignored. `not_padding` is false for all
        padding, of the batches and of this function, and for the copies.

    Raises:
        UsageError: an input is not a tensor of (rows, sequence), or one of `extra` is none whose first dim are rows.
    """
    batches = [{**batch, NOT_PADDING: _not_padding(batch)} for batch in batches]
    copy = (
        batches[-1]
        | _ignored(batches[-1])
        | {NOT_PADDING: torch.zeros_like(batches[-1][NOT_PADDING])}
    )
    batches += [copy] * (micro_batches - len(batches))
    rows = max(batch["input_ids"].shape[0] for batch in batches)
    length = max(batch["input_ids"].shape[1] for batch in batches)
    stacked = {}
    for name, value in batches[0].items():
        is_of_rows = isinstance(value, torch.Tensor) and value.ndim >= (1 if name in extra else 2)
        # What is padded to one length is cut to its own again, which needs to be that of the tokens
        is_of_tokens = all(_is_of_tokens(batch[name], batch) for batch in batches if name in extra)
        if not (is_of_rows and is_of_tokens):
            raise _not_of_sequences(name)
        stacked[name] = torch.cat([_padded(name, batch[name], rows, length) for batch in batches])
    return stacked


def _is_of_tokens(value: torch.Tensor, batch: Mapping[str, Any]) -> bool:
    return value.ndim == 1 or value.shape[1] == batch["input_ids"].shape[1]


def _not_padding(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return which tokens of a batch are no padding, (rows, sequence)."""
    tokens: torch.Tensor = batch["input_ids"]
    mask = token_mask(batch)
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    if mask.shape != tokens.shape:
        raise _not_of_sequences("attention_mask")
    return mask


def _not_of_sequences(name: str) -> UsageError:
    return UsageError(
        f"input {name} is not a tensor of (batch, sequence), which a pipeline needs to split it: have the data "
        "collator leave it out"
    )


def pad_to_multiple(inputs: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Pad every input on the right, so that its length is a multiple of `multiple`.

    The labels of the padding are ignored, and the other tokens of a causal model do not attend to it.

    Args:
        inputs (`dict`): tensors of (rows, sequence).
        multiple (`int`): the number, in tokens, of which the new length is the next multiple.

    Returns:
        The padded inputs.
    """
    rows, length = inputs["input_ids"].shape
    return {
        name: _padded(name, value, rows, -(-length // multiple) * multiple)
        for name, value in inputs.items()
    }


def with_labels_of_first(inputs: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Have the labels of all rows after the first ones ignored.

    Args:
        inputs (`dict`): tensors of (rows, sequence).
        rows (`int`): number of rows that keep their labels.

    Returns:
        The inputs, of the same shapes; the given tensors are not changed.
    """
    return {**inputs, **_ignored(inputs, after=rows)}


def _ignored(batch: dict[str, torch.Tensor], after: int = 0) -> dict[str, torch.Tensor]:
    labels = {name: batch[name] for name in _PADDING if name in batch}
    return {
        name: torch.cat([x[:after], torch.full_like(x[after:], IGNORED_LABEL)])
        for name, x in labels.items()
    }


def _padded(name: str, value: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Pad an input to (rows, length). Added rows attend to themselves: a row that attends to nothing has NaN logits,
    and then NaN gradients, even if its labels are ignored."""
    fill = _PADDING.get(name, 0)
    behind = (0, 0) * (value.ndim - 2)  # `pad` begins with the last dim
    if value.ndim > 1:
        value = nn.functional.pad(value, (*behind, 0, length - value.shape[1]), value=fill)
        behind = (*behind, 0, 0)
    fill_of_rows = 1 if name == "attention_mask" else fill
    return nn.functional.pad(value, (*behind, 0, rows - value.shape[0]), value=fill_of_rows)


def _split(inputs: dict[str, torch.Tensor], micro_batches: int) -> list[dict[str, torch.Tensor]]:
    columns = [value.tensor_split(micro_batches) for value in inputs.values()]
    return [dict(zip(inputs, values, strict=True)) for values in zip(*columns, strict=True)]


# --- one stage -------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """One pipeline stage: takes tokens or hidden states, returns hidden states or the loss.

    Args:
        view (`PreTrainedModel`): the stage's view of the model, from `stage_view`.
        structure (`ModelStructure`): names of the model's parts.
        spec (`StageSpec`): which stage it is.
        loss (`callable`): `loss(view, inputs)`, a scalar, used by the last stage; `inputs` are the model's keywords.
        balance (`RouterBalanceLoss`, *optional*): the load-balancing loss of experts, where the model has one.
        stage_hidden_states (`callable`, *optional*): with sequence parallelism, takes the hidden states of another
            stage, (rows, sequence / tp, hidden), and returns the decoder's input.
        context (`ContextParallel`, *optional*): with context parallelism, prepares the inputs of a micro-batch.
    """

    def __init__(
        self,
        view: PreTrainedModel,
        structure: ModelStructure,
        spec: StageSpec,
        loss: Callable[[PreTrainedModel, dict[str, Any]], torch.Tensor],
        balance: RouterBalanceLoss | None = None,
        stage_hidden_states: Callable[[torch.Tensor], torch.Tensor] | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.view = view
        self.spec = spec
        self._loss = loss
        self._base_model = structure.decoder.split(".")[0]
        self._entry = _only(StageEntry, structure.layers_of(view))
        self._exit = _only(StageExit, structure.layers_of(view))
        self._stage_hidden_states = stage_hidden_states
        self._context = context
        self._balance = balance
        self._balance_losses: list[torch.Tensor] = []
        self.keywords: frozenset[str] | None = None
        """The inputs that this stage gives to the model; None: all. Others are for a loss of the user's."""
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        if balance is not None:
            balance.watch(self)

    def call_model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the view, of a model's only stage, as its user calls a model.

        Args:
            args, kwargs: as for the model's `forward`.

        Returns:
            The model's output.
        """
        self._call = (args, kwargs)
        try:
            return self(None)  # through the hooks of FSDP2, which gather the parameters
        finally:
            self._call = None

    def forward(self, hidden: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the stage on one micro-batch.

        Args:
            hidden (`torch.Tensor`): tokens (rows, sequence) for the first stage, else hidden states (rows, sequence,
                hidden).
            inputs: the model's other keywords; only the last stage computes a loss from `labels`. Of `not_padding` the
                counters of tokens read which of this rank's positions are no padding.

        Returns:
            Hidden states, (rows, sequence, hidden), or the last stage's loss, a scalar.
        """
        if self._call is not None:
            args, kwargs = self._call
            whole: torch.Tensor = self.view(*args, **kwargs)  # or what else the model returns
            return whole
        not_padding = inputs.pop(NOT_PADDING, None)
        if not self.spec.is_last:
            inputs = {name: value for name, value in inputs.items() if self._takes(name)}
        if self._stage_hidden_states is not None and not self.spec.is_first:
            hidden = self._stage_hidden_states(hidden)
        if self._entry is not None:
            self._entry.receive(hidden)
        attention_mask = inputs.get("attention_mask")
        labels = inputs.get("labels")
        if self._context is not None:
            inputs = self._context.prepare_micro_batch(inputs)
        inputs["input_ids" if self.spec.is_first else "inputs_embeds"] = hidden
        if self._balance is None:
            return self._compute(inputs)
        self._balance.start_forward()
        output = self._compute(inputs | {"output_router_logits": False})
        balance_loss = self._balance.finish_forward(
            attention_mask, not_padding, labels, hidden.shape[0]
        )
        balance_loss = balance_loss.to(output.device)
        if self.spec.is_last:
            return output + balance_loss
        self._balance_losses.append(balance_loss.detach())
        attached: torch.Tensor = AttachLoss.apply(output, balance_loss)  # type: ignore[no-untyped-call]  # of torch
        return attached

    def _takes(self, name: str) -> bool:
        return name not in OF_OWN_LOSS and (self.keywords is None or name in self.keywords)

    def _compute(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.spec.is_last:
            return self._loss(self.view, inputs)
        for name in ("labels", "shift_labels"):
            inputs.pop(name, None)
        getattr(self.view, self._base_model)(**inputs, use_cache=False)
        assert self._exit is not None  # of every stage but the last
        return self._exit.take()

    def take_balance_losses(self) -> list[torch.Tensor]:
        """Return the load-balancing losses that a stage other than the last has computed since the previous call.

        Returns:
            One scalar per micro-batch, without a gradient; empty on the last stage and without experts.
        """
        losses = self._balance_losses
        self._balance_losses = []
        return losses


def _only(kind: type[_LayerT], layers: nn.ModuleList) -> _LayerT | None:
    """Return the layer of a kind, of which a stage has one or none."""
    return next((layer for layer in layers if isinstance(layer, kind)), None)


# --- all stages of a rank --------------------------------------------------------------------------------------------


class Pipeline:
    """Runs a rank's stages over micro-batches, forward and backward or forward only.

    Args:
        stages (`Sequence[Stage]`): this rank's stages, in the order of `plan.stages_of`.
        plan (`StagePlan`): all stages of the pipeline.
        group (`ProcessGroup`): the pipeline ranks.
        device (`torch.device`): where the stages are.
        hidden_size (`int`): width of the hidden states that stages exchange.
        dtype (`torch.dtype`): their type.
        sequence_parts (`int`): into how many parts sequence parallelism splits them; 1 without.
        turns (`Turns`, *optional*): the turns that passes take which the schedule pairs; absent: torch runs one after
            the other.
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
        turns: Turns | None = None,
    ) -> None:
        self.stages = list(stages)
        self.plan = plan
        self.group = group
        self.device = device
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.sequence_parts = sequence_parts
        self.turns = turns
        self.clock = BusyClock(device)
        self._schedules: OrderedDict[tuple[int, int, int], Any] = OrderedDict()

    def train(self, micro_batches: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run forward and backward of a whole step.

        Args:
            micro_batches (`int`): number of micro-batches.
            inputs (`dict`): the model's keywords, each (micro-batches x rows, …), with `input_ids` and `labels`.

        Returns:
            On the rank of the last stage the sum of the micro-batches' losses, a scalar; on the others 0, or the sum
            of their load-balancing losses.

        Raises:
            LayoutError: the schedule does not support this number of micro-batches.
        """
        if self.plan.pp == 1:
            return self._train_single_stage(micro_batches, inputs)
        inputs = dict(inputs)
        tokens = inputs.pop("input_ids")
        schedule = self._schedule(micro_batches, tokens.shape[0] // micro_batches, tokens.shape[1])
        losses: list[torch.Tensor] = []
        has_first = any(stage.spec.is_first for stage in self.stages)
        has_last = any(stage.spec.is_last for stage in self.stages)
        start = self.clock.now()
        schedule.step(
            *([tokens] if has_first else []),
            target=tokens if has_last else None,  # unused: the last stage's output is the loss
            losses=losses if has_last else None,
            return_outputs=False,
            **inputs,
        )
        self.clock.add("all", start)
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the forward passes of all micro-batches, in the same way for every schedule.

        The ranks follow `StagePlan.forward_ticks`: after each tick a rank sends and receives in one batch, which NCCL
        runs as one kernel on the communicator of the group. Single sends and receives would share one queue per pair
        of ranks, in which those of several stages per rank wait for each other forever; and each pair would get a
        communicator of its own. torch's own `eval` does not support the V-shaped schedules (2.13).

        Args:
            micro_batches (`int`): number of micro-batches, also one that the schedule does not support.
            inputs (`dict`): the model's keywords, each (micro-batches x rows, …), with `input_ids` and `labels`.

        Returns:
            On the rank of the last stage the sum of the micro-batches' losses, a scalar; on the others 0, or the sum
            of their load-balancing losses.
        """
        parts = _split(inputs, micro_batches)
        stages = {stage.spec.index: stage for stage in self.stages}
        # (stage, micro-batch) -> its hidden states
        received: dict[tuple[int, int], torch.Tensor] = {}
        losses = []
        for tick in self.plan.forward_ticks(micro_batches):
            outputs = {}
            for index, number in tick:
                if index not in stages:
                    continue
                keywords = dict(parts[number])
                tokens = keywords.pop("input_ids")
                hidden = tokens if stages[index].spec.is_first else received.pop((index, number))
                output = stages[index](hidden, **keywords)
                if stages[index].spec.is_last:
                    losses.append(output)
                else:
                    outputs[index, number] = output
            shapes = {
                number: self._hidden_shape(*parts[number]["input_ids"].shape) for _, number in tick
            }
            received |= self._exchange(tick, outputs, shapes)
        return self._sum(losses)

    def _exchange(
        self,
        tick: Sequence[tuple[int, int]],
        outputs: Mapping[tuple[int, int], torch.Tensor],
        shapes: Mapping[int, tuple[int, ...]],
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Send what this rank has computed in a tick of an evaluation, and receive what it needs from the others.

        Args:
            tick (`Sequence[tuple[int, int]]`): the passes of all ranks in this tick, as (stage, micro-batch).
            outputs (`Mapping`): the hidden states of those of this rank.
            shapes (`Mapping`): shape of the hidden states of each micro-batch in the tick.

        Returns:
            The hidden states for stages of this rank, by (stage, micro-batch).
        """
        own = {stage.spec.index for stage in self.stages}
        received: dict[tuple[int, int], torch.Tensor] = {}
        transfers = []
        for index, number in tick:
            if index == self.plan.stages - 1:
                continue
            sender, receiver = self.plan.rank_of(index), self.plan.rank_of(index + 1)
            if sender == receiver:
                if index in own:
                    received[index + 1, number] = outputs[index, number]
            elif index in own:
                output = outputs[index, number].contiguous()
                transfers.append(
                    dist.P2POp(dist.isend, output, group=self.group, group_peer=receiver)
                )
            elif index + 1 in own:
                buffer = torch.empty(shapes[number], dtype=self.dtype, device=self.device)
                received[index + 1, number] = buffer
                transfers.append(
                    dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=sender)
                )
        if transfers:
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        return received

    def _train_single_stage(
        self, micro_batches: int, inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Accumulate gradients without a pipeline; the data parallel reduction follows the last backward pass."""
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
        losses = [
            *map(value_of, losses),
            *(loss for stage in self.stages for loss in stage.take_balance_losses()),
        ]
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach().float() for loss in losses]).sum()

    def _schedule(self, micro_batches: int, rows: int, length: int) -> Any:
        """Return torch's schedule for micro-batches of this shape. The most recent ones are cached."""
        key = (micro_batches, rows, length)
        if key not in self._schedules:
            self.plan.check_micro_batches(micro_batches)
            if len(self._schedules) == _CACHED_SCHEDULES:
                self._schedules.popitem(last=False)
            stages = [self._torch_stage(stage, rows, length) for stage in self.stages]
            for stage in stages:
                stage.of_rank = stages
            schedule = TORCH_SCHEDULES[self.plan.schedule](
                stages[0] if SCHEDULES[self.plan.schedule] == "line" else stages,
                n_microbatches=micro_batches,
                loss_fn=lambda output, target: output,
                scale_grads=False,  # the loss is already normalised by the tokens of the whole step
            )
            if self.turns is not None:
                pairs = Pairs(
                    self.turns, schedule.pipeline_order[dist.get_rank(self.group)], self.device
                )
                for stage in stages:
                    stage.pairs = pairs
            self._schedules[key] = schedule
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _hidden_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        """Return the shape of what one stage sends to the next, (rows, sequence / sequence_parts, hidden)."""
        return rows, length // self.sequence_parts, self.hidden_size

    def _torch_stage(self, stage: Stage, rows: int, length: int) -> "TimedStage":
        """Make a stage for torch's schedules. Its shapes are given, so that torch need not run the model."""
        hidden = torch.empty(
            self._hidden_shape(rows, length), dtype=self.dtype, device="meta", requires_grad=True
        )
        tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        timed = TimedStage(
            stage,
            stage.spec.index,
            self.plan.stages,
            self.device,
            input_args=tokens if stage.spec.is_first else hidden,
            output_args=loss if stage.spec.is_last else hidden,
            group=self.group,
        )
        timed.clock = self.clock
        return timed


# --- how long a rank waits -------------------------------------------------------------------------------------------


class BusyClock:
    """Adds up how long a rank's stages compute and how long its schedules take; the difference is waiting time.

    Args:
        device (`torch.device`): where the stages compute; on a GPU events are recorded, on a CPU the host's clock is
            read.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self.now = self._clock.now
        self._spans: dict[str, list[tuple[Any, Any]]] = {"busy": [], "all": []}

    def add(self, kind: str, start: Any) -> None:
        """Add the time since `start` to one of the two sums.

        Args:
            kind (`str`): `busy` where a stage has computed, `all` where a schedule has run.
            start: a value of `now()`.
        """
        self._spans[kind].append((start, self.now()))
        if kind == "all" and len(self._spans["all"]) > _TIMED_SCHEDULES:
            self._spans = {"busy": [], "all": []}  # not read for long: only recent spans count

    def read(self) -> tuple[float, float, int]:
        """Return the times since the previous call and start again from zero. On a GPU it waits for the last event.

        Returns:
            Seconds in which stages computed, seconds in which schedules ran, and the number of these schedules.
        """
        spans = self._spans
        self._spans = {"busy": [], "all": []}
        for recorded in spans.values():
            if recorded:
                self._clock.wait_for(recorded[-1][1])
        busy, total = (
            sum(self._clock.seconds(start, end) for start, end in spans[kind])
            for kind in ("busy", "all")
        )
        return busy, total, len(spans["all"])


class TimedStage(ReceivingStage):
    """A stage that times its computation: everything except waiting for its neighbours.

    Where the schedule pairs passes, a forward pass runs together with the backward pass that torch calls next.
    """

    clock: BusyClock
    pairs: Pairs | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of one micro-batch and add its time to `busy`."""
        run = partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        if self.pairs is not None and self.pairs.has(self.stage_index, fwd_chunk_id):
            return self.pairs.defer(run)
        return self._timed(run)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the output of another stage of this rank, also one that is computed later."""
        take = super().set_local_fwd_input
        if isinstance(prev_stage_outputs, Deferred):
            prev_stage_outputs.when_done(lambda output: take(output, mb_index))
        else:
            take(prev_stage_outputs, mb_index)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the backward pass of one micro-batch, or its part for the inputs, and add its time to `busy`."""
        run = partial(super().backward_one_chunk, bwd_chunk_id, value_of(loss), *args, **kwargs)
        self._timed(run if self.pairs is None else partial(self.pairs.run_backward, run))

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part for the weights of one micro-batch's backward pass and add its time to `busy`."""
        self._timed(partial(super().backward_weight_one_chunk, *args, **kwargs))

    def _timed(self, run: Callable[[], Any]) -> Any:
        start = self.clock.now()
        try:
            result = run()
        except RuntimeError as error:
            # torch replaces every error of a stage by one with the shapes of its inputs
            if error.__cause__ is None:
                raise
            raise error.__cause__  # noqa: B904  # it is the error that the user's program would see in one process
        self.clock.add("busy", start)
        return result


class StageTimes:
    """Metrics of the time that stages take, for each training log.

    A run whose folder has `scaling.jsonl` also gets each rank's own time, for `hfscale report`: one slow stage slows
    all others down.

    | name | unit | meaning |
    |---|---|---|
    | `scaling/bubble_fraction` | ratio | share of the longest rank's schedule in which a rank waits, mean over ranks |
    | `stage_s` in `hfscale_ranks.jsonl` | s | computing time of a rank's stages per schedule, one number per rank |

    Args:
        clock (`BusyClock`): the clock of this rank's stages; the times that it has added up until now are discarded.
        output_dir (`Path`): the run's folder.
    """

    def __init__(self, clock: BusyClock, output_dir: Path) -> None:
        self._clock = clock
        self._folder = output_dir
        self._lines = RankLines(output_dir)
        clock.read()

    def numbers(
        self, state: TrainerState, logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the times of this rank since the previous call; its arguments are those of `LogPart`, and not used.

        Returns:
            `dict[str, float]`: seconds in which stages computed, seconds of the schedules, and their number.
        """
        busy_s, schedules_s, schedules = self._clock.read()
        return {"busy_s": busy_s, "schedules_s": schedules_s, "schedules": schedules}

    def keys(
        self, columns: Columns, state: TrainerState, logs: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metrics of the numbers of all ranks. It is called on every rank.

        Args:
            columns (`Mapping[str, Sequence[float]]`): the numbers of every rank, by name.
            state (`TrainerState`): the step, and whether this is the main process, which writes the ranks' times.
            logs (`Mapping[str, float]`): the keys of Trainer's log, which are not used.

        Returns:
            `dict[str, float]`: values by metric key; empty where no schedule has run.
        """
        busy = columns["busy_s"]
        whole = columns["schedules_s"]
        number = columns["schedules"]
        if not sum(whole):
            return {}
        if state.is_world_process_zero and (self._folder / JSONL_NAME).exists():
            own = [seconds / times for seconds, times in zip(busy, number, strict=True)]
            self._lines.add(state.global_step, {"stage_s": own})
        # A rank that finishes its part early waits outside its schedule too, so the longest schedule counts for all.
        return {"scaling/bubble_fraction": 1 - statistics.mean(busy) / max(whole)}
