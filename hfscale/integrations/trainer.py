"""`TrainerAdapter`: what hfscale does with a Trainer beyond its public API, and how it is undone.

Trainer passes its callbacks the arguments, the state, the model and the optimizer, but not itself. `TrainerAdapter`
finds the Trainer and has one named method for each thing that hfscale changes on it. The docstring of
`hfscale.integrations` lists the internals that these methods touch.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.errors import HfScaleError

LogSource = Callable[[TrainerState], dict[str, float]]

_ATTRIBUTE = "_hfscale_adapter"
_STATE_KEY = "hfscale"
_ABSENT = object()


class TrainerAdapter:
    """The changes that hfscale makes to one Trainer, one named method for each.

    Every change is made on an instance, never on a class or a module of a library. A change lasts until the end of
    the training during which it was made, whether that training returns or raises. To see the end, the adapter wraps
    `train` of the instance when it is made, that is, when the first hfscale callback meets its Trainer. Where the
    callback was added after the Trainer was made, the first training is already running at that moment; then the
    adapter wraps the two methods of Trainer in which the rest of that training takes place.

    Two changes last longer, because they must be there before or after a training: the wrapper of `train` and the
    wrapper of `get_eval_dataloader`. They are undone at the end of the first training that finds no `AdapterCallback`
    in the Trainer any more.

    Calling a method again during one training replaces what the earlier call did. This happens when
    `auto_find_batch_size` restarts the training loop.

    Get the adapter with `TrainerAdapter.of(trainer)`, or in a callback with `TrainerAdapter.current()`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._undo: dict[Any, Callable[[], None]] = {}  # of the running training, oldest first
        self._undo_lasting: dict[Any, Callable[[], None]] = {}
        self._preparations: list[Callable[[], None]] = []
        self._injector: MetricInjector | None = None
        self._fetch_hook: DataFetchHook | None = None
        self._wait_for_save: Callable[[], None] | None = None
        self._wraps_training = False
        self._skips_steps = False
        self._replace(trainer, "train", self._restoring(trainer.train), undo=self._undo_lasting)

    @classmethod
    def of(cls, trainer: Trainer) -> "TrainerAdapter":
        """The Trainer's adapter, made at the first call."""
        adapter = vars(trainer).get(_ATTRIBUTE)
        if adapter is None:
            adapter = cls(trainer)
            setattr(trainer, _ATTRIBUTE, adapter)
        return adapter

    @classmethod
    def current(cls) -> "TrainerAdapter":
        """The adapter of the Trainer whose callback event is being handled.

        Raises:
            HfScaleError: no Trainer is on the call stack.
        """
        return cls.of(calling_trainer())

    # --- logs and batches -------------------------------------------------------------------------------------------

    def add_metrics(self, source: LogSource) -> None:
        """Add the keys that `source(state)` returns to each training log, on every rank, in the order of addition."""
        self._metric_injector().add(source)

    def before_last_log(self, call: Callable[[], None]) -> None:
        """Have `call()` made before the record that ends a training is completed.

        It is also the last event before Trainer loads the best checkpoint.
        """
        self._metric_injector().before_last(call)

    def _metric_injector(self) -> "MetricInjector":
        if self._injector is None:
            self._injector = MetricInjector()
            self.prepend_callback(self._injector)
            self.at_training_end(lambda: setattr(self, "_injector", None))
        return self._injector

    def on_batch(self, listener: Callable[[], object]) -> None:
        """Have `listener()` called on this rank after each batch has been fetched.

        Trainer gathers the number of tokens of a step over all ranks before `on_step_begin`. Until then, a rank that
        has its batches waits for the ranks that do not, so that at `on_step_begin` all of them have waited.
        """
        if self._fetch_hook is None:
            self._fetch_hook = DataFetchHook(self.trainer.get_batch_samples)
            self._replace(self.trainer, "get_batch_samples", self._fetch_hook)
            self.at_training_end(lambda: setattr(self, "_fetch_hook", None))
        self._fetch_hook.add(listener)

    # --- callbacks --------------------------------------------------------------------------------------------------

    def prepend_callback(self, callback: TrainerCallback) -> None:
        """Put `callback` before all others until the end of the training.

        What it adds to the logs then reaches the reporting integrations, which run before any callback of the user.
        """
        self._change_callbacks(callback, lambda others: [callback, *others])

    def append_callback(self, callback: TrainerCallback) -> None:
        """Put `callback` after all others until the end of the training."""
        self._change_callbacks(callback, lambda others: [*others, callback])

    def _change_callbacks(
        self, callback: TrainerCallback, change: Callable[[list[TrainerCallback]], list[TrainerCallback]]
    ) -> None:
        handler = self.trainer.callback_handler

        def others() -> list[TrainerCallback]:
            return [other for other in handler.callbacks if other is not callback]

        def remove() -> None:
            handler.callbacks = others()

        self._watch_running_training()
        handler.callbacks = change(others())  # a new list: an event may be iterating over the old one
        self._undo[id(callback)] = remove

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def replace_saving(self, save: Callable[[Any, Any], None], wait: Callable[[], None]) -> Callable[[Any, Any], None]:
        """Replace `_save_checkpoint`: Trainer has no event between the decision to save and the writing.

        Args:
            save: called as `save(model, trial)` in its place, on every rank.
            wait: returns when no save is being written; `wait_for_save` calls it.

        Returns:
            The Trainer's own method.
        """
        self._undo_one((id(self.trainer), "_save_checkpoint"))
        original = self.trainer._save_checkpoint
        self._replace(self.trainer, "_save_checkpoint", save)
        self._wait_for_save = wait
        self.at_training_end(lambda: setattr(self, "_wait_for_save", None))
        return original

    def wait_for_save(self) -> None:
        """Wait for the save that is being written in the background, if there is one. Every rank must call it."""
        if self._wait_for_save is not None:
            self._wait_for_save()

    def output_dir(self, trial: Any) -> str:
        """The folder of the run; that of one trial in a hyperparameter search."""
        return self.trainer._get_output_dir(trial)

    @contextmanager
    def output_dir_replaced(self, folder: str) -> Iterator[None]:
        """Within the block, Trainer writes its checkpoints below `folder`."""
        name = "_get_output_dir"
        self._replace(self.trainer, name, lambda trial: folder)
        try:
            yield
        finally:
            self._undo_one((id(self.trainer), name))

    def load_rng_state(self, checkpoint: str) -> None:
        """Restore the random number generators from a checkpoint folder, as Trainer does after a resume."""
        self.trainer._load_rng_state(checkpoint)

    # --- data, evaluation, arguments --------------------------------------------------------------------------------

    def replace_train_dataset(self, dataset: Any) -> None:
        """Train on `dataset`."""
        self._replace(self.trainer, "train_dataset", dataset)

    def wrap_ulysses_loader(self, wrap: Callable[[Any], Any]) -> None:
        """Have Accelerate's data loader for ranks that share a sequence (DeepSpeed Ulysses) replaced by `wrap(it)`."""
        accelerator = self.trainer.accelerator
        adapt = accelerator.deepspeed_ulysses_dl_adapter
        self._replace(accelerator, "deepspeed_ulysses_dl_adapter", lambda loader, model: wrap(adapt(loader, model)))

    def wrap_evaluate(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `evaluate` by `wrap(evaluate)`: an evaluation has no flag that ends it early."""
        self._undo_one((id(self.trainer), "evaluate"))
        self._replace(self.trainer, "evaluate", wrap(self.trainer.evaluate))

    def wrap_eval_dataloader(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `get_eval_dataloader` by `wrap(get_eval_dataloader)`, for evaluations after the training too."""
        key = (id(self.trainer), "get_eval_dataloader")
        if key not in self._undo_lasting:
            self._replace(self.trainer, key[1], wrap(self.trainer.get_eval_dataloader), undo=self._undo_lasting)

    def set_argument(self, name: str, value: Any) -> None:
        """Give the training argument `name` another value until the end of the training."""
        self.restore_argument(name)
        self._replace(self.trainer.args, name, value)

    def restore_argument(self, name: str) -> None:
        """Undo `set_argument` before the end of the training."""
        self._undo_one((id(self.trainer.args), name))

    # --- the training itself ----------------------------------------------------------------------------------------

    def before_each_training(self, prepare: Callable[[], None]) -> None:
        """Have `prepare()` called at the beginning of each `train`, before Trainer does anything."""
        self._preparations.append(prepare)

    def finish_without_steps(self) -> None:
        """Have the next `train` load its checkpoint and end without a step, a loss or metrics of its own."""
        self._skips_steps = True

    def at_training_end(self, call: Callable[[], None]) -> None:
        """Have `call()` made when the training ends, also when it raises; the last one added is called first."""
        self._watch_running_training()
        self._undo[call] = call

    def restore(self) -> None:
        """Undo everything that was to last until the end of the training."""
        undo, self._undo = self._undo, {}
        _call_all(undo)

    def _restoring(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train` with preparations at its beginning and `restore` at its end."""

        @functools.wraps(train)
        def train_and_restore(*args: Any, **kwargs: Any) -> Any:
            self.restore()  # a training that was not wrapped may have been broken off
            self._wraps_training = True
            skips_steps, self._skips_steps = self._skips_steps, False
            try:
                for callback in self.trainer.callback_handler.callbacks:
                    if isinstance(callback, AdapterCallback):
                        callback.before_train(self)
                for prepare in self._preparations:
                    prepare()
                if skips_steps:
                    self._skip_steps()
                result = train(*args, **kwargs)
                return result._replace(metrics={}) if skips_steps else result
            finally:
                self._wraps_training = False
                self.restore()
                self._leave_if_unused()

        return train_and_restore

    def _leave_if_unused(self) -> None:
        """Undo the lasting changes too if nobody needs the adapter any more."""
        callbacks = self.trainer.callback_handler.callbacks
        if not self._preparations and not any(isinstance(callback, AdapterCallback) for callback in callbacks):
            _call_all(self._undo_lasting)
            delattr(self.trainer, _ATTRIBUTE)

    def _watch_running_training(self) -> None:
        """If a training is running that began before this adapter wrapped `train`, restore at its end."""
        if self._wraps_training or "running" in self._undo:
            return
        frame = training_frame()
        if frame is None or frame.f_locals.get("self") is not self.trainer:
            return
        self._undo["running"] = lambda: None
        run_epoch, finalize = self.trainer._run_epoch, self.trainer._finalize_training

        @functools.wraps(run_epoch)
        def run_epoch_or_restore(*args: Any, **kwargs: Any) -> Any:
            try:
                return run_epoch(*args, **kwargs)
            except BaseException:
                self.restore()
                raise

        @functools.wraps(finalize)
        def finalize_and_restore(*args: Any, **kwargs: Any) -> Any:
            try:
                return finalize(*args, **kwargs)
            finally:
                self.restore()

        self._replace(self.trainer, "_run_epoch", run_epoch_or_restore)
        self._replace(self.trainer, "_finalize_training", finalize_and_restore)

    def _skip_steps(self) -> None:
        log, initial_values = self.trainer.log, self.trainer.set_initial_training_values

        def without_epochs(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return (0, *initial_values(*args, **kwargs)[1:])

        def without_training(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "train_loss" not in logs:
                log(logs, *args, **kwargs)

        self._replace(self.trainer, "set_initial_training_values", without_epochs)
        self._replace(self.trainer, "log", without_training)

    def _replace(
        self, owner: Any, name: str, value: Any, *, undo: dict[Any, Callable[[], None]] | None = None
    ) -> None:
        """Set an attribute of an instance; the undo leaves it alone if somebody else has replaced it since."""
        if undo is None:
            self._watch_running_training()
            undo = self._undo
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name, _ABSENT) is not value:
                return
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        undo[id(owner), name] = put_back

    def _undo_one(self, key: Any) -> None:
        self._undo.pop(key, lambda: None)()


def _call_all(undo: dict[Any, Callable[[], None]]) -> None:
    """Call the last one first, and all of them even if one raises."""
    with ExitStack() as stack:
        for call in undo.values():
            stack.callback(call)


class AdapterCallback(TrainerCallback):
    """A callback that uses its Trainer's `TrainerAdapter`: the base class of the callbacks of hfscale."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the adapter while the Trainer is being made, so that it sees each training from its beginning."""
        TrainerAdapter.current()

    def before_train(self, adapter: TrainerAdapter) -> None:
        """At the beginning of `Trainer.train`, before the data loader is made and before any `on_train_begin`.

        It is not called in the first training if the callback was added after the Trainer was made.
        """


class MetricInjector(TrainerCallback):
    """Completes each training log with the keys of its sources, as the first of a Trainer's callbacks.

    So a metric needs no log record of its own: it is in the same record as the loss of its step, in `log_history`, on
    the console and in every integration of `report_to`. Use it through `TrainerAdapter.add_metrics`.
    """

    def __init__(self) -> None:
        self._sources: list[LogSource] = []
        self._last_calls: list[Callable[[], None]] = []

    def add(self, source: LogSource) -> None:
        """Have `source(state)` asked for keys at each training log."""
        if source not in self._sources:
            self._sources.append(source)

    def before_last(self, call: Callable[[], None]) -> None:
        """Have `call()` made before the sources are asked for the record that ends a training."""
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
    """

    def __init__(self, fetch: Callable[..., Any]) -> None:
        self._fetch = fetch
        self._listeners: list[Callable[[], object]] = []

    def add(self, listener: Callable[[], object]) -> None:
        """Have `listener()` called after each batch."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def __call__(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        return self._fetch(self._notify_after_each(epoch_iterator), *args, **kwargs)

    def _notify_after_each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for listener in self._listeners:
                listener()
            yield batch


# --- what is read from the Trainer's frames and state ---------------------------------------------------------------


def calling_trainer() -> Trainer:
    """The Trainer whose callback event is being handled, found on the call stack.

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

    Trainer passes it from method to method and keeps it nowhere.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer) and "resume_from_checkpoint" in frame.f_locals:
            found = frame.f_locals["resume_from_checkpoint"]
            return str(found) if found and not isinstance(found, bool) else None
        frame = frame.f_back
    return None


def training_frame(frame: FrameType | None = None) -> FrameType | None:
    """The call of `Trainer.train` that `frame` (by default the caller) is in; None if it is in none."""
    frame = frame or inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer.train.__code__:
        frame = frame.f_back
    return frame


def is_training_in(frame: FrameType | None) -> bool:
    """Whether `Trainer.train` is under way in `frame`, the innermost frame of its thread."""
    return frame is not None and training_frame(frame) is not None


def saved_state(state: TrainerState, name: str) -> dict[str, Any]:
    """The live dictionary `name` of what hfscale keeps in `trainer_state.json`; empty in a fresh run.

    Changes made to it are part of every later checkpoint. transformers' own `ExportableState` is not used: it raises
    a KeyError on save when the run resumed from a checkpoint that was written without the callback, and it restores
    by making a second instance of the callback.
    """
    return state.stateful_callbacks.setdefault(_STATE_KEY, {}).setdefault(name, {})


def global_batch_size(trainer: Trainer) -> int:
    """Sequences per optimizer step: per-device batch x accumulation x data-parallel size."""
    return trainer.get_total_train_batch_size(trainer.args)
