"""Keeps the position in a stream, so that a resumed run continues there without reading again what it has seen.

Trainer knows only how many batches it has taken from a stream; on resume it takes as many again and drops them. A
stream of `datasets` can report its position (`IterableDataset.state_dict`), but data loaders read ahead. So
`PositionedStream` remembers the position after each of the last samples that it returned, and `StreamPosition` keeps
the one after the last sample of the last step in `trainer_state.json`. It is the same for any number of ranks: either
one rank reads for all, or each rank reads everything.

Where worker processes of a loader read the stream, each of them is at a position of its own, ahead of the training;
they take turns by batches, and a new loader begins with the first worker, whichever was next. So the pass is read
again from its beginning, by workers that start with the seed of the first time: rank 0's is in the checkpoint.

A stream of a user's own class has no position that is known, so its pass is read again too; `data_order` sets the
random numbers with which it is read.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hfscale.checkpoint.data_order.owners import DataState
from hfscale.checkpoint.program_state.kept_values import check_values
from hfscale.checkpoint.random_states import global_states, plain, set_global_states
from hfscale.checkpoint.rank_files import read_of_rank
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.batch_indices import is_hub_stream, is_own_stream
from hfscale.trainer.state import (
    data_ranks,
    global_batch_size,
    micro_batch_size,
    model_of,
    saved_state,
)

logger = get_logger(__name__)

NAME = "stream_collator"
"""The file of a rank other than 0 is `stream_collator_RANK.json`."""


class OwnStream:
    """A stream of a user's own class, whose passes are read from their beginning.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains on it.
        dataset (`IterableDataset`): the stream.
    """

    is_read_again = True
    most_workers = sys.maxsize
    """How many processes of a data loader can read at once: the stream itself decides what each of them reads."""

    def __init__(self, adapter: TrainerAdapter, dataset: Any) -> None:
        self._adapter = adapter
        self._dataset = dataset
        self.remembered = 0

    def is_known_in(self, dataset: Dataset[Any]) -> bool:
        """Whether the loader's dataset, of this process, reads what the position is of."""
        return True

    def begin_with_pass(self, number: int) -> None:
        """Let `set_epoch` of the stream, if it has one, count from a later pass.

        Args:
            number (`int`): number of the pass in the run, from 0.
        """
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is None:
            return
        # Accelerate counts the passes of this launch
        self._dataset.set_epoch = lambda epoch: set_epoch(number + epoch)
        self._adapter.at_training_end(lambda: vars(self._dataset).pop("set_epoch", None))


