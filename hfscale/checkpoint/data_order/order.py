"""Keeps the order of the samples in the checkpoints, and the random numbers that are drawn while they are read.

Trainer seeds the random number generators anew in a resumed launch, and restores their states when the first batch has
been fetched. So a sampler that draws the order of a pass from a global generator (`group_by_length`,
`WeightedRandomSampler`) draws another one, a sampler with a generator of its own (TRL's `RepeatSampler`) draws that of
the first pass again, and a collator that masks at random gives the batch that was read ahead another mask.

Here the checkpoint keeps, for each rank,

- the states of all generators when the pass began, and what the samplers count;
- their states before each batch whose indices had been taken and which had not been trained on;
- the states at the save of the generators that are not in Trainer's own file;
- a hash of the batches of the pass so far.

A resumed launch begins the pass with the first, gives the batches that were read ahead the second, sets the third and
Trainer's own before the batch after them, and compares the hash: a sampler whose order depends on anything else is
named in a warning.

A stream of a user's own class (`torch.utils.data.IterableDataset`) is kept in the same way, by the process that reads
it. If it has no length, its passes are counted here, since Trainer cannot.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hfscale.checkpoint.data_order.owners import DataState
from hfscale.checkpoint.data_order.rows import RowsInPlace
from hfscale.checkpoint.loader_seeds import warn_of_workers
from hfscale.checkpoint.program_state.kept_values import check_values
from hfscale.checkpoint.program_state.state import warn_of_iterators
from hfscale.checkpoint.random_states import (
    States,
    check_global_states,
    global_states,
    plain,
    set_global_states,
)
from hfscale.checkpoint.rank_files import read_of_rank
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.batch_indices import (
    BatchListener,
    batch_sampler_of,
    digest_of,
    listen_to_batches,
    listen_to_stream,
    own_stream_of,
)
from hfscale.trainer.state import (
    global_batch_size,
    micro_batches_of_pass,
    model_of,
    steps_per_epoch,
)

logger = get_logger(__name__)

NAME = "data_order"
"""The file of a rank is `data_order_RANK.json`."""
_DATASET = "data1."
"""What the paths of the dataset's values begin with: `DataState` numbers the objects that own values."""


