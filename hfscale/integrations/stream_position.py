"""Keeps the position in a stream, so that a resumed run continues there without reading again what it has seen.

Trainer knows only how many batches it has taken from a stream; on resume it takes as many again and drops them. A
stream of `datasets` can report its position (`IterableDataset.state_dict`), but data loaders read ahead. So
`PositionedStream` remembers the position after each of the last samples that it returned, and `StreamPosition` keeps
the one after the last sample of the last step in `trainer_state.json`. It is the same for any number of ranks: either
one rank reads for all, or each rank reads everything.
"""

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import datasets
import xxhash
from torch.utils.data import IterableDataset, get_worker_info
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.integrations.trainer import TrainerAdapter, global_batch_size, resumed_from, saved_state
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_READ_AHEAD = 64  # samples
_COMPARED = 64  # entries of each column by which a sample is recognised
_LEAVE_S = 5.0  # how long the end of a pass waits for a read under way: a preemption notice may be running out


class PositionedStream(IterableDataset[Any]):
    """Reads a stream that can be set to its position after any of the last samples that it returned.

    A thread reads ahead, so that reading and tokenising need no data loader process, whose position would not be known
    here. All attributes but its own are those of the dataset.

    Args:
        dataset (`datasets.IterableDataset`): the stream to read.
    """

    def __init__(self, dataset: datasets.IterableDataset) -> None:
        self.dataset = dataset
        self.remembered = 0
        """For how many of the last samples the position is remembered."""
        self._reader: threading.Thread | None = None
        self._start: dict[str, Any] | None = None
        self._positions: dict[int, tuple[Any, str]] = {}
        self._count = 0
        self._has_ended = False
        self._first_epoch = 0

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass. Accelerate calls it before each pass.

        Args:
            epoch (`int`): number of the pass in this launch, from 0; a resumed run counts from 0 again. The dataset
                gets its number in the whole run.
        """
        self.dataset.set_epoch(self._first_epoch + epoch)

    def go_to(self, position: dict[str, Any]) -> None:
        """Let the next pass begin at a position that an earlier launch has recorded.

        Args:
            position (`dict[str, Any]`): what `position_after` returned, with `pass` (number of the pass in the run,
                from 0) and `samples` (samples taken from that pass).
        """
        self._first_epoch = position["pass"]
        self._start = position

    def position_after(self, samples: int) -> dict[str, Any] | None:
        """Return the position in this pass after a number of samples.

        It is known only after the next sample has been read too: a resumed run compares that sample to check the
        position.

        Args:
            samples (`int`): samples taken from this pass, those of earlier launches included.

        Returns:
            `dict[str, Any]` or `None`: `state` (the dataset's state as JSON values; None at the end of the pass) and
            `next` (a hash of the next sample; absent at the end of the pass). None if the position is not known.
        """
        if self._has_ended and samples >= self._count:
            return {"state": None}
        here, after = self._positions.get(samples), self._positions.get(samples + 1)
        if here is None or after is None:
            return None
        try:
            return {"state": json.loads(json.dumps(here[0])), "next": after[1]}
        except TypeError:
            return None

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:  # a worker reads ahead by itself, and its position is not used
            yield from self.dataset
            return
        start, self._start = self._start, None
        self._begin_pass()
        if start is None or start["state"] is None:
            yield from self._hand_out(None)
            return
        self._count = start["samples"]
        samples = self._hand_out(start["state"])
        first = next(samples, None)
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
        for sample in self._hand_out(None):
            if self._count > start["samples"]:
                yield sample

    def _begin_pass(self) -> None:
        self._positions = {}
        self._has_ended = False
        self._count = 0

    def _hand_out(self, state: Any) -> Iterator[Any]:
        if self._reader is not None:
            self._reader.join()  # it must not change the state of the pass that begins
        if state:
            self.dataset.set_epoch(state["epoch"])  # otherwise the state is ignored
        self.dataset.load_state_dict(state or {})
        for sample, after in self._read_ahead():
            self._count += 1
            self._positions[self._count] = (after, _digest(sample))
            self._positions.pop(self._count - self.remembered, None)
            yield sample
        self._has_ended = True

    def _read_ahead(self) -> Iterator[tuple[Any, Any]]:
        """Yield each sample with the stream's state after it, read by a thread."""
        waiting: queue.Queue[Any] = queue.Queue(_READ_AHEAD)
        is_left, end = threading.Event(), object()
        self._reader = threading.Thread(
            target=_read, args=(self.dataset, waiting, is_left, end), name="hfscale-stream", daemon=True
        )
        self._reader.start()
        try:
            while (item := waiting.get()) is not end:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            is_left.set()
            self._reader.join(_LEAVE_S)


def _read(dataset: Any, waiting: "queue.Queue[Any]", is_left: threading.Event, end: object) -> None:
    """Put each sample and the state after it into the queue, until the stream ends or `is_left` is set."""

    def hand_over(item: Any) -> None:
        while not is_left.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    try:
        for sample in dataset:
            hand_over((sample, dataset.state_dict()))
            if is_left.is_set():
                return
    except Exception as error:  # raised again where the samples are consumed
        hand_over(error)
    hand_over(end)


def _digest(sample: Any) -> str:
    """Return a hash by which a sample is recognised."""
    columns = sample.items() if isinstance(sample, dict) else enumerate([sample])
    heads = [(name, value[:_COMPARED] if hasattr(value, "__getitem__") else value) for name, value in columns]
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
        self._begun_with = 0  # samples of the pass that another launch has taken; -1: the position is not known
        self._resumed: str | None = None  # the checkpoint, until the first step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first_pass = 0
        self._pass = -1
        self._resumed = None
        batch = global_batch_size(self._adapter.trainer)
        self.stream.remembered = 4 * batch  # a step's samples, and what loaders fetch before it
        if args.dataloader_num_workers:
            logger.info(
                "a resumed run reads again what was seen of a stream, because its position is not known where data "
                "loader processes read it: set --dataloader_num_workers 0 to continue at the position"
            )
        position = saved_state(state, "stream")
        is_known = bool(position) and not args.dataloader_num_workers
        resumed = None if args.ignore_data_skip else resumed_from()
        if resumed is None:
            return
        # Other nodes may have no position in their checkpoint: rank 0 decides.
        known_samples = position["samples"] if is_known and distributed.rank() == 0 else -1
        self._begun_with = int(distributed.all_max([float(known_samples)])[0])
        if self._begun_with < 0:
            seen = state.global_step * batch
            logger.info("the position in the stream is not known: the %d sequences already seen are read again", seen)
            return
        self._resumed = resumed
        self._adapter.set_argument("ignore_data_skip", True)  # in the first pass: Trainer would drop batches
        if is_known:
            self.stream.go_to(position)
            self._first_pass = position["pass"]
            self._samples = position["samples"]
            self._steps = position["steps"]
            self._at_step = state.global_step
            logger.info("the stream continues after %d sequences of pass %d", self._samples, self._first_pass + 1)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._pass += 1
        if self._resumed is not None and self._begun_with == 0:  # the loader draws its seed when a pass begins
            self._adapter.load_rng_state(self._resumed)
        if self._resumed is None:
            self._samples = self._steps = 0
            self._at_step = state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._resumed is None:
            return
        if self._begun_with > 0:  # Trainer restores it here too after skipping: behind the first batch
            self._adapter.load_rng_state(self._resumed)
        self._adapter.restore_argument("ignore_data_skip")
        self._resumed = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        steps = state.global_step - self._at_step
        samples = self._samples + steps * global_batch_size(self._adapter.trainer)
        if state.epoch is not None:  # Trainer counts from 0 where nothing is skipped
            state.epoch += self._first_pass + self._steps / state.max_steps
        saved, position = saved_state(state, "stream"), self.stream.position_after(samples)
        saved.clear()
        if position is None:
            return
        if position["state"] is None:  # the next pass is to begin
            saved |= {"pass": self._first_pass + self._pass + 1, "samples": 0, "steps": 0} | position
        else:
            saved |= {"pass": self._first_pass + self._pass, "samples": samples, "steps": self._steps + steps}
            saved |= position


def track_stream(adapter: TrainerAdapter) -> None:
    """Keep the position in the checkpoints if the Trainer's training data is a stream of `datasets`.

    Call it before the training begins. Other training data is left alone.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that will train.
    """
    dataset = adapter.trainer.train_dataset
    if isinstance(dataset, datasets.IterableDataset):
        stream = PositionedStream(dataset)
        adapter.replace_train_dataset(stream)
        adapter.append_callback(StreamPosition(adapter, stream))
