"""What `TrainerAdapter` adds to a Trainer: the keys of the callbacks in its logs, and calls after each batch."""

from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

LogSource = Callable[[TrainerState], dict[str, float]]


class MetricInjector(TrainerCallback):
    """Completes each training log with the keys of its sources, as the first of a Trainer's callbacks.

    A metric therefore needs no log record of its own: it is in the same record as the loss of its step, in
    `log_history`, on the console and in every integration of `report_to`. Use it through `TrainerAdapter.add_metrics`.
    """

    def __init__(self) -> None:
        self._sources: list[LogSource] = []
        self._last_calls: list[Callable[[], None]] = []

    def add(self, source: LogSource) -> None:
        """Have `source(state)` called for metric keys at each training log.

        Args:
            source (`Callable`): returns values by metric key; adding it twice has no effect.
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

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None or not ("loss" in logs or "train_runtime" in logs):
            return  # an evaluation's own record
        for call in self._last_calls if "train_runtime" in logs else ():
            call()
        for source in self._sources:
            keys = source(state)
            logs.update(keys)
            state.log_history[-1].update(keys)  # Trainer appended a copy of `logs` just before


class DataFetchHook:
    """Replaces a Trainer's `get_batch_samples` and calls its listeners after each batch.

    Use it through `TrainerAdapter.on_batch`.

    Args:
        fetch (`Callable`): the Trainer's own `get_batch_samples`.
    """

    def __init__(self, fetch: Callable[..., Any]) -> None:
        self._fetch = fetch
        self._listeners: list[Callable[[], object]] = []

    def add(self, listener: Callable[[], object]) -> None:
        """Have `listener()` called after each batch.

        Args:
            listener (`Callable`): called without arguments; adding it twice has no effect.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)

    def __call__(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        return self._fetch(self._notify_after_each(epoch_iterator), *args, **kwargs)

    def _notify_after_each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for listener in self._listeners:
                listener()
            yield batch
