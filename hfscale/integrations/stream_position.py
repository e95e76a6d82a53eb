"""Where in a stream the training is, so that a resumed run goes on there without reading again what it has seen.

Trainer knows only how many batches it has taken from a stream, and on resume takes as many again and drops them. A
stream of `datasets` can say where it stands (`IterableDataset.state_dict`), but data loaders read ahead. So
`PlacedStream` remembers the place after each of the samples handed out last, and `StreamPlace` keeps, in
`trainer_state.json`, the one after the last sample of the last step. It is the same for any number of ranks: one rank
reads for all, or each reads all.
"""

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import datasets
import xxhash
from torch.utils.data import IterableDataset, get_worker_info
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.integrations.trainer import calling_trainer, global_batch_size, resumed_from, saved_state
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_READ_AHEAD = 64  # samples
_COMPARED = 64  # entries of each column by which a sample is known again
_LEAVE_S = 5.0  # that the end of a pass waits for a read under way; a notice may be running out


class PlacedStream(IterableDataset[Any]):
    """A stream that can be put back to where it was after any of the last samples that it handed out.

    A thread reads ahead, so that reading and tokenising need no data loader process, whose place nobody would know.

    Args:
        dataset (`datasets.IterableDataset`): whatever else is asked of the stream, it answers.
    """

    def __init__(self, dataset: datasets.IterableDataset) -> None:
        self.dataset = dataset
        self.remembered = 0
        """Of how many samples, the last ones, the place is remembered."""
        self._reader: threading.Thread | None = None
        self._start: dict[str, Any] | None = None
        self._places: dict[int, tuple[Any, str]] = {}
        self._count, self._has_ended, self._first_epoch = 0, False, 0

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """What accelerate calls before each pass; a resumed run counts its passes from 0 again."""
        self.dataset.set_epoch(self._first_epoch + epoch)

    def go_to(self, place: dict[str, Any]) -> None:
        """Let the next pass begin at a place that `place_after` has given."""
        self._first_epoch, self._start = place["pass"], place

    def place_after(self, samples: int) -> dict[str, Any] | None:
        """The place in this pass after so many samples, for JSON; None where it is not known.

        It is known once the next sample has been read too: by that one a resumed run sees that it is right.
        """
        if self._has_ended and samples >= self._count:
            return {"state": None}
        here, after = self._places.get(samples), self._places.get(samples + 1)
        if here is None or after is None:
            return None
        try:
            return {"state": json.loads(json.dumps(here[0])), "next": after[1]}
        except TypeError:
            return None

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:  # which reads ahead by itself, and whose place nobody asks for
            yield from self.dataset
            return
        start, self._start = self._start, None
        self._places, self._has_ended, self._count = {}, False, 0
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
            "the stream does not go on where it was, as one with a shuffle buffer cannot: the %d sequences already "
            "seen are read again and left out",
            start["samples"],
        )
        self._places, self._has_ended, self._count = {}, False, 0
        for sample in self._hand_out(None):
            if self._count > start["samples"]:
                yield sample

    def _hand_out(self, state: Any) -> Iterator[Any]:
        if self._reader is not None:
            self._reader.join()  # it must not move the state of the pass that begins
        if state:
            self.dataset.set_epoch(state["epoch"])  # else it would not be taken
        self.dataset.load_state_dict(state or {})
        for sample, after in self._read_ahead():
            self._count += 1
            self._places[self._count] = (after, _digest(sample))
            self._places.pop(self._count - self.remembered, None)
            yield sample
        self._has_ended = True

    def _read_ahead(self) -> Iterator[tuple[Any, Any]]:
        """Each sample with the place after it, read by a thread."""
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
    except Exception as error:  # raised where the samples are wanted
        hand_over(error)
    hand_over(end)


def _digest(sample: Any) -> str:
    """By which a sample is known again."""
    columns = sample.items() if isinstance(sample, dict) else enumerate([sample])
    heads = [(name, value[:_COMPARED] if hasattr(value, "__getitem__") else value) for name, value in columns]
    return xxhash.xxh3_64_hexdigest(repr(heads).encode())


class StreamPlace(TrainerCallback):
    """Keeps the place of a Trainer's stream in its checkpoints, and resumes there. Made by `attach`."""

    def __init__(self, stream: PlacedStream) -> None:
        self.stream = stream
        self._first_pass = self._pass = 0
        self._samples = self._steps = self._at_step = 0  # taken in this pass, and when that was so
        self._begun_with = 0
        self._resumed: str | None = None  # from where, until the first step
        self._skips = False

    @classmethod
    def attach(cls, trainer: Trainer) -> None:
        """Put a `PlacedStream` before a stream that knows its place. Call it when the Trainer is being made."""
        dataset = trainer.train_dataset
        if isinstance(dataset, datasets.IterableDataset):
            trainer.train_dataset = PlacedStream(dataset)
            trainer.add_callback(cls(trainer.train_dataset))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first_pass, self._pass, self._resumed = 0, -1, None
        self.stream.remembered = 4 * global_batch_size(calling_trainer())  # a step's, and what loaders fetch before it
        if args.dataloader_num_workers:
            logger.info(
                "a resumed run reads again what was seen of a stream, for its place is not known where data loader "
                "processes read it: with dataloader_num_workers 0 it goes on there"
            )
        place = saved_state(state, "stream")
        is_known = bool(place) and not args.dataloader_num_workers
        resumed = None if args.ignore_data_skip else resumed_from()
        if resumed is None:
            return
        mine = place["samples"] if is_known and distributed.rank() == 0 else -1  # other nodes may know of no place
        self._begun_with = int(distributed.all_max([float(mine)])[0])
        if self._begun_with < 0:
            seen = state.global_step * global_batch_size(calling_trainer())
            logger.info("the place in the stream is not known: the %d sequences already seen are read again", seen)
            return
        self._resumed, self._skips = resumed, args.ignore_data_skip
        args.ignore_data_skip = True  # for the first pass: Trainer would take batches and drop them
        if is_known:
            self.stream.go_to(place)
            self._first_pass, self._samples, self._steps = place["pass"], place["samples"], place["steps"]
            self._at_step = state.global_step
            logger.info("the stream goes on after %d sequences of its pass %d", self._samples, self._first_pass + 1)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._pass += 1
        if self._resumed is not None and self._begun_with == 0:  # a pass begins with drawing the loader's seed
            calling_trainer()._load_rng_state(self._resumed)
        if self._resumed is None:
            self._samples, self._steps, self._at_step = 0, 0, state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._resumed is not None:
            if self._begun_with > 0:  # where Trainer restores it when it has skipped: behind the first batch
                calling_trainer()._load_rng_state(self._resumed)
            args.ignore_data_skip, self._resumed = self._skips, None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, steps = calling_trainer(), state.global_step - self._at_step
        samples = self._samples + steps * global_batch_size(trainer)
        if state.epoch is not None:  # Trainer counts from 0 where nothing is skipped
            state.epoch += self._first_pass + self._steps / state.max_steps
        kept, place = saved_state(state, "stream"), self.stream.place_after(samples)
        kept.clear()
        if place is not None:
            kept |= {"pass": self._first_pass + self._pass, "samples": samples, "steps": self._steps + steps} | place
            if place["state"] is None:  # the next pass is to begin
                kept |= {"pass": kept["pass"] + 1, "samples": 0, "steps": 0}
