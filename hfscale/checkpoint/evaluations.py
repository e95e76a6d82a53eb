"""Gives a resumed run the evaluations and the early stop of an uninterrupted one.

An evaluation that a notice cuts short has no metrics, so it may move nothing: not the best model, not the count of
early stopping, not a schedule that follows a metric. The checkpoint of its step says that it is missing, and the
resumed launch makes it up before its first step. The same holds for the evaluation at the end of an epoch whose last
step was saved before it. Early stopping counts on from the number in the checkpoint; where that has reached the
patience, the run has ended, and takes no further step.
"""

from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy

from hfscale.checkpoint.best import note_best
from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import drop_saved_state, saved_state

logger = get_logger(__name__)

_STATE_NAME = "evaluations"  # in `trainer_state.json`
_MISSING = "missing"
_HAS_BEGUN = "has_begun"


def note_missing(state: TrainerState, *, has_begun: bool) -> None:
    """Note in the state that the evaluation of this step has no metrics.

    Args:
        state (`TrainerState`): the state of the Trainer.
        has_begun (`bool`): whether it has begun, so that the random number generators have moved by what it draws.
    """
    saved = saved_state(state, _STATE_NAME)
    saved |= {_MISSING: state.global_step, _HAS_BEGUN: has_begun}


def note_unfinished_epoch(
    args: TrainingArguments, state: TrainerState, evaluated_step: int | None
) -> None:
    """Note it where the step that is about to be saved ends an epoch, and the epoch's evaluation is still to come.

    Args:
        args (`TrainingArguments`): the training arguments.
        state (`TrainerState`): the state of the Trainer.
        evaluated_step (`int`, *optional*): the step of the last evaluation.
    """
    ends_epoch = state.epoch is not None and float(state.epoch).is_integer()
    is_due = args.eval_strategy == IntervalStrategy.EPOCH and ends_epoch
    if is_due and evaluated_step != state.global_step:
        note_missing(state, has_begun=False)


def note_made(state: TrainerState) -> None:
    """Note that the evaluation of this step has its metrics.

    Args:
        state (`TrainerState`): the state of the Trainer.
    """
    drop_saved_state(state, _STATE_NAME)


class ResumedEvaluations(TrainerCallback):
    """Makes up a missing evaluation at the beginning of a resumed training; ends one that has stopped or is complete.

    `resume_evaluations` adds it to the Trainer.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that resumes.
        checkpoint (`str`): the checkpoint.
    """

    def __init__(self, adapter: TrainerAdapter, checkpoint: str) -> None:
        self._adapter = adapter
        self._checkpoint = checkpoint
        self._is_first_epoch = True
        state = adapter.trainer.state
        if state.global_step >= state.max_steps:  # there may be no further epoch
            adapter.evaluations.before_finalizing(self._make_up)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._is_first_epoch:
            return
        self._is_first_epoch = False
        self._make_up()
        is_complete = state.global_step >= state.max_steps
        if is_complete or any(map(_has_stopped, self._adapter.trainer.callback_handler.callbacks)):
            how = "is complete" if is_complete else "has stopped early"
            logger.info("the run %s at step %d: it takes no further step", how, state.global_step)
            control.should_training_stop = True
            # Trainer looks at the number of steps after a step: of a stream, and inside an epoch, it would take one
            self._adapter.evaluations.skip_epoch()

    def _make_up(self) -> None:
        """Make the evaluation of the checkpoint's step, as the training would have done, if it is missing."""
        adapter = self._adapter
        state = adapter.trainer.state
        saved = dict(saved_state(state, _STATE_NAME))
        drop_saved_state(state, _STATE_NAME)
        has_evaluations = adapter.trainer.args.eval_strategy != IntervalStrategy.NO
        if saved.get(_MISSING) == state.global_step and has_evaluations:
            self._evaluate(has_begun=bool(saved[_HAS_BEGUN]))

    def _evaluate(self, *, has_begun: bool) -> None:
        adapter = self._adapter
        logger.info(
            "the evaluation of step %d, which the launch before has not completed, is made now",
            adapter.trainer.state.global_step,
        )
        # It may save the best model, in this checkpoint again, with the states that it finds
        adapter.checkpoints.load_rng_state(self._checkpoint)
        if not has_begun:
            # What it draws comes after the state of the checkpoint, which Trainer would set after it
            adapter.checkpoints.replace_rng_loading(lambda checkpoint: None)
        adapter.evaluations.evaluate_as_in_training()
        note_best(adapter.trainer, adapter.checkpoints.run_dir())


def _has_stopped(callback: TrainerCallback) -> bool:
    if not isinstance(callback, EarlyStoppingCallback):
        return False
    return callback.early_stopping_patience_counter >= callback.early_stopping_patience


def resume_evaluations(adapter: TrainerAdapter) -> None:
    """Continue with the evaluations and the early stop of the checkpoint. Call it when a training begins.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains; nothing is done if it does not resume.
    """
    if adapter.resumes_from is None:
        return
    state = adapter.trainer.state
    for callback in adapter.trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            _restore_count(callback, state.stateful_callbacks)
    adapter.append_callback(ResumedEvaluations(adapter, adapter.resumes_from))


def _restore_count(callback: EarlyStoppingCallback, saved: Any) -> None:
    """Set the number of evaluations without progress, as Trainer does with `restore_callback_states_from_checkpoint`.

    It is left alone where several callbacks of the class count, or the checkpoint has none.
    """
    of_class = saved.get(type(callback).__name__) if isinstance(saved, dict) else None
    attributes = of_class.get("attributes", {}) if isinstance(of_class, dict) else {}
    count = attributes.get("early_stopping_patience_counter")
    if isinstance(count, int):
        callback.early_stopping_patience_counter = count
