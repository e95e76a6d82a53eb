"""Reads from the call stack what Trainer does not pass to its callbacks: the Trainer, and where it resumed from."""

import inspect
from types import FrameType
from typing import Any

from transformers import Trainer

from hfscale.errors import HfScaleError


def calling_trainer() -> Trainer:
    """Return the Trainer whose callback event is being handled, found on the call stack.

    Raises:
        HfScaleError: no Trainer is on the call stack.
    """
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    raise HfScaleError(
        "no Trainer is calling: pass this callback to transformers.Trainer(callbacks=[...])"
    )


def resumed_from() -> str | None:
    """Return the checkpoint folder from which the calling Trainer has resumed; None for a fresh start.

    It is found on the call stack, since Trainer passes it from method to method and does not store it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (
            isinstance(frame.f_locals.get("self"), Trainer)
            and "resume_from_checkpoint" in frame.f_locals
        ):
            found = frame.f_locals["resume_from_checkpoint"]
            return str(found) if found and not isinstance(found, bool) else None
        frame = frame.f_back
    return None


def training_frame(frame: FrameType | None = None) -> FrameType | None:
    """Return the frame of the call of `Trainer.train` that another frame is in.

    Args:
        frame (`FrameType`, *optional*): the innermost frame to look at; by default the caller's.

    Returns:
        `FrameType` or `None`: the frame of the innermost such call; None if there is none.
    """
    frame = frame or inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer.train.__code__:
        frame = frame.f_back
    return frame


def is_training_in(frame: FrameType | None) -> bool:
    """Return whether `Trainer.train` is running in a thread.

    Args:
        frame (`FrameType`, *optional*): the innermost frame of the thread; None: the result is False.
    """
    return frame is not None and training_frame(frame) is not None


def constructor_arguments(trainer: Trainer) -> dict[str, Any] | None:
    """Return the arguments with which a Trainer is being made; None if no constructor of it is on the call stack.

    A subclass passes to Trainer a part of what it was given, and sets the rest after the event `on_init_end`.

    Args:
        trainer (`Trainer`): the Trainer.
    """
    found = None
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_name
        values = frame.f_locals
        if name == "__init__" and values.get("self") is trainer:
            found = values  # of the outermost, which the caller has called
        frame = frame.f_back
    return found
