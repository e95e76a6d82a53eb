"""What a training does with a notice: all ranks stop at one step, and save where the time is enough.

A part of `SpotCheckpointCallback`, which calls it from its own events.
"""

import functools
import math
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from hfscale.errors import UsageError
from hfscale.integrations.trainer import TrainerAdapter, is_training_in
from hfscale.preemption import (
    BOARD,
    SOURCES,
    Notice,
    NoticeBoard,
    Shielding,
    assumed_notice_s,
    end_workers,
    shield_workers,
    watch_signals,
)
from hfscale.preemption.agreement import EVERY_S, OverlappedAgreement
from hfscale.preemption.clouds import check_cloud, watch_cloud
from hfscale.preemption.notice import AWS, STOP_FILE
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

STOP_FILE_NAME = "hfscale_stop"
SAFETY = 1.5
"""A save is begun if 1.5 times what the last one took is left, and as much of what stands around it: the rest of one
in flight, the copy to a remote. A disk that all machines write to at once is slower than usual, and the process still
has to end."""
_GO_ON, _SAVE, _STOP = 0.0, 1.0, 2.0  # the ranks agree on the greatest


class _EvaluationCutError(Exception):
    """Leaves an evaluation that a stop does not wait for."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """What all ranks have agreed on.

    Args:
        source (`str`): what the notice came from, one of `hfscale.preemption.SOURCES`.
        step (`int`): the last step taken.
        seconds_left (`float`, *optional*): when it was agreed on, of the rank that has least; None: not known.
        save (`bool`): whether that step is to be saved.
        why_not (`str`, *optional*): in words, where it is not.
    """

    source: str
    step: int
    seconds_left: float | None
    save: bool
    why_not: str | None = None


class PreemptionStop:
    """Collects notices, makes the ranks agree on them, and turns them into the flags of `TrainerControl`.

    Args:
        notice_s (`float`, *optional*): seconds between a signal and the end of the process; absent: what
            `assumed_notice_s` says. Cloud notices carry their own.
        cloud (`str`, *optional*): whose notices are polled: aws, gcp, azure; "auto": this machine's, if it is one of
            them; None: no polling.
        stop_file (`str`, *optional*): a file, in the output directory unless its path is absolute, whose presence
            stops the run; it is removed once that is done. None: no such file.
        board (`NoticeRankStore`): where the notices are left.

    Raises:
        UsageError: a time that is not positive, an unknown cloud.
    """

    exchange_every_s = EVERY_S

    def __init__(
        self,
        *,
        notice_s: float | None = None,
        cloud: str | None = "auto",
        stop_file: str | None = STOP_FILE_NAME,
        board: NoticeBoard = BOARD,
    ) -> None:
        if notice_s is not None and not notice_s > 0:
            raise UsageError(f"notice_s is {notice_s}: it must be greater than 0, in seconds, or None")
        check_cloud(cloud)
        self.notice_s = notice_s
        self.cloud = cloud
        self.stop_file = stop_file
        self.board = board
        self.stop: Stop | None = None
        """What was agreed on; None while the run goes on."""
        self.last_write_s: float | None = None
        """Seconds from the start of the last save to its commit; None before the first."""
        self.around_save_s: Callable[[], float] = float
        """Seconds on this rank that a save of now would wait for an earlier one, and its copy to a remote would take
        after it."""
        self._agreement = OverlappedAgreement(self.exchange_every_s)
        self._evaluation: OverlappedAgreement | None = None
        self._saved_step: int | None = None
        self._listening = ExitStack()

    def begin(self, adapter: TrainerAdapter, train_dataloader: Any) -> None:
        """At the beginning of a training, on every rank, before its workers are started."""
        self._adapter, trainer = adapter, adapter.trainer
        self._listening = ExitStack()  # what ends with the training: at `end`, or where an exception ends it
        adapter.at_training_end(self._listening.close)
        self.stop, self._saved_step, self._evaluation = None, None, None
        self._agreement = OverlappedAgreement(self.exchange_every_s)
        self._stop_path = Path(trainer.args.output_dir) / self.stop_file if self.stop_file else None
        self._metric = trainer.args.metric_for_best_model
        watch = watch_signals()
        if watch.is_installed:
            watch.serve(is_training_in)
            self._listening.callback(watch.done)
        else:
            logger.warning(
                "signals are not caught: Python allows that in the main thread only, train() runs in another"
            )
        if trainer.args.local_process_index == 0:
            poller = watch_cloud(self.cloud, board=self.board)
            if poller is not None:
                self._listening.callback(poller.stop)
        shield_workers(train_dataloader)
        adapter.wrap_eval_dataloader(Shielding)
        adapter.wrap_evaluate(self._guarding)

    def at_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """The step boundary at which ranks agree. At the last step there is nothing left to stop."""
        if self.stop is None:
            if state.global_step >= state.max_steps:
                return
            self._heed(self._agreement.step(self._vote), args, state, control)
        self._apply(args, state, control)

    def at_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """An evaluation, which can last for hours, is left at once: it changes nothing that a checkpoint holds, and
        gives no metrics, for those of a part of the data would pass for the whole's. After the last step that is all,
        so that the run gets to its last save and its end."""
        if self._evaluation is None:
            return  # not an evaluation of the training
        if self.stop is None:
            agreed = self._evaluation.step(self._vote)
            if state.global_step < state.max_steps:
                self._heed(agreed, args, state, control)
            elif agreed == _STOP:
                raise _EvaluationCutError
        if self.stop is not None:
            self._apply(args, state, control)
            raise _EvaluationCutError

    def at_evaluation_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """What arrived during an evaluation is served before the next step."""
        if self._evaluation is None or state.global_step >= state.max_steps:
            return
        if self.stop is None:
            self._heed(self._evaluation.now(self._vote()), args, state, control)
        self._apply(args, state, control)

    def at_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """What arrived during a save is served by that save."""
        self._saved_step = state.global_step
        if self.stop is None and state.global_step < state.max_steps:
            self._heed(self._agreement.now(self._vote()), args, state, control)
        self._apply(args, state, control)

    def at_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """A stop ends the epoch early: what is due at the end of one is not due now."""
        if self.stop is not None:
            control.should_evaluate = False
            self._apply(args, state, control)

    def end(self) -> None:
        """The training is over, its checkpoints are committed."""
        end_workers()
        self._agreement.finish()
        if self.stop is not None and distributed.rank() == 0 and self._stop_path is not None:
            try:
                self._stop_path.unlink(missing_ok=True)  # only now: killed before, the relaunched run has to obey too
            except OSError as error:
                logger.warning("remove %s, or it stops the next launch too: %s", self._stop_path, error.strerror)
        self.board.clear()
        self._listening.close()

    def reason(self, last_committed: str | None) -> str | None:
        """Why the run stopped, for the status file; None where it did not."""
        if self.stop is None:
            return None
        if self.stop.why_not is not None:
            return f"{self.stop.source}: {self.stop.why_not}"
        return f"{self.stop.source}: {last_committed} is committed" if last_committed else self.stop.source

    def _vote(self) -> float:
        if self._stop_path is not None and distributed.rank() == 0:
            with suppress(OSError):  # absent; or a file system in trouble, which is no reason to stop
                self._stop_path.stat()
                self.board.post(Notice(source=STOP_FILE))
        if self.board.notices():
            return _STOP
        return _SAVE if self.board.take_hint() else _GO_ON

    def _heed(
        self, agreed: float | None, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        if agreed == _SAVE:
            logger.info("an interruption is likely (%s): step %d is saved", AWS, state.global_step)
            control.should_save = control.should_save or self._may_save(args, state)
        elif agreed == _STOP:
            self.stop = self._agree_on_stop(args, state)
            if self.stop is not None:
                _announce(self.stop)

    def _agree_on_stop(self, args: TrainingArguments, state: TrainerState) -> Stop | None:
        """One exchange more, so that all ranks reckon with the same numbers. None where the notice was withdrawn
        meanwhile."""
        notices = self.board.notices()
        left = [notice.seconds_left(self._assumed_s(notice.source)) for notice in notices]
        least = min((seconds for seconds in left if seconds is not None), default=math.inf)
        source = max((SOURCES.index(notice.source) for notice in notices), default=-1)
        write_s = -1.0 if self.last_write_s is None else self.last_write_s
        mine = [float(source), -least, write_s, self.around_save_s()]
        agreed_source, minus_left, write_s, around_s = distributed.all_max(mine)
        if agreed_source < 0:
            return None
        seconds_left = None if math.isinf(minus_left) else -minus_left
        why_not = None
        if args.save_strategy == "no":
            why_not = "save_strategy is 'no', nothing was saved"
        elif write_s >= 0 and (write_s + around_s) * SAFETY > -minus_left and self._saved_step != state.global_step:
            beside = f", with what stands before and after it {write_s + around_s:.1f} s" if around_s else ""
            left = max(-minus_left, 0.0)
            why_not = f"{left:.1f} s left, the last save took {write_s:.1f} s{beside}: no other was begun"
        return Stop(
            source=SOURCES[int(agreed_source)],
            step=state.global_step,
            seconds_left=seconds_left,
            save=why_not is None,
            why_not=why_not,
        )

    def _assumed_s(self, source: str) -> float | None:
        is_signal = source in signal.Signals.__members__
        return self.notice_s if is_signal and self.notice_s is not None else assumed_notice_s(source)

    def _apply(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if self.stop is None:
            return
        control.should_training_stop = True
        control.should_save = self.stop.save and self._may_save(args, state)
        if args.load_best_model_at_end:  # loading it takes as long as a save, and nobody will use it
            self._adapter.set_argument("load_best_model_at_end", False)

    def _may_save(self, args: TrainingArguments, state: TrainerState) -> bool:
        return args.save_strategy != "no" and self._saved_step != state.global_step

    def _guarding(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """`Trainer.evaluate`, which a stop leaves early: there is no flag that would end it."""

        @functools.wraps(evaluate)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            outer = self._evaluation  # several evaluation sets: one call for all of them, and one for each
            self._evaluation = outer or OverlappedAgreement(self.exchange_every_s)
            try:
                return evaluate(*args, **kwargs)
            except _EvaluationCutError:
                logger.info("the evaluation is left; it gives no metrics")
                return self._no_metrics()
            finally:
                self._evaluation = outer

        return guarded

    def _no_metrics(self) -> dict[str, float]:
        """Trainer looks up the metric that names the best model, and nan is better than none."""
        if self._metric is None:
            return {}
        return {self._metric if self._metric.startswith("eval_") else f"eval_{self._metric}": math.nan}


def _announce(stop: Stop) -> None:
    left = "" if stop.seconds_left is None else f", {max(stop.seconds_left, 0.0):.0f} s left"
    if stop.save:
        logger.info("%s%s: every process stops after step %d and saves it", stop.source, left, stop.step)
    else:
        logger.warning("%s: every process stops after step %d; %s", stop.source, stop.step, stop.why_not)
