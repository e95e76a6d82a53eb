"""Checkpoints on a cadence of steps and minutes, committed by a manifest, with a status file for schedulers."""

import atexit
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.best import note_best
from hfscale.checkpoint.cadence import SaveCadence
from hfscale.checkpoint.epoch_end import (
    check_no_epoch_was_cut,
    note_cut_epoch,
    note_epoch_end,
    note_stop,
)
from hfscale.checkpoint.equal_ranks import check_ranks
from hfscale.checkpoint.evaluations import (
    ends_epoch,
    has_stopped_early,
    note_made,
    note_unfinished_epoch,
)
from hfscale.checkpoint.followers import Followers
from hfscale.checkpoint.identity import check_identity, identity_of, words_of
from hfscale.checkpoint.kept import KeptCheckpoints, committed_checkpoints
from hfscale.checkpoint.loading import (
    check_files,
    check_own_adapters,
    check_weights,
    discard_conversions,
    finish_merged_load,
)
from hfscale.checkpoint.lock import lock_for_all_ranks, make_and_lock, unlock_output_dir
from hfscale.checkpoint.manifest import Identity, Manifest
from hfscale.checkpoint.memory_snapshots import MemorySnapshots
from hfscale.checkpoint.native_loading import NativeLoading
from hfscale.checkpoint.options import CheckpointOptions
from hfscale.checkpoint.pickles import check_pickles, safe_globals
from hfscale.checkpoint.preemption import Preempted
from hfscale.checkpoint.preemption.stop import PreemptionStop
from hfscale.checkpoint.remote_copies import RemoteCopies
from hfscale.checkpoint.resumed_files import ResumedFiles
from hfscale.checkpoint.retention import keeps_weights_apart
from hfscale.checkpoint.run_status import RunStatus
from hfscale.checkpoint.saving import TrainerSaving
from hfscale.checkpoint.starting import (
    finish_load,
    is_from_scratch,
    keep_what_trainer_does_not,
    refuse_to_discard,
)
from hfscale.checkpoint.state_formats import states_in_saved_formats
from hfscale.checkpoint.state_order import check_engine_order, states_by_name
from hfscale.checkpoint.states_after_save import UNFINISHED, StatesAfterSave
from hfscale.checkpoint.store import (
    archive,
    checkpoint_step,
    update_manifest,
)
from hfscale.checkpoint.writer import clear_unfinished, finish_renames
from hfscale.core import distributed
from hfscale.core.activity import activity
from hfscale.core.alarms import raise_end
from hfscale.core.clocks import StepPace
from hfscale.core.collectives import START, TRAINING, StepAgreement
from hfscale.core.logging import get_logger
from hfscale.core.options import takes_options
from hfscale.core.versions import is_peft_model
from hfscale.errors import CheckpointError, StorageError
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.batch_indices import is_hub_stream, is_own_stream
from hfscale.trainer.hooks import switch_off_jit_checkpoint
from hfscale.trainer.state import output_folder
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.native import Native

logger = get_logger(__name__)

# What the ranks vote about at a step boundary, besides snapshots in host memory
_STOP, _OVERDUE, _WRITER = "stop", "save by minutes", "writer"
_WRITES, _HAS_FAILED = 1.0, 2.0
_EXIT_WAIT_S = 600.0  # for a save in flight when the process ends early


