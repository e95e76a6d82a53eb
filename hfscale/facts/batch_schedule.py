"""A global batch that grows during a training: how a schedule is written, and the steps that follow from it.

| written | means |
|---|---|
| `256@0,512@1B,1024@4B` | 256 sequences per step, 512 after 1e9 tokens, 1024 after 4e9 |
| `256,512@500Ksamples` | 512 after 500,000 sequences; the first `@0` may be left out |
| `auto:256..4096` | from 256 sequences up to 4096, doubled when the measured noise scale is twice the batch |

Tokens are positions of the rows that the model gets, padding included: sequences times the length of a row. So every
threshold is a number of sequences, which does not depend on the number of GPUs.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from hfscale.errors import ParameterError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STAGE = re.compile(r"(\d+)(?:@(\d+(?:\.\d+)?)([KMBT]?)(tokens|samples)?)?", re.IGNORECASE)
_AUTO = re.compile(r"auto:(\d+)\.\.(\d+)", re.IGNORECASE)
_FORM = "write it as 256@0,512@1B,1024@4B (sequences per step @ tokens seen), or as auto:256..4096"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the training with one global batch."""

    batch: int
    """Sequences per optimizer step."""
    after: int
    """How much has been seen when it begins."""
    in_tokens: bool = True
    """Whether `after` counts tokens; False: sequences."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a training reads, as its Trainer divides it."""

    micro_batch: int
    """Sequences of a micro-batch, of all data-parallel ranks together."""
    per_pass: int | None
    """Micro-batches of a pass over the data; None where the data have no length."""
    samples: int | None = None
    """Sequences of a pass; the last micro-batch may repeat some. None: as many as the micro-batches hold."""

    @property
    def samples_of_pass(self) -> int:
        """Sequences that a pass counts for."""
        assert self.per_pass is not None
        in_batches = self.per_pass * self.micro_batch
        return in_batches if self.samples is None else min(in_batches, self.samples)


