"""What `TrainerAdapter` adds to a Trainer (keys in its logs, calls after batches), and what recipes set on theirs."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer
from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger

logger = get_logger(__name__)

LogSource = Callable[[TrainerState, Mapping[str, float]], dict[str, float]]


class MetricInjector:
    """Replaces a Trainer's `log` and completes each training log with the keys of its sources.

    A metric therefore needs no log record of its own: it is in the same record as the loss of its step, in
    `log_history`, on the console and in every integration of `report_to`. Use it through `TrainerAdapter.add_metrics`.

    Sources exchange values between the ranks. So they are called only where Trainer itself logs, which it does on all
    ranks: in the methods that also call `store_flos`, a collective of Trainer's own. A log of the user's code, which
    may be on one rank only, is left as it is. What a subclass does in its own `log` has no effect on the exchanges
    either, because they are made before.

    Args:
        trainer (`Trainer`): the Trainer.
        log (`Callable`): its own `log`.
    """

    def __init__(self, trainer: Trainer, log: Callable[..., None]) -> None:
        self._trainer = trainer
        self._log = log
        self._sources: list[LogSource] = []
        self._last_calls: list[Callable[[], None]] = []

    def add(self, source: LogSource) -> None:
        """Have `source` called for metric keys at each training log.

        Args:
            source (`Callable`): called as `source(state, logs)` with the keys that Trainer logs; returns values by
                metric key. Adding it twice has no effect.
        """
        if source not in self._sources:
            self._sources.append(source)

    def before_last(self, call: Callable[[], None]) -> None:
        """Have `call()` made before the sources are called for the record that ends a training.

        Args:
            call (`Callable`): called without arguments; adding it twice has no effect.
        """
        if call not in self._last_calls:
            self._last_calls.append(call)

    def __call__(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1)
        if "store_flos" in caller.f_code.co_names and caller.f_locals.get("self") is self._trainer:
            for call in self._last_calls if "train_runtime" in logs else ():
                call()
            given = dict(logs)
            for source in self._sources:
                logs.update(source(self._trainer.state, given))
        self._log(logs, *args, **kwargs)


class DataFetchHook:
    """Replaces a Trainer's `get_batch_samples` and calls its listeners after each batch.

    Use it through `TrainerAdapter.on_batch`.

    Args:
        fetch (`Callable`): the Trainer's own `get_batch_samples`.
    """

    def __init__(self, fetch: Callable[..., Any]) -> None:
        self._fetch = fetch
        self._listeners: list[Callable[[], object]] = []
        self.to_drop = 0
        """Number of batches that are taken from the iterator before the next one is returned."""

    def add(self, listener: Callable[[], object]) -> None:
        """Have `listener()` called after each batch.

        Args:
            listener (`Callable`): called without arguments; adding it twice has no effect.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)

    def __call__(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        while self.to_drop > 0:
            self.to_drop -= 1
            next(epoch_iterator, None)
        return self._fetch(self._notify_after_each(epoch_iterator), *args, **kwargs)

    def _notify_after_each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for listener in self._listeners:
                listener()
            yield batch


def use_optimizer(trainer: Trainer, kind: type[Optimizer], options: dict[str, Any]) -> None:
    """Let a Trainer make an optimizer of a class, as its argument `optimizer_cls_and_kwargs` does.

    Args:
        trainer (`Trainer`): a Trainer that has not made its optimizer.
        kind (`type`): the class of the optimizer.
        options (`dict[str, Any]`): its keyword arguments.
    """
    trainer.optimizer_cls_and_kwargs = (kind, options)


def wrap_prediction_steps(
    trainer: Trainer, context: Callable[[bool], AbstractContextManager[None]]
) -> None:
    """Let each step of an evaluation or prediction of a Trainer run in a context, as long as the Trainer lives.

    Args:
        trainer (`Trainer`): its method `prediction_step` is replaced.
        context (`Callable`): returns the context, given whether the step needs the loss alone.
    """
    step = trainer.prediction_step

    @functools.wraps(step)
    def step_in_context(
        model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        with context(prediction_loss_only):
            return step(model, inputs, prediction_loss_only, *args, **kwargs)

    trainer.prediction_step = step_in_context  # type: ignore[method-assign]


def switch_off_jit_checkpoint(trainer: Trainer) -> None:
    """Switch off transformers' own checkpoint on SIGTERM (`enable_jit_checkpoint`), and log one line if it was on.

    Its handler of the signal would replace that of `SpotCheckpointCallback`, and its ranks do not agree on a step. The
    callback stays in the Trainer's list and does nothing any more: the list may be being iterated over.

    Args:
        trainer (`Trainer`): a Trainer, while it is made or at the beginning of its training.
    """
    # From 5.0; imported where the flag is given
    module = sys.modules.get("transformers.trainer_jit_checkpoint")
    if module is None:
        return
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, module.JITCheckpointCallback) and callback.jit_manager is not None:
            # Restores the handler of before
            callback.on_train_end(trainer.args, trainer.state, trainer.control)
            callback.jit_manager = None
            logger.info(
                "enable_jit_checkpoint is switched off: SpotCheckpointCallback saves on SIGTERM, at the same step on "
                "all ranks"
            )
