"""Checkpoints on a cadence of steps and minutes, committed by a manifest, with a status file for schedulers."""

import atexit
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale import distributed
from hfscale.callbacks.log_keys import LogKeys
from hfscale.callbacks.preemption_stop import STOP_FILE_NAME, PreemptionStop
from hfscale.callbacks.trainer_access import calling_trainer, global_batch_size
from hfscale.checkpoint.lock import lock_output_dir, unlock_output_dir
from hfscale.checkpoint.manifest import MANIFEST_NAME
from hfscale.checkpoint.status import write_status
from hfscale.checkpoint.store import commit, rotate, set_aside
from hfscale.errors import UsageError
from hfscale.logs import get_logger
from hfscale.strategy import running_strategy

logger = get_logger(__name__)

DEFAULT_EVERY_STEPS = 500
DEFAULT_EVERY_MINUTES = 15.0
_AGREEMENT_EVERY_S = 5.0


class SpotCheckpointCallback(TrainerCallback):
    """Saves every N steps or M minutes, whichever comes first, and makes each checkpoint provably whole.

    Trainer writes the checkpoint; this callback then flushes it to the disk, records every file's hash in
    `hfscale_manifest.json`, and only after that deletes older ones beyond `save_total_limit` (Trainer itself deletes
    them before). `hfscale_status.json` says how the run stands. `hfscale.latest_checkpoint(output_dir)` is then the
    newest checkpoint that is whole. With `save_strategy="no"` nothing is saved.

    A notice that the machine goes (SIGTERM, SIGUSR1, Ctrl-C, a cloud's, the stop file; on any rank) makes all ranks
    stop at one step boundary and save that step, if there is time for it. `Trainer.train` then returns as at its end,
    the status is `preempted`, and `preempted` says why; an evaluation under way is left. A second Ctrl-C stops at
    once.

    | metric key | unit | meaning |
    |---|---|---|
    | `checkpoint/stall_s` | s | training stood still for the last save |
    | `checkpoint/write_s` | s | from the start of the last save to its commit |
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

    Raises:
        UsageError: a cadence or notice that is not positive, an unknown cloud.
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = DEFAULT_EVERY_MINUTES,
        notice_s: float | None = None,
        cloud: str | None = "auto",
        stop_file: str | None = STOP_FILE_NAME,
    ) -> None:
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            if value is not None and value <= 0:
                raise UsageError(f"{name} is {value}: it must be greater than 0, or None")
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.last_committed: str | None = None
        """Name of the newest checkpoint that this run committed or resumed from, `checkpoint-N`."""
        self.preemption = PreemptionStop(notice_s=notice_s, cloud=cloud, stop_file=stop_file)
        self._limit: int | None = None
        self._running_step: int | None = None
        self._pending_keys: dict[str, float] = {}

    @property
    def preempted(self) -> str | None:
        """Why the last training stopped before its end; None where it did not."""
        return self.preemption.reason(self.last_committed)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._take_over_rotation(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _lock(args)
        trainer = calling_trainer()
        self._take_over_rotation(args)
        self._strategy = running_strategy(trainer)
        self._global_batch_size = global_batch_size(trainer)
        self._agreement = distributed.StepAgreement(every_s=_AGREEMENT_EVERY_S)
        self._saved_step, self._saved_at, self._idle_since = state.global_step, time.monotonic(), time.monotonic()
        LogKeys.of(trainer).add(self._keys)
        if args.save_strategy == "no":
            logger.info("save_strategy is 'no': nothing will be saved, and a lost machine loses the run")
        if args.should_save:
            for moved in set_aside(args.output_dir, after_step=state.global_step):
                logger.info("set aside a checkpoint of later steps than this run begins at: %s", moved)
            start = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.last_committed = start.name if (start / MANIFEST_NAME).is_file() else None
            self._set_status(args, "running", state.global_step)
            atexit.register(self._report_failure, args)
        distributed.barrier()  # no rank may begin to write what another is about to set aside
        self.preemption.begin(trainer, kwargs.get("train_dataloader"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._idle_since = time.monotonic()
        if self._running_step is not None:
            self._running_step = state.global_step
        if args.save_strategy != "no":
            self._follow_cadence(args, state, control)
        self.preemption.at_step_end(args, state, control)

    def _follow_cadence(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        minutes = (time.monotonic() - self._saved_at) / 60
        overdue = self.every_minutes is not None and minutes >= self.every_minutes
        # Ranks read different clocks; the step at which they save must be one and the same.
        agreed = self._agreement.step(float(overdue)) if self.every_minutes is not None else 0.0
        if agreed or state.global_step - self._saved_step >= self._cadence_steps(args, state):
            control.should_save = True

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
        distributed.barrier()  # every rank has written its files
        if args.should_save:
            self._commit(args, state)
        distributed.barrier()
        self._saved_step, self._saved_at = state.global_step, time.monotonic()
        self.preemption.at_save(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.preemption.at_epoch_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.preemption.end()
        if args.should_save:
            status = "completed" if self.preempted is None else "preempted"
            self._set_status(args, status, state.global_step, reason=self.preempted)
            atexit.unregister(self._report_failure)
            unlock_output_dir(args.output_dir)

    def _cadence_steps(self, args: TrainingArguments, state: TrainerState) -> int:
        if self.every_steps is not None:
            return self.every_steps
        by_steps = args.save_strategy == "steps" and state.save_steps > 0  # of `args`, it may be a share of all steps
        return state.save_steps if by_steps else DEFAULT_EVERY_STEPS

    def _take_over_rotation(self, args: TrainingArguments) -> None:
        """Trainer rotates inside its save, before the new checkpoint is committed: with a limit of 1, a machine lost
        between the two leaves nothing. So the limit is taken from it and applied after the commit."""
        if args.save_total_limit is not None:
            self._limit, args.save_total_limit = args.save_total_limit, None

    def _commit(self, args: TrainingArguments, state: TrainerState) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        manifest = commit(
            checkpoint,
            step=state.global_step,
            strategy=self._strategy,
            world_size=args.world_size,
            global_batch_size=self._global_batch_size,
        )
        self.last_committed = checkpoint.name
        if self._limit is not None:
            best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
            rotate(args.output_dir, limit=self._limit, keep=best)
        self._set_status(args, "running", state.global_step)
        self.preemption.last_write_s = stall_s = time.monotonic() - self._idle_since
        self._pending_keys = {
            "checkpoint/stall_s": stall_s,
            "checkpoint/write_s": stall_s,  # the save is synchronous: training stands still for all of it
            "checkpoint/bytes": float(sum(record.bytes for record in manifest.files.values())),
        }

    def _keys(self, state: TrainerState) -> dict[str, float]:
        keys, self._pending_keys = self._pending_keys, {}
        return keys

    def _set_status(self, args: TrainingArguments, status: str, step: int, reason: str | None = None) -> None:
        self._running_step = step if status == "running" else None
        write_status(Path(args.output_dir), status, step=step, checkpoint=self.last_committed, reason=reason)

    def _report_failure(self, args: TrainingArguments) -> None:
        """At interpreter exit: a run that neither completed nor was preempted has failed."""
        if self._running_step is not None:
            error = getattr(sys, "last_value", None)
            reason = f"{type(error).__name__}: {error}" if error is not None else "the process ended before the run"
            with suppress(OSError):  # a full disk may be why it failed; that has been said, and this is the last act
                self._set_status(args, "failed", self._running_step, reason=" ".join(reason.split()))


def _lock(args: TrainingArguments) -> None:
    """Take the output directory on the main process; every rank learns whether that went well."""
    error: UsageError | None = None
    if args.should_save:
        try:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            lock_output_dir(args.output_dir)
        except UsageError as refused:
            error = refused
    if distributed.all_max([float(error is not None)])[0]:
        raise error or UsageError(f"{args.output_dir} is in use by another run")
