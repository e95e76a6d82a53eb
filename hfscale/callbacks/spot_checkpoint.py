"""Checkpoints on a cadence of steps and minutes, committed by a manifest, with a status file for schedulers."""

import atexit
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.callbacks.preemption_stop import STOP_FILE_NAME, PreemptionStop
from hfscale.callbacks.remote_copies import RemoteCopies
from hfscale.callbacks.save_cadence import DEFAULT_EVERY_MINUTES, SaveCadence
from hfscale.checkpoint.lock import lock_for_all_ranks, unlock_output_dir
from hfscale.checkpoint.manifest import MANIFEST_NAME, Manifest
from hfscale.checkpoint.store import archive, checkpoint_step, read_status, rotate, write_status
from hfscale.checkpoint.writer import clear_unfinished, finish_renames
from hfscale.errors import StorageError
from hfscale.health.build_locks import remove_abandoned_locks
from hfscale.integrations.metric_injector import MetricInjector
from hfscale.integrations.resume import check_resumed, discard_conversions, finish_merged_load, finish_universal_load
from hfscale.integrations.saving import TrainerSaving
from hfscale.integrations.stream_position import StreamPlace
from hfscale.integrations.trainer import calling_trainer, resumed_from
from hfscale.metrics.clocks import StepPace
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_WATCH_EVERY_S = 1.0  # how soon all ranks learn that a save beside the training has ended, or failed
_EXIT_WAIT_S = 600.0  # for a save in flight when the process ends early


