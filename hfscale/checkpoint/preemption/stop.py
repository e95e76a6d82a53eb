"""Stops a training after a preemption notice: all ranks stop at the same step, and save it if there is time.

`SpotCheckpointCallback` calls `PreemptionStop` from its own events. A notice (a signal, a cloud's notice, the stop
file) may reach any rank at any time, so the ranks agree in three steps:

1. *Vote.* At step boundaries, about every half second, all ranks exchange a vote: continue, save (a notice is likely)
   or stop (a notice is pending). The greatest vote counts. The exchange overlaps with the next step (`StepAgreement`),
   and every rank reads its result at the same step boundary. `SpotCheckpointCallback` makes it, together with the
   other votes of a step. Votes are also exchanged during evaluations, and at their end and after a save.
2. *Agree on the numbers.* If the result is to stop, all ranks exchange once more: the source of the notice, the least
   time left, and the longest time that a save takes. If all notices have been withdrawn meanwhile, training continues.
3. *Decide.* From the same numbers every rank makes the same decision: stop after this step, and save it unless nothing
   is ever saved or the time left is too short.

The decision is applied through the flags of `TrainerControl`, at this boundary and at every later event of the step.
"""

import functools
import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState

from hfscale.checkpoint.evaluations import note_missing
from hfscale.checkpoint.preemption import (
    EXIT_CODE,
    NOTICES,
    SOURCES,
    Notice,
    PeerWatch,
    Preempted,
    PreemptionNotices,
    assumed_notice_s,
    end_workers,
    peers_of,
    shield_workers,
    stop_watching_peers,
    watch_signals,
)
from hfscale.checkpoint.preemption.clouds import watch_cloud
from hfscale.checkpoint.preemption.notice import AWS, STOP_FILE
from hfscale.core import distributed
from hfscale.core.alarms import PREEMPTION, raise_alarm
from hfscale.core.collectives import TRAINING, StepAgreement
from hfscale.core.logging import get_logger, is_main_process
from hfscale.core.processes import describe_process
from hfscale.core.run_files import SAVE_NAME
from hfscale.core.run_state import ResetOnCopy
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.frames import is_training_in
from hfscale.trainer.state import model_of, output_folder

logger = get_logger(__name__)

STOP_FILE_NAME = "hfscale_stop"
SAFETY = 1.5
"""A save is started if 1.5 times its expected time is left: the time of the last write, plus the wait for a save in
flight and the copy to a remote store. A disk to which all machines write at once is slower than usual, and the process
still has to end."""
EXCHANGE_EVERY_S = 0.5
"""Seconds between two exchanges. A notice is known to all ranks within this time and two steps: half a second of the 5
that the shortest notice leaves (RunPod), at the cost of one small collective in the background."""
_WITHOUT_DEADLINE = (signal.SIGINT.name, STOP_FILE)
"""Sources after which nothing ends the process before it has finished."""
_STOP_VOTE = "stop"
_CONTINUE = 0.0
_SAVE = 1.0
_SAVE_ASKED = 1.5
_STOP = 2.0
"""Votes; the ranks agree on the greatest."""


class _EvaluationCutError(Exception):
    """Ends an evaluation early."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The decision that all ranks have agreed on.

    Args:
        source (`str`): the source of the notice, one of `hfscale.checkpoint.preemption.SOURCES`.
        step (`int`): the last step of the training.
        seconds_left (`float`, *optional*): seconds left on the rank that has the least; None: not known.
        save (`bool`): whether that step is saved.
        why_not (`str`, *optional*): the reason if it is not.
    """

    source: str
    step: int
    seconds_left: float | None
    save: bool
    why_not: str | None = None
    finishes_evaluation: bool = False
    """Whether an evaluation under way, or due at that step, is made before the training ends."""