class DataOrder(BatchListener, TrainerCallback):
    """Keeps the order of a Trainer's samples in its checkpoints, and resumes with it.

    `keep_data_order` adds it to the Trainer.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer, whose state is that of the beginning of the training.
        train_dataloader (`DataLoader`): its training data.
    """

    def __init__(self, adapter: TrainerAdapter, train_dataloader: Any) -> None:
        self._adapter = adapter
        args = adapter.trainer.args
        self._accumulation = args.gradient_accumulation_steps
        self._steps_per_pass = steps_per_epoch(adapter.trainer)
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)
        self._loader = train_dataloader
        self._stream = own_stream_of(train_dataloader)
        self._data = DataState(
            batch_sampler_of(train_dataloader) if self._stream is None else self._stream,
            getattr(loader, "collate_fn", None),
            getattr(loader, "dataset", None),
            apart=(adapter.trainer, *model_of(adapter.trainer).modules()),
        )
        self._rows = RowsInPlace(getattr(loader, "dataset", None))
        # What must be equal in the launch that resumes, for more than the beginning of the pass to count
        self._launch = {
            "world_size": distributed.world_size(),
            "batch": args.per_device_train_batch_size,
            # Batches are counted one by one, so that it does not matter where it changes
            "accumulation": 0
            if adapter.announced.grows_batch
            else args.gradient_accumulation_steps,
        }
        self._begin = self._states()
        self._begin_counters: dict[str, Any] = {}
        self._before: dict[int, States] = {}
        self._digests: dict[int, str] = {0: ""}
        self._digest = xxhash.xxh3_64()
        self._taken = 0
        self._resumed: _Resumed | None = None
        self._unread: dict[str, Any] | None = None
        """What the checkpoint says from which the training resumes, until a pass begins."""
        # Of a pass over a stream without a length
        self._begun_at_step: int | None = None
        self._batches_in_pass: int | None = None

    def listen(self) -> bool:
        """Hear of the batches until the end of the training; return whether they can be heard of."""
        trainer = self._adapter.trainer
        if self._stream is None:
            is_ordered = has_length(self._loader) and batch_sampler_of(self._loader) is not None
            return is_ordered and listen_to_batches(self._adapter, self._loader, self)
        if trainer.args.dataloader_num_workers:
            return False  # each worker has a copy of the stream, and reads ahead by itself
        per_batch = max(global_batch_size(trainer) // self._accumulation, 1)
        return listen_to_stream(self._adapter, self._stream, per_batch, self)

    def warn_of_iterators(self) -> None:
        """Name the iterators that the collator and the dataset hold: no checkpoint has their positions."""
        kinds = {"data0": "collator", "data1": "dataset"}
        for path in self._data.iterators:
            root, _, rest = path.replace(".data_collator", "").partition(
                "."
            )  # that of transformers around it
            warn_of_iterators([f"{kinds.get(root, root)}.{rest}"])

    # --- the checkpoint ---------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint of this step keeps, as JSON values."""
        if self._unread is not None:
            # An evaluation that is made up may save before anything is read
            return self._unread
        self._rows.tell(self._data.values())
        trained = self._batches_trained()
        if self._stream is not None and not self._taken:
            trained = (
                0  # another rank reads the stream, and this one does not hear where a pass ends
            )
        before = {n: _as_json(states) for n, states in self._before.items() if n >= trained}
        return {
            "launch": self._launch,
            "begin": {"counters": self._begin_counters, **_as_json(self._begin)},
            "trained": trained,
            "pass_steps": trained // self._accumulation,
            "taken": self._taken,
            "before": before,
            "now": {
                "counters": self._data.counters(),
                "generators": plain(self._data.generators()),
                "values": self._data.values(),
            },
            "digest": self._digests.get(trained),
        }

    def keep_in_evaluations(self) -> None:
        """Let an evaluation that is cut short move no generator and no value of the collator and the dataset."""
        evaluations = self._adapter.evaluations
        evaluations.put_back_if_cut("data order", self._data.take)
        evaluations.around_made_up("data order", self._around_made_up)

    @contextmanager
    def _around_made_up(self) -> Iterator[None]:
        """Let the checkpoint hold what the collator has counted in the evaluation that is made up."""
        yield
        if self._unread is not None:
            self._unread["now"] |= {
                "generators": plain(self._data.generators()),
                "values": self._data.values(),
            }

    def _batches_trained(self) -> int:
        """Return how many batches of this pass have been trained on; 0 between two passes."""
        trainer = self._adapter.trainer
        steps = trainer.state.global_step
        if self._steps_per_pass:
            return micro_batches_of_pass(trainer, steps)
        if self._begun_at_step is None:
            return 0
        trained = (steps - self._begun_at_step) * self._accumulation
        has_ended = self._batches_in_pass is not None and trained >= self._batches_in_pass
        return 0 if has_ended else trained

    def resume(self, saved: dict[str, Any], checkpoint: str) -> None:
        """Continue with what the checkpoint keeps. Call it when the training begins.

        Args:
            saved (`dict[str, Any]`): what `saved` returned.
            checkpoint (`str`): the folder of the checkpoint.
        """
        self._unread = saved
        self._data.set_generators(saved["now"]["generators"])
        self._data.set_counters(saved["now"]["counters"])
        self._data.set_values(saved["now"].get("values", {}))
        steps = saved.get("pass_steps", 0)
        if steps and not self._steps_per_pass:
            self._begun_at_step = self._adapter.trainer.state.global_step - steps
        trained = self._batches_trained()
        if trained == 0:
            return  # a new pass: Trainer restores its states before it begins
        is_same_launch = saved["launch"] == self._launch
        self._resumed = _Resumed(saved, checkpoint, trained, is_same_launch=is_same_launch)
        # Trainer would restore its states after the batches that follow have been fetched: `_finish` does it before
        self._load = self._adapter.checkpoints.replace_rng_loading(self._load_before_reading)

    def _load_before_reading(self, checkpoint: str | None) -> None:
        """Restore the states for what comes before the first batch, such as an evaluation that is made up."""
        if self._unread is not None:
            self._load(checkpoint)

    # --- the batches ------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self._unread = None
        self._before = {}
        self._digests = {0: ""}
        self._digest = xxhash.xxh3_64()
        self._taken = 0
        self._batches_in_pass = None
        resumed = self._resumed
        if resumed is None:
            self._begun_at_step = self._adapter.trainer.state.global_step
        else:
            self._set_epoch()
            set_global_states(resumed.begin["random"])
            self._data.set_generators(resumed.begin["generators"])
            self._data.set_counters(resumed.begin["counters"])
            self._data.set_values(resumed.begin.get("values", {}))
        self._begin = self._states()
        self._begin_counters = self._data.counters()

    def _set_epoch(self) -> None:
        """Tell the batch sampler which pass it orders.

        Accelerate does so only where no batches are skipped: its `SkipBatchSampler` hides the method.
        """
        set_epoch = getattr(batch_sampler_of(self._loader), "set_epoch", None)
        if set_epoch is not None and self._steps_per_pass:
            step = self._adapter.trainer.state.global_step
            set_epoch(step // self._steps_per_pass)

    def before_batch(self, number: int) -> None:
        if self._resumed is not None:
            self._set_states(self._resumed, number)
        trained = self._batches_trained()
        self._before = {n: states for n, states in self._before.items() if n >= trained}
        self._digests = {n: digest for n, digest in self._digests.items() if n >= trained}
        self._before[number] = self._states()

    def _states(self) -> States:
        return {
            "random": global_states(),
            "generators": self._data.generators(),
            "values": self._data.values(),
        }

    def batch_taken(self, number: int, batch: Any) -> None:
        if batch is not None:
            self._digest.update(repr(batch).encode())
        self._taken = number + 1
        self._digests[self._taken] = self._digest.hexdigest()

    def sample_read(self, sample: Any) -> None:
        self._digest.update(digest_of(sample).encode())
        self._digests[self._taken] = self._digest.hexdigest()

    def end_pass(self, number: int) -> None:
        self._batches_in_pass = number
        if self._resumed is not None:
            self._finish(self._resumed)

    def _set_states(self, resumed: "_Resumed", number: int) -> None:
        """Set the generators as they were before a batch in the launch that saved."""
        if number == resumed.trained:
            self._compare_order(resumed)
        if number >= resumed.taken:
            self._finish(resumed)
        elif number in resumed.before:
            set_global_states(resumed.before[number]["random"])
            self._data.set_generators(resumed.before[number]["generators"])
            self._data.set_values(resumed.before[number].get("values", {}))

    def _finish(self, resumed: "_Resumed") -> None:
        """Set the generators as they were at the save: what follows is not of that launch any more."""
        self._resumed = None
        self._load(resumed.checkpoint)
        self._data.set_generators(resumed.now["generators"])
        self._data.set_values(resumed.now.get("values", {}))

    def _compare_order(self, resumed: "_Resumed") -> None:
        if resumed.digest is None or resumed.digest == self._digests.get(resumed.trained):
            return
        sampler = self._data.describe_sampler()
        logger.warning(
            "%s does not repeat the order of the samples: the %d batches that this pass has trained on were others, "
            "so that some samples of the pass are seen twice or never; let it draw from a generator that is seeded, "
            "such as torch's global one",
            sampler,
            resumed.trained,
        )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._unread = None  # of a process that reads nothing
        if self._resumed is not None:  # fewer workers read ahead than in the launch that saved
            self._finish(self._resumed)


class _Resumed:
    """What the checkpoint says of the pass in which a training resumes, until it has been used."""

    def __init__(
        self, saved: dict[str, Any], checkpoint: str, trained: int, *, is_same_launch: bool
    ) -> None:
        self.checkpoint = checkpoint
        self.trained = trained
        self.begin = saved["begin"]
        self.now = saved["now"]
        self.taken = trained
        self.before: dict[int, States] = {}
        self.digest: str | None = None
        if is_same_launch:
            self.taken = saved["taken"]
            self.before = {int(number): states for number, states in saved["before"].items()}
            self.digest = saved["digest"]


def keep_data_order(adapter: TrainerAdapter, train_dataloader: Any) -> None:
    """Keep the order of the samples in the checkpoints of this training, and resume with it.

    Call it when a training begins. Left alone are data without a length and loaders without a batch sampler, unless
    the data is a stream of a user's own class, and the streams of `datasets`.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        train_dataloader (`DataLoader`): its training data.

    Raises:
        CheckpointError: the file of a rank is broken; raised on every rank.
    """
    order = DataOrder(adapter, train_dataloader)
    if not order.listen():
        return
    adapter.announced.json[NAME] = order.saved
    adapter.append_callback(order)
    order.keep_in_evaluations()
    if adapter.trainer.args.save_strategy != "no":
        order.warn_of_iterators()
    checkpoint = adapter.resumes_from
    if checkpoint is None or adapter.trainer.args.ignore_data_skip:
        return
    with TRAINING.agreed("start: data order"):  # the file of one rank may be broken
        saved = _read(Path(checkpoint))
    if saved is not None:
        order.resume(saved, checkpoint)
        _warn_of_workers(adapter)


def _warn_of_workers(adapter: TrainerAdapter) -> None:
    args = adapter.trainer.args
    trainer = adapter.trainer
    is_inside_pass = micro_batches_of_pass(trainer, trainer.state.global_step) > 0
    if args.dataloader_num_workers and is_inside_pass and not args.dataloader_persistent_workers:
        warn_of_workers(args.dataloader_num_workers, "this pass")


def _read(checkpoint: Path) -> dict[str, Any] | None:
    """Return what the file of this rank says, else that of rank 0; None if an older version wrote the checkpoint."""
    found = read_of_rank(checkpoint, NAME, _parse)
    if found is None:
        return None
    saved, rank = found
    if rank != distributed.rank():
        saved["launch"] = {}  # that of another rank: only the beginning of the pass counts
    return saved


def restored_places(checkpoint: Path) -> set[str]:
    """Return the attributes of the dataset that a resume from a checkpoint sets, by the path from the dataset.

    Args:
        checkpoint (`Path`): a checkpoint directory.
    """
    places: set[str] = set()
    saved = _read(checkpoint)
    if saved is None:
        return places
    for path, names in saved["now"].get("values", {}).items():
        for name in names:
            place = f"{path}.{name}"
            if place.startswith(_DATASET):
                places.add(place.removeprefix(_DATASET))
    return places


def _as_json(states: States) -> dict[str, Any]:
    """Return the states before a batch as JSON values; `values` are that already."""
    generators = plain({name: states[name] for name in ("random", "generators")})
    return {**generators, "values": states["values"]}


def _parse(saved: Any) -> dict[str, Any]:
    for name in ("launch", "begin", "trained", "taken", "before", "now", "digest"):
        saved[name]
    for part in (saved["now"], saved["begin"]):
        dict(part["generators"])
        dict(part["counters"])
    for states in (saved["begin"], *saved["before"].values()):
        check_global_states(states["random"])
    for states in (saved["begin"], saved["now"], *saved["before"].values()):
        check_values(states.get("values", {}))
    return dict(saved)
