"""`TrainerAdapter`: what hfscale does with a Trainer beyond its public API, and how it is undone.

Trainer passes its callbacks the arguments, the state, the model and the optimizer, but not itself. `TrainerAdapter`
finds the Trainer and has one named method for each thing that hfscale changes on it. The docstring of
`hfscale.trainer` lists the internals that these methods touch.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from hfscale.core.build_locks import remove_locks_before_deepspeed
from hfscale.core.clocks import PhaseClock
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.options import describe_options, fill_in_options
from hfscale.core.rank_link import connect
from hfscale.core.run_state import ResetOnCopy
from hfscale.core.versions import has_epoch_methods
from hfscale.trainer.collector import Judge, LogCollector, LogPart
from hfscale.trainer.expert_adapters import spread_expert_adapters
from hfscale.trainer.frames import calling_trainer, resumed_from, training_frame
from hfscale.trainer.fsdp2_loading import name_layers_that_are_there
from hfscale.trainer.hooks import DataFetchHook, LogSource, MetricInjector
from hfscale.trainer.hub import without_working_files
from hfscale.trainer.loss_rule import why_loss_grows
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.weight_wrappers import keep_stored_weights

logger = get_logger(__name__)

_ATTRIBUTE = "_hfscale_adapter"
_ABSENT = object()


class SavedShards(Protocol):
    """Gives what checkpoints keep of tensors of which each rank may have a part."""

    def bytes_to_allocate(self) -> int:
        """Return the host memory in bytes that the next copy would allocate on this rank."""
        ...

    def take(self, *, copies: bool) -> Mapping[str, Any]:
        """Return this rank's parts by the names of the tensors.

        Args:
            copies (`bool`): whether a later step must not change them; a copy is valid until the next call.
        """
        ...

    def files(self) -> Mapping[str, bytes]:
        """Return small files that the main process writes beside them, by name."""
        ...


class TrainerAdapter:
    """Makes the changes that hfscale needs to one Trainer, by one named method for each.

    Every change is made on an instance, never on a class or a module of a library. A change lasts until the end of
    the training during which it was made, whether that training returns or raises. To see the end, the adapter wraps
    `train` of the instance when it is made, that is, when the first hfscale callback meets its Trainer. Where the
    callback was added after the Trainer was made, the first training is already running at that moment; then the
    adapter wraps the two methods of Trainer in which the rest of that training takes place.

    Some changes last longer, because they must be there before or after a training: the wrappers of `train`,
    `save_model`, `get_eval_dataloader`, `push_to_hub` and `_push_from_checkpoint`, and a scaled optimizer. They are
    undone at the beginning of the first training that finds no `AdapterCallback` in the Trainer any more. Adapters of
    experts that ranks share stay as `spread_expert_adapters` has made them.

    Calling a method again during one training replaces what the earlier call did. This happens when
    `auto_find_batch_size` restarts the training loop.

    Get the adapter with `TrainerAdapter.of(trainer)`, or in a callback with `TrainerAdapter.current()`.

    Args:
        trainer (`Trainer`): the Trainer that is changed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._undo: dict[Any, Callable[[], object]] = {}  # of the running training, oldest first
        self._undo_lasting: dict[Any, Callable[[], object]] = {}
        self._preparations: list[Callable[[], None]] = []
        self._injector: MetricInjector | None = None
        self._fetch_hook: DataFetchHook | None = None
        self._collector: LogCollector | None = None
        self._eval_listeners: dict[str, Callable[[Any], object]] = {}
        self._wait_for_save: Callable[[], None] | None = None
        self._calls_after_reports: dict[str, Callable[[], None]] = {}
        self._evaluation_wraps: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}
        self.saved_tensors: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
        self.saved_json: dict[str, Callable[[], dict[str, Any]]] = {}
        self.saved_shards: dict[str, SavedShards] = {}
        self.is_interrupted = False
        """Whether the training ends early because of a notice, and another launch is to resume it."""
        self.callback_saves = False
        """Whether a callback saves in this training, although `save_strategy` may be `no`."""
        self.grows_batch = False
        """Whether the global batch changes in this training."""
        self.skip_bad_batches: int | None = None
        """How many bad batches the run may leave out; None: none is looked for in this training."""
        self._unmeasured: dict[str, str | None] = {}
        self._resumes_from: str | None = None
        self._wraps_training = False
        self._skips_steps = False
        self._final_error: BaseException | None = None
        self._replace(trainer, "train", self._restoring(trainer.train), undo=self._undo_lasting)
        for name in ("push_to_hub", "_push_from_checkpoint"):
            push = without_working_files(trainer, getattr(trainer, name))
            self._replace(trainer, name, push, undo=self._undo_lasting)
        if trainer.is_fsdp_enabled:
            name_layers_that_are_there(model_of(trainer))
            save = self._saving_complete_weights(trainer.save_model)
            self._replace(trainer, "save_model", save, undo=self._undo_lasting)
        remove_locks_before_deepspeed()
        spread_expert_adapters(trainer)

    @classmethod
    def of(cls, trainer: Trainer) -> "TrainerAdapter":
        """Return the Trainer's adapter, which the first call makes.

        Args:
            trainer (`Trainer`): the Trainer; its `train` is wrapped by the first call.
        """
        adapter = vars(trainer).get(_ATTRIBUTE)
        if adapter is None:
            adapter = cls(trainer)
            setattr(trainer, _ATTRIBUTE, adapter)
            if adapter._is_training():
                Strategy.of(trainer).check_support()
                keep_stored_weights(trainer.model)
        return adapter

    @classmethod
    def current(cls) -> "TrainerAdapter":
        """Return the adapter of the Trainer whose callback event is being handled.

        Raises:
            HfScaleError: no Trainer is on the call stack.
        """
        return cls.of(calling_trainer())

    # --- logs and batches -------------------------------------------------------------------------------------------

    def add_metrics(self, source: LogSource) -> None:
        """Add the metric keys of `source` to each training log, on every rank, in the order of addition.

        Args:
            source (`Callable`): called as `source(state, logs)` at each log that Trainer itself makes, with the keys
                of that log; returns values by metric key. A source that needs values of other ranks is a part of the
                exchange of the log instead: see `collect`.
        """
        self._metric_injector().add(source)

    def before_last_log(self, call: Callable[[], None]) -> None:
        """Have `call()` made before the record that ends a training is completed.

        It is also the last event before Trainer loads the best checkpoint.

        Args:
            call (`Callable`): called without arguments, on every rank.
        """
        self._metric_injector().before_last(call)

    def _metric_injector(self) -> "MetricInjector":
        if self._injector is None:
            self._injector = MetricInjector(self.trainer, self.trainer.log)
            self._replace(self.trainer, "log", self._injector)
            self.at_training_end(lambda: setattr(self, "_injector", None))
        return self._injector

    def on_batch(self, listener: Callable[[], object]) -> None:
        """Have `listener()` called on this rank after each batch has been fetched.

        Trainer gathers the number of tokens of a step over all ranks before `on_step_begin`. Until then, a rank that
        has its batches waits for the ranks that do not, so that at `on_step_begin` all of them have waited.

        Args:
            listener (`Callable`): called without arguments; its result is ignored.
        """
        self._data_fetch_hook().add(listener)

    def drop_batches(self, count: int) -> None:
        """Have the training take batches from its data loader, on every rank, before the first one that it trains on.

        Args:
            count (`int`): number of batches of a rank.
        """
        self._data_fetch_hook().to_drop = count

    def _data_fetch_hook(self) -> DataFetchHook:
        if self._fetch_hook is None:
            self._fetch_hook = DataFetchHook(self.trainer.get_batch_samples)
            self._replace(self.trainer, "get_batch_samples", self._fetch_hook)
            self.at_training_end(lambda: setattr(self, "_fetch_hook", None))
        return self._fetch_hook

    def collect(self, part: LogPart, judge: Judge | None = None) -> PhaseClock:
        """Add a part to the exchange that the ranks make at each training log; every rank must add it.

        Args:
            part (`LogPart`): gives its numbers at each log, and makes metric keys from those of all ranks.
            judge (`Callable`, *optional*): as in `LogCollector.add`.

        Returns:
            `PhaseClock`: the clock of this training, which only the collector charges.
        """
        if self._collector is None:
            self._collector = LogCollector()
            self.on_batch(self._collector.batch_fetched)
            self.append_callback(self._collector)
            self.add_metrics(self._collector.keys)
            self.at_training_end(lambda: setattr(self, "_collector", None))
        self._collector.add(part, judge)
        return self._collector.clock

    def phase_ended(self, phase: str) -> None:
        """Report the end of a phase that Trainer has no event for.

        Args:
            phase (`str`): its name in `hfscale.core.phases`.
        """
        if self._collector is not None:
            self._collector.clock.end(phase)

    def after_reports(self, name: str, call: Callable[[], None]) -> None:
        """Have `call()` made after each step for which Trainer has logged, evaluated and saved what was due.

        It is the last point before the next batch is fetched: Trainer has no event there.

        Args:
            name (`str`): whose call it is; a later call of this method with the same name replaces it.
            call (`Callable`): called without arguments, on every rank.
        """
        if not self._calls_after_reports:
            original = self.trainer._maybe_log_save_evaluate

            def report_and_call(*args: Any, **kwargs: Any) -> None:
                original(*args, **kwargs)
                for each in list(self._calls_after_reports.values()):
                    each()

            self._replace(self.trainer, "_maybe_log_save_evaluate", report_and_call)
            self.at_training_end(self._calls_after_reports.clear)
        self._calls_after_reports[name] = call

    # --- callbacks --------------------------------------------------------------------------------------------------

    def prepend_callback(self, callback: TrainerCallback) -> None:
        """Put `callback` before all others until the end of the training.

        What it adds to the logs then reaches the reporting integrations, which run before any callback of the user.

        Args:
            callback (`TrainerCallback`): the callback; at the end of the training it is removed.
        """
        self._change_callbacks(callback, lambda others: [callback, *others])

    def append_callback(self, callback: TrainerCallback) -> None:
        """Put `callback` after all others until the end of the training.

        Args:
            callback (`TrainerCallback`): the callback; at the end of the training it is removed.
        """
        self._change_callbacks(callback, lambda others: [*others, callback])

    def _change_callbacks(
        self,
        callback: TrainerCallback,
        change: Callable[[list[TrainerCallback]], list[TrainerCallback]],
    ) -> None:
        handler = self.trainer.callback_handler

        def others() -> list[TrainerCallback]:
            return [other for other in handler.callbacks if other is not callback]

        def remove() -> None:
            handler.callbacks = others()

        self._watch_running_training()
        # A new list: an event may be iterating over the old one
        handler.callbacks = change(others())
        self._undo[id(callback)] = remove

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def replace_saving(
        self, save: Callable[[Any, Any], None], wait: Callable[[], None]
    ) -> Callable[[Any, Any], None]:
        """Replace `_save_checkpoint`: Trainer has no event between the decision to save and the writing.

        Args:
            save (`Callable`): called as `save(model, trial)` in its place, on every rank.
            wait (`Callable`): called by `wait_for_save`; returns when no save is being written.

        Returns:
            `Callable`: the Trainer's own method.
        """
        self._undo_one((id(self.trainer), "_save_checkpoint"))
        original = self.trainer._save_checkpoint
        self._replace(self.trainer, "_save_checkpoint", save)
        self._wait_for_save = wait
        self.at_training_end(lambda: setattr(self, "_wait_for_save", None))
        return original

    def replace_loading(
        self,
        *,
        model: Callable[..., None],
        optimizer_and_scheduler: Callable[[str | None], None],
        rng_state: Callable[[str | None], None],
        best_model: Callable[[], None],
    ) -> Callable[[str | None], None]:
        """Replace the methods by which Trainer resumes: it has no event before it loads a checkpoint.

        Args:
            model (`Callable`): called as `model(checkpoint, model)` in place of `_load_from_checkpoint`.
            optimizer_and_scheduler (`Callable`): called with the checkpoint.
            rng_state (`Callable`): called with the checkpoint.
            best_model (`Callable`): called without arguments.

        Returns:
            `Callable`: the Trainer's own `_load_rng_state`.
        """
        methods: dict[str, Callable[..., None]] = {
            "_load_from_checkpoint": model,
            "_load_optimizer_and_scheduler": optimizer_and_scheduler,
            "_load_rng_state": rng_state,
            "_load_best_model": best_model,
        }
        for name in methods:
            self._undo_one((id(self.trainer), name))
        original: Callable[[str | None], None] = self.trainer._load_rng_state
        for name, method in methods.items():
            self._replace(self.trainer, name, method)
        return original

    def load_states_in(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Have Trainer load the optimizer and the scheduler of a checkpoint within a context.

        Args:
            context (`Callable`): returns the context.
        """
        load = self.trainer._load_optimizer_and_scheduler

        def load_in_context(checkpoint: str | None) -> None:
            with context():
                load(checkpoint)

        self._replace(self.trainer, "_load_optimizer_and_scheduler", load_in_context)

    def replace_rng_loading(
        self, load: Callable[[str | None], None]
    ) -> Callable[[str | None], None]:
        """Replace `_load_rng_state`, which Trainer calls after the first batch of a resumed training has been fetched.

        Args:
            load (`Callable`): called with the checkpoint.

        Returns:
            `Callable`: the method of before.
        """
        original: Callable[[str | None], None] = self.trainer._load_rng_state
        self._replace(self.trainer, "_load_rng_state", load)
        return original

    def _saving_complete_weights(self, save_model: Callable[..., None]) -> Callable[..., None]:
        """Return `save_model` for scripts: with sharded checkpoints, Trainer's writes no model and does not say so."""

        @functools.wraps(save_model)
        def save(
            output_dir: str | None = None, _internal_call: bool = False, *args: Any, **kwargs: Any
        ) -> None:
            if _internal_call:  # of a checkpoint
                save_model(output_dir, _internal_call, *args, **kwargs)
                return
            with Strategy.of(self.trainer).full_state_dicts():
                save_model(output_dir, _internal_call, *args, **kwargs)

        return save

    def announce_saves(self) -> None:
        """Set `callback_saves` until the end of the training. Call it before `on_train_begin`, in `before_train`."""
        self.callback_saves = True
        self.at_training_end(lambda: setattr(self, "callback_saves", False))

    def announce_growing_batch(self) -> None:
        """Set `grows_batch` until the end of the training. Call it before `on_train_begin`, in `before_train`."""
        self.grows_batch = True
        self.at_training_end(lambda: setattr(self, "grows_batch", False))

    def announce_skipping(self, most: int) -> None:
        """Set `skip_bad_batches` until the end of the training. Call it before `on_train_begin`, in `before_train`.

        Args:
            most (`int`): batches that the run may leave out.
        """
        self.skip_bad_batches = most
        self.at_training_end(lambda: setattr(self, "skip_bad_batches", None))

    def announce_measurement(self, key: str, why_not: str | None) -> None:
        """Say whether a metric key is measured in this training, for a callback that acts on its value.

        Args:
            key (`str`): the metric key.
            why_not (`str`, *optional*): why it is not measured; None: it is.
        """
        self._unmeasured[key] = why_not
        self.at_training_end(self._unmeasured.clear)

    def why_unmeasured(self, key: str) -> str | None:
        """Return why a metric key is not measured in this training; None: it is.

        Args:
            key (`str`): the metric key.
        """
        return self._unmeasured.get(key, "no callback measures it")

    def wait_for_save(self) -> None:
        """Wait for the save that is being written in the background, if there is one. Every rank must call it.

        Raises:
            StorageError: on every rank: that save failed.
        """
        if self._wait_for_save is not None:
            self._wait_for_save()

    def save_tensors(self, name: str, source: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Have each checkpoint of this training keep tensors of this rank, if `SpotCheckpointCallback` saves it.

        Args:
            name (`str`): the file is `NAME_outer_RANK.safetensors`.
            source (`Callable`): called at each save; returns copies, on the CPU, that do not change any more. Where
                there are none, no file is written.
        """
        self.saved_tensors[name] = source
        self.at_training_end(lambda: self.saved_tensors.pop(name, None))

    def save_json(self, name: str, source: Callable[[], dict[str, Any]]) -> None:
        """Have each checkpoint of this training keep JSON values of this rank, if `SpotCheckpointCallback` saves it.

        Args:
            name (`str`): the file is `NAME_RANK.json`.
            source (`Callable`): called at each save; what it returns is written out before the next step.
        """
        self.saved_json[name] = source
        self.at_training_end(lambda: self.saved_json.pop(name, None))

    def save_shards(self, name: str, source: "SavedShards") -> None:
        """Have each checkpoint of this training keep tensors of which each rank may have a part.

        `SpotCheckpointCallback` writes them as one of torch's distributed checkpoints.

        Args:
            name (`str`): the folder in the checkpoint.
            source (`SavedShards`): gives this rank's part at each save.
        """
        self.saved_shards[name] = source
        self.at_training_end(lambda: self.saved_shards.pop(name, None))

    @property
    def has_saver(self) -> bool:
        """Whether `SpotCheckpointCallback` writes the checkpoints of this training, once all callbacks have begun."""
        return self._wait_for_save is not None

    def note_interruption(self) -> None:
        """Set `is_interrupted` until the end of the training."""
        if not self.is_interrupted:
            self.is_interrupted = True
            self.at_training_end(lambda: setattr(self, "is_interrupted", False))

    def output_dir(self, trial: Any) -> str:
        """Return the output folder of the run, or that of one trial in a hyperparameter search.

        Args:
            trial (`optuna.Trial` or `dict`, *optional*): the trial, as Trainer passes it; None: not a search.
        """
        return self.trainer._get_output_dir(trial)

    def run_dir(self) -> Path:
        """Return the folder of the running training's checkpoints; in a hyperparameter search, that of its trial."""
        frame = training_frame()
        return Path(self.output_dir(frame.f_locals["trial"] if frame is not None else None))

    def output_dir_replaced(self, folder: str) -> AbstractContextManager[None]:
        """Have Trainer write its checkpoints below another folder, and delete none, within the `with` block.

        The methods of a subclass get the same answers as before.

        Args:
            folder (`str`): the folder, in which Trainer creates `checkpoint-N`.
        """
        original = self.trainer._get_output_dir

        def output_dir(trial: Any = None) -> str:
            caller = sys._getframe(1).f_code
            return folder if caller is Trainer._save_checkpoint.__code__ else original(trial)

        return self._methods_replaced({"_get_output_dir": output_dir})

    def methods_skipped(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Have calls of methods of the Trainer do nothing within the `with` block.

        Args:
            names (`Sequence[str]`): names of methods that write a part of a checkpoint.
        """
        return self._methods_replaced(dict.fromkeys(names, lambda *args, **kwargs: None))

    def folder_shown_as(
        self, names: Sequence[str], folder: str, shown: str
    ) -> AbstractContextManager[None]:
        """Have methods of the Trainer get another path for a folder that is their first argument, in the `with` block.

        Args:
            names (`Sequence[str]`): names of methods whose first argument is the folder of a checkpoint.
            folder (`str`): the path that Trainer passes.
            shown (`str`): the path that they get instead.
        """

        def showing(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
                return method(shown if output_dir == folder else output_dir, *args, **kwargs)

            return call

        return self._methods_replaced(
            {name: showing(getattr(self.trainer, name)) for name in names}
        )

    def pushes_delayed(self, folders: list[str]) -> AbstractContextManager[None]:
        """Keep Trainer from uploading checkpoints within the `with` block.

        Args:
            folders (`list[str]`): gets the folders that Trainer would have uploaded.
        """
        return self._methods_replaced({"_push_from_checkpoint": folders.append})

    @contextmanager
    def _methods_replaced(self, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
        for name, method in methods.items():
            self._replace(self.trainer, name, method)
        try:
            yield
        finally:
            for name in methods:
                self._undo_one((id(self.trainer), name))

    def load_rng_state(self, checkpoint: str) -> None:
        """Restore the random number generators of this rank, as Trainer does after a resume.

        Args:
            checkpoint (`str`): the checkpoint folder to read from.
        """
        self.trainer._load_rng_state(checkpoint)

    # --- data, optimizer, evaluation, arguments ---------------------------------------------------------------------

    def share_train_dataset(self, dataset: Any) -> None:
        """Train on `dataset` as long as the Trainer has one of our callbacks.

        Args:
            dataset (`Dataset` or `IterableDataset`): the training data.
        """
        self._replace(self.trainer, "train_dataset", dataset, undo=self._undo_lasting)

    def replace_train_dataset(self, dataset: Any) -> None:
        """Train on `dataset` until the end of the training. Call it before the training's data loader is made.

        Args:
            dataset (`Dataset` or `IterableDataset`): the training data.
        """
        self._replace(self.trainer, "train_dataset", dataset)

    def wrap_ulysses_loader(self, wrap: Callable[[Any], Any]) -> None:
        """Replace Accelerate's data loader for ranks that share a sequence (DeepSpeed Ulysses).

        Args:
            wrap (`Callable`): called with that data loader; returns the one to use.
        """
        accelerator = self.trainer.accelerator
        adapt = accelerator.deepspeed_ulysses_dl_adapter
        self._replace(
            accelerator,
            "deepspeed_ulysses_dl_adapter",
            lambda loader, model: wrap(adapt(loader, model)),
        )

    def wrap_create_optimizer(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace `create_optimizer`: there is no event between the making of the optimizer and of its scheduler.

        Args:
            wrap (`Callable`): called with the Trainer's `create_optimizer`; returns the function to use, which takes
                the same arguments.
        """
        self._undo_one((id(self.trainer), "create_optimizer"))
        self._replace(self.trainer, "create_optimizer", wrap(self.trainer.create_optimizer))

    def wrap_create_scheduler(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace `create_scheduler`, which counts optimizer steps, for a schedule that counts something else.

        Args:
            wrap (`Callable`): called with the Trainer's `create_scheduler`; returns the function to use, which takes
                the same arguments.
        """
        self._undo_one((id(self.trainer), "create_scheduler"))
        self._replace(self.trainer, "create_scheduler", wrap(self.trainer.create_scheduler))

    def wrap_counting(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `set_initial_training_values` as long as the Trainer has one of our callbacks.

        Trainer computes there how many steps a training has, from one accumulation for all of them. A script asks it
        before a training too.

        Args:
            wrap (`Callable`): called with the Trainer's method; returns the function to use.
        """
        name = "set_initial_training_values"
        self._undo_lasting.pop((id(self.trainer), name), lambda: None)()
        values = wrap(getattr(self.trainer, name))
        self._replace(self.trainer, name, values, undo=self._undo_lasting)

    def wrap_stepping(
        self, wraps: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
    ) -> None:
        """Replace the methods by which the loop finds its place and takes steps of one accumulation.

        Args:
            wraps (`Mapping`): name of a method -> a function that is called with the Trainer's method and returns the
                one to use.
        """
        for name, wrap in wraps.items():
            self._undo_one((id(self.trainer), name))
            self._replace(self.trainer, name, wrap(getattr(self.trainer, name)))

    def wrap_evaluate(
        self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace `evaluate` of the Trainer: no event comes before an evaluation, and no flag ends one early.

        Args:
            name (`str`): what it is wrapped for; a later call with the same name replaces this one.
            wrap (`Callable`): called with the Trainer's `evaluate`, or what an earlier wrap has made of it; returns
                the function to use, which takes the same arguments.
        """
        self._undo_one((id(self.trainer), "evaluate"))
        self._evaluation_wraps[name] = wrap
        self.at_training_end(self._evaluation_wraps.clear)
        evaluate: Callable[..., Any] = self.trainer.evaluate
        for each in self._evaluation_wraps.values():
            evaluate = each(evaluate)
        self._replace(self.trainer, "evaluate", evaluate)

    def wrap_evaluation_of_training(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace `_evaluate`, by which a training evaluates, and then moves a schedule that follows a metric.

        Args:
            wrap (`Callable`): called with the Trainer's `_evaluate`; returns the function to use, which takes the same
                arguments.
        """
        self._undo_one((id(self.trainer), "_evaluate"))
        self._replace(self.trainer, "_evaluate", wrap(self.trainer._evaluate))

    def evaluate_as_in_training(self) -> None:
        """Evaluate between two steps as the training loop does: its schedule, the best model and a save follow."""
        trainer = self.trainer
        frame = training_frame()
        known = frame.f_locals if frame is not None else {}
        metrics = trainer._evaluate(None, known.get("ignore_keys_for_eval"))
        is_best = trainer._determine_best_metric(metrics=metrics, trial=None)
        if trainer.args.save_strategy == SaveStrategy.BEST and is_best:
            trainer._save_checkpoint(trainer.model_wrapped, None)
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def skip_epoch(self) -> None:
        """Have the epoch that is about to begin take no step. Call it in `on_epoch_begin`."""
        if not has_epoch_methods():
            logger.warning("transformers before 5.4 takes one more step before it stops early")
            return
        self._replace(self.trainer, "_run_epoch", lambda *args, **kwargs: None)

    def before_finalizing(self, call: Callable[[], None]) -> None:
        """Have `call()` made when the training has taken its last step, before Trainer loads the best model.

        Args:
            call (`Callable`): called without arguments, on every rank.
        """
        if not has_epoch_methods():
            call()
            return
        finalize: Callable[..., Any] = self.trainer._finalize_training

        @functools.wraps(finalize)
        def call_and_finalize(*args: Any, **kwargs: Any) -> Any:
            call()
            return finalize(*args, **kwargs)

        self._replace(self.trainer, "_finalize_training", call_and_finalize)

    def on_eval_dataloader(self, name: str, listener: Callable[[Any], object]) -> None:
        """Have `listener(loader)` called when the Trainer gets a data loader for an evaluation, after training too.

        Args:
            name (`str`): what the listener does; it replaces an earlier one of this name.
            listener (`Callable`): called with each loader before it is read; its result is ignored.
        """
        key = (id(self.trainer), "get_eval_dataloader")
        self._eval_listeners[name] = listener
        if key in self._undo_lasting:
            return
        get = self.trainer.get_eval_dataloader

        @functools.wraps(get)
        def get_and_tell(*args: Any, **kwargs: Any) -> Any:
            loader = get(*args, **kwargs)
            for listener in self._eval_listeners.values():
                listener(loader)
            return loader

        self._replace(self.trainer, key[1], get_and_tell, undo=self._undo_lasting)

    def wrap_compute_loss(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `compute_loss` of the Trainer, because no event separates a batch's preparation from its loss.

        Args:
            wrap (`Callable`): called with the Trainer's `compute_loss`; returns the function to use, which takes the
                same arguments.
        """
        self.unwrap_compute_loss()
        self._replace(self.trainer, "compute_loss", wrap(self.trainer.compute_loss))

    def unwrap_compute_loss(self) -> None:
        """Undo `wrap_compute_loss` before the end of the training."""
        self._undo_one((id(self.trainer), "compute_loss"))

    def wrap_training_step(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `training_step` of the Trainer, because no event comes right before and after a micro-batch.

        Args:
            wrap (`Callable`): called with the Trainer's `training_step`; returns the function to use, which takes the
                same arguments.
        """
        self._replace(self.trainer, "training_step", wrap(self.trainer.training_step))

    def wrap_gradient_norm(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `_get_grad_norm`, since no event has the norm of the gradients before the optimizer steps.

        Args:
            wrap (`Callable`): called with the Trainer's `_get_grad_norm`; returns the function to use, which takes the
                same arguments, and may return None for a step of which no norm is to be logged.
        """
        self._undo_one((id(self.trainer), "_get_grad_norm"))
        self._replace(self.trainer, "_get_grad_norm", wrap(self.trainer._get_grad_norm))

    def wrap_optimizer_step(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `step` of the Trainer's optimizer, which is Accelerate's: no event can keep it from stepping.

        Args:
            wrap (`Callable`): called with the method; returns the function to use, which takes the same arguments.
        """
        optimizer: Any = self.trainer.optimizer
        self._undo_one((id(optimizer), "step"))
        self._replace(optimizer, "step", wrap(optimizer.step))

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """Set attributes in which a subclass of Trainer counts or keeps what it has done, as a resume needs them.

        They stay after the training, as what the subclass itself sets.

        Args:
            values (`Mapping[str, Any]`): the values by the names of the attributes, which the Trainer has.
        """
        for name, value in values.items():
            setattr(self.trainer, name, value)

    def set_argument(self, name: str, value: Any) -> None:
        """Give a training argument another value until the end of the training.

        Args:
            name (`str`): an attribute of the Trainer's `TrainingArguments`.
            value (`Any`): its value until then.
        """
        self.restore_argument(name)
        self._replace(self.trainer.args, name, value)

    def restore_argument(self, name: str) -> None:
        """Undo `set_argument` before the end of the training.

        Args:
            name (`str`): the training argument; nothing happens if it has not been set.
        """
        self._undo_one((id(self.trainer.args), name))

    # --- the training itself ----------------------------------------------------------------------------------------

    @property
    def resumes_from(self) -> str | None:
        """The checkpoint from which the running training resumes; None: it starts from scratch.

        Before the training loop it is the one that the arguments of `train` name.
        """
        if self._wraps_training:
            return self._resumes_from
        return resumed_from()  # the callback has joined a training that was already running

    def before_each_training(self, prepare: Callable[[], None]) -> None:
        """Have `prepare()` called at the beginning of each `train`, before Trainer does anything.

        Args:
            prepare (`Callable`): called without arguments; changes that it makes by this adapter last until that
                training ends.
        """
        self._preparations.append(prepare)

    def finish_without_steps(self) -> None:
        """Have the next `train` load its checkpoint and end without a step, a loss or metrics of its own."""
        self._skips_steps = True

    def raise_after_training(self, error: BaseException) -> None:
        """Have `train` raise `error` instead of returning, when the training that is ending has done all its work.

        Args:
            error (`BaseException`): the exception. Every rank must give one: they wait for each other before.
        """
        self._final_error = error
        self.at_training_end(lambda: setattr(self, "_final_error", None))

    def _raise_final_error(self) -> None:
        if self._final_error is not None:
            TRAINING.barrier("end")  # a rank that ends first makes the launcher end the others
            raise self._final_error

    def at_training_end(self, call: Callable[[], object]) -> None:
        """Have `call()` made when the training ends, also when it raises.

        Args:
            call (`Callable`): called without arguments; the last one added is called first. Its result is ignored.
        """
        self._watch_running_training()
        self._undo[call] = call

    def when_unused(self, name: str, call: Callable[[], None]) -> None:
        """Have `call()` made when the Trainer has none of our callbacks any more, before its next training.

        Args:
            name (`str`): what is undone; a later call with the same name replaces this one.
            call (`Callable`): called without arguments.
        """
        self._undo_lasting[name] = call

    def restore(self) -> None:
        """Undo every change that lasts until the end of the training."""
        undo, self._undo = self._undo, {}
        _call_all(undo)
        Strategy.forget(self.trainer)  # the next training may be distributed in another way

    def _restoring(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train` with preparations at its beginning and `restore` at its end."""

        @functools.wraps(train)
        def train_and_restore(*args: Any, **kwargs: Any) -> Any:
            if self._leave_if_unused():
                return train(*args, **kwargs)
            self.restore()  # a training that was not wrapped may have been broken off
            self._wraps_training = True
            skips_steps, self._skips_steps = self._skips_steps, False
            self._resumes_from = self._find_asked(*args, **kwargs)
            self._note_chosen_checkpoint()
            try:
                for callback in self.trainer.callback_handler.callbacks:
                    if isinstance(callback, AdapterCallback):
                        callback.before_train(self)
                for prepare in self._preparations:
                    prepare()
                # In a hyperparameter search `train` makes the model of each trial
                if self.trainer.model is not None:
                    self._check_support()
                if skips_steps:
                    self._skip_steps()
                result = train(*args, **kwargs)
                self._raise_final_error()
                return result._replace(metrics={}) if skips_steps else result
            finally:
                self._wraps_training = False
                self.restore()
                self._leave_if_unused()

        return train_and_restore

    def _find_asked(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return the checkpoint that the arguments of `train` name; True is the newest one, as in Trainer."""
        if resume_from_checkpoint is True:
            output_dir = self.output_dir(None)
            if not Path(output_dir).is_dir():
                return None
            newest: str | None = get_last_checkpoint(output_dir)
            return newest
        return str(resume_from_checkpoint) if resume_from_checkpoint else None

    def _note_chosen_checkpoint(self) -> None:
        """Note with which checkpoint the training loop is called: a subclass's `train` may choose another one.

        There the training is refused too if the table of what works with what refuses it.
        """
        loop = self.trainer._inner_training_loop

        @functools.wraps(loop)
        def note_and_train(*args: Any, **kwargs: Any) -> Any:
            chosen = kwargs.get("resume_from_checkpoint")
            self._resumes_from = str(chosen) if chosen else None
            self._check_support()
            keep_stored_weights(self.trainer.model)
            grows = why_loss_grows(self.trainer)
            if grows is not None:
                logger.warning(grows)
            return loop(*args, **kwargs)

        self._replace(self.trainer, "_inner_training_loop", note_and_train)

    def _check_support(self) -> None:
        """Refuse a training that the table of what works with what refuses."""
        Strategy.of(self.trainer).check_support(
            callback_saves=self.callback_saves,
            grows_batch=self.grows_batch,
            skip_bad_batches=self.skip_bad_batches,
        )

    def _leave_if_unused(self) -> bool:
        """Undo the lasting changes too if no preparation and no `AdapterCallback` needs the adapter any more."""
        callbacks = self.trainer.callback_handler.callbacks
        if self._preparations or any(
            isinstance(callback, AdapterCallback) for callback in callbacks
        ):
            return False
        _call_all(self._undo_lasting)
        delattr(self.trainer, _ATTRIBUTE)
        return True

    def _watch_running_training(self) -> None:
        """If a training is running that began before this adapter wrapped `train`, restore at its end."""
        if self._wraps_training or "running" in self._undo or not self._is_training():
            return
        self._undo["running"] = lambda: None
        # In older versions an exception between two steps is not seen; the next training then restores first.
        steps_name = "_run_epoch" if has_epoch_methods() else "training_step"
        end_name = "_finalize_training" if has_epoch_methods() else "_finish_current_push"
        take_steps, finalize = getattr(self.trainer, steps_name), getattr(self.trainer, end_name)

        @functools.wraps(take_steps)
        def take_steps_or_restore(*args: Any, **kwargs: Any) -> Any:
            try:
                return take_steps(*args, **kwargs)
            except BaseException:
                self.restore()
                raise

        @functools.wraps(finalize)
        def finalize_and_restore(*args: Any, **kwargs: Any) -> Any:
            try:
                result = finalize(*args, **kwargs)
                self._raise_final_error()
                return result
            finally:
                self.restore()

        self._replace(self.trainer, steps_name, take_steps_or_restore)
        self._replace(self.trainer, end_name, finalize_and_restore)

    def _is_training(self) -> bool:
        """Return whether a training of this Trainer is on the call stack."""
        frame = training_frame()
        return frame is not None and frame.f_locals.get("self") is self.trainer

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
        self,
        owner: Any,
        name: str,
        value: Any,
        *,
        undo: dict[Any, Callable[[], object]] | None = None,
    ) -> None:
        """Set an attribute of an instance; the undo leaves it alone if other code has replaced it since."""
        if undo is None:
            self._watch_running_training()
            undo = self._undo
        before = vars(owner).get(name, _ABSENT)
        earlier = undo.pop((id(owner), name), lambda: None)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name, _ABSENT) is not value:
                return
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
            earlier()

        undo[id(owner), name] = put_back

    def _undo_one(self, key: Any) -> None:
        self._undo.pop(key, lambda: None)()


def _call_all(undo: dict[Any, Callable[[], object]]) -> None:
    """Call the last one first, and all of them even if one raises."""
    with ExitStack() as stack:
        for call in undo.values():
            stack.callback(call)


class AdapterCallback(ResetOnCopy, TrainerCallback):
    """Gives a callback access to its Trainer's `TrainerAdapter`: the base class of the callbacks of hfscale.

    One instance can serve several Trainers: see `ResetOnCopy`.
    """

    averages_weights: ClassVar[bool] = False
    """Whether it keeps an average of the weights, which not every other callback allows."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Describe the options of a callback in its docstring."""
        super().__init_subclass__(**kwargs)
        options = getattr(vars(cls).get("__init__"), "options", None)
        if options is not None:
            cls.__doc__ = fill_in_options(cls.__doc__ or "", describe_options(options))

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the adapter while the Trainer is being made, so that it sees each training from its beginning.

        The supervisor of `hfscale run`, if there is one, hears of this process before an error can end it.
        """
        connect()
        TrainerAdapter.current()

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Prepare the Trainer at the beginning of `train`, before its data loader is made and before `on_train_begin`.

        It is not called in the first training if the callback was added after the Trainer was made.

        Args:
            adapter (`TrainerAdapter`): the adapter of the Trainer that will train.
        """
