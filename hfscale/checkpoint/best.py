"""Which checkpoint of a run is the best one, also after the run has moved.

Trainer names it by a path, which is gone when the folder was renamed, is mounted elsewhere, or was given relative to
another working directory. The step of the best checkpoint stays true: it is a sibling of the others.

Importing this module loads no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfscale.core.text_files import read_json

if TYPE_CHECKING:
    from transformers import Trainer

STATE_NAME = "trainer_state.json"


def best_step(state: Mapping[str, Any]) -> int | None:
    """Return the step of the best checkpoint; None if there is none.

    Args:
        state (`Mapping[str, Any]`): the content of a `trainer_state.json`.
    """
    if not state.get("best_model_checkpoint"):
        return None
    step = state.get("best_global_step")
    if isinstance(step, int) and step > 0:
        return step
    # A state of transformers before 4.50, or one that a callback of the user has set
    number = str(state["best_model_checkpoint"]).rpartition("-")[2]
    return int(number) if number.isdecimal() else None


def best_step_of(checkpoint: Path) -> int | None:
    """Return the step of the best checkpoint of a run; None if its state names none, or cannot be read.

    Args:
        checkpoint (`Path`): a checkpoint of the run.
    """
    try:
        return best_step(read_json(checkpoint / STATE_NAME))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def note_best(trainer: "Trainer", run_dir: Path) -> None:
    """Record the best checkpoint, as `Trainer._save_checkpoint` does: the one of the best step.

    Call it before each save, and when a training begins: there Trainer has forgotten a path that is gone.

    Args:
        trainer (`Trainer`): the Trainer, whose state is changed.
        run_dir (`Path`): the folder of the run's checkpoints.
    """
    state = trainer.state
    if trainer.args.save_strategy == "no" or not state.best_global_step:
        return
    best = run_dir / f"checkpoint-{state.best_global_step}"
    if state.best_global_step == state.global_step or best.exists():
        state.best_model_checkpoint = str(best)


def name_best(trainer_state: Path, best: str | None) -> None:
    """Correct the best checkpoint in a `trainer_state.json`: Trainer may have named it by the unfinished folder.

    Args:
        trainer_state (`Path`): the file.
        best (`str`, *optional*): the path of the best checkpoint.
    """
    if not trainer_state.is_file():
        return  # a subclass has not called Trainer's method
    fields = read_json(trainer_state)
    if fields["best_model_checkpoint"] != best:
        fields["best_model_checkpoint"] = best
        trainer_state.write_text(
            json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
