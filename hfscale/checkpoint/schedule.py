"""Says where a launch resumes with another learning rate, or another schedule of it, than the launch that saved.

Trainer makes the schedule from the arguments of this launch, and takes the rates and the number of steps from the
checkpoint. With other epochs, another warm-up or another kind the rate jumps at the second step; another
`learning_rate` has no effect. Neither library says so.
"""

import functools
import math
from pathlib import Path
from typing import Any

from transformers.trainer import SCHEDULER_NAME

from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import find_saved_state, saved_state

logger = get_logger(__name__)

_STATE_NAME, _RATE = "schedule", "learning_rate"  # in `trainer_state.json`
_TOLERANCE = 1e-6
"""Relative; the rates are the same products of the same numbers, in another order where they were scaled."""


def compare_schedules(adapter: TrainerAdapter) -> None:
    """Compare the learning rate and its schedule with those of the checkpoint, and note them in the next ones.

    Call it in `on_train_begin`.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
    """
    trainer = adapter.trainer
    state = trainer.state
    asked = trainer.args.learning_rate
    trained = find_saved_state(state, _STATE_NAME).get(_RATE, asked)
    saved_state(state, _STATE_NAME)[_RATE] = trained
    checkpoint = adapter.resumes_from
    if checkpoint is None or not (Path(checkpoint) / SCHEDULER_NAME).is_file():
        return  # without one, as under save_only_model, the rates are those of the arguments
    if not math.isclose(asked, trained, rel_tol=_TOLERANCE):
        logger.warning(
            "learning_rate is %g, and the run began with %g: the rates of the checkpoint are used, and the "
            "argument has no effect",
            asked,
            trained,
        )
    if not adapter.announced.grows_batch:
        _compare_rates(trainer)


def _compare_rates(trainer: Any) -> None:
    """Log where the schedule of this launch has another rate at the step of the checkpoint than the checkpoint has."""
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    factors = getattr(schedule, "lr_lambdas", None) or []
    # Those of transformers; a function of the user's may count its calls
    if not factors or not all(isinstance(factor, functools.partial) for factor in factors):
        return
    for factor, first, rate in zip(
        factors, schedule.base_lrs, schedule.get_last_lr(), strict=False
    ):
        now = first * factor(schedule.last_epoch)
        if math.isclose(now, rate, rel_tol=_TOLERANCE, abs_tol=1e-15):
            continue
        logger.warning(
            "the schedule of this launch has the learning rate %.4g after step %d, and the checkpoint has %.4g: its "
            "number of steps (now %d), its warm-up or its kind differ from those of the launch that saved, and the "
            "rate jumps; give the same arguments to go on with the same rates",
            now,
            trainer.state.global_step,
            rate,
            trainer.state.max_steps,
        )
        return