class StreamPosition(TrainerCallback):
    """Keeps the position of a Trainer's stream in its checkpoints, and resumes there.

    `track_stream` adds it to the Trainer.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains on the stream.
        stream (`PositionedStream` or `OwnStream`): the Trainer's training data.
    """

    def __init__(self, adapter: TrainerAdapter, stream: Any) -> None:
        self.stream = stream
        self._adapter = adapter
        self._first_pass = 0  # the pass of the run in which this training begins
        self._pass = 0  # of this training
        self._samples = self._steps = 0  # of this pass, taken before `_at_step`
        self._at_step = 0
        # Samples of the pass that another launch has taken; -1: the position is not known
        self._begun_with = 0
        self._begun_step: int | None = None
        self._has_named_cut_step = False
        self._resumed: str | None = None  # the checkpoint, until the first step
        self._must_load_rng_state = False
        self._collator: DataState | None = None
        # The state of the collator when the checkpoint was saved, until it is set
        self._collator_at_save: dict[str, Any] | None = None
        # The random states with which the pass that workers read began
        self._seed_state: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first_pass = 0
        self._pass = -1
        self._resumed = None
        self._seed_state = {}
        self._keep_collator(kwargs["train_dataloader"])
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
        # A loader of another library, such as ms-swift's, need not have it
        dataset = getattr(kwargs["train_dataloader"], "dataset", None)
        is_known = is_known and dataset is not None and self.stream.is_known_in(dataset)
        resumed = None if args.ignore_data_skip else self._adapter.resumes_from
        if resumed is None:
            return
        if position:
            self._warn_of_other_readers(position)
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
        if self._is_read_again(workers):
            self._adapter.drop_batches(self._begun_with // batch * args.gradient_accumulation_steps)
        else:
            position |= _collator_of_rank(Path(resumed))
        if is_known:
            self._go_to(position, state, workers)

    def _is_read_again(self, workers: int) -> bool:
        """Whether a resumed run reads the pass from its beginning and drops what was seen of it."""
        return bool(workers) or self.stream.is_read_again

    def _go_to(self, position: dict[str, Any], state: TrainerState, workers: int) -> None:
        """Begin at a position of an earlier launch, or at the beginning of its pass, which is read again."""
        self._first_pass = position["pass"]
        self._samples = position["samples"]
        self._steps = position["steps"]
        self._at_step = state.global_step
        if self._is_read_again(workers):
            self.stream.begin_with_pass(position["pass"])
            self._seed_state = {name: position[name] for name in ("torch",) if name in position}
            after = "the %d sequences already seen of pass %d are read again and dropped"
        else:
            self.stream.go_to(position, self._load_rng_state)
            self._set_collator(position.get("collator"))
            self._collator_at_save = position.get("collator_at_save")
            after = "the stream continues after %d sequences of pass %d"
        self._warn_of_other_filling(position)
        logger.info(after, self._samples, self._first_pass + 1)

    def _readers(self) -> dict[str, int]:
        """Return what decides in which order the sequences come, and with how many a batch is filled up.

        Processes of a data loader take turns, each with the rows of a batch.
        """
        trainer = self._adapter.trainer
        ranks = data_ranks(trainer)
        rows = micro_batch_size(trainer)
        is_dispatched = isinstance(trainer.callback_handler.train_dataloader, DataLoaderDispatcher)
        return {
            "workers": trainer.args.dataloader_num_workers,
            "processes": ranks,
            "rows_of_turn": rows if is_dispatched else rows * ranks,
        }

    def _warn_of_other_readers(self, position: dict[str, Any]) -> None:
        """Log where the data loader reads the stream in another order than the one that a position is of."""
        now = self._readers()
        workers, rows = now["workers"], now["rows_of_turn"]
        earlier_workers = position.get("workers", 0)
        earlier_rows = position.get("rows_of_turn", rows)
        if workers != earlier_workers:
            logger.warning(
                "%d processes of the data loader read the stream, and now %d do: the sequences come in another order, "
                "so that some of them are seen twice or never",
                earlier_workers,
                workers,
            )
        elif min(workers, self.stream.most_workers) > 1 and rows != earlier_rows:
            logger.warning(
                "the %d processes of the data loader read the stream in turns of %d sequences, and now of %d: the "
                "sequences come in another order, so that some of them are seen twice or never; to keep it with "
                "other processes or another batch per device, begin with dataloader_num_workers of 0 or 1",
                workers,
                earlier_rows,
                rows,
            )
        elif rows != earlier_rows:
            # Trainer does not know where a stream ends, and does not step there
            logger.warning(
                "batches of %d sequences after %d: where a pass over the stream ends within a step, that step goes on "
                "with the next pass, so that it and later ones may have other sequences than in an uninterrupted run",
                rows,
                earlier_rows,
            )

    def _warn_of_other_filling(self, position: dict[str, Any]) -> None:
        """Log where the last batch of the pass may be another than in an uninterrupted run.

        Accelerate fills the last batch of several processes up with the first batch that this launch has read.
        """
        trainer = self._adapter.trainer
        if trainer.args.dataloader_drop_last:
            return
        ranks = data_ranks(trainer)
        is_another_size = position.get("processes", ranks) != ranks
        reads_all = self._is_read_again(trainer.args.dataloader_num_workers)
        is_another_first = ranks > 1 and self._samples > 0 and not reads_all
        if not is_another_size and not is_another_first:
            return
        logger.warning(
            "if the sequences of pass %d%s do not divide by the %d of a batch, the last one is filled up with "
            "others than in an uninterrupted run; set dataloader_drop_last to leave it out",
            position["pass"] + 1,
            " and later ones" if is_another_size else "",
            global_batch_size(trainer),
        )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._pass += 1
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
        self._begun_step = state.global_step
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
            self._position_to_read_again()
            if self._is_read_again(args.dataloader_num_workers)
            else self.stream.position_after(samples)
        )
        saved.clear()
        if position is None:
            return
        position["collator_at_save"] = self._collator_state()
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
        saved |= self._readers()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Name a save in the middle of a step, as at the end of a pass."""
        if self._begun_step != state.global_step or self._has_named_cut_step:
            return
        self._has_named_cut_step = True
        logger.warning(
            "a pass over the stream ends within step %d: the checkpoint of step %d is saved before its rest, and "
            "a launch that resumes from it takes the first rows of the step again, with other random numbers; let the "
            "batches of a pass divide by gradient_accumulation_steps, or save and evaluate by steps",
            state.global_step + 1,
            state.global_step,
        )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep what the collator has counted in the evaluation of a step that is saved after it."""
        saved = saved_state(state, "stream")
        if "collator_at_save" not in saved or self._resumed is not None:
            return
        saved["collator_at_save"] = self._collator_state()
        # The next batch is of a new pass, and comes after the evaluation
        if saved.get("state") is None:
            saved["collator"] = saved["collator_at_save"]

    def _position_to_read_again(self) -> dict[str, Any]:
        """Return whether the pass of the workers has ended (`state` is None), and the seed that began it."""
        if self._adapter.trainer.accelerator.gradient_state.end_of_dataloader:
            return {"state": None}
        return {"state": {}} | self._seed_state

    def _load_rng_state(self) -> None:
        """Set this rank's random number generators to their states in the checkpoint, the first time it is called."""
        if self._must_load_rng_state and self._resumed is not None:
            self._adapter.checkpoints.load_rng_state(self._resumed)
            self._set_collator(self._collator_at_save)
        self._must_load_rng_state = False
        self._collator_at_save = None

    def _keep_collator(self, train_dataloader: Any) -> None:
        """Let the stream remember the states of the collator, which batches that were read ahead have changed."""
        trainer = self._adapter.trainer
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)
        collate = getattr(loader, "collate_fn", None)
        apart = (trainer, *model_of(trainer).modules())
        self._collator = DataState(None, collate, None, apart=apart)
        if self._collator.is_empty or trainer.args.dataloader_num_workers:
            self._collator = None
        self.stream.collator_state = self._collator_state
        if self._collator is not None:
            if distributed.rank() > 0:  # the state of the Trainer is that of rank 0
                self._adapter.announced.json[NAME] = self._saved_collator
            evaluations = self._adapter.evaluations
            evaluations.put_back_if_cut("collator of the stream", self._collator.take)
            evaluations.around_made_up("collator of the stream", self._around_made_up)

    def _saved_collator(self) -> dict[str, Any]:
        """Return the states of this rank's collator that a checkpoint keeps.

        A rank that reads nothing of the stream has collated other batches than rank 0: those of its evaluations.
        """
        stream = saved_state(self._adapter.trainer.state, "stream")
        at_save = stream.get("collator_at_save", self._collator_state())
        return {"collator": stream.get("collator", at_save), "collator_at_save": at_save}

    @contextmanager
    def _around_made_up(self) -> Iterator[None]:
        """Let an evaluation that is made up begin with the collator of the save, and keep what it counts."""
        with_next_batch = self._collator_state()
        self._set_collator(self._collator_at_save)
        yield
        if self._collator_at_save is None:
            return
        self._collator_at_save = self._collator_state()
        saved = saved_state(self._adapter.trainer.state, "stream")
        saved["collator_at_save"] = self._collator_at_save
        if self._begun_with == 0:  # the next batch is of a new pass, and comes after the evaluation
            saved["collator"] = self._collator_at_save
        else:
            self._set_collator(with_next_batch)

    def _collator_state(self) -> dict[str, Any] | None:
        if self._collator is None:
            return None
        generators = plain(self._collator.generators())
        return {"generators": generators, "values": self._collator.values()}

    def _set_collator(self, saved: dict[str, Any] | None) -> None:
        if self._collator is not None and saved is not None:
            self._collator.set_generators(saved["generators"])
            self._collator.set_values(saved["values"])