class SpotCheckpointCallback(AdapterCallback):
    """Saves every N steps or M minutes, whichever comes first, and makes each checkpoint verifiable.

    A checkpoint is what Trainer writes, in its layout. It is written in a hidden folder, flushed to the disk, gets a
    manifest with the hash of every file (`hfscale_manifest.json`), and only then its final name; after that, older
    checkpoints beyond `save_total_limit` are deleted, the same as by Trainer (which deletes them before).
    `hfscale_status.json` holds the state of the run. `hfscale.latest_checkpoint(output_dir)` then returns the newest
    complete checkpoint. With `save_strategy="no"` nothing is saved.

    A model that was loaded with `distributed_config` (expert parallelism, transformers' own FSDP2 and tensor
    parallelism) is saved too, although Trainer accepts only `save_only_model=True` or `save_strategy="no"` for it: the
    checkpoints have the complete state with either, with `"no"` if `every_steps` is given. Any other layout resumes
    from them.

    A checkpoint for which neither Trainer nor `every_steps` is the reason is temporary: it does not count toward the
    limit, the next checkpoint replaces it, and it is removed at the end of the training. The best one is kept.

    On one process, under DDP, FSDP2 and `ParallelTrainer`, training waits only for a copy of its state to host
    memory; everything else happens in the background, one save at a time. Under DeepSpeed the partitions, which are
    the largest part, are written in the background. So `on_save` of other callbacks is called before the checkpoint
    exists. Where one of them may read it, and where weights are gathered from all ranks to be written, training waits
    for the complete save, and a log line says why. The end of the training, the loading of the best checkpoint and
    the next save wait for the one in flight. If it fails, the run stops soon after, at the same step on all ranks.

    On a preemption notice (SIGTERM, SIGUSR1, Ctrl-C, one of the cloud provider, the stop file; on any rank) all ranks
    stop at the same step boundary and save that step, if there is time for it; an evaluation under way is cut short.
    transformers' `enable_jit_checkpoint` is switched off, since this does the same on all ranks at once.
    The training ends as usual, the status is `preempted`, and `preempted` holds the reason. Then `Trainer.train`
    raises on every rank: KeyboardInterrupt after Ctrl-C, else SystemExit with code 75, so that nothing after it runs
    and the scheduler starts the job again. A second Ctrl-C stops at once.

    | metric key | unit | meaning |
    |---|---|---|
    | `checkpoint/stall_s` | s | time that training waited for the last save |
    | `checkpoint/write_s` | s | from the start of the last save to its commit |
    | `checkpoint/slowdown` | ratio | time of a step during a save in the background / of other steps, medians |
    | `checkpoint/bytes` | bytes | size of the last committed checkpoint |

    Args:
        **options: the options, see below.

    Raises:
        UsageError: a cadence, `notice_s` or `memory_interval_steps` is not positive, the cloud, `on_preemption` or a
            word of `resume_with_other` is unknown, `remote` is not a valid URL, another run holds the output
            directory, the strategy's checkpoints cannot hold the model's adapters, or training resumes from a
            checkpoint of another task, model, adapter, tokenizer or dataset.
        MissingDependencyError: the package for the protocol of `remote` is not installed.
        StorageError: on every rank: a file of a checkpoint could not be written during training; or, when the Trainer
            is made, the remote store cannot be read and there is no local checkpoint, or a download failed.
        LayoutError: training resumes from a checkpoint of a strategy whose files the running one cannot read.
        CheckpointError: training resumes from a checkpoint whose manifest or weights are broken; or it starts at step
            0 beside checkpoints of which none can be resumed from, or beside checkpoints of the remote store.
    """

    @takes_options(CheckpointOptions)
    def __init__(self, options: CheckpointOptions) -> None:
        self.options = options
        self.resume_with_other = words_of(options.resume_with_other)
        self.cadence = SaveCadence(
            every_steps=options.every_steps, every_minutes=options.every_minutes
        )
        self.remote = RemoteCopies(options.remote) if options.remote is not None else None
        self.last_committed: str | None = None
        """Name of the newest checkpoint that this run committed or resumed from, `checkpoint-N`."""
        self.preemption = PreemptionStop(
            notice_s=options.notice_s, cloud=options.cloud, stop_file=options.stop_file
        )
        self.memory = MemorySnapshots(options.memory_interval_steps)
        self._begin_run()

    def _begin_run(self) -> None:
        self._output_dir = Path()
        # Before `train`, of which a subclass may change the data: A2PO leaves out prompts without a reward
        self._identity: Identity | None = None
        # The Trainer and the checkpoint that `check_identity` has compared
        self._checked_resume: tuple[int, str | None] | None = None
        self._resumed_files: ResumedFiles | None = None
        self._followers: Followers | None = None
        # In a hyperparameter search, the folder of the trial in the output directory
        self._run_dir = Path()
        self._kept = KeptCheckpoints(self._run_dir, limit=None, state_limit=None)
        self._status = RunStatus(self._output_dir)
        self._has_read_back = False
        self._has_checked_weights = False
        self._saves = False
        self._has_reserved = False
        self._own_step: int | None = None  # saved for no other reason than the cadence or a notice
        self._evaluated_step: int | None = None
        self._is_ended_by_others = False
        self._ended_step: int | None = None
        """The last step of the last epoch of whose end callbacks have heard."""
        self._after_save: StatesAfterSave | None = None
        self._pending_keys: dict[str, float] = {}
        self._stalls_s: dict[int, float] = {}
        self._saving: TrainerSaving | None = None
        self._agreement = StepAgreement("step", self.preemption.exchange_every_s, overlapped=True)
        # Whether the save in the background has to be looked at
        self._is_watched = False
        self._pace = StepPace()
        self._idle_since = 0.0

    @property
    def preempted(self) -> str | None:
        """Why the last training stopped before its end; None if it did not."""
        return self.preemption.reason(self.last_committed)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_init_end(args, state, control, **kwargs)
        switch_off_jit_checkpoint(TrainerAdapter.current().trainer)
        # So that plain `resume_from_checkpoint=True` finds them too
        finish_renames(output_folder(args))
        if self.remote is not None and not is_from_scratch(args):
            self.remote.fetch(output_folder(args))

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Check what the training resumes from, keep its position in a stream, and resume what Trainer cannot."""
        adapter.at_training_end(self._forget_check)
        self.check_identity(adapter.trainer, adapter.resumes_from)
        if adapter.trainer.model is not None:  # in a search `train` makes it
            check_ranks(adapter.trainer)
            with START.agreed("start: read identity"):
                self._identity = identity_of(adapter.trainer)
            if adapter.resumes_from is not None:
                # Before Trainer loads them, whose own error names no way out
                check_files(adapter.trainer, adapter.resumes_from)
        if isinstance(Strategy.of(adapter.trainer), Native):
            NativeLoading(adapter)
            if self.cadence.every_steps is not None:
                adapter.announced.callback_saves = True
        elif adapter.trainer.model is not None and is_peft_model(adapter.trainer.model):
            adapter.checkpoints.keep_adapters_in_place()
        if adapter.resumes_from is not None:
            self._resumed_files = ResumedFiles(adapter.resumes_from)
            adapter.checkpoints.load_states_in(
                lambda: torch.serialization.safe_globals(safe_globals())
            )
            adapter.checkpoints.load_states_in(lambda: states_in_saved_formats(adapter))
            adapter.checkpoints.load_states_in(lambda: states_by_name(adapter))
        dataset = adapter.trainer.train_dataset
        if is_own_stream(dataset) or is_hub_stream(dataset):
            from hfscale.checkpoint.stream_position import track_stream

            track_stream(adapter)

    def check_identity(self, trainer: Trainer, checkpoint: str | None) -> None:
        """Check that a checkpoint is a state of what the Trainer trains, once per resume. Every rank must call it.

        A recipe calls it before it decides that nothing is left to train, and the callback when `train` is called. The
        beginning of the training calls it again for a checkpoint that only the training loop was given, by a `train`
        of a subclass, and where the callback has joined late.

        Args:
            trainer (`Trainer`): the Trainer that is about to resume.
            checkpoint (`str`, *optional*): the checkpoint; None: it starts from scratch.

        Raises:
            UsageError: it is a state of something else that `resume_with_other` does not allow.
            CheckpointError: its manifest is broken.
        """
        resume = (id(trainer), checkpoint)
        if self._checked_resume != resume:
            check_identity(trainer, checkpoint, self.resume_with_other)
            self._checked_resume = resume

    def _forget_check(self) -> None:
        self._checked_resume = None
        self._resumed_files = None
        self._identity = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        adapter = TrainerAdapter.current()
        switch_off_jit_checkpoint(adapter.trainer)
        lock_for_all_ranks(output_folder(args), is_holder=args.should_save)
        self.check_identity(adapter.trainer, adapter.resumes_from)
        refuse_to_discard(adapter, self.remote)
        self._wait()  # for a save that a training left in flight when it broke off
        identity = self._identity
        resumed_files = self._resumed_files
        self._begin_run()
        self._resumed_files = resumed_files
        self.last_committed = None
        with TRAINING.agreed("start: load"):
            finish_load(adapter)
        check_engine_order(adapter)
        self._take_over_saving(adapter, identity)
        note_best(adapter.trainer, self._run_dir)
        if (
            args.load_best_model_at_end
            and state.best_global_step
            and not state.best_model_checkpoint
        ):
            logger.warning(
                "the best checkpoint, of step %d, is gone: unless a later evaluation is better, the model of the last "
                "step is what the training ends with",
                state.best_global_step,
            )
        self._saves = args.save_strategy != "no" or adapter.announced.callback_saves
        assert self._saving is not None  # `_take_over_saving` has made it
        if self._saves and not self._saving.is_complete:
            logger.warning(
                "save_only_model is True: the checkpoints have no optimizer, schedule and random states, and no run "
                "can resume from them"
            )
        self._followers = None
        if self._saves:
            check_own_adapters(adapter.trainer)
            self._followers = Followers(adapter)
        else:
            logger.info(
                "save_strategy is 'no': nothing will be saved, and a lost machine loses the run"
            )
        # No rank may begin to write what another is about to archive
        with TRAINING.agreed("start: output directory"):
            if args.should_save:
                self._prepare_output_dir(args, state)
        atexit.register(self._at_exit)
        adapter.at_training_end(self._report_failure)
        self._begin_counting(adapter, state)
        self.preemption.begin(adapter, kwargs.get("train_dataloader"), saves=self._saves)
        assert self._saving is not None
        self.memory.begin(
            adapter, state, self._saving, self._run_dir, kwargs.get("train_dataloader")
        )
        check_no_epoch_was_cut(adapter, is_allowed="data" in self.resume_with_other)
        keep_what_trainer_does_not(adapter, kwargs.get("train_dataloader"))

    def _take_over_saving(self, adapter: TrainerAdapter, identity: Identity | None) -> None:
        """Write checkpoints instead of Trainer, and delete old ones instead of Trainer.

        Trainer deletes inside its save, before the new checkpoint is committed: with a limit of 1, a machine lost
        between the two leaves nothing. So the limit is applied after the commit; Trainer's save sees only the hidden
        folder that it writes to. At the end Trainer would delete the newest checkpoint if the best is another one.
        """
        args = adapter.trainer.args
        self._run_dir = adapter.checkpoints.run_dir()
        self._output_dir = output_folder(args)
        self._kept = KeptCheckpoints(
            self._run_dir, limit=args.save_total_limit, state_limit=self.options.state_limit
        )
        self._status = RunStatus(self._output_dir)
        self._saving = TrainerSaving(
            adapter,
            asynchronous=self.options.asynchronous,
            begin=self._begin_save,
            committed=partial(self._committed, adapter.trainer),
            identity=identity,
        )
        adapter.before_last_log(self._wait)
        adapter.before_last_log(lambda: adapter.set_argument("save_total_limit", None))
        adapter.append_callback(_AfterOthers(self))
        self._after_save = None
        if self._saving.has_readers:
            self._after_save = StatesAfterSave(adapter.trainer, self._run_dir)
            adapter.prepend_callback(self._after_save)

    def _prepare_output_dir(self, args: TrainingArguments, state: TrainerState) -> None:
        """Remove what earlier launches left, and record the checkpoint that this one starts from.

        It is called only on the ranks that save.
        """
        self._run_dir.mkdir(parents=True, exist_ok=True)
        clear_unfinished(self._run_dir)
        archived = archive(self._run_dir, after_step=state.global_step, limit=self._kept.limit)
        if archived and state.global_step == 0:
            logger.warning(
                "training starts at step 0, and the checkpoints in %s are archived (the last as %s): to resume from "
                "the newest one, call train(resume_from_checkpoint=latest_checkpoint(args.output_dir))",
                self._run_dir,
                archived[-1].name,
            )
        elif archived:
            logger.info(
                "archived checkpoints of later steps than step %d: %s",
                state.global_step,
                archived[-1],
            )
        else:
            self._status.warn_if_completed(state.global_step)
        self._kept.begin(state)
        committed = committed_checkpoints(self._run_dir)
        # Older than a snapshot in host memory
        self._note_committed(committed[-1].name if committed else None)
        self._status.set("running", state.global_step)
        if self.remote is not None:
            # "." outside of a search
            trial = self._run_dir.relative_to(self._output_dir).as_posix()
            limit = self._kept.limit
            self.remote.begin(
                self._run_dir,
                state,
                limit=limit,
                state_limit=self.options.state_limit,
                committed=self.last_committed,
                below=trial,
            )

    def _begin_counting(self, adapter: TrainerAdapter, state: TrainerState) -> None:
        """Start the cadence and the measurements."""
        self.cadence.begin(state)
        self._idle_since = time.monotonic()
        adapter.add_metrics(self._keys)
        self.preemption.around_save_s = self._expected_wait_s

    def _expected_wait_s(self) -> float:
        """Return the seconds that a save started now would wait for an earlier one and need for its remote copy."""
        copying_s = self.remote.expected_s if self.remote is not None else 0.0
        return copying_s + (self._saving.writer.remaining_s if self._saving is not None else 0.0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._check_resumed_files()  # the random states were loaded last, after the first batch was fetched
        if self._followers is not None:
            self._followers.step_begins()
        self._pace.begin(self._saving is not None and self._saving.writer.in_flight)
        self.memory.step_began(state)

    def _check_resumed_files(self) -> None:
        """Check once that the files of the checkpoint were there until the last of them was loaded."""
        files, self._resumed_files = self._resumed_files, None
        if files is not None:
            files.check()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()
        self.memory.step_ended(state, self._output_dir)
        if self._saving is not None and self._saves and not self._has_reserved:
            self._has_reserved = True
            self._saving.reserve_memory()  # the optimizer has its states now
        self._pace.end(self._saving is not None and self._saving.writer.in_flight)
        self._status.step_ended(state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()
        with self._noting_own_save(state, control):
            self.preemption.at_prediction_step(state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()
        self._evaluated_step = state.global_step
        note_made(state)
        self._check_resumed_files()  # one that was made up may be followed by a save of this checkpoint
        with self._noting_own_save(state, control):
            self.preemption.at_evaluation_end(state, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.cadence.saved(state)
        self._stalls_s[state.global_step] = time.monotonic() - self._idle_since
        self._is_watched = True
        agreed: Mapping[str, float] = {}
        if self._votes_count(state):
            agreed = self._agreement.now(self._votes(state))
        self.memory.follow(agreed)
        self.preemption.at_save(agreed.get(_STOP), state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._ended_step = state.global_step
        note_cut_epoch(TrainerAdapter.current(), control)
        with self._noting_own_save(state, control):
            self.preemption.at_epoch_end(state, control)
        is_stopped = self.preemption.stop is not None
        if (
            is_stopped
            and args.logging_strategy == "epoch"
            and not ends_epoch(TrainerAdapter.current().trainer)
        ):
            # The launch that ends this epoch logs the mean of all its steps
            control.should_log = False

    @contextmanager
    def _noting_own_save(self, state: TrainerState, control: TrainerControl) -> Iterator[None]:
        """Note whether what runs inside is the only reason to save this step."""
        requested_by_others = control.should_save
        try:
            yield
        finally:
            if control.should_save and not requested_by_others:
                self._own_step = state.global_step

    @activity("saving")
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._wait()
        if self._saving is not None:
            self._saving.stop_reserving()
        adapter = TrainerAdapter.current()
        adapter.restore_argument("save_total_limit")
        if args.load_best_model_at_end:
            finish_merged_load(adapter.trainer, state.best_model_checkpoint)
        self._agreement.finish()
        self.preemption.end(exits=self.options.on_preemption == "exit")
        if args.should_save:
            status = "completed" if self.preempted is None else "preempted"
            self._status.set(status, state.global_step, reason=self.preempted)
            raise_end(status, state.global_step, self.preempted)
        if self.remote is not None:
            self.remote.wait(self.last_committed)
        if args.should_save and self.preempted is None:
            self._rotate_at_end(state)
        atexit.unregister(self._at_exit)
        if args.should_save:
            unlock_output_dir(output_folder(args))
        ending = self.preemption.ending(self.last_committed)
        if ending is not None and self.options.on_preemption == "exit":
            if isinstance(ending, Preempted):  # Python prints nothing for a SystemExit
                logger.info("%s", ending.message)
                self.memory.preempted(ending.code)
            adapter.raise_after_training(ending)

    def _wait(self) -> None:
        """Wait until no save is in flight; if it failed, raise its error on all ranks."""
        self._is_watched = False
        if self._saving is not None:
            self._saving.writer.wait()

    def _votes(self, state: TrainerState) -> dict[str, float]:
        """Return this rank's votes at a step boundary, for one exchange."""
        return {
            _STOP: self.preemption.vote(),
            _OVERDUE: self.cadence.vote() if self._saves else 0.0,
            _WRITER: self._vote_of_writer(),
            **self.memory.votes(state),
        }

    def _vote_of_writer(self) -> float:
        """Return whether this rank writes in the background, or whether that has failed."""
        if self._saving is None:
            return 0.0
        writer = self._saving.writer
        return _HAS_FAILED if writer.has_failed else _WRITES * writer.in_flight

    def _votes_count(self, state: TrainerState) -> bool:
        """Return whether the votes of this step decide anything, the same on every rank: not where training ends."""
        ends = self.preemption.stop is not None or state.global_step >= state.max_steps
        return not ends or self.memory.is_due(state)

    def _agree(self, state: TrainerState) -> Mapping[str, float]:
        """Exchange the votes of a step boundary, if it is time for it. Every rank must call it once per step.

        Returns:
            `Mapping[str, float]`: the greatest vote of all ranks by name; empty if no exchange is read at this step.
        """
        if not self._votes_count(state):
            return {}
        at_once = self.memory.is_due(state)
        return self._agreement.step(lambda: self._votes(state), at_once=at_once) or {}

    def _watch_writer(self, agreed: Mapping[str, float]) -> None:
        """Raise at the same step on all ranks if the save in the background has failed."""
        if not self._is_watched:
            return
        # On one process a look at each step costs nothing
        worst = agreed.get(_WRITER) if distributed.is_distributed() else self._vote_of_writer()
        if worst == 0.0:
            self._wait()
        elif worst == _HAS_FAILED:
            self._wait()
            raise CheckpointError(
                "a checkpoint could not be written on another rank, whose error names the reason"
            )

    def request_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Ask for a save if one is due or the run stops. It is called at the end of a step, after all others.

        Args:
            args (`TrainingArguments`): the training arguments.
            state (`TrainerState`): the state of the Trainer.
            control (`TrainerControl`): its flags are set.
        """
        requested_by_others = control.should_save
        self._is_ended_by_others = control.should_training_stop
        agreed = self._agree(state)
        self._watch_writer(agreed)
        self.memory.follow(agreed)
        if self._saves:
            due = self.cadence.is_due(args, state, agreed=agreed.get(_OVERDUE, 0.0))
            if args.save_strategy == "no" and state.global_step >= state.max_steps:
                # As Trainer saves the last step under its strategy `steps`
                due = requested_by_others = True
            requested_by_others = requested_by_others or (due and self.cadence.is_steps_of_user)
            control.should_save = due or control.should_save
        self.preemption.at_step_end(agreed.get(_STOP), state, control)
        if self.preemption.asked_step == state.global_step:
            requested_by_others = True
        self._own_step = (
            state.global_step if control.should_save and not requested_by_others else None
        )

    def _begin_save(self, state: TrainerState, args: TrainingArguments) -> None:
        """Note in the state whether the checkpoint that is about to be written is temporary.

        Raises:
            UsageError: the output directory was removed and made again, and another run has locked it.
        """
        if args.should_save:
            # Something may have removed the folder, and the lock with it
            make_and_lock(self._output_dir)
        trainer = TrainerAdapter.current().trainer
        note_unfinished_epoch(trainer, self._evaluated_step)
        has_ended = self._ended_step == state.global_step
        note_epoch_end(trainer, is_due=ends_epoch(trainer) and not has_ended)
        may_be_asked = self._is_ended_by_others or self.preemption.stop is None
        note_stop(trainer, is_asked=may_be_asked and not has_stopped_early(trainer))
        is_temporary = self._own_step == state.global_step
        self._own_step = None  # a second save of this step is one that others have asked for
        if args.save_strategy == "best" and state.best_global_step == state.global_step:
            is_temporary = False  # Trainer would save it too
        if args.save_strategy == "epoch" and ends_epoch(trainer):
            is_temporary = False
        self._kept.note(state, is_temporary=is_temporary)

    def finish_save(self, state: TrainerState) -> None:
        """Complete a checkpoint to which other callbacks may have added files in `on_save`.

        Every rank must call it, after `on_save` of all other callbacks.

        Args:
            state (`TrainerState`): the state of the Trainer.
        """
        if self._saving is None or not self._saving.has_readers:
            return
        checkpoint = self._run_dir / f"checkpoint-{state.global_step}"
        with TRAINING.agreed("save: files of callbacks"):
            if self._after_save is not None:
                is_temporary = state.global_step in self._kept.temporary
                self._after_save.finish(checkpoint, is_temporary=is_temporary)
        if self._saving.commits and checkpoint.is_dir():
            (checkpoint / UNFINISHED).unlink(missing_ok=True)
            update_manifest(checkpoint)
            self._read_back(TrainerAdapter.current().trainer, checkpoint)
            best = state.best_model_checkpoint
            self._offer_and_rotate(checkpoint, Path(best) if best else None)

    def _offer_and_rotate(self, checkpoint: Path, best: Path | None) -> None:
        if self.remote is not None:
            self.remote.offer(checkpoint, best, self._kept.temporary)
        self._kept.rotate(best)

    def _rotate_at_end(self, state: TrainerState) -> None:
        """Leave the checkpoints that Trainer would leave at the end of a training, on the ranks that save."""
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        newest = self._kept.rotate_at_end(best)
        if self.last_committed is not None and newest not in (None, self.last_committed):
            self._note_committed(newest)
            self._status.set("completed", state.global_step)

    def _committed(
        self,
        trainer: Trainer,
        checkpoint: Path,
        manifest: Manifest,
        best: Path | None,
        seconds: float,
    ) -> None:
        """Do what follows a commit, on the rank that made it, and in the background if the save is."""
        self._note_committed(checkpoint.name)
        self.preemption.last_write_s = seconds
        self._check_weights_are_apart(manifest)
        discard_conversions(self._run_dir)
        if self._saving is not None and not self._saving.has_readers:
            self._read_back(trainer, checkpoint)
            self._offer_and_rotate(checkpoint, best)
        self._status.committed(manifest.step)
        self._pending_keys = {
            "checkpoint/write_s": seconds,
            "checkpoint/bytes": float(sum(record.bytes for record in manifest.files.values())),
        }

    def _read_back(self, trainer: Trainer, checkpoint: Path) -> None:
        """Say at the first save of a training, and not at a resume, that no run could resume from it."""
        if self._has_read_back:
            return
        self._has_read_back = True
        try:
            check_pickles(checkpoint)
            check_weights(trainer, checkpoint)
        except CheckpointError as error:
            logger.warning(
                "no run will be able to resume from the checkpoints of this training: %s", error
            )

    def _check_weights_are_apart(self, manifest: Manifest) -> None:
        """Say at the first save of a training that `state_limit` has no effect on its checkpoints."""
        if self.options.state_limit is None or self._has_checked_weights:
            return
        self._has_checked_weights = True
        if not keeps_weights_apart(manifest):
            logger.warning(
                "state_limit has no effect: checkpoints of %s have weights and optimizer in the same files",
                manifest.strategy,
            )

    def _keys(self, state: TrainerState, logs: Mapping[str, float]) -> dict[str, float]:
        keys, self._pending_keys = self._pending_keys, {}
        if keys and self.last_committed is not None:
            step = checkpoint_step(Path(self.last_committed))
            keys = {"checkpoint/stall_s": self._stalls_s.pop(step, 0.0), **keys}
            slowdown = self._pace.take_slowdown()
            if slowdown is not None:
                keys["checkpoint/slowdown"] = slowdown
        return keys | self.memory.keys()

    def _note_committed(self, name: str | None) -> None:
        """Note the newest checkpoint, None if there is none, for the status file too."""
        self.last_committed = name
        if name is None:
            self._status.checkpoint = None
        else:
            path = self._run_dir / name
            self._status.checkpoint = path.relative_to(self._output_dir).as_posix()

    def _at_exit(self) -> None:
        """Finish a save in flight and report the failure. It is called at interpreter exit if the run did not end."""
        try:
            if self._saving is not None:
                with suppress(StorageError, KeyboardInterrupt):
                    self._saving.writer.wait(_EXIT_WAIT_S)
        finally:
            self._report_failure()

    def _report_failure(self) -> None:
        """Set the status `failed` if the run neither completed nor was preempted."""
        if self._saving is not None and self._saving.commits:
            self._status.report_failure()


class _AfterOthers(TrainerCallback):
    """Calls a `SpotCheckpointCallback` after the other callbacks of the Trainer have handled an event."""

    def __init__(self, spot: SpotCheckpointCallback) -> None:
        self._spot = spot

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._spot.request_save(args, state, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._spot.finish_save(state)
