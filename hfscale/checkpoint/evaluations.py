"""Gives a resumed run the evaluations and the early stop of an uninterrupted one.

An evaluation that a notice cuts short has no metrics, so it may move nothing: not the best model, not the count of
early stopping, not a schedule that follows a metric, not a random number generator, a counter of the program or a
buffer of the model. The checkpoint of its step says that it is missing, and the resumed launch makes it up before its
first step, with the random numbers of the uninterrupted run; the training goes on with those after it. The same holds
for the evaluation at the end of an epoch whose last step was saved before it, and for what callbacks do there. Early
stopping counts on from the number in the checkpoint; where that has reached the patience, the run has ended, and takes
no further step.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy

from hfscale.checkpoint.best import note_best
from hfscale.checkpoint.contents import rng_state, set_rng_state
from hfscale.checkpoint.epoch_end import make_up_epoch_end, warn_of_stop
from hfscale.checkpoint.states_after_save import restore_states_after_save, warn_of_unfinished
from hfscale.core import distributed
from hfscale.core.logging import get_logger
from hfscale.core.torch_internals import version_of
from hfscale.core.versions import has_epoch_methods
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import (
    drop_saved_state,
    find_saved_state,
    is_inside_pass,
    model_of,
    saved_state,
    steps_per_epoch,
)

logger = get_logger(__name__)

_STATE_NAME = "evaluations"  # in `trainer_state.json`
_MISSING = "missing"
_HAS_BEGUN = "has_begun"
_LARGEST_BUFFER = 2**20
"""Numbers of a buffer that is copied before an evaluation: weights that are quantized are buffers too."""


def note_missing(state: TrainerState) -> None:
    """Note in the state that the evaluation of this step has no metrics, and has moved nothing.

    Args:
        state (`TrainerState`): the state of the Trainer.
    """
    saved = saved_state(state, _STATE_NAME)
    saved |= {_MISSING: state.global_step, _HAS_BEGUN: False}


def note_unfinished_epoch(trainer: Trainer, evaluated_step: int | None) -> None:
    """Note it where the step that is about to be saved ends an epoch, and the epoch's evaluation is still to come.

    Args:
        trainer (`Trainer`): the Trainer that trains.
        evaluated_step (`int`, *optional*): the step of the last evaluation.
    """
    # What Trainer itself asks for at the end of an epoch, which `eval_delay` decides too
    asked = DefaultFlowCallback().on_epoch_end(trainer.args, trainer.state, TrainerControl())
    is_due = asked.should_evaluate and ends_epoch(trainer)
    if is_due and evaluated_step != trainer.state.global_step:
        note_missing(trainer.state)


def ends_epoch(trainer: Trainer) -> bool:
    """Return whether the last step is the last one of its epoch.

    Args:
        trainer (`Trainer`): the Trainer that trains.
    """
    if not steps_per_epoch(trainer):  # of a stream, Trainer counts no epochs
        return bool(trainer.accelerator.gradient_state.end_of_dataloader)
    epoch = trainer.state.epoch
    return epoch is not None and float(epoch).is_integer()


def note_made(state: TrainerState) -> None:
    """Note that the evaluation of this step has its metrics.

    Args:
        state (`TrainerState`): the state of the Trainer.
    """
    drop_saved_state(state, _STATE_NAME)


class ResumedEvaluations(TrainerCallback):
    """Makes up a missing evaluation at the beginning of a resumed training; ends one that has stopped or is complete.

    It is made before it is known what loads the random states (`keep_data_order` and others), so that they load those
    after the evaluation. `begin` adds it to the Trainer.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that resumes.
        checkpoint (`str`): the checkpoint.
    """

    def __init__(self, adapter: TrainerAdapter, checkpoint: str) -> None:
        self._adapter = adapter
        self._checkpoint = checkpoint
        self._is_first_epoch = True
        self._begun_at = 0
        self._begins_pass = False
        """Whether the training resumes between two passes over its data."""
        self._has_states = False
        """Whether the random states of the checkpoint have been restored."""
        self._states_after: dict[str, Any] | None = None
        """The random states after what is made up, which the checkpoint would have, had it been saved then."""
        self._load = adapter.checkpoints.replace_rng_loading(self._load_states)

    def begin(self) -> None:
        """Make the evaluation when the first pass begins, or after the last step where there is none."""
        adapter = self._adapter
        state = adapter.trainer.state
        self._begun_at = state.global_step
        # There may be no further epoch
        if has_epoch_methods() or state.global_step >= state.max_steps:
            adapter.evaluations.before_finalizing(self._finish)
        warn_of_unfinished(Path(self._checkpoint))
        if adapter.trainer.args.eval_on_start:
            # It would count for an early stop and the best model, and an uninterrupted run has none here
            logger.info(
                "eval_on_start: a run that resumes at step %d is not evaluated first",
                state.global_step,
            )
            adapter.set_argument("eval_on_start", False)
        adapter.append_callback(self)
        self._begins_pass = not is_inside_pass(adapter.trainer)
        if self._begins_pass:
            # That of the pass before: what callbacks do at the beginning of the next one comes after it
            adapter.prepend_callback(_Earlier(self))

    def _load_states(self, checkpoint: str | None) -> None:
        if self._states_after is not None:
            set_rng_state(self._states_after)
            return
        self._load(checkpoint)
        restore_states_after_save(Path(self._checkpoint))

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._is_first_epoch:
            self._note_states()
            return
        self._is_first_epoch = False
        if self._begins_pass:
            self._end_pass(control)
        is_made = self._make_up()
        if not is_made or control.should_training_stop:
            # Cut short as well: a step before it would move what it finds. If it was finished before a stop, Trainer
            # would leave the next step after its first micro-batch
            control.should_training_stop = True
            self._adapter.evaluations.skip_epoch()
            return
        is_complete = state.global_step >= state.max_steps
        if is_complete or has_stopped_early(self._adapter.trainer):
            how = "is complete" if is_complete else "has stopped early"
            logger.info("the run %s at step %d: it takes no further step", how, state.global_step)
            control.should_training_stop = True
            # Trainer looks at the number of steps after a step: of a stream, and inside an epoch, it would take one
            self._adapter.evaluations.skip_epoch()
        else:
            warn_of_stop(self._adapter.trainer)

    def _note_states(self) -> None:
        """Note the random states after all callbacks have begun the first pass, if it is a new one.

        Trainer restores those of the checkpoint then, and would undo what the callbacks have drawn.
        """
        if self._begins_pass:
            self._begins_pass = False
            self._states_after = rng_state(self._adapter.trainer)

    def _end_pass(self, control: TrainerControl) -> None:
        """Do what callbacks have yet to do at the end of the last pass, with the random states of the checkpoint."""
        adapter = self._adapter
        state = adapter.trainer.state
        self._load_states(self._checkpoint)
        self._has_states = True
        if state.global_step >= state.max_steps:
            return
        with adapter.evaluations.as_at_the_save():
            asked = make_up_epoch_end(adapter.trainer)
        if asked is None:
            return
        is_missing = find_saved_state(state, _STATE_NAME).get(_MISSING) == state.global_step
        if asked.should_evaluate and not is_missing:
            self._evaluate(has_moved=False)
        control.should_training_stop = control.should_training_stop or asked.should_training_stop
        if control.should_training_stop:
            adapter.evaluations.skip_epoch()

    def _finish(self) -> None:
        """Where the training has taken no step: make the evaluation, and leave the random states of the checkpoint.

        What the program draws after a run that was finished is to be what it drew when that run ended.
        """
        state = self._adapter.trainer.state
        if state.global_step != self._begun_at:
            return
        if state.global_step >= state.max_steps:
            self._make_up()
        self._load_states(self._checkpoint)

    def _make_up(self) -> bool:
        """Make the evaluation of the checkpoint's step, as the training would have done, if it is missing.

        Returns:
            `bool`: whether it is not missing any more: it may be cut short as well.
        """
        adapter = self._adapter
        state = adapter.trainer.state
        saved = dict(find_saved_state(state, _STATE_NAME))
        drop_saved_state(state, _STATE_NAME)
        has_evaluations = adapter.trainer.args.eval_strategy != IntervalStrategy.NO
        if saved.get(_MISSING) == state.global_step and has_evaluations:
            self._evaluate(has_moved=bool(saved[_HAS_BEGUN]))
            return find_saved_state(state, _STATE_NAME).get(_MISSING) != state.global_step
        return True

    def _evaluate(self, *, has_moved: bool) -> None:
        """Evaluate with the states of the checkpoint.

        Args:
            has_moved (`bool`): an earlier version of hfscale has saved the states after a part of the evaluation.
        """
        adapter = self._adapter
        trainer = adapter.trainer
        logger.info(
            "the evaluation of step %d, which the launch before has not completed, is made now",
            trainer.state.global_step,
        )
        _warn_of_own_buffers(model_of(trainer))
        before = rng_state(trainer)  # with which the loader of the pass begins
        if not self._has_states:
            # It may save the best model, in this checkpoint again, with the states that it finds
            adapter.checkpoints.load_rng_state(self._checkpoint)
        adapter.evaluations.evaluate_as_in_training()
        self._states_after = None if has_moved else rng_state(trainer)
        if has_moved or not self._has_states:
            set_rng_state(before)
        note_best(trainer, adapter.checkpoints.run_dir())


class _Earlier(TrainerCallback):
    """Calls a callback at the beginning of a pass before all others."""

    def __init__(self, evaluations: ResumedEvaluations) -> None:
        self._evaluations = evaluations

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluations.on_epoch_begin(args, state, control)


def has_stopped_early(trainer: Trainer) -> bool:
    """Return whether an `EarlyStoppingCallback` has lost its patience.

    Args:
        trainer (`Trainer`): the Trainer that trains.
    """
    for callback in trainer.callback_handler.callbacks:
        if not isinstance(callback, EarlyStoppingCallback):
            continue
        patience = callback.early_stopping_patience
        if callback.early_stopping_patience_counter >= patience:
            return True
    return False


def resume_evaluations(adapter: TrainerAdapter) -> ResumedEvaluations | None:
    """Continue with the early stop of the checkpoint, and prepare for the evaluation that it misses.

    Call it when a training begins, before `keep_data_order`; what it returns has to `begin` after that.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.

    Returns:
        `ResumedEvaluations` or `None`: None if the Trainer does not resume.
    """
    if adapter.resumes_from is None:
        return None
    state = adapter.trainer.state
    for callback in adapter.trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            _restore_count(callback, state.stateful_callbacks)
    return ResumedEvaluations(adapter, adapter.resumes_from)


def put_back_if_cut(adapter: TrainerAdapter) -> None:
    """Let an evaluation that is cut short move neither the global generators nor a buffer of the model.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
    """
    trainer = adapter.trainer

    def take_states() -> Callable[[], None]:
        return partial(set_rng_state, rng_state(trainer))

    def take_buffers() -> Callable[[], None]:
        model = model_of(trainer)
        copies = {}
        large = {}
        for name, buffer in model.named_buffers():
            if buffer.device.type == "meta" or buffer.is_inference():
                continue
            if buffer.numel() <= _LARGEST_BUFFER:
                copies[name] = buffer.detach().clone()
            else:
                large[name] = _writes_of(buffer)

        @torch.no_grad()
        def put_back() -> None:
            for name, buffer in model.named_buffers():
                copy = copies.get(name)
                if copy is not None and copy.shape == buffer.shape:
                    buffer.copy_(copy)
                if name in large and large[name] != _writes_of(buffer):
                    logger.warning(
                        "an evaluation that was cut short has changed the buffer %s, which has more than %d numbers "
                        "and is not put back: the resumed run goes on with what a part of the evaluation has left",
                        name,
                        _LARGEST_BUFFER,
                    )

        return put_back

    adapter.evaluations.put_back_if_cut("random states", take_states)
    adapter.evaluations.put_back_if_cut("buffers", take_buffers)


def _warn_of_own_buffers(model: torch.nn.Module) -> None:
    """Log where processes may have buffers of their own, as of batch norm: a checkpoint has the first one's."""
    if not distributed.is_distributed():
        return
    saved = model.state_dict()
    buffers = [name for name, each in model.named_buffers() if each.is_floating_point()]
    own = [name for name in buffers if name in saved]
    if own:
        logger.warning(
            "a checkpoint has the buffers of the first process (%s): if each moves its own, as batch norm does, the "
            "evaluation that is made now may have other metrics than in an uninterrupted run",
            ", ".join(own[:3]),
        )


def _writes_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return what is another value where a buffer was written or replaced."""
    return buffer.data_ptr(), version_of(buffer)


def _restore_count(callback: EarlyStoppingCallback, saved: Any) -> None:
    """Set the number of evaluations without progress, as Trainer does with `restore_callback_states_from_checkpoint`.

    It is left alone where several callbacks of the class count, or the checkpoint has none.
    """
    of_class = saved.get(type(callback).__name__) if isinstance(saved, dict) else None
    attributes = of_class.get("attributes", {}) if isinstance(of_class, dict) else {}
    count = attributes.get("early_stopping_patience_counter")
    if isinstance(count, int):
        callback.early_stopping_patience_counter = count
