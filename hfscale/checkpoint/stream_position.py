"""Keeps the position in a stream, so that a resumed run continues there without reading again what it has seen.

Trainer knows only how many batches it has taken from a stream; on resume it takes as many again and drops them. A
stream of `datasets` can report its position (`IterableDataset.state_dict`), but data loaders read ahead. So
`PositionedStream` remembers the position after each of the last samples that it returned, and `StreamPosition` keeps
the one after the last sample of the last step in `trainer_state.json`. It is the same for any number of ranks: either
one rank reads for all, or each rank reads everything.

Where worker processes of a loader read the stream, each of them is at a position of its own, ahead of the training;
they take turns by batches, and a new loader begins with the first worker, whichever was next. So the pass is read
again from its beginning, by workers that start with the seed of the first time: rank 0's is in the checkpoint.

Functions that a stream maps over its samples may draw random numbers. They draw from the same sequence as without
`PositionedStream`, because it reads a sample only when it is asked for one. Samples that were read ahead are read
again after a resume, with the states that the random number generators had when they were read.
"""

import functools
import itertools
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import xxhash
from torch.utils.data import get_worker_info
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.data_order.random_states import global_states, plain, set_global_states
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import global_batch_size, saved_state

logger = get_logger(__name__)

_COMPARED = 64  # entries of each column by which a sample is recognised
_END = object()


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """A sample whose reading drew random numbers."""

    number: int
    """Number of the sample in the pass, counted from 1."""
    before: dict[str, Any]
    """The states before it of the generators that were drawn from (`global_states`)."""
    continues: bool
    """Whether nothing else has drawn from them since the draw before."""


