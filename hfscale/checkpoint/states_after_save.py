"""Keeps the random numbers that callbacks draw in `on_save`, such as those of a text that is generated for each save.

The checkpoint has been written by then, with the states of the generators before it. Where a callback has moved them,
each rank adds a file with the states after it, which a resumed launch restores in place of the others. A save that
plain Trainer would not make, such as that of a stop, leaves the states as they were before it. A launch that ends
before that leaves a mark in the checkpoint, and the launch that resumes from it says so.
"""

import json
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.contents import rng_name, rng_state, set_rng_state
from hfscale.checkpoint.random_states import plain, restore
from hfscale.checkpoint.rank_files import read_of_rank
from hfscale.core import distributed
from hfscale.core.durable_files import write_atomically
from hfscale.core.logging import get_logger

NAME = "hfscale_after_save"
"""The file of a rank is `hfscale_after_save_RANK.json`."""
UNFINISHED = "hfscale_in_on_save"
"""An empty file, which is in a checkpoint while `on_save` of other callbacks runs."""

logger = get_logger(__name__)


class StatesAfterSave(TrainerCallback):
    """Compares the states of the generators before and after `on_save` of other callbacks. It has to come before them.

    Args:
        trainer (`Trainer`): the Trainer that trains.
        folder (`Path`): the folder of its checkpoints.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder
        self._before: dict[str, Any] | None = None

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before = rng_state(self._trainer)
        checkpoint = self._folder / f"checkpoint-{state.global_step}"
        mark = checkpoint / UNFINISHED
        if args.should_save and checkpoint.is_dir():
            mark.touch()

    def finish(self, checkpoint: Path, *, is_temporary: bool) -> None:
        """Keep the states or put them back if they have changed, after `on_save` of the other callbacks.

        Args:
            checkpoint (`Path`): the checkpoint of this step.
            is_temporary (`bool`): neither Trainer nor the user asked for a save at this step.

        Raises:
            OSError: the file cannot be written.
        """
        before, self._before = self._before, None
        has_states = (checkpoint / rng_name(self._trainer)).is_file()
        if before is None or not has_states:
            return
        now = _as_text(rng_state(self._trainer))
        if now == _as_text(before):
            return
        if is_temporary:
            set_rng_state(before)
            return
        name = f"{NAME}_{distributed.rank()}.json"
        write_atomically(checkpoint / name, now)


def warn_of_unfinished(checkpoint: Path) -> None:
    """Log that a checkpoint is from a launch that ended in `on_save` of another callback.

    Args:
        checkpoint (`Path`): the checkpoint from which the training resumes.
    """
    mark = checkpoint / UNFINISHED
    if mark.exists():
        logger.warning(
            "%s: the launch that saved it ended in on_save of its callbacks, which is not called again: what they had "
            "yet to draw, count or write is missing",
            checkpoint.name,
        )


def restore_states_after_save(checkpoint: Path) -> None:
    """Restore the states of this rank's generators that a checkpoint has from after `on_save`, if it has any.

    Args:
        checkpoint (`Path`): the checkpoint from which the training resumes.

    Raises:
        CheckpointError: the file of this rank is broken.
    """
    found = read_of_rank(checkpoint, NAME, _parse)
    if found is None:
        return
    states, rank = found
    if rank == distributed.rank():
        set_rng_state(states)


def _as_text(states: dict[str, Any]) -> str:
    return json.dumps(plain(states))


def _parse(saved: Any) -> dict[str, Any]:
    states = {name: restore(saved[name]) for name in ("python", "numpy", "cpu")}
    of_gpu = restore(saved.get("cuda"))
    if of_gpu is not None:
        # One for each GPU that this process sees
        states["cuda"] = list(of_gpu) if isinstance(of_gpu, tuple) else of_gpu
    return states
