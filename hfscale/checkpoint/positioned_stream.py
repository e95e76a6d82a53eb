"""A stream of `datasets` that knows its position after each of the last samples that it returned.

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
from torch.utils.data import get_worker_info

from hfscale.checkpoint.random_states import global_states, plain, set_global_states
from hfscale.core.logging import get_logger
from hfscale.trainer.batch_indices import digest_of

logger = get_logger(__name__)

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

    is_read_again = False
    """Whether each launch reads its first pass from the beginning."""

    def __init__(self, dataset: datasets.IterableDataset) -> None:
        self.__dict__.update(vars(dataset))
        self.remembered = 0
        """For how many of the last samples the position is remembered."""
        self._start: dict[str, Any] | None = None
        # What is called before a sample is read, by its number
        self._before: dict[int, Callable[[], None]] = {}
        self._first_epoch = 0
        self.collator_state: Callable[[], Any] = lambda: None
        """Returns the state of the collator as JSON values; None if it has none."""
        self._begin_pass()

    @property
    def most_workers(self) -> int:
        """How many processes of a data loader can read at once: one per shard."""
        return int(self.num_shards)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass. Accelerate calls it before each pass.

        Args:
            epoch (`int`): number of the pass in this launch, from 0; a resumed run counts from 0 again. The dataset
                gets its number in the whole run.
        """
        super().set_epoch(self._first_epoch + epoch)

    def is_known_in(self, dataset: Any) -> bool:
        """Whether the loader's dataset, of this process, reads what the position is of.

        Accelerate gives each process a part of the files with `dispatch_batches` false.

        Args:
            dataset (`Dataset`): the dataset of the training's loader.
        """
        return dataset is self or not isinstance(dataset, datasets.IterableDataset)

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
        if "collated_with" in position:  # what was read ahead is collated with these again
            first = position["samples"] + 1 - position.get("drop", 0)
            states = position["collated_with"]
            self._before[first] = functools.partial(set_global_states, states)
        for number, states in position.get("random", ()):
            self._before[number] = functools.partial(set_global_states, states)
        # Nothing is read after the end, and the last batch, which is not full, has not been collated when it is found
        if not position.get("ended"):
            self._before[position.get("read", -1) + 1] = finish

    def position_after(self, samples: int) -> dict[str, Any] | None:
        """Return the position in this pass after a number of samples.

        It is known only after the next sample has been read too: a resumed run compares that sample to check the
        position.

        Args:
            samples (`int`): samples taken from this pass, those of earlier launches included.

        Returns:
            `dict[str, Any]` or `None`: `state` (the dataset's state as JSON values; None at the end of the pass),
            `next` (a hash of the next sample; absent at the end of the pass), `drop` (samples to drop before it),
            `read` (samples read from this pass), `ended` (whether these are all), `collator` and `collated_with` (the
            states of the collator, None if it has none, and of the global generators, with which the next batch was
            collated), and `random` (numbers of samples, and the states to which the random number generators are set
            before them; empty if reading draws no random numbers). None if the position is not known.
        """
        if self._has_ended and samples >= self._count:
            return {"state": None, "collator": self.collator_state()}
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
            "collator": after[2],
            "ended": self._has_ended,
            "collated_with": after[3],
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
        if first is not None and digest_of(first) == start["next"]:
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
        # State of the dataset, hash of the sample, and the states with which the next batch is collated: of the
        # collator itself, and of the global generators
        self._positions: dict[int, tuple[Any, str, Any, dict[str, Any]]] = {}
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
            state = self.state_dict()
            collator = self.collator_state()
            self._positions[self._count] = (state, digest_of(sample), collator, after)
            self._forget(self._count - self.remembered)
            yield sample
        self._has_ended = True

    def _forget(self, number: int) -> None:
        """Drop what belongs to samples up to this one, except for the last draw."""
        self._positions.pop(number, None)
        while len(self._draws) > 1 and self._draws[1].number <= number:
            del self._draws[0]
