"""Another number of micro-batches in each optimizer step: the loop of Trainer takes it to be constant.

`Trainer._run_epoch` reads `args.gradient_accumulation_steps` anew for each micro-batch, and asks with a remainder
whether the micro-batch ends a step. So each step gets a number of its own, `MicroBatches`, whose remainder counts from
the beginning of that step. What Trainer computes from a constant number is replaced: how many steps a pass and the
training have, where a checkpoint continues, and how many micro-batches are fetched for a step.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.spelling import spelled
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError, UsageError
from hfscale.facts.batch_schedule import Count, Data
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import (
    begin_growing_batch_state,
    global_batch_size,
    growing_batch_state,
)
from hfscale.trainer.strategies import Strategy


class MicroBatches(int):
    """The micro-batches of one optimizer step, where they may be another number in the next one.

    It is the integer that it stands for, except that `n % MicroBatches(...)` counts from the step's first micro-batch.

    Args:
        number (`int`): micro-batches of the step.
        first (`int`): micro-batches of the pass before this step.
    """

    first: int

    def __new__(cls, number: int, first: int = 0) -> "MicroBatches":
        made = super().__new__(cls, number)
        made.first = first
        return made

    def __rmod__(self, number: int) -> int:
        return (number - self.first) % int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # training_args.bin needs no hfscale


class BatchSource(Protocol):
    """Says which global batch each step has."""

    def check(self, data: Data) -> None:
        """Raise a UsageError if these data cannot be trained on."""

    def check_earlier(self, batch: int) -> None:
        """Raise a UsageError if a training with a constant global batch cannot go on with the batches to come."""

    def count(self, data: Data, *, passes: float | None, steps: int | None) -> Count:
        """Return how long a training is that ends after passes, or after steps; of unknown batches the most steps."""

    def choose(self, state: TrainerState, samples: int) -> int:
        """Return the global batch of the step that begins after `samples` sequences."""

    def chosen(self, batch: int) -> None:
        """Hear the global batch of the step that is about to be fetched, or in which a training begins."""

    def fetched(self, batches: list[Any]) -> None:
        """Hear the micro-batches of the step that is about to be taken, on every rank."""

    def stepped(self, state: TrainerState, samples: int) -> None:
        """Hear that a step has ended, after which `samples` sequences have been seen."""


class ChangingAccumulation(TrainerCallback):
    """Has each step of a Trainer accumulate as many micro-batches as a source says.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer.
        source (`BatchSource`): says which global batch each step has.
    """

    def __init__(self, adapter: TrainerAdapter, source: BatchSource) -> None:
        self._adapter = adapter
        self._trainer = adapter.trainer
        self._source = source
        self._data: Data | None = None
        self._wanted = 0.0  # micro-batches of the training; infinite where it ends after steps
        self._resumed_pass: int | None = None
        self._done = self._fetched = 0  # micro-batches of this pass
        self._begun_with = 0  # sequences of earlier launches
        adapter.wrap_counting(self._counting)

    def begin(self) -> None:
        """Take part in the training that begins. Call it before its data loader is made."""
        self._adapter.wrap_method("_init_training_state", self._resuming)
        self._adapter.wrap_method("_run_epoch", self._running)
        self._adapter.wrap_method("get_batch_samples", self._fetching)
        self._adapter.wrap_method("_finalize_training", self._ending)
        self._adapter.prepend_callback(self)

    # ---- how long the training is

    def _counting(self, count: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(count)
        def count_steps(args: TrainingArguments, dataloader: Any) -> tuple[Any, ...]:
            passes, _, examples, samples, _, per_pass, _ = count(args, dataloader)
            micro_batch = global_batch_size(self._trainer) // args.gradient_accumulation_steps
            known = int(per_pass) if has_length(dataloader) else None
            in_pass = None if args.dataloader_drop_last else examples
            self._data = data = Data(micro_batch=micro_batch, per_pass=known, samples=in_pass)
            self._source.check(data)
            is_by_steps = args.max_steps > 0
            found = self._source.count(
                data,
                passes=None if is_by_steps else args.num_train_epochs,
                steps=args.max_steps if is_by_steps else None,
            )
            return _values(found, data, passes, examples, samples, is_by_steps)

        return count_steps

    # ---- where it continues

    def _resuming(self, resume: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
        @functools.wraps(resume)
        def find_position(*args: Any, **kwargs: Any) -> tuple[int, int]:
            resume(*args, **kwargs)
            state = self._trainer.state
            saved = begin_growing_batch_state(state)
            if state.global_step == 0:
                saved |= {"pass": 0, "in_pass": 0, "samples": 0}
            if "samples" not in saved:
                saved |= self._after_constant_batch(state.global_step)
            self._begun_with = saved["samples"]
            self._done, self._resumed_pass = self._skipped(saved), saved["pass"]
            self._set(self._source.choose(state, saved["samples"]))
            return saved["pass"], self._done

        return find_position

    def _after_constant_batch(self, steps: int) -> dict[str, int]:
        """Return the position of a checkpoint that was written with a constant batch, which its manifest has."""
        assert self._data is not None
        manifest = Path(self._adapter.resumes_from or "") / MANIFEST_NAME
        if not manifest.is_file() or self._trainer.args.dataloader_drop_last:
            raise UsageError(
                f"{spelled('batch_schedule')}: the checkpoint is of a training with a constant global batch, and it "
                "is not known how much that has seen; resume without it, or start a new run from its weights"
            )
        batch = int(read_json(manifest)["global_batch_size"])
        self._source.check_earlier(batch)
        passes, steps_of_pass = divmod(steps, -(-self._data.samples_of_pass // batch))
        in_pass = steps_of_pass * batch
        samples = passes * self._data.samples_of_pass + in_pass
        return {"pass": passes, "in_pass": in_pass, "samples": samples}

    def _skipped(self, saved: dict[str, Any]) -> int:
        """Return the micro-batches of this pass that another launch has trained on."""
        assert self._data is not None
        if self._trainer.args.ignore_data_skip:
            saved["in_pass"] = 0
        in_pass: int = saved["in_pass"]
        skipped, rest = divmod(in_pass, self._data.micro_batch)
        if rest:
            raise CheckpointError(
                f"the checkpoint continues after {saved['in_pass']} sequences of the pass, which is no number of "
                f"micro-batches of {self._data.micro_batch}: use another per_device_train_batch_size or number of "
                "processes"
            )
        return skipped

    # ---- each step

    def _running(self, run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def run_epoch(*args: Any, **kwargs: Any) -> None:
            if kwargs["epoch"] != self._resumed_pass:
                self._done = 0
            self._resumed_pass = None
            # More than there can be: `on_step_end` ends the pass
            kwargs["num_update_steps_per_epoch"] = kwargs["steps_in_epoch"] + 1
            run(*args, **kwargs)

        return run_epoch

    def _fetching(self, fetch: Callable[..., tuple[list[Any], Any]]) -> Callable[..., Any]:
        @functools.wraps(fetch)
        def fetch_step(iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
            assert self._data is not None
            state = self._trainer.state
            self._set(self._source.choose(state, growing_batch_state(state)["samples"]))
            number = int(self._trainer.args.gradient_accumulation_steps)
            if self._data.per_pass is not None:
                number = min(number, self._data.per_pass - self._done)
            batches, items = fetch(iterator, number, device)
            self._fetched = len(batches)
            self._source.fetched(batches)
            return batches, items

        return fetch_step

    def _set(self, batch: int) -> None:
        """Let the next step have a global batch."""
        assert self._data is not None
        number = batch // self._data.micro_batch
        self._adapter.set_argument(
            "gradient_accumulation_steps", MicroBatches(number, first=self._done)
        )
        Strategy.of(self._trainer).set_accumulation(number)
        self._source.chosen(batch)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        data = self._data
        assert data is not None
        saved = growing_batch_state(state)
        before = saved["samples"] - saved["in_pass"]
        self._done += self._fetched
        saved["in_pass"] = self._done * data.micro_batch
        saved["samples"] = before + saved["in_pass"]
        if data.per_pass is None:
            self._source.stepped(state, saved["samples"])
            return
        done_in_all = saved["pass"] * data.per_pass + self._done
        if self._done >= data.per_pass:
            saved["pass"] += 1
            saved["in_pass"] = 0
            saved["samples"] = before + data.samples_of_pass
            control.should_epoch_stop = True
        self._source.stepped(state, saved["samples"])
        ends = args.max_steps <= 0 and done_in_all >= args.num_train_epochs * data.per_pass
        if ends:
            # The steps that a measured batch leaves are not known before
            state.max_steps = state.global_step

    # ---- the end

    def _ending(self, end: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(end)
        def end_training(trial: Any, num_train_samples: float, start_time: float) -> Any:
            state = self._trainer.state
            steps = state.global_step - self._trainer._initial_global_step
            if steps:
                # Trainer takes the share of the steps for the share of the samples
                trained = growing_batch_state(state)["samples"] - self._begun_with
                num_train_samples = trained * state.max_steps / steps
            return end(trial, num_train_samples, start_time)

        return end_training


def _values(
    found: Count, data: Data, passes: int, examples: int, samples: int, is_by_steps: bool
) -> tuple[Any, ...]:
    """What `Trainer.set_initial_training_values` returns, for a batch that changes."""
    steps_of_pass = found.steps
    steps_in_epoch = -(-found.samples // data.micro_batch)
    if data.per_pass is not None:
        steps_in_epoch = data.per_pass
        steps_of_pass = max(round(found.steps / max(found.passes, 1)), 1)
        if is_by_steps:
            passes = math.ceil(found.passes)
    if is_by_steps:
        samples = found.samples
    batch = found.samples // max(found.steps, 1)
    return passes, steps_of_pass, examples, samples, batch, steps_in_epoch, found.steps
