"""Adds metric keys to what the Trainer logs, before any reporter sees it."""

from collections.abc import Callable

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.integrations.trainer import prepend_callback

LogSource = Callable[[TrainerState], dict[str, float]]


class MetricInjector(TrainerCallback):
    """Stands first among a Trainer's callbacks and completes each training log with the keys of its sources.

    So a metric needs no log record of its own: it stands beside the loss of its step, in `log_history`, on the
    console and with every integration of `report_to`. Get the one of a Trainer with `MetricInjector.of(trainer)`.
    """

    def __init__(self) -> None:
        self._sources: list[LogSource] = []
        self._last_calls: list[Callable[[], None]] = []

    @classmethod
    def of(cls, trainer: Trainer) -> "MetricInjector":
        """The Trainer's `MetricInjector`, put in place at the first call."""
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, cls):
                return callback
        log_keys = cls()
        prepend_callback(trainer, log_keys)
        return log_keys

    def add(self, source: LogSource) -> None:
        """Have `source(state)` asked for keys at each training log, on every rank, in the order of addition."""
        if source not in self._sources:
            self._sources.append(source)

    def before_last(self, call: Callable[[], None]) -> None:
        """Have `call()` made before the sources are asked for the record that ends a training.

        It is also the last event before Trainer loads the best checkpoint.
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
