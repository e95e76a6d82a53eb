"""The global batch of each step by a schedule or by the measured noise scale, and what follows it.

`hfscale.facts.batch_schedule` reads the schedule, `hfscale.trainer.accumulation` has the Trainer accumulate by it.
Here is which batch a step has, and how the learning rate schedule counts sequences: it ends where the data end,
however large the steps have become.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerState

from hfscale.core.collectives import TRAINING
from hfscale.core.spelling import spelled
from hfscale.core.versions import has_epoch_methods
from hfscale.errors import UsageError
from hfscale.facts.batch_schedule import (
    BatchSchedule,
    Count,
    Data,
    check_divisible,
    count,
)
from hfscale.trainer.accumulation import ChangingAccumulation
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.loss_rule import why_loss_grows
from hfscale.trainer.state import global_batch_size, growing_batch_state
from hfscale.trainer.strategies import Strategy

NOISE_SCALE = "scaling/noise_scale"
_STEP_ARGUMENTS = ("num_decay_steps", "num_stable_steps", "timescale")
"""The arguments of transformers' learning rate schedules that are numbers of steps."""

_GENERATED = "_buffered_inputs"
"""Attribute in which trainers of TRL keep the batches of one generation."""


class GrowingBatch:
    """Chooses the global batch of each step of a Trainer, and moves its learning rate schedule.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer.
        schedule (`BatchSchedule`): with thresholds in sequences.
        row_length (`int`, *optional*): tokens of a row, by which thresholds were computed; None: they count sequences.
        counts_tokens (`bool`): whether the learning rate schedule counts tokens; False: optimizer steps.
        on_change (`Callable`): called when another global batch begins, before its first step.
    """

    def __init__(
        self,
        adapter: TrainerAdapter,
        schedule: BatchSchedule,
        *,
        row_length: int | None,
        counts_tokens: bool,
        on_change: Callable[[], None],
    ) -> None:
        self._adapter = adapter
        self._trainer = adapter.trainer
        self._schedule = schedule
        self._row_length = row_length
        self._has_compared_rows = False
        self._counts_tokens = counts_tokens
        self._on_change = on_change
        self._samples = 0  # of the whole training
        self._seen = 0
        self.batch: int | None = None
        """The global batch of the step that is running or has ended last, sequences."""
        self._accumulation = ChangingAccumulation(adapter, self)

    def begin(self) -> None:
        """Take part in the training that begins. Call it before its data loader is made."""
        self.batch = None
        self._check_trainer()
        self._accumulation.begin()
        self._adapter.announced.grows_batch = True
        if self._counts_tokens:
            self._adapter.wrap_method("create_scheduler", self._creating_scheduler)

    def _check_trainer(self) -> None:
        """Refuse a Trainer whose steps or samples depend on a constant batch."""
        args = self._trainer.args
        if not has_epoch_methods():
            raise _refused("it needs transformers 5.4 or newer")
        # Trainers that train on policy may read all micro-batches of a step at once
        reads_steps = _GENERATED in vars(self._trainer)
        if reads_steps or hasattr(args, "steps_per_generation") or hasattr(args, "num_generations"):
            kind = type(self._trainer).__name__
            raise _refused(
                f"{kind} generates completions for a constant number of steps; leave it out"
            )
        by_length = getattr(args, "train_sampling_strategy", "random")
        if by_length not in ("random", "sequential"):
            given = spelled("train_sampling_strategy", by_length)
            raise _refused(
                f"the order of the samples of {given} depends on the global batch; use random or sequential"
            )

    def check_loss(self) -> None:
        """Refuse a model whose loss grows with the micro-batches of a step. Call it when the training begins."""
        trainer = self._trainer
        per_step = global_batch_size(trainer) // trainer.args.gradient_accumulation_steps
        grows = why_loss_grows(trainer, max(self._schedule.sizes) // per_step)
        if grows is not None:
            raise _refused(grows)

    # ---- what `ChangingAccumulation` asks

    def check(self, data: Data) -> None:
        """Raise a UsageError if these data cannot be trained on with the schedule."""
        args = self._trainer.args
        given = int(args.gradient_accumulation_steps)
        first = self._schedule.first // data.micro_batch
        if self.batch is None and given not in (1, first):
            raise UsageError(
                f"{spelled('gradient_accumulation_steps')} is {given}, and {spelled('batch_schedule')} begins with "
                f"{self._schedule.first} sequences: leave it out, as the schedule decides it"
            )
        check_divisible(self._schedule, data.micro_batch)
        self._check_accumulated(data.micro_batch)
        if data.per_pass is None:
            raise _refused(
                "the training data have no length, so that a resumed run would not find its place in them; use data "
                "with a length, which is no stream"
            )
        # A learning rate schedule is made for a length, and the batches of `auto` are not known before
        is_by_steps = args.max_steps > 0
        if self._schedule.is_measured and self._counts_tokens == is_by_steps:
            bound = spelled("max_steps" if is_by_steps else "num_train_epochs")
            counted, instead = ("tokens", "steps") if is_by_steps else ("steps", "tokens")
            raise _refused(
                f"with auto and {bound} it is not known where a learning rate schedule ends that counts {counted}: "
                f"use {spelled('lr_clock', instead)}"
            )

    def _check_accumulated(self, micro_batch: int) -> None:
        """Refuse a batch of which the engine cannot run the micro-batches."""
        strategy = Strategy.of(self._trainer)
        for size in self._schedule.sizes:
            number = size // micro_batch
            reason = strategy.why_not_accumulated(number)
            if reason is not None:
                raise _refused(
                    f"{size} sequences are {number} micro-batches of {micro_batch}: {reason}; write other batches, or "
                    f"set another {spelled('per_device_train_batch_size')}"
                )

    def check_earlier(self, batch: int) -> None:
        """Refuse to continue a training with a constant batch whose learning rate schedule is at no full unit."""
        if self._counts_tokens and batch % self._schedule.unit:
            raise _refused(
                f"the checkpoint has a constant batch of {batch} sequences, which is no multiple of the "
                f"{self._schedule.unit} in which the learning rate schedule counts; use {spelled('lr_clock', 'steps')}"
            )

    def count(self, data: Data, *, passes: float | None, steps: int | None) -> Count:
        """Return how long the training is; of unknown batches the most steps."""
        found = count(self._schedule, data, passes=passes, steps=steps)
        self._samples = found.samples
        return found

    def choose(self, state: TrainerState, samples: int) -> int:
        """Return the global batch of the step that begins after `samples` sequences."""
        if not self._schedule.is_measured:
            return self._schedule.batch_after(samples)
        return int(growing_batch_state(state).get("batch", self._schedule.first))

    def chosen(self, batch: int) -> None:
        """Hear the global batch of the step that is about to be fetched, or in which a training begins."""
        if batch == self.batch:
            return
        self.batch = batch
        self._on_change()

    def fetched(self, batches: list[Any]) -> None:
        """Refuse rows that have not the length by which the thresholds in tokens were computed, in the first step."""
        if self._row_length is None or self._has_compared_rows:
            return
        self._has_compared_rows = True
        with TRAINING.agreed("start: row length"):  # the rows of one rank may be shorter
            for batch in batches:
                length = _length_of_rows(batch)
                if length != self._row_length:
                    found = f"rows have {length or 'no'} tokens"
                    raise _refused(
                        f"{found}, and thresholds in tokens need rows of {self._row_length} (block_size); count "
                        "sequences instead, as in 512@100Ksamples"
                    )

    def stepped(self, state: TrainerState, samples: int) -> None:
        """Move the learning rate schedule to where the sequences are; Trainer has moved it by one."""
        saved = growing_batch_state(state)
        before, saved["moved_at"] = saved.get("moved_at", 0), samples
        if self._trainer.accelerator.optimizer_step_was_skipped:
            # As Trainer, which does not move it then: the gradients have overflown
            saved["skipped"] = saved.get("skipped", 0) + samples - before
        self.move_schedule(state)

    def move_schedule(self, state: TrainerState) -> None:
        """Move the learning rate schedule to where the sequences are, if it counts tokens.

        Args:
            state (`TrainerState`): the state of the Trainer, when a training begins or a step has ended.
        """
        wrapped: Any = self._trainer.lr_scheduler
        scheduler = getattr(wrapped, "scheduler", wrapped)
        counts_evaluations = "metrics" in inspect.signature(scheduler.step).parameters
        if not self._counts_tokens or counts_evaluations:
            return
        saved = growing_batch_state(state)
        target = (saved["samples"] - saved.get("skipped", 0)) // self._schedule.unit
        while scheduler.last_epoch < target:
            scheduler.step()

    # ---- the learning rate schedule

    def _creating_scheduler(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def create_scheduler(num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
            ratio = self._schedule.first / self._schedule.unit
            if self._trainer.lr_scheduler is not None and ratio != 1:
                raise _refused(
                    f"the given learning rate schedule counts steps of {self._schedule.first} sequences, of which "
                    f"{self._schedule.text()} are no multiples; use {spelled('lr_clock', 'steps')}"
                )
            units = math.ceil(self._samples / self._schedule.unit)
            arguments = self._trainer.args
            given = {
                name: vars(arguments).get(name) for name in ("warmup_steps", "lr_scheduler_kwargs")
            }
            try:
                vars(arguments).update(_in_units(given, ratio))
                return create(units, *args, **kwargs)
            finally:
                vars(arguments).update(given)

        return create_scheduler

    # ---- a batch that follows the noise scale

    def check_measured(self) -> None:
        """Refuse `auto` where the noise scale is not measured. Call it before the first step."""
        if not self._schedule.is_measured:
            return
        why = self._adapter.announced.why_unmeasured(NOISE_SCALE)
        if why is not None:
            raise _refused(
                f"the noise scale that it follows is not measured: {why}; it needs ScalingMetricsCallback with "
                f"{spelled('noise_scale', True)}"
            )

    def noise_measured(self, state: TrainerState, noise_scale: float) -> None:
        """Double the batch of the next step if the noise scale is twice as large.

        Args:
            state (`TrainerState`): the state of the Trainer.
            noise_scale (`float`): in sequences, the same on every rank.
        """
        if not self._schedule.is_measured or self.batch is None:
            return
        doubled = 2 * self.batch
        if doubled in self._schedule.sizes and noise_scale >= doubled:
            growing_batch_state(state)["batch"] = doubled


def _length_of_rows(batch: Any) -> int | None:
    """Return the positions of a row of a batch; None where it has no tokens."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return None
    return int(batch["input_ids"].shape[-1])


def _refused(reason: str) -> UsageError:
    return UsageError(f"{spelled('batch_schedule')}: {reason}")


def _in_units(given: dict[str, Any], ratio: float) -> dict[str, Any]:
    """Return the arguments of a learning rate schedule that are numbers of steps in units; shares stay."""
    warmup = given["warmup_steps"]
    found = dict(given)
    if warmup and warmup >= 1:
        found["warmup_steps"] = round(warmup * ratio)
    kwargs = given["lr_scheduler_kwargs"]
    if isinstance(kwargs, dict):
        found["lr_scheduler_kwargs"] = {
            name: round(value * ratio) if name in _STEP_ARGUMENTS and value else value
            for name, value in kwargs.items()
        }
    return found
