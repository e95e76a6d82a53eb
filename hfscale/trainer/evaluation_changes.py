"""`EvaluationChanges`: how hfscale changes the evaluations and the end of a training: `TrainerAdapter.evaluations`."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from hfscale.core.logging import get_logger
from hfscale.core.versions import has_epoch_methods
from hfscale.trainer.changes import Changes
from hfscale.trainer.checkpoint_changes import CheckpointChanges
from hfscale.trainer.frames import training_frame

logger = get_logger(__name__)

Method = Callable[..., Any]
Wrap = Callable[[Method], Method]
PutBack = Callable[[], None]
Around = Callable[[], AbstractContextManager[None]]


class EvaluationChanges:
    """Replaces the methods by which one Trainer evaluates and ends.

    Args:
        trainer (`Trainer`): the Trainer.
        changes (`Changes`): makes the changes, and undoes them.
        checkpoints (`CheckpointChanges`): saves where an evaluation is the best.
    """

    def __init__(self, trainer: Trainer, changes: Changes, checkpoints: CheckpointChanges) -> None:
        self.trainer = trainer
        self.changes = changes
        self._checkpoints = checkpoints
        self._listeners: dict[str, Callable[[Any], object]] = {}
        self._wraps: dict[str, Wrap] = {}
        self._takes: dict[str, Callable[[], PutBack]] = {}
        self._around_made_up: dict[str, Around] = {}

    def wrap_evaluate(self, name: str, wrap: Wrap) -> None:
        """Replace `evaluate` of the Trainer: no event comes before an evaluation, and no flag ends one early.

        Args:
            name (`str`): what it is wrapped for; a later call with the same name replaces this one.
            wrap (`Callable`): called with the Trainer's `evaluate`, or what an earlier wrap has made of it; returns
                the function to use, which takes the same arguments.
        """
        self.changes.put_back(self.trainer, "evaluate")
        self._wraps[name] = wrap
        self.changes.at_end("evaluations", self._wraps.clear)
        evaluate: Method = self.trainer.evaluate
        for each in self._wraps.values():
            evaluate = each(evaluate)
        self.changes.replace(self.trainer, "evaluate", evaluate)

    def put_back_if_cut(self, name: str, take: Callable[[], PutBack]) -> None:
        """Let something that an evaluation moves be put back where the evaluation is cut short, in this training.

        Args:
            name (`str`): what it is; a later call with the same name replaces this one.
            take (`Callable`): called before each evaluation; returns the function that puts it back.
        """
        self._takes[name] = take
        self.changes.at_end("moved by evaluations", self._takes.clear)

    def take(self) -> PutBack:
        """Take what an evaluation moves, and return the function that puts all of it back."""
        taken = ExitStack()
        for take in self._takes.values():
            put_back = take()
            taken.callback(put_back)
        return taken.close

    def around_made_up(self, name: str, around: Around) -> None:
        """Let something that an evaluation moves be as it was at the save, in an evaluation that is made up.

        Args:
            name (`str`): what it is; a later call with the same name replaces this one.
            around (`Callable`): returns the context in which the evaluation is made. Where the context ends, what the
                evaluation has moved is what the checkpoint holds from now on.
        """
        self._around_made_up[name] = around
        self.changes.at_end("around evaluations", self._around_made_up.clear)

    @contextmanager
    def as_at_the_save(self) -> Iterator[None]:
        """Within the context, let what the checkpoint keeps of the program be as it was at the save."""
        with ExitStack() as stack:
            for around in self._around_made_up.values():
                stack.enter_context(around())
            yield

    def evaluate_as_in_training(self) -> None:
        """Evaluate between two steps as the training loop does: its schedule, the best model and a save follow."""
        trainer = self.trainer
        frame = training_frame()
        known = frame.f_locals if frame is not None else {}
        with self.as_at_the_save():
            metrics = trainer._evaluate(None, known.get("ignore_keys_for_eval"))
        is_best = trainer._determine_best_metric(metrics=metrics, trial=None)
        if trainer.args.save_strategy == SaveStrategy.BEST and is_best:
            self._checkpoints.save_as_in_training()

    def skip_epoch(self) -> None:
        """Have the epoch that is about to begin take no step. Call it in `on_epoch_begin`."""
        if not has_epoch_methods():
            logger.warning("transformers before 5.4 takes one more step before it stops early")
            return
        self.changes.replace(self.trainer, "_run_epoch", lambda *args, **kwargs: None)

    def before_finalizing(self, call: Callable[[], object]) -> None:
        """Have `call()` made when the training has taken its last step, before Trainer loads the best model.

        Args:
            call (`Callable`): called without arguments, on every rank.
        """
        if not has_epoch_methods():
            call()
            return
        finalize: Method = self.trainer._finalize_training

        @functools.wraps(finalize)
        def call_and_finalize(*args: Any, **kwargs: Any) -> Any:
            call()
            return finalize(*args, **kwargs)

        self.changes.replace(self.trainer, "_finalize_training", call_and_finalize)

    def on_eval_dataloader(self, name: str, listener: Callable[[Any], object]) -> None:
        """Have `listener(loader)` called when the Trainer gets a data loader for an evaluation, after training too.

        Args:
            name (`str`): what the listener does; it replaces an earlier one of this name.
            listener (`Callable`): called with each loader before it is read; its result is ignored.
        """
        self._listeners[name] = listener
        if self.changes.is_replaced(self.trainer, "get_eval_dataloader"):
            return
        get = self.trainer.get_eval_dataloader

        @functools.wraps(get)
        def get_and_tell(*args: Any, **kwargs: Any) -> Any:
            loader = get(*args, **kwargs)
            for listener in self._listeners.values():
                listener(loader)
            return loader

        self.changes.replace(self.trainer, "get_eval_dataloader", get_and_tell, lasting=True)