class SpotCheckpointCallback(TrainerCallback):
    """Saves every N steps or M minutes, whichever comes first, and makes each checkpoint provably whole.

    A checkpoint is what Trainer writes, in its layout. It grows in a hidden folder, is flushed to the disk, gets a
    manifest with the hash of every file (`hfscale_manifest.json`) and only then its name; after that, older ones
    beyond `save_total_limit` are deleted (Trainer itself deletes them before). `hfscale_status.json` says how the run
    stands. `hfscale.latest_checkpoint(output_dir)` is then the newest checkpoint that is whole. With
    `save_strategy="no"` nothing is saved.

    Alone, under DDP, FSDP2 and `ParallelTrainer`, training waits only for a copy of its state to host memory; the
    rest happens beside it, one save at a time. Under DeepSpeed the partitions, which are the most, are written beside
    it. So `on_save` of other callbacks comes before the checkpoint is there: where one of them may read it, and where
    weights are gathered from all ranks to be written, training waits for the whole save, and a line says so. The end
    of the training, the loading of the best checkpoint and the next save wait for the one in flight; if it fails, the
    run stops soon after, at the same step on all ranks.

    A notice that the machine goes (SIGTERM, SIGUSR1, Ctrl-C, a cloud's, the stop file; on any rank) makes all ranks
    stop at one step boundary and save that step, if there is time for it. `Trainer.train` then returns as at its end,
    the status is `preempted`, and `preempted` says why; an evaluation under way is left. A second Ctrl-C stops at
    once.

    | metric key | unit | meaning |
    |---|---|---|
    | `checkpoint/stall_s` | s | training stood still for the last save |
    | `checkpoint/write_s` | s | from the start of the last save to its commit |
    | `checkpoint/slowdown` | ratio | steps while it was written beside the training / other steps, medians |
    | `checkpoint/bytes` | bytes | size of the last committed checkpoint |

    Args:
        every_steps (`int`, *optional*): steps between saves; absent: the Trainer's `save_steps`, or 500 where its
            `save_strategy` is not `steps`.
        every_minutes (`float`, *optional*): minutes between saves; None: steps only.
        notice_s (`float`, *optional*): seconds between a signal and the end of the process; absent: what a launcher
            waits after SIGTERM (`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, 30), no limit after SIGUSR1.
        cloud (`str`, *optional*): whose notices are polled: aws, gcp, azure; "auto": this machine's (`HFSCALE_CLOUD`
            in the environment overrules); None: nobody's.
        stop_file (`str`, *optional*): a file whose presence stops the run, in the output directory unless its path is
            absolute; removed once obeyed. None: no such file.
        asynchronous (`bool`): write beside the training where that gives the same files; False: training waits.
        remote (`str`, *optional*): a folder of a remote store, such as `s3://bucket/run`, `gs://…` or `file://…`, that
            committed checkpoints are copied to beside the training, and that a newer one than the local is fetched
            from when the Trainer is made. `save_total_limit` holds there too. Credentials come from where the
            provider's tools look for them.

    Raises:
        UsageError: a cadence or notice that is not positive, an unknown cloud, a remote that is no URL; or another
            run holds the output directory.
        StorageError: during training, on every rank: a checkpoint could not be written.
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = DEFAULT_EVERY_MINUTES,
        notice_s: float | None = None,
        cloud: str | None = "auto",
        stop_file: str | None = STOP_FILE_NAME,
        asynchronous: bool = True,
        remote: str | None = None,
    ) -> None:
        self.cadence = SaveCadence(every_steps=every_steps, every_minutes=every_minutes)
        self.asynchronous = asynchronous
        self.remote = RemoteCopies(remote) if remote is not None else None
        self.last_committed: str | None = None
        """Name of the newest checkpoint that this run committed or resumed from, `checkpoint-N`."""
        self.preemption = PreemptionStop(notice_s=notice_s, cloud=cloud, stop_file=stop_file)
        self._limit: int | None = None
        self._running_step: int | None = None
        self._pending_keys: dict[str, float] = {}
        self._stalls_s: dict[int, float] = {}
        self._saving: TrainerSaving | None = None
        self._watch: distributed.StepAgreement | None = None
        self._pace = StepPace()

    @property
    def preempted(self) -> str | None:
        """Why the last training stopped before its end; None where it did not."""
        return self.preemption.reason(self.last_committed)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._take_over_rotation(args)
        StreamPlace.attach(calling_trainer())
        finish_renames(Path(args.output_dir))  # so that plain `resume_from_checkpoint=True` finds them too
        if args.deepspeed and args.local_process_index == 0:  # it is before training begins that it would wait
            remove_abandoned_locks(os.environ)
        if self.remote is not None:
            self.remote.fetch(Path(args.output_dir))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        lock_for_all_ranks(args.output_dir, is_holder=args.should_save)
        trainer = calling_trainer()
        self._wait()  # for what a training that was broken off has left in flight
        finish_universal_load(trainer)
        finish_merged_load(trainer, resumed_from())
        check_resumed(trainer)
        self._take_over_rotation(args)
        self._output_dir = Path(args.output_dir)
        self._saving = TrainerSaving(trainer, asynchronous=self.asynchronous, committed=self._committed)
        writer = self._saving.writer
        self.preemption.around_save_s = lambda: writer.remaining_s + (self.remote.expected_s if self.remote else 0.0)
        self._watch = None
        self.cadence.begin(state)
        self._idle_since = time.monotonic()
        MetricInjector.of(trainer).add(self._keys)
        MetricInjector.of(trainer).before_last(self._wait)
        if args.save_strategy == "no":
            logger.info("save_strategy is 'no': nothing will be saved, and a lost machine loses the run")
        if args.should_save:
            clear_unfinished(self._output_dir)
            for moved in archive(args.output_dir, after_step=state.global_step):
                logger.info("set aside a checkpoint of later steps than this run begins at: %s", moved)
            self._rotate(state.best_model_checkpoint)  # which a launch that was killed may have left to this one
            start = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.last_committed = start.name if (start / MANIFEST_NAME).is_file() else None
            self._set_status(args, "running", state.global_step)
            if self.remote is not None:
                self.remote.begin(self._output_dir, state, limit=self._limit, committed=self.last_committed)
        atexit.register(self._at_exit, args)
        distributed.barrier()  # no rank may begin to write what another is about to set aside
        self.preemption.begin(trainer, kwargs.get("train_dataloader"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._pace.begin(self._saving is not None and self._saving.writer.in_flight)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()
        self._pace.end(self._saving is not None and self._saving.writer.in_flight)
        if self._running_step is not None:
            self._running_step = state.global_step
        if args.save_strategy != "no":
            self._watch_writer()
            control.should_save = self.cadence.is_due(args, state) or control.should_save
        self.preemption.at_step_end(args, state, control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._idle_since = time.monotonic()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()
        self.preemption.at_prediction_step(args, state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()
        self.preemption.at_evaluation_end(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.cadence.saved(state)
        self._stalls_s[state.global_step] = time.monotonic() - self._idle_since
        # Alone, looking at each step costs nothing.
        self._watch = distributed.StepAgreement(_WATCH_EVERY_S if distributed.is_distributed() else 0.0)
        self.preemption.at_save(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.preemption.at_epoch_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._wait()
        if args.load_best_model_at_end:
            finish_merged_load(calling_trainer(), state.best_model_checkpoint)
        self.preemption.end()
        if args.should_save:
            status = "completed" if self.preempted is None else "preempted"
            self._set_status(args, status, state.global_step, reason=self.preempted)
        if self.remote is not None:
            self.remote.wait(self.last_committed)
        if self._saving is not None:
            self._saving.restore()
        atexit.unregister(self._at_exit)
        if args.should_save:
            unlock_output_dir(args.output_dir)

    def _wait(self) -> None:
        """Until no save is in flight; raises where it failed, on all ranks."""
        self._watch = None
        if self._saving is not None:
            self._saving.writer.wait()

    def _watch_writer(self) -> None:
        """Raise at one and the same step on all ranks where the save beside the training has failed."""
        if self._watch is None or self._saving is None:
            return
        writer = self._saving.writer
        worst = self._watch.step(2.0 if writer.has_failed else float(writer.in_flight))
        if worst == 0.0:
            self._wait()
        elif worst == 2.0:
            self._wait()
            raise StorageError("a checkpoint could not be written on another rank: see its error")

    def _take_over_rotation(self, args: TrainingArguments) -> None:
        """Trainer rotates inside its save, before the new checkpoint is committed: with a limit of 1, a machine lost
        between the two leaves nothing. So the limit is taken from it and applied after the commit."""
        if args.save_total_limit is not None:
            self._limit, args.save_total_limit = args.save_total_limit, None

    def _rotate(self, best: str | os.PathLike[str] | None) -> None:
        if self._limit is not None:
            rotate(self._output_dir, limit=self._limit, keep=Path(best) if best is not None else None)

    def _committed(self, checkpoint: Path, manifest: Manifest, best: Path | None, seconds: float) -> None:
        """What follows a commit, on the rank that made it; beside the training, if the save is."""
        self.last_committed = checkpoint.name
        self.preemption.last_write_s = seconds
        discard_conversions(self._output_dir)
        if self.remote is not None:
            self.remote.offer(checkpoint, best)
        self._rotate(best)
        write_status(self._output_dir, "running", step=manifest.step, checkpoint=checkpoint.name, reason=None)
        self._pending_keys = {
            "checkpoint/write_s": seconds,
            "checkpoint/bytes": float(sum(record.bytes for record in manifest.files.values())),
        }

    def _keys(self, state: TrainerState) -> dict[str, float]:
        keys, self._pending_keys = self._pending_keys, {}
        if keys and self.last_committed is not None:
            step = checkpoint_step(Path(self.last_committed))
            keys = {"checkpoint/stall_s": self._stalls_s.pop(step, 0.0), **keys}
            slowdown = self._pace.take_slowdown()
            if slowdown is not None:
                keys["checkpoint/slowdown"] = slowdown
        return keys

    def _set_status(self, args: TrainingArguments, status: str, step: int, reason: str | None = None) -> None:
        self._running_step = step if status == "running" else None
        write_status(Path(args.output_dir), status, step=step, checkpoint=self.last_committed, reason=reason)

    def _at_exit(self, args: TrainingArguments) -> None:
        """At interpreter exit, of a run that did not come to its end: a save in flight is good to have."""
        if self._saving is not None:
            with suppress(StorageError, KeyboardInterrupt):
                self._saving.writer.wait(_EXIT_WAIT_S)
        if args.should_save:
            self._report_failure(args)

    def _report_failure(self, args: TrainingArguments) -> None:
        """A run that neither completed nor was preempted has failed, unless one after it has told of its own end."""
        told = read_status(Path(args.output_dir))
        if self._running_step is not None and (told is None or told.get("status") == "running"):
            error = getattr(sys, "last_value", None)
            reason = f"{type(error).__name__}: {error}" if error is not None else "the process ended before the run"
            with suppress(OSError):  # a full disk may be why it failed; that has been said, and this is the last act
                self._set_status(args, "failed", self._running_step, reason=" ".join(reason.split()))
