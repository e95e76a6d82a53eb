"""Gives a resumed run what callbacks do at the end of an epoch whose last step was saved before it.

A checkpoint of a step is written before `on_epoch_end`, and Trainer begins the next epoch when it resumes: what the
program's callbacks do there, such as an evaluation, another order of the rows or layers that are unfrozen, would be
left out. The checkpoint says that it is still to come, and the resumed launch calls them before its first step.

Trainer counts the epochs of a resumed run by its steps. Once a callback has ended an epoch before its last step
(`should_epoch_stop`), a resume would begin at another row, in another epoch, and take another number of steps: that is
said, and refused. A callback that has ended the training (`should_training_stop`) may have meant this launch only, as
one that looks at the clock does: a resume goes on, and says so.
"""

import copy

from transformers import Trainer, TrainerCallback, TrainerControl

from hfscale.checkpoint.program_state.objects import is_of_program
from hfscale.core.logging import get_logger
from hfscale.errors import CheckpointError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import (
    drop_saved_state,
    find_saved_state,
    micro_batches_of_pass,
    saved_state,
    steps_per_epoch,
)

logger = get_logger(__name__)

_STATE_NAME = "epoch_end"  # in `trainer_state.json`
_DUE = "due"
_CUT_NAME = "cut_epochs"  # in `trainer_state.json`
_FIRST = "first"
_STOP_NAME = "stop"  # in `trainer_state.json`
_STEP = "step"
_INSTEAD = "give each epoch fewer rows instead, as with a Subset or a sampler with num_samples"


def note_epoch_end(trainer: Trainer, *, is_due: bool) -> None:
    """Note in the state that is about to be saved whether callbacks have yet to hear of the end of the epoch.

    Args:
        trainer (`Trainer`): the Trainer that trains.
        is_due (`bool`): whether the last step is that of an epoch, of whose end callbacks have not heard.
    """
    drop_saved_state(trainer.state, _STATE_NAME)
    if is_due and _hearing(trainer):
        saved_state(trainer.state, _STATE_NAME)[_DUE] = trainer.state.global_step


def make_up_epoch_end(trainer: Trainer) -> TrainerControl | None:
    """Call the program's callbacks at the end of the epoch, if the checkpoint says that it is still to come.

    Args:
        trainer (`Trainer`): the Trainer that resumes, before its first epoch begins.

    Returns:
        `TrainerControl` or `None`: what the callbacks ask for; None if nothing was still to come.
    """
    state = trainer.state
    due = find_saved_state(state, _STATE_NAME).get(_DUE)
    drop_saved_state(state, _STATE_NAME)
    callbacks = _hearing(trainer)
    if due != state.global_step or not callbacks:
        return None
    names = ", ".join(type(each).__name__ for each in callbacks)
    logger.info(
        "the end of the epoch at step %d, which the launch before has saved before it, is made up: on_epoch_end of %s",
        state.global_step,
        names,
    )
    handler = copy.copy(trainer.callback_handler)
    handler.callbacks = callbacks
    control: TrainerControl = handler.on_epoch_end(trainer.args, state, TrainerControl())
    return control


def _hearing(trainer: Trainer) -> list[TrainerCallback]:
    """Return the program's callbacks that do something at the end of an epoch."""
    found = []
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if is_of_program(callback) and kind.on_epoch_end is not TrainerCallback.on_epoch_end:
            found.append(callback)
    return found


def note_cut_epoch(adapter: TrainerAdapter, control: TrainerControl) -> None:
    """Note an epoch that a callback has ended early, and say so at the first one. Call it in `on_epoch_end`.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        control (`TrainerControl`): what the callbacks ask for.
    """
    trainer = adapter.trainer
    state = trainer.state
    is_last = control.should_training_stop or state.global_step >= state.max_steps
    if is_last or adapter.announced.grows_batch or not steps_per_epoch(trainer):
        return
    is_known = bool(find_saved_state(state, _CUT_NAME))
    is_inside = micro_batches_of_pass(trainer, state.global_step) > 0
    if is_known or not is_inside or not control.should_epoch_stop:
        return
    saved_state(state, _CUT_NAME)[_FIRST] = state.global_step
    logger.warning(
        "a callback has ended an epoch at step %d, before its last one (should_epoch_stop): no run can resume from "
        "later checkpoints as this one goes on, since Trainer counts epochs by steps; %s",
        state.global_step,
        _INSTEAD,
    )


def check_no_epoch_was_cut(adapter: TrainerAdapter, *, is_allowed: bool) -> None:
    """Check that a run resumes from a checkpoint before the first epoch that was ended early.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        is_allowed (`bool`): whether the run may go on with other samples.

    Raises:
        CheckpointError: an epoch was ended early before; raised on every rank.
    """
    first = find_saved_state(adapter.trainer.state, _CUT_NAME).get(_FIRST)
    if first is None or adapter.resumes_from is None or is_allowed:
        return
    raise CheckpointError(
        f"{adapter.resumes_from} cannot be continued exactly: a callback has ended an epoch at step {first}, before "
        "its last one (should_epoch_stop), and Trainer counts epochs by steps, so that the resumed run would see "
        f"other samples and take another number of steps; {_INSTEAD}, or, to resume nevertheless, give "
        "resume_with_other data"
    )


def note_stop(trainer: Trainer, *, is_asked: bool) -> None:
    """Note in the state that is about to be saved whether a callback of the program has ended the training.

    Args:
        trainer (`Trainer`): the Trainer that trains.
        is_asked (`bool`): whether a callback may have asked for the end, which neither a notice nor a signal explains.
    """
    state = trainer.state
    drop_saved_state(state, _STOP_NAME)
    is_early = state.global_step < state.max_steps
    if is_asked and is_early and trainer.control.should_training_stop:
        saved_state(state, _STOP_NAME)[_STEP] = state.global_step


def warn_of_stop(trainer: Trainer) -> None:
    """Log that a callback has ended the training at the step from which it goes on.

    Args:
        trainer (`Trainer`): the Trainer that resumes, before its first step.
    """
    state = trainer.state
    step = find_saved_state(state, _STOP_NAME).get(_STEP)
    if step != state.global_step:
        return
    logger.warning(
        "a callback had ended the training at step %d (should_training_stop), and it goes on from there now: if that "
        "was its end, do not train again",
        step,
    )