@dataclass(frozen=True, kw_only=True)
class _Outlook:
    """What the ranks know about the notice and about the time of a save, the worst values of all ranks.

    The ranks exchange these numbers by one element-wise maximum.
    """

    source: int
    """Index in `SOURCES`; -1: there is no notice."""
    seconds_left: float
    """Seconds until the end; infinity: not known."""
    write_s: float
    """Seconds that the last save took; -1: there was none."""
    around_save_s: float
    """Seconds that waiting for a save in flight and copying to a remote store take in addition."""
    evaluation_s: float
    """Seconds that an evaluation under way, or due at this step, still takes; infinity: not known."""

    def of_all_ranks(self) -> "_Outlook":
        """Return the worst values of all ranks; every rank must call it."""
        source, minus_left, write_s, around_save_s, evaluation_s = TRAINING.maximum(
            "stop: outlook",
            [
                float(self.source),
                -self.seconds_left,
                self.write_s,
                self.around_save_s,
                self.evaluation_s,
            ],
        )
        return _Outlook(
            source=int(source),
            seconds_left=-minus_left,
            write_s=write_s,
            around_save_s=around_save_s,
            evaluation_s=evaluation_s,
        )

    @property
    def has_time_to_evaluate(self) -> bool:
        """Whether the evaluation fits into the time that is left, with a save after it; not if that is not known."""
        if self.source < 0:  # the notice has been withdrawn
            return True
        if math.isinf(self.seconds_left):
            return SOURCES[self.source] in _WITHOUT_DEADLINE
        save_s = max(self.write_s, 0.0) + self.around_save_s
        return (self.evaluation_s + save_s) * SAFETY <= self.seconds_left

    @property
    def has_time_to_save(self) -> bool:
        """Whether a save is expected to complete in the time left; True where no save has been timed."""
        return self.write_s < 0 or (self.write_s + self.around_save_s) * SAFETY <= self.seconds_left