class PositionedStream(datasets.IterableDataset):  # type: ignore[misc]
    """Reads a stream that can be set to its position after any of the last samples that it returned.

    It is a copy of the dataset: other libraries treat it as one.

    Args:
        dataset (`datasets.IterableDataset`): the stream to read; it is not changed.
    """

    def __init__(self, dataset: datasets.IterableDataset) -> None:
        self.__dict__.update(vars(dataset))
        self.remembered = 0
        """For how many of the last samples the position is remembered."""
        self._start: dict[str, Any] | None = None
        # What is called before a sample is read, by its number
        self._before: dict[int, Callable[[], None]] = {}
        self._first_epoch = 0
        self._begin_pass()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass. Accelerate calls it before each pass.

        Args:
            epoch (`int`): number of the pass in this launch, from 0; a resumed run counts from 0 again. The dataset
                gets its number in the whole run.
        """
        super().set_epoch(self._first_epoch + epoch)

    def begin_with_pass(self, number: int) -> None:
        """Let this launch begin with a later pass, which it reads from the beginning.

        Args:
            number (`int`): number of the pass in the run, from 0.
        """
        self._first_epoch = number

    def go_to(self, position: dict[str, Any], finish: Callable[[], None]) -> None:
        """Let the next pass begin at a position that an earlier launch has recorded.

        Args:
            position (`dict[str, Any]`): what `position_after` returned, with `pass` (number of the pass in the run,
                from 0) and `samples` (samples taken from that pass).
            finish (`Callable`): called when the samples that the earlier launch had read have been read again; it
                sets the random number generators to their states in the checkpoint.
        """
        self._first_epoch = position["pass"]
        self._start = position
        for number, states in position.get("random", ()):
            self._before[number] = functools.partial(set_global_states, states)
        self._before[position.get("read", -1) + 1] = finish

    def position_after(self, samples: int) -> dict[str, Any] | None:
        """Return the position in this pass after a number of samples.

        It is known only after the next sample has been read too: a resumed run compares that sample to check the
        position.

        Args:
            samples (`int`): samples taken from this pass, those of earlier launches included.

        Returns:
            `dict[str, Any]` or `None`: `state` (the dataset's state as JSON values; None at the end of the pass) and
            `next` (a hash of the next sample; absent at the end of the pass), `drop` (samples to drop before it),
            `read` (samples read from this pass) and `random` (numbers of samples, and the states to which the random
            number generators are set before them; empty if reading draws no random numbers). None if the position is
            not known.
        """
        if self._has_ended and samples >= self._count:
            return {"state": None}
        after = self._positions.get(samples + 1)
        if after is None or samples not in self._positions:
            return None
        # A function that maps batches draws for all samples of a batch when the first one is read. If that is the next
        # one, the dataset maps the batch before it once more: then it begins a sample earlier.
        last = [draw for draw in self._draws if draw.number <= samples + 1][-1:]
        drop = int(
            any(draw.number == samples + 1 for draw in last) and samples - 1 in self._positions
        )
        ahead = [draw for draw in self._draws if draw.number > samples + 1 and not draw.continues]
        states = [
            *((samples + 1, draw.before) for draw in last),
            *((draw.number, draw.before) for draw in ahead),
        ]
        try:
            state = json.loads(json.dumps(self._positions[samples - drop][0]))
        except TypeError:
            return None
        return {
            "state": state,
            "next": after[1],
            "drop": drop,
            "read": self._count,
            "random": states,
        }

    def __iter__(self) -> Iterator[Any]:
        # A worker reads ahead by itself, and its position is not used
        if get_worker_info() is not None:
            yield from super().__iter__()
            return
        start, self._start = self._start, None
        self._begin_pass()
        if start is None or start["state"] is None:
            yield from self._read(None)
            return
        drop = start.get("drop", 0)
        self._count = start["samples"] - drop
        samples = self._read(start["state"])
        first = next(itertools.islice(samples, drop, None), None)
        if first is not None and _digest(first) == start["next"]:
            yield first
            yield from samples
            return
        samples.close()
        logger.warning(
            "the stream cannot continue at its recorded position (a stream with a shuffle buffer never can): the %d "
            "sequences already seen are read again and dropped",
            start["samples"],
        )
        self._begin_pass()
        for sample in self._read(None):
            if self._count > start["samples"]:
                yield sample

    def _begin_pass(self) -> None:
        self._positions: dict[int, tuple[Any, str]] = {}
        self._draws: list[_Draw] = []
        self._has_ended = False
        self._count = 0

    def _read(self, state: Any) -> Generator[Any, None, None]:
        if state:
            super().set_epoch(state["epoch"])  # otherwise the state is ignored
        self.load_state_dict(state or {})
        samples = super().__iter__()
        last: dict[str, Any] = {}  # the states after the last draw
        while True:
            self._before.pop(self._count + 1, lambda: None)()
            before = plain(global_states())
            sample = next(samples, _END)
            if sample is _END:
                break
            self._count += 1
            after = plain(global_states())
            drawn = {name: states for name, states in before.items() if states != after[name]}
            if drawn:
                continues = all(last.get(name) == states for name, states in drawn.items())
                self._draws.append(_Draw(number=self._count, before=drawn, continues=continues))
                last = after
            self._positions[self._count] = (self.state_dict(), _digest(sample))
            self._forget(self._count - self.remembered)
            yield sample
        self._has_ended = True

    def _forget(self, number: int) -> None:
        """Drop what belongs to samples up to this one, except for the last draw."""
        self._positions.pop(number, None)
        while len(self._draws) > 1 and self._draws[1].number <= number:
            del self._draws[0]


def _digest(sample: Any) -> str:
    """Return a hash by which a sample is recognised."""
    columns = sample.items() if isinstance(sample, dict) else enumerate([sample])
    heads = [
        (name, value[:_COMPARED] if hasattr(value, "__getitem__") else value)
        for name, value in columns
    ]
    return xxhash.xxh3_64_hexdigest(repr(heads).encode())


class StreamPosition(TrainerCallback):
    """Keeps the position of a Trainer's stream in its checkpoints, and resumes there.

    `track_stream` adds it to the Trainer.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains on the stream.
        stream (`PositionedStream`): the Trainer's training data.
    """

    def __init__(self, adapter: TrainerAdapter, stream: PositionedStream) -> None:
        self.stream = stream
        self._adapter = adapter
        self._first_pass = 0  # the pass of the run in which this training begins
        self._pass = 0  # of this training
        self._samples = self._steps = 0  # of this pass, taken before `_at_step`
        self._at_step = 0
        # Samples of the pass that another launch has taken; -1: the position is not known
        self._begun_with = 0
        self._resumed: str | None = None  # the checkpoint, until the first step
        self._must_load_rng_state = False
        # The random states with which the pass that workers read began
        self._seed_state: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first_pass = 0
        self._pass = -1
        self._resumed = None
        self._seed_state = {}
        batch = global_batch_size(self._adapter.trainer)
        self.stream.remembered = 4 * batch  # a step's samples, and what loaders fetch before it
        workers = args.dataloader_num_workers
        if workers:
            logger.info(
                "a resumed run reads again what was seen of this pass of a stream, because its position is not known "
                "where data loader processes read it: set dataloader_num_workers to 0 to continue at the position"
            )
        position = saved_state(state, "stream")
        is_known = bool(position) and position.get("workers", 0) == workers
        dataset = kwargs["train_dataloader"].dataset
        if isinstance(dataset, datasets.IterableDataset) and dataset is not self.stream:
            # Accelerate has given each process a part of the files (`dispatch_batches` false)
            is_known = False
        resumed = None if args.ignore_data_skip else self._adapter.resumes_from
        if resumed is None:
            return
        if position and position.get("workers", 0) != workers:
            logger.warning(
                "%d processes of the data loader read the stream, and now %d do: the sequences come in another order, "
                "so that some of them are seen twice or never",
                position.get("workers", 0),
                workers,
            )
        # Other nodes may have no position in their checkpoint: rank 0 decides.
        known_samples = position["samples"] if is_known and distributed.rank() == 0 else -1
        self._begun_with = int(TRAINING.maximum("start: stream", [float(known_samples)])[0])
        if self._begun_with < 0:
            seen = state.global_step * batch
            logger.info(
                "the position in the stream is not known: the %d sequences already seen are read again",
                seen,
            )
            return
        self._resumed = resumed
        self._must_load_rng_state = True
        # In the first pass: Trainer would drop batches
        self._adapter.set_argument("ignore_data_skip", True)
        if workers:
            self._adapter.drop_batches(self._begun_with // batch * args.gradient_accumulation_steps)
        if is_known:
            self._go_to(position, state, workers)

    def _go_to(self, position: dict[str, Any], state: TrainerState, workers: int) -> None:
        """Begin at a position of an earlier launch, or, with workers, at the beginning of its pass."""
        self._first_pass = position["pass"]
        self._samples = position["samples"]
        self._steps = position["steps"]
        self._at_step = state.global_step
        if workers:
            self.stream.begin_with_pass(position["pass"])
            self._seed_state = {name: position[name] for name in ("torch",) if name in position}
            after = "the %d sequences already seen of pass %d are read again and dropped"
        else:
            self.stream.go_to(position, self._load_rng_state)
            after = "the stream continues after %d sequences of pass %d"
        logger.info(after, self._samples, self._first_pass + 1)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._pass += 1
        # The loader draws its seed when a pass begins
        if self._resumed is not None and self._begun_with == 0:
            self._adapter.load_rng_state(self._resumed)
        if self._resumed is None:
            self._samples = self._steps = 0
            self._at_step = state.global_step
        if args.dataloader_num_workers:  # they start with the seed that the loader draws now
            if self._resumed is not None:
                set_global_states(self._seed_state)  # empty where a new pass begins
            self._seed_state = plain({"torch": global_states()["torch"]})

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._resumed is None:
            return
        if self._begun_with > 0:
            # Unless the stream has called it; ranks that read nothing have no stream
            self._load_rng_state()
        self._adapter.restore_argument("ignore_data_skip")
        self._resumed = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        steps = state.global_step - self._at_step
        samples = self._samples + steps * global_batch_size(self._adapter.trainer)
        if state.epoch is not None:  # Trainer counts from 0 where nothing is skipped
            state.epoch += self._first_pass + self._steps / state.max_steps
        saved = saved_state(state, "stream")
        position = (
            self._position_of_workers()
            if args.dataloader_num_workers
            else self.stream.position_after(samples)
        )
        saved.clear()
        if position is None:
            return
        if position["state"] is None:  # the next pass is to begin
            saved |= {
                "pass": self._first_pass + self._pass + 1,
                "samples": 0,
                "steps": 0,
            } | position
        else:
            saved |= {
                "pass": self._first_pass + self._pass,
                "samples": samples,
                "steps": self._steps + steps,
            }
            saved |= position

    def _position_of_workers(self) -> dict[str, Any]:
        """Return the number of workers, whether their pass has ended (`state` is None), and the seed that began it."""
        trainer = self._adapter.trainer
        found = {"workers": trainer.args.dataloader_num_workers}
        if trainer.accelerator.gradient_state.end_of_dataloader:
            return found | {"state": None}
        return found | {"state": {}} | self._seed_state

    def _load_rng_state(self) -> None:
        """Set this rank's random number generators to their states in the checkpoint, the first time it is called."""
        if self._must_load_rng_state and self._resumed is not None:
            self._adapter.load_rng_state(self._resumed)
        self._must_load_rng_state = False


def track_stream(adapter: TrainerAdapter) -> None:
    """Keep the position in the checkpoints if the Trainer's training data is a stream of `datasets`.

    Call it before the training begins. Other training data is left alone.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that will train.
    """
    dataset = adapter.trainer.train_dataset
    if type(dataset) is datasets.IterableDataset:
        stream = PositionedStream(dataset)
        adapter.replace_train_dataset(stream)
        adapter.append_callback(StreamPosition(adapter, stream))
