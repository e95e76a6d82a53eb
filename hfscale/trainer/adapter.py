"""`TrainerAdapter`: what hfscale does with a Trainer beyond its public API, and how it is undone.

Trainer passes its callbacks the arguments, the state, the model and the optimizer, but not itself. `TrainerAdapter`
finds the Trainer and has one named method for each thing that hfscale changes on it. The docstring of
`hfscale.trainer` lists the internals that these methods touch.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hfscale.core.build_locks import remove_locks_before_deepspeed
from hfscale.core.clocks import PhaseClock
from hfscale.core.logging import get_logger
from hfscale.core.options import describe_options, fill_in_options
from hfscale.core.rank_link import connect
from hfscale.core.run_state import ResetOnCopy
from hfscale.core.vocabulary import knows_no_text
from hfscale.trainer.announced import Announced
from hfscale.trainer.changes import Changes
from hfscale.trainer.checkpoint_changes import CheckpointChanges
from hfscale.trainer.collector import Judge, LogCollector, LogPart
from hfscale.trainer.evaluation_changes import EvaluationChanges
from hfscale.trainer.expert_adapters import spread_expert_adapters
from hfscale.trainer.flattened_rows import why_documents_mix
from hfscale.trainer.frames import calling_trainer, resumed_from
from hfscale.trainer.fsdp2_loading import gather_head_with_root, name_layers_that_are_there
from hfscale.trainer.generation_server import check_generation_servers
from hfscale.trainer.hooks import DataFetchHook, LogSource, MetricInjector
from hfscale.trainer.hub import without_working_files
from hfscale.trainer.loss_rule import why_loss_grows
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.weight_wrappers import keep_stored_weights

logger = get_logger(__name__)

_ATTRIBUTE = "_hfscale_adapter"
Wrapped = Literal[
    "_evaluate",
    "_finalize_training",
    "_get_grad_norm",
    "_init_training_state",
    "_run_epoch",
    "compute_loss",
    "create_optimizer",
    "create_scheduler",
    "get_batch_samples",
]
"""Methods of Trainer of which one callback alone needs a wrapped form."""


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
        self.changes = Changes(trainer, self.restore)
        self.checkpoints = CheckpointChanges(trainer, self.changes)
        self.evaluations = EvaluationChanges(trainer, self.changes, self.checkpoints)
        self._announced = Announced()
        self._preparations: list[Callable[[], None]] = []
        self._injector: MetricInjector | None = None
        self._fetch_hook: DataFetchHook | None = None
        self._collector: LogCollector | None = None
        self._calls_after_reports: dict[str, Callable[[], None]] = {}
        self._resumes_from: str | None = None
        self._skips_steps = False
        self.changes.replace(trainer, "train", self._restoring(trainer.train), lasting=True)
        for name in ("push_to_hub", "_push_from_checkpoint"):
            push = without_working_files(trainer, getattr(trainer, name))
            self.changes.replace(trainer, name, push, lasting=True)
        if trainer.is_fsdp_enabled:
            name_layers_that_are_there(model_of(trainer))
            gather_head_with_root(trainer)
            save = self._saving_complete_weights(trainer.save_model)
            self.changes.replace(trainer, "save_model", save, lasting=True)
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
            if adapter.changes.is_training():
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

    @property
    def announced(self) -> Announced:
        """What callbacks have announced for this training; forgotten at its end."""
        self.changes.watch()
        return self._announced

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
            self.changes.replace(self.trainer, "log", self._injector)
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
            self.changes.replace(self.trainer, "get_batch_samples", self._fetch_hook)
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

            self.changes.replace(self.trainer, "_maybe_log_save_evaluate", report_and_call)
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

        self.changes.watch()
        # A new list: an event may be iterating over the old one
        handler.callbacks = change(others())
        self.changes.at_end(id(callback), remove)

    # --- checkpoints ------------------------------------------------------------------------------------------------

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

    # --- data, optimizer, evaluation, arguments ---------------------------------------------------------------------

    def share_train_dataset(self, dataset: Any) -> None:
        """Train on `dataset` as long as the Trainer has one of our callbacks.

        Args:
            dataset (`Dataset` or `IterableDataset`): the training data.
        """
        self.changes.replace(self.trainer, "train_dataset", dataset, lasting=True)

    def replace_train_dataset(self, dataset: Any) -> None:
        """Train on `dataset` until the end of the training. Call it before the training's data loader is made.

        Args:
            dataset (`Dataset` or `IterableDataset`): the training data.
        """
        self.changes.replace(self.trainer, "train_dataset", dataset)

    def wrap_ulysses_loader(self, wrap: Callable[[Any], Any]) -> None:
        """Replace Accelerate's data loader for ranks that share a sequence (DeepSpeed Ulysses).

        Args:
            wrap (`Callable`): called with that data loader; returns the one to use.
        """
        accelerator = self.trainer.accelerator
        adapt = accelerator.deepspeed_ulysses_dl_adapter
        self.changes.replace(
            accelerator,
            "deepspeed_ulysses_dl_adapter",
            lambda loader, model: wrap(adapt(loader, model)),
        )

    def wrap_data_collator(self, wrap: Callable[[Any], Any]) -> None:
        """Replace what makes batches of samples, for training and evaluations, as long as the Trainer lives.

        Args:
            wrap (`Callable`): called with the Trainer's collator; returns the one to use.
        """
        collator = wrap(self.trainer.data_collator)
        self.changes.replace(self.trainer, "data_collator", collator, lasting=True)

    def wrap_method(
        self, name: Wrapped, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace a method of the Trainer where no event comes; the docstring of `hfscale.trainer` says why for each.

        Args:
            name (`str`): the method.
            wrap (`Callable`): called with the Trainer's method; returns the function to use, which takes the same
                arguments.
        """
        self.unwrap_method(name)
        self.changes.replace(self.trainer, name, wrap(getattr(self.trainer, name)))

    def unwrap_method(self, name: Wrapped) -> None:
        """Undo `wrap_method` before the end of the training.

        Args:
            name (`str`): the method.
        """
        self.changes.put_back(self.trainer, name)

    def wrap_counting(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `set_initial_training_values` as long as the Trainer has one of our callbacks.

        Trainer computes there how many steps a training has, from one accumulation for all of them. A script asks it
        before a training too.

        Args:
            wrap (`Callable`): called with the Trainer's method; returns the function to use.
        """
        name = "set_initial_training_values"
        self.changes.put_back(self.trainer, name, lasting=True)
        values = wrap(getattr(self.trainer, name))
        self.changes.replace(self.trainer, name, values, lasting=True)

    def wrap_training_step(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `training_step` of the Trainer, because no event comes right before and after a micro-batch.

        Args:
            wrap (`Callable`): called with the Trainer's `training_step`; returns the function to use, which takes the
                same arguments.
        """
        self.changes.replace(self.trainer, "training_step", wrap(self.trainer.training_step))

    def wrap_optimizer_step(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace `step` of the Trainer's optimizer, which is Accelerate's: no event can keep it from stepping.

        Args:
            wrap (`Callable`): called with the method; returns the function to use, which takes the same arguments.
        """
        optimizer: Any = self.trainer.optimizer
        self.changes.put_back(optimizer, "step")
        self.changes.replace(optimizer, "step", wrap(optimizer.step))

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
        self.changes.replace(self.trainer.args, name, value)

    def restore_argument(self, name: str) -> None:
        """Undo `set_argument` before the end of the training.

        Args:
            name (`str`): the training argument; nothing happens if it has not been set.
        """
        self.changes.put_back(self.trainer.args, name)

    # --- the training itself ----------------------------------------------------------------------------------------

    @property
    def resumes_from(self) -> str | None:
        """The checkpoint from which the running training resumes; None: it starts from scratch.

        Before the training loop it is the one that the arguments of `train` name.
        """
        if self.changes.sees_whole_training:
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
        self.changes.raise_at_end(error)

    def at_training_end(self, call: Callable[[], object]) -> None:
        """Have `call()` made when the training ends, also when it raises.

        Args:
            call (`Callable`): called without arguments; the last one added is called first. Its result is ignored.
        """
        self.changes.at_end(call, call)

    def when_unused(self, name: str, call: Callable[[], None]) -> None:
        """Have `call()` made when the Trainer has none of our callbacks any more, before its next training.

        Args:
            name (`str`): what is undone; a later call with the same name replaces this one.
            call (`Callable`): called without arguments.
        """
        self.changes.when_unused(name, call)

    def restore(self) -> None:
        """Undo every change that lasts until the end of the training."""
        try:
            self.changes.restore()
        finally:
            self._announced = Announced()
            Strategy.forget(self.trainer)  # the next training may be distributed in another way

    def _restoring(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train` with preparations at its beginning and `restore` at its end."""

        @functools.wraps(train)
        def train_and_restore(*args: Any, **kwargs: Any) -> Any:
            if self._leave_if_unused():
                return train(*args, **kwargs)
            self.restore()  # a training that was not wrapped may have been broken off
            self.changes.sees_whole_training = True
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
                self.changes.raise_final_error()
                return result._replace(metrics={}) if skips_steps else result
            finally:
                self.changes.sees_whole_training = False
                self.restore()
                self._leave_if_unused()

        return train_and_restore

    def _find_asked(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return the checkpoint that the arguments of `train` name; True is the newest one, as in Trainer."""
        if resume_from_checkpoint is True:
            output_dir = self.checkpoints.output_dir(None)
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
            self.changes.begin_loop()
            chosen = kwargs.get("resume_from_checkpoint")
            self._resumes_from = str(chosen) if chosen else None
            self._check_support()
            keep_stored_weights(self.trainer.model)
            if knows_no_text(self.trainer.processing_class):
                logger.warning(
                    "the tokenizer has special tokens only, as transformers makes it where a model's folder has none: "
                    "load the one that the model was trained with"
                )
            for warning in (why_loss_grows(self.trainer), why_documents_mix(self.trainer)):
                if warning is not None:
                    logger.warning(warning)
            return loop(*args, **kwargs)

        self.changes.replace(self.trainer, "_inner_training_loop", note_and_train)

    def _check_support(self) -> None:
        """Refuse a training that the table of what works with what refuses."""
        Strategy.of(self.trainer).check_support(
            callback_saves=self._announced.callback_saves,
            grows_batch=self._announced.grows_batch,
            skip_bad_batches=self._announced.skip_bad_batches,
            base_width=self._announced.base_width,
        )

    def _leave_if_unused(self) -> bool:
        """Undo the lasting changes too if no preparation and no `AdapterCallback` needs the adapter any more."""
        callbacks = self.trainer.callback_handler.callbacks
        if self._preparations or any(
            isinstance(callback, AdapterCallback) for callback in callbacks
        ):
            return False
        self.changes.restore_lasting()
        delattr(self.trainer, _ATTRIBUTE)
        return True

    def _skip_steps(self) -> None:
        log, initial_values = self.trainer.log, self.trainer.set_initial_training_values

        def without_epochs(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return (0, *initial_values(*args, **kwargs)[1:])

        def without_training(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "train_loss" not in logs:
                log(logs, *args, **kwargs)

        self.changes.replace(self.trainer, "set_initial_training_values", without_epochs)
        self.changes.replace(self.trainer, "log", without_training)


class AdapterCallback(ResetOnCopy, TrainerCallback):
    """Gives a callback access to its Trainer's `TrainerAdapter`: the base class of the callbacks of hfscale.

    One instance can serve several Trainers: see `ResetOnCopy`.
    """

    averages_weights: ClassVar[bool] = False
    """Whether it keeps an average of the weights, which not every other callback allows."""

    @property
    def decides_accumulation(self) -> bool:
        """Whether it decides how many micro-batches a step has, in place of `gradient_accumulation_steps`."""
        return False

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
        is_first = _ATTRIBUTE not in vars(calling_trainer())
        adapter = TrainerAdapter.current()
        if is_first:
            check_generation_servers(adapter.trainer)

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Prepare the Trainer at the beginning of `train`, before its data loader is made and before `on_train_begin`.

        It is not called in the first training if the callback was added after the Trainer was made.

        Args:
            adapter (`TrainerAdapter`): the adapter of the Trainer that will train.
        """