class PreemptionStop(ResetOnCopy):
    """Collects notices, makes the ranks agree on them, and applies the decision to the flags of `TrainerControl`.

    Args:
        notice_s (`float`, *optional*): seconds between a signal and the end of the process; None: what
            `assumed_notice_s` returns. Notices of clouds have their own times.
        cloud (`str`, *optional*): the cloud whose notices are polled: aws, gcp, azure; "auto": this machine's, if it
            is one of them; None: no polling.
        stop_file (`str`, *optional*): a file, in the output directory unless its path is absolute, whose presence
            stops the run; it is removed when the run has stopped. None: no such file.
        notices (`PreemptionNotices`): where notices are added.
    """

    exchange_every_s = EXCHANGE_EVERY_S

    def __init__(
        self,
        *,
        notice_s: float | None = None,
        cloud: str | None = "auto",
        stop_file: str | None = STOP_FILE_NAME,
        notices: PreemptionNotices = NOTICES,
    ) -> None:
        self.notice_s = notice_s
        self.cloud = cloud
        self.stop_file = stop_file
        self.notices = notices
        self.stop: Stop | None = None
        """The decision to stop; None while the run continues."""
        self.last_write_s: float | None = None
        """Seconds from the start of the last save to its commit; None before the first."""
        self.around_save_s: Callable[[], float] = float
        """Seconds on this rank that a save started now would wait for an earlier one, and that its copy to a remote
        store would take after it."""
        self._begin_run()

    def _begin_run(self) -> None:
        self._evaluation_agreement: StepAgreement | None = None
        self._saved_step: int | None = None
        self._saves = True
        self._listening = ExitStack()  # is closed by `end`, or when an exception ends the training
        self._adapter: TrainerAdapter | None = None
        self._stop_path: Path | None = None
        self._save_path: Path | None = None
        self._is_save_asked = False
        self.asked_step: int | None = None
        """The step that was saved last because a user has asked for it."""
        self._metric_for_best_model: str | None = None
        self._is_in_training = False  # whether the training evaluates, and not a callback
        self._evaluation_begun: float | None = None
        self._last_evaluation_s: float | None = None

    def begin(self, adapter: TrainerAdapter, train_dataloader: Any, *, saves: bool) -> None:
        """Start collecting notices, at the beginning of a training and before its data loader workers start.

        Args:
            adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
            train_dataloader (`DataLoader`): its training data.
            saves (`bool`): whether this training saves checkpoints.

        Raises:
            UsageError: `HFSCALE_CLOUD` in the environment names an unknown cloud.
        """
        trainer = adapter.trainer
        self._listening.close()  # of a training loop that `auto_find_batch_size` has restarted
        self._begin_run()
        self._adapter = adapter
        self._saves = saves
        adapter.at_training_end(self._listening.close)
        adapter.before_last_log(self._skip_best_model)
        self.stop = None
        self.last_write_s = None
        self._stop_path = output_folder(trainer.args) / self.stop_file if self.stop_file else None
        self._save_path = output_folder(trainer.args) / SAVE_NAME
        self._metric_for_best_model = trainer.args.metric_for_best_model
        watch = watch_signals()
        processes = self._gather_processes()
        if watch.is_installed:
            watch.serve(is_training_in)
            self._listening.callback(watch.done)
            stop_watching_peers()  # the recipe's, from before the training
            if peers := peers_of(distributed.rank(), processes):
                peer_watch = PeerWatch(peers)
                self._listening.callback(peer_watch.stop)
                peer_watch.start()
        else:
            logger.warning(
                "signals are not handled: train() runs in a thread, and Python needs the main thread"
            )
        if trainer.args.local_process_index == 0:
            poller = watch_cloud(self.cloud, notices=self.notices)
            if poller is not None:
                self._listening.callback(poller.stop)
        shield_workers(train_dataloader)
        adapter.evaluations.on_eval_dataloader("shield", shield_workers)
        adapter.evaluations.wrap_evaluate("stop", self._cut_short_by_a_stop)
        adapter.wrap_method("_evaluate", self._without_effect_if_cut)

    def at_step_end(
        self, agreed: float | None, state: TrainerState, control: TrainerControl
    ) -> None:
        """Follow the votes of a step boundary, except at the last step of the training, which ends anyway.

        Args:
            agreed (`float`, *optional*): the greatest vote of all ranks; None: no exchange was read at this step.
            state (`TrainerState`): the state of the Trainer.
            control (`TrainerControl`): the Trainer's flags, which are set if the run stops or a save is due.
        """
        if self.stop is None and state.global_step < state.max_steps:
            self._follow(agreed, state, control)
        self._apply(state, control)

    def at_prediction_step(self, state: TrainerState, control: TrainerControl) -> None:
        """Vote during an evaluation, which can last for hours, and end it at once if the run stops.

        It is finished first if the time that is left allows it, as after Ctrl-C. An evaluation that is ended early
        returns no metrics, since metrics of a part of the data would be mistaken for those of all data; the resumed
        launch makes it again. After the last step only the evaluation is ended, so that the run reaches its last save
        and its end.

        Args:
            state (`TrainerState`): the state of the Trainer.
            control (`TrainerControl`): the Trainer's flags, which are set if the run stops or a save is due.

        Raises:
            _EvaluationCutError: the evaluation ends here. The wrapper of `Trainer.evaluate` catches it.
        """
        if self._evaluation_agreement is None:
            return  # an evaluation outside of the training
        if self.stop is None:
            votes = self._evaluation_agreement.step(self._votes_of_evaluation)
            agreed = None if votes is None else votes[_STOP_VOTE]
            if state.global_step < state.max_steps:
                self._follow(agreed, state, control)
            elif agreed == _STOP and not self._outlook().of_all_ranks().has_time_to_evaluate:
                logger.warning(
                    "the last evaluation of the training is cut short: the best model is chosen without it"
                )
                raise _EvaluationCutError
        if self.stop is not None:
            self._apply(state, control)
            if not self.stop.finishes_evaluation:
                raise _EvaluationCutError

    def at_evaluation_end(self, state: TrainerState, control: TrainerControl) -> None:
        """Vote after an evaluation, before the next step.

        Args:
            state (`TrainerState`): the state of the Trainer.
            control (`TrainerControl`): the Trainer's flags, which are set if the run stops or a save is due.
        """
        if self._evaluation_agreement is None or state.global_step >= state.max_steps:
            return
        if self.stop is None:
            votes = self._evaluation_agreement.now(self._votes_of_evaluation())
            self._follow(votes[_STOP_VOTE], state, control)
        self._apply(state, control)

    def at_save(self, agreed: float | None, state: TrainerState, control: TrainerControl) -> None:
        """Record that this step is saved, and follow the votes after it: a notice during the save needs no second one.

        Args:
            agreed (`float`, *optional*): the greatest vote of all ranks, exchanged after the save; None: the training
                ends with this step.
            state (`TrainerState`): the state of the Trainer.
            control (`TrainerControl`): the Trainer's flags, which are set if the run stops.
        """
        self._saved_step = state.global_step
        if self.stop is None and state.global_step < state.max_steps:
            self._follow(agreed, state, control)
        self._apply(state, control)

    def at_epoch_end(self, state: TrainerState, control: TrainerControl) -> None:
        """Prevent the evaluation at the end of the epoch in which the run stops.

        Where the epoch has taken all its steps, the checkpoint says that its evaluation is missing.

        Args:
            state (`TrainerState`): the state of the Trainer.
            control (`TrainerControl`): the Trainer's flags, which are set if the run stops.
        """
        if self.stop is not None:
            control.should_evaluate = False
            self._apply(state, control)

    def end(self, *, exits: bool) -> None:
        """Stop collecting notices and remove the stop file.

        Call it when the training has ended and its checkpoints are committed.

        Args:
            exits (`bool`): whether a run that was stopped ends its process now. Then, with several processes, signals
                are ignored from here on: as soon as one rank has ended, the launcher signals the others.
        """
        if exits and self.stop is not None and distributed.is_distributed():
            watch_signals().ignore()
        end_workers()
        if self.stop is not None and distributed.rank() == 0 and self._stop_path is not None:
            try:
                # Not before: a run that is killed must stop again
                self._stop_path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning(
                    "remove %s, or it stops the next launch too: %s",
                    self._stop_path,
                    error.strerror,
                )
        self.notices.clear()
        self._listening.close()

    def ending(self, last_committed: str | None) -> Preempted | KeyboardInterrupt | None:
        """Return the exception that ends the process of a run that was stopped; None if it was not.

        Args:
            last_committed (`str`, *optional*): the name of the last committed checkpoint; None: there is none.

        Returns:
            `KeyboardInterrupt` after Ctrl-C, else `Preempted`, which is SystemExit with code 75.
        """
        if self.stop is None:
            return None
        reason = self.reason(last_committed)
        if self.stop.source == signal.SIGINT.name:
            return KeyboardInterrupt(f"stopped by {reason}; relaunch the same command to resume")
        return Preempted(
            f"preempted by {reason}; relaunch the same command to resume (exit code {EXIT_CODE})"
        )

    def reason(self, last_committed: str | None) -> str | None:
        """Return why the run stopped, for the status file.

        Args:
            last_committed (`str`, *optional*): the name of the last committed checkpoint; None: there is none.

        Returns:
            `str` or `None`: the source of the notice and what was saved; None if the run was not stopped.
        """
        if self.stop is None:
            return None
        if self.stop.why_not is not None:
            return f"{self.stop.source}: {self.stop.why_not}"
        return (
            f"{self.stop.source}: {last_committed} is committed"
            if last_committed
            else self.stop.source
        )

    def _gather_processes(self) -> list[dict[str, Any]]:
        """Return what `describe_process` returns on each rank; every rank must call it."""
        return TRAINING.gather("processes", describe_process())

    def _new_agreement(self) -> StepAgreement:
        return StepAgreement("evaluation", self.exchange_every_s, overlapped=True)

    def _votes_of_evaluation(self) -> dict[str, float]:
        return {_STOP_VOTE: self.vote()}

    def vote(self) -> float:
        """Return this rank's vote; rank 0 also looks for the files of a user."""
        if self._stop_path is not None and distributed.rank() == 0:
            # It does not exist; or the file system fails, which is no reason to stop
            with suppress(OSError):
                self._stop_path.stat()
                self.notices.add(Notice(source=STOP_FILE))
        if self.notices.pending():
            return _STOP
        if self._look_for_save_file():
            return _SAVE_ASKED
        return _SAVE if self.notices.take_hint() else _CONTINUE

    def _look_for_save_file(self) -> bool:
        """Return whether a user has asked for a checkpoint on rank 0, until one is saved; the file is removed."""
        if self._save_path is not None and distributed.rank() == 0:
            # It does not exist; or it cannot be removed, and would be found again after each step
            with suppress(OSError):
                self._save_path.unlink()
                self._is_save_asked = True
        return self._is_save_asked

    def _follow(self, agreed: float | None, state: TrainerState, control: TrainerControl) -> None:
        """Act on the vote that the ranks agreed on; do nothing for None, which means that no exchange was read."""
        if agreed in (_SAVE, _SAVE_ASKED):
            self._log_save(agreed, state)
            control.should_save = control.should_save or self._may_save(state)
        elif agreed == _STOP:
            self.stop = self._agree_on_stop(state)
            if self.stop is not None:
                _log_stop(self.stop)

    def _log_save(self, agreed: float, state: TrainerState) -> None:
        """Log why a step is saved that the cadence does not save."""
        if agreed == _SAVE:
            logger.info("an interruption is likely (%s): step %d is saved", AWS, state.global_step)
            return
        self._is_save_asked = False
        if not self._saves:
            logger.warning("%s: save_strategy is 'no', nothing is saved", SAVE_NAME)
            return
        self.asked_step = state.global_step
        logger.info("%s: step %d is saved", SAVE_NAME, state.global_step)

    def _agree_on_stop(self, state: TrainerState) -> Stop | None:
        """Exchange what the ranks know and decide; return None if all notices have been withdrawn meanwhile."""
        outlook = self._outlook().of_all_ranks()
        if outlook.source < 0:
            return None
        why_not = self._reason_not_to_save(outlook, state)
        finishes = outlook.has_time_to_evaluate and why_not is None
        return Stop(
            source=SOURCES[outlook.source],
            step=state.global_step,
            seconds_left=None if math.isinf(outlook.seconds_left) else outlook.seconds_left,
            save=why_not is None,
            why_not=why_not,
            finishes_evaluation=finishes,
        )

    def _outlook(self) -> _Outlook:
        """Return the worst values of this rank: its pending notices and the times of its saves."""
        notices = self.notices.pending()
        left = [notice.seconds_left(self._assumed_s(notice.source)) for notice in notices]
        return _Outlook(
            source=max((SOURCES.index(notice.source) for notice in notices), default=-1),
            seconds_left=min(
                (seconds for seconds in left if seconds is not None), default=math.inf
            ),
            write_s=-1.0 if self.last_write_s is None else self.last_write_s,
            around_save_s=self.around_save_s(),
            evaluation_s=self._evaluation_left_s(),
        )

    def _evaluation_left_s(self) -> float:
        """Return the seconds that the evaluation under way still takes, or the next one; infinity: not known."""
        if self._last_evaluation_s is None:
            return math.inf
        if self._evaluation_begun is None:
            return self._last_evaluation_s
        return max(self._last_evaluation_s - (time.monotonic() - self._evaluation_begun), 0.0)

    def _assumed_s(self, source: str) -> float | None:
        """Return the seconds that are assumed for a source that gives no time; None: no limit."""
        is_signal = source in signal.Signals.__members__
        return (
            self.notice_s if is_signal and self.notice_s is not None else assumed_notice_s(source)
        )

    def _reason_not_to_save(self, outlook: _Outlook, state: TrainerState) -> str | None:
        if not self._saves:
            return "save_strategy is 'no', nothing was saved"
        if outlook.has_time_to_save or self._saved_step == state.global_step:
            return None
        expected_s = outlook.write_s + outlook.around_save_s
        total = f" ({expected_s:.1f} s with waiting and copying)" if outlook.around_save_s else ""
        left_s = max(outlook.seconds_left, 0.0)
        return f"{left_s:.1f} s left, the last save took {outlook.write_s:.1f} s{total}: no further save was started"

    def _apply(self, state: TrainerState, control: TrainerControl) -> None:
        """Set the flags of `TrainerControl` if the run stops."""
        if self.stop is None:
            return
        if self._adapter is not None:
            self._adapter.announced.is_interrupted = True
        control.should_training_stop = True
        control.should_save = self.stop.save and self._may_save(state)

    def _skip_best_model(self) -> None:
        """Do not load the best model after a stop: that takes as long as a save, and nothing uses it."""
        if self.stop is not None and self._adapter is not None:
            self._adapter.set_argument("load_best_model_at_end", False)

    def _may_save(self, state: TrainerState) -> bool:
        return self._saves and self._saved_step != state.global_step

    def _cut_short_by_a_stop(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Trainer.evaluate`, so that a stop ends it early: Trainer has no flag for that."""

        @functools.wraps(evaluate)
        def cut_short(*args: Any, **kwargs: Any) -> Any:
            # With several evaluation sets evaluate() calls itself for each
            outer = self._evaluation_agreement
            if outer is not None:
                return evaluate(*args, **kwargs)
            self._evaluation_agreement = self._new_agreement()
            self._evaluation_begun = time.monotonic()
            assert self._adapter is not None
            put_back = self._adapter.evaluations.take()
            try:
                metrics = evaluate(*args, **kwargs)
                self._last_evaluation_s = time.monotonic() - self._evaluation_begun
                return metrics
            except _EvaluationCutError:
                logger.info("the evaluation was cut short; it gives no metrics")
                try:
                    put_back()
                # Objects of the user raise anything, and the save that follows counts for more
                except Exception as error:
                    logger.warning(
                        "what the evaluation has moved could not be put back (%s: %s): the resumed run may make it "
                        "up with other random numbers, and may go on with others",
                        type(error).__name__,
                        error,
                    )
                if self._is_in_training:
                    raise
                return self._missing_metrics()
            finally:
                self._evaluation_agreement = self._evaluation_begun = None

        return cut_short

    def _without_effect_if_cut(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Trainer._evaluate`, so that an evaluation without metrics does not move the schedule."""

        @functools.wraps(evaluate)
        def evaluate_or_note(*args: Any, **kwargs: Any) -> Any:
            self._is_in_training = True
            try:
                return evaluate(*args, **kwargs)
            except _EvaluationCutError:
                assert self._adapter is not None
                note_missing(self._adapter.trainer.state)
                # TRL logs what it has gathered in an evaluation for as long as the model evaluates
                model_of(self._adapter.trainer).train()
                return self._missing_metrics()
            finally:
                self._is_in_training = False

        return evaluate_or_note

    def _missing_metrics(self) -> dict[str, float]:
        """Return NaN for the metric that selects the best model, which Trainer looks up, and no other metric."""
        name = self._metric_for_best_model
        if name is None:
            return {}
        return {name if name.startswith("eval_") else f"eval_{name}": math.nan}


def _log_stop(stop: Stop) -> None:
    left = "" if stop.seconds_left is None else f", {max(stop.seconds_left, 0.0):.0f} s left"
    if stop.save:
        logger.info(
            "%s%s: every process stops after step %d and saves it", stop.source, left, stop.step
        )
    else:
        logger.warning(
            "%s: every process stops after step %d; %s", stop.source, stop.step, stop.why_not
        )
    if is_main_process():
        saved = "and saves it" if stop.save else f"and does not save it: {stop.why_not}"
        text = f"{stop.source}{left}: every process stops after step {stop.step} {saved}"
        raise_alarm(PREEMPTION, text, step=stop.step)