def _collator_of_rank(checkpoint: Path) -> dict[str, Any]:
    """Return the states of the collator that this rank has saved; empty where those of rank 0 are to be used."""
    with TRAINING.agreed("start: collator of the stream"):  # the file of one rank may be broken
        found = read_of_rank(checkpoint, NAME, _parse_collator)
    return found[0] if found is not None else {}


def _parse_collator(saved: Any) -> dict[str, Any]:
    for state in (saved["collator"], saved["collator_at_save"]):
        dict(state["generators"])
        check_values(state["values"])
    return dict(saved)


def track_stream(adapter: TrainerAdapter) -> None:
    """Keep the position in the checkpoints if the Trainer's training data is a stream.

    Call it before the training begins. Other training data is left alone, and so is a stream of a user's own class
    that has a length, because Trainer counts its passes.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that will train.
    """
    dataset = adapter.trainer.train_dataset
    if is_own_stream(dataset) and not has_length(dataset):
        adapter.append_callback(StreamPosition(adapter, OwnStream(adapter, dataset)))
        return
    if not is_hub_stream(dataset):
        return
    import datasets

    from hfscale.checkpoint.positioned_stream import PositionedStream

    if type(dataset) is datasets.IterableDataset:
        stream = PositionedStream(dataset)
        adapter.replace_train_dataset(stream)
        adapter.append_callback(StreamPosition(adapter, stream))
