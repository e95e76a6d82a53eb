"""What callbacks need of the Trainer and its API does not hand them.

Trainer passes its callbacks the arguments, state, model and optimizer, but neither itself nor a place in its state.
The gaps are closed here and nowhere else:

- `calling_trainer` finds the Trainer on the call stack of the event being handled;
- `resumed_from` finds there too from which checkpoint it goes on;
- `saved_state` keeps values in `trainer_state.json`, so they travel with each checkpoint;
- `prepend_callback` puts a callback before the reporting integrations, which would otherwise run before any user
  callback;
- `DataFetchHook` tells when a batch has come, before the ranks count their tokens together;
- `training_frame` tells which call of `Trainer.train` is under way;
- `is_training_in` tells a signal handler whether it has interrupted one.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState

from hfscale.errors import HfScaleError

_KEY = "hfscale"


def calling_trainer() -> Trainer:
    """The Trainer whose callback event is being handled.

    Raises:
        HfScaleError: no Trainer is on the call stack.
    """
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    raise HfScaleError("no Trainer is calling: pass this callback to transformers.Trainer(callbacks=[...])")


def resumed_from() -> str | None:
    """The checkpoint folder from which the calling Trainer has resumed; None for a fresh start.

    Trainer hands it on from method to method and keeps it nowhere.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer) and "resume_from_checkpoint" in frame.f_locals:
            found = frame.f_locals["resume_from_checkpoint"]
            return str(found) if found and not isinstance(found, bool) else None
        frame = frame.f_back
    return None


def training_frame(frame: FrameType | None = None) -> FrameType | None:
    """The call of `Trainer.train` that `frame` is in, of the caller if none is given; None where it is in none."""
    frame = frame or inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer.train.__code__:
        frame = frame.f_back
    return frame


def is_training_in(frame: FrameType | None) -> bool:
    """Whether `Trainer.train` is under way in `frame`, the innermost one of its thread."""
    return frame is not None and training_frame(frame) is not None


def saved_state(state: TrainerState, name: str) -> dict[str, Any]:
    """The live dictionary `name` of what hfscale keeps in `trainer_state.json`; empty in a fresh run.

    Changes made to it are part of every later checkpoint. transformers' own `ExportableState` is not used: it raises
    a KeyError on save when the run resumed from a checkpoint that was written without the callback, and it restores
    by making a second instance of the callback.
    """
    return state.stateful_callbacks.setdefault(_KEY, {}).setdefault(name, {})


def prepend_callback(trainer: Trainer, callback: TrainerCallback) -> None:
    """Put `callback` before all others, so that what it adds to the logs reaches every reporter.

    The list is replaced, not changed: an event may be iterating over it right now.
    """
    handler = trainer.callback_handler
    handler.callbacks = [callback, *handler.callbacks]


def global_batch_size(trainer: Trainer) -> int:
    """Sequences per optimizer step: per-device batch x accumulation x data-parallel size."""
    return trainer.get_total_train_batch_size(trainer.args)


class DataFetchHook:
    """Stands for a Trainer's `get_batch_samples` and rings when a batch has come.

    Trainer gathers the number of tokens of a step over all ranks before `on_step_begin`: until then a rank that has
    its batches waits for those that have not, and by that event all have waited alike. Get the one of a Trainer with
    `DataFetchHook.of(trainer)`.
    """

    def __init__(self, fetch: Callable[..., Any]) -> None:
        self._fetch = fetch
        self._listeners: list[Callable[[], object]] = []

    @classmethod
    def of(cls, trainer: Trainer) -> "DataFetchHook":
        """The Trainer's bell, put in place at the first call."""
        if not isinstance(trainer.get_batch_samples, cls):
            trainer.get_batch_samples = cls(trainer.get_batch_samples)
        return trainer.get_batch_samples

    def add(self, listener: Callable[[], object]) -> None:
        """Have `listener()` called after each batch, on this rank."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def __call__(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        return self._fetch(self._ring_after_each(epoch_iterator), *args, **kwargs)

    def _ring_after_each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for listener in self._listeners:
                listener()
            yield batch
