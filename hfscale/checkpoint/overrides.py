"""What code of users does in a save: methods of a Trainer's subclass, and other callbacks.

It may have to run while training waits, or with the files in its reach.
"""

import ast
import inspect
import os
import textwrap
from collections.abc import Sequence

from transformers import Trainer, TrainerCallback

WRITING_METHODS = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
"""Methods that a subclass of Trainer may override; then the subclass's code must run, on the live model."""
_MODEL_METHODS = ("save_model", "_save")
# Callbacks of transformers whose `on_save` reads no file of the checkpoint (wandb's only under WANDB_LOG_MODEL).
_ON_SAVE_READS_NOTHING = ("WandbCallback", "TrackioCallback", "SwanLabCallback")


def own_methods(trainer: Trainer) -> list[str]:
    """Return the methods by which a checkpoint is written and that the Trainer's class overrides.

    Args:
        trainer (`Trainer`): any Trainer.
    """
    return [name for name in WRITING_METHODS if not _is_known(type(trainer), name)]


def model_methods(own_methods: Sequence[str]) -> list[str]:
    """Return those methods that write the model.

    Args:
        own_methods (`Sequence[str]`): what `own_methods` returned.
    """
    return [name for name in own_methods if name in _MODEL_METHODS]


def why_own_methods_wait(trainer: Trainer, own_methods: Sequence[str]) -> str | None:
    """Return why the own methods of a Trainer's class need the complete save, as a clause; None if they do not.

    Args:
        trainer (`Trainer`): any Trainer.
        own_methods (`Sequence[str]`): what `own_methods` returned for it.
    """
    name = type(trainer).__name__
    written_before = {"_save_checkpoint", *_MODEL_METHODS}
    others = [method for method in own_methods if method not in written_before]
    if others:
        return f"{name} has its own {others[0]}"
    if "_save_checkpoint" in own_methods and not _ends_with_trainers(type(trainer)):
        return f"{name}._save_checkpoint may read the files after Trainer has written them"
    return None


def _ends_with_trainers(kind: type) -> bool:
    """Return whether each `_save_checkpoint` of the class and its bases ends with the call of that of its base.

    Then nothing in it can read what Trainer writes. It is False where the source is not available.
    """
    for base in kind.__mro__[: kind.__mro__.index(Trainer)]:
        method = vars(base).get("_save_checkpoint")
        if method is None:
            continue
        try:
            (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            return False
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            return False
        last = function.body[-1]
        call = last.value if isinstance(last, ast.Expr | ast.Return) else None
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(
            ")._save_checkpoint"
        ):
            return False
    return True


def _is_known(kind: type, method: str) -> bool:
    """Return whether the method is Trainer's own, or that of `ParallelTrainer`, which hands over its shards."""
    home = next(base for base in kind.__mro__ if method in vars(base))
    return home is Trainer or "sharded_state" in vars(home)


def reader_of_saves(callback: TrainerCallback) -> str | None:
    """Return the callback's name if its `on_save` may read the checkpoint, else None.

    Args:
        callback (`TrainerCallback`): a callback of a Trainer.
    """
    kind = type(callback)
    if kind.on_save is TrainerCallback.on_save or kind.on_save.__module__.startswith("hfscale."):
        return None
    logs_model = os.environ.get("WANDB_LOG_MODEL", "").lower() == "checkpoint"
    if (
        kind.__module__.startswith("transformers.")
        and kind.__name__ in _ON_SAVE_READS_NOTHING
        and not logs_model
    ):
        return None
    return kind.__name__