@dataclass(frozen=True, kw_only=True)
class Count:
    """How long a training is."""

    steps: int
    """Optimizer steps."""
    samples: int
    """Sequences that they train on."""
    passes: float
    """Passes over the data; 1 where the data have no length."""


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Which global batch a training has, by what it has seen or by its noise scale."""

    stages: tuple[Stage, ...]
    """The parts of the training, in their order; of `auto` the first."""
    largest: int | None = None
    """The largest global batch of `auto`, the smallest times a power of two; None: the schedule is given."""

    @property
    def is_measured(self) -> bool:
        """Whether the batch follows the measured noise scale."""
        return self.largest is not None

    @property
    def first(self) -> int:
        """The global batch in which the training begins, sequences."""
        return self.stages[0].batch

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch that the training may have, in the order in which they can come."""
        if self.largest is None:
            return tuple(stage.batch for stage in self.stages)
        doublings = (self.largest // self.first).bit_length()
        return tuple(self.first * 2**number for number in range(doublings))

    @property
    def unit(self) -> int:
        """The sequences in which the learning rate schedule counts: each global batch is a multiple of them."""
        return math.gcd(*self.sizes)

    @property
    def counts_tokens(self) -> bool:
        """Whether a threshold is in tokens."""
        return any(stage.in_tokens and stage.after for stage in self.stages)

    def in_samples(self, row_length: int | None) -> "BatchSchedule":
        """Return the schedule with every threshold in sequences.

        Args:
            row_length (`int`, *optional*): tokens of a row; None: it is not known, and no threshold may need it.

        Raises:
            ParameterError: a threshold in tokens needs the length, or two thresholds are the same sequence.
        """
        stages = [self._stage_in_samples(stage, row_length) for stage in self.stages]
        for earlier, later in pairwise(stages):
            if later.after <= earlier.after:
                rule = f"{later.batch} begins at the sequence of the one before it"
                raise ParameterError("batch_schedule", self.text(), rule)
        return BatchSchedule(stages=tuple(stages), largest=self.largest)

    def _stage_in_samples(self, stage: Stage, row_length: int | None) -> Stage:
        if not stage.in_tokens or stage.after == 0:
            return Stage(batch=stage.batch, after=stage.after, in_tokens=False)
        if row_length is None:
            example = f"{stage.batch}@100Ksamples"
            rule = f"tokens need rows of one length: give block_size, or count sequences, as in {example}"
            raise ParameterError("batch_schedule", self.text(), rule)
        return Stage(batch=stage.batch, after=-(-stage.after // row_length), in_tokens=False)

    def batch_after(self, samples: int) -> int:
        """Return the global batch of the step that begins after a number of sequences; of `auto` the first.

        Args:
            samples (`int`): sequences seen, in a schedule that `in_samples` has returned.
        """
        return next(stage.batch for stage in reversed(self.stages) if stage.after <= samples)

    def text(self) -> str:
        """Return the schedule as it is written."""
        if self.largest is not None:
            return f"auto:{self.first}..{self.largest}"
        return ",".join(_written(stage) for stage in self.stages)


def _written(stage: Stage) -> str:
    """Return a stage as it is written."""
    unit = "" if stage.in_tokens or stage.after == 0 else "samples"
    return f"{stage.batch}@{stage.after}{unit}"


def parse_batch_schedule(text: str) -> BatchSchedule:
    """Read a schedule.

    Args:
        text (`str`): as in the table of this module.

    Raises:
        ParameterError: it cannot be read, a batch is 0, or thresholds do not grow.
    """
    measured = _AUTO.fullmatch(text.strip())
    if measured is not None:
        return _measured(text, int(measured[1]), int(measured[2]))
    stages = [_stage(text, part) for part in text.split(",")]
    first, *others = stages
    if first.after != 0:
        example = f"{first.batch}@0"
        rule = f"it must say with which batch the training begins, as in {example}"
        raise ParameterError("batch_schedule", text, rule)
    if any(stage.batch == 0 for stage in stages):
        raise ParameterError("batch_schedule", text, "a batch must be greater than 0")
    for earlier, later in pairwise([first, *others]):
        # Tokens and sequences are compared when the length of a row is known
        is_comparable = earlier is first or earlier.in_tokens == later.in_tokens
        if is_comparable and later.after <= earlier.after:
            rule = "each threshold must be greater than the one before it"
            raise ParameterError("batch_schedule", text, rule)
    return BatchSchedule(stages=tuple(stages))


def _stage(text: str, part: str) -> Stage:
    """Read one stage of a schedule."""
    found = _STAGE.fullmatch(part.strip())
    is_first = text.startswith(part)
    if found is None or (found[2] is None and not is_first):
        raise ParameterError("batch_schedule", text, _FORM)
    number = float(found[2] or 0)
    factor = _FACTORS[(found[3] or "").upper()]
    unit = (found[4] or "tokens").lower()
    return Stage(batch=int(found[1]), after=round(number * factor), in_tokens=unit == "tokens")


def _measured(text: str, smallest: int, largest: int) -> BatchSchedule:
    if smallest == 0 or largest <= smallest:
        rule = "the second batch must be greater than the first, which is above 0"
        raise ParameterError("batch_schedule", text, rule)
    doublings = max(round(math.log2(largest / smallest)), 1)
    nearest = smallest * 2**doublings
    if largest != nearest:
        rule = f"the batch is doubled: write auto:{smallest}..{nearest}"
        raise ParameterError("batch_schedule", text, rule)
    return BatchSchedule(stages=(Stage(batch=smallest, after=0),), largest=largest)


def check_divisible(schedule: BatchSchedule, micro_batch: int) -> None:
    """Check that every global batch is a number of micro-batches.

    Args:
        schedule (`BatchSchedule`): the schedule.
        micro_batch (`int`): sequences of a micro-batch of all data-parallel ranks together.

    Raises:
        ParameterError: one is not; it names the nearest values that are.
    """
    for batch in schedule.sizes:
        below = batch // micro_batch * micro_batch
        if below == batch:
            continue
        nearest = f"{below} or {below + micro_batch}"
        if below == 0:
            nearest = str(micro_batch)
        rule = (
            f"{batch} sequences are no multiple of {micro_batch} (per_device_train_batch_size x data-parallel "
            f"processes): use {nearest}, or another per_device_train_batch_size"
        )
        raise ParameterError("batch_schedule", schedule.text(), rule)


def count(
    schedule: BatchSchedule, data: Data, *, passes: float | None = None, steps: int | None = None
) -> Count:
    """Count the steps of a training, or what a number of steps trains on.

    The last step of a pass trains on what is left of it, as in Trainer. For `auto` the batch does not grow, so that
    the steps are the most that can be.

    Args:
        schedule (`BatchSchedule`): in sequences (`in_samples`).
        data (`Data`): what the training reads.
        passes (`float`, *optional*): for a training that ends after passes over the data.
        steps (`int`, *optional*): for a training that ends after optimizer steps.
    """
    wanted = math.inf if steps is None else steps
    left = math.inf
    if data.per_pass is None:
        assert steps is not None  # Trainer demands it for data without a length
    elif passes is not None:
        left = math.ceil(passes * data.per_pass)
    place = _Place(data)
    done = taken = 0
    while done < wanted and left > 0:
        # As many steps at a time as have the same batch
        batch = schedule.batch_after(place.samples)
        until_change = _divided_up(_next_change(schedule, place.samples) - place.samples, batch)
        size = batch // data.micro_batch
        until_stop = _divided_up(left, size)
        number = min(until_change, until_stop, wanted - done, place.steps_of_pass(size))
        moved = place.move(int(number), size)
        done += int(number)
        taken += moved
        left -= moved
    all_passes = 1.0
    if data.per_pass is not None:
        all_passes = taken / data.per_pass
    return Count(steps=done, samples=place.samples, passes=all_passes)


class _Place:
    """Where a training is in its data.

    Args:
        data (`Data`): what the training reads.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._before = 0  # sequences of earlier passes
        self._position = 0  # micro-batches of this pass

    @property
    def samples(self) -> int:
        """Sequences seen."""
        return self._before + self._position * self._data.micro_batch

    def steps_of_pass(self, size: int) -> float:
        """Return how many steps of `size` micro-batches are left of the pass; the last one may be smaller."""
        if self._data.per_pass is None:
            return math.inf
        return _divided_up(self._data.per_pass - self._position, size)

    def move(self, steps: int, size: int) -> int:
        """Take steps of `size` micro-batches of this pass; return the micro-batches."""
        moved = steps * size
        per_pass = self._data.per_pass
        if per_pass is not None:
            moved = min(moved, per_pass - self._position)
        self._position += moved
        if self._position == per_pass:
            self._before += self._data.samples_of_pass
            self._position = 0
        return moved


def _divided_up(number: float, divisor: int) -> float:
    """The quotient, rounded up; of what is infinite, infinite."""
    return number if number == math.inf else -(-number // divisor)


def _next_change(schedule: BatchSchedule, samples: int) -> float:
    """The sequence at which the next stage begins; infinite if there is none."""
    later = [stage.after for stage in schedule.stages if stage.after > samples]
    return min(later, default=math.inf)
