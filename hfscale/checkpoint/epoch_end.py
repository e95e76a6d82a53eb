"""Gives a resumed run what callbacks do at the end of an epoch whose last step was saved before it.

A checkpoint of a step is written before `on_epoch_end`, and Trainer begins the next epoch when it resumes: what the
program's callbacks do there, such as an evaluation, another order of the rows or layers that are unfrozen, would be
left out. The checkpoint says that it is still to come, and the resumed launch calls them before its first step.
"""

import copy

from transformers import Trainer, TrainerCallback, TrainerControl

from hfscale.checkpoint.program_state.objects import is_of_program
from hfscale.core.logging import get_logger
from hfscale.trainer.state import drop_saved_state, find_saved_state, saved_state

logger = get_logger(__name__)

_STATE_NAME = "epoch_end"  # in `trainer_state.json`
_DUE = "due"


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
