"""`CheckpointChanges`: how hfscale changes the saves and loads of a Trainer: `TrainerAdapter.checkpoints`."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import Trainer

from hfscale.trainer.adapters_in_place import adapters_in_place
from hfscale.trainer.changes import Changes
from hfscale.trainer.frames import training_frame


def loads_itself(trainer: Trainer) -> bool:
    """Return whether a Trainer's class loads the weights of a checkpoint in a way of its own.

    Args:
        trainer (`Trainer`): the Trainer.
    """
    return type(trainer)._load_from_checkpoint is not Trainer._load_from_checkpoint


class CheckpointChanges:
    """Replaces the methods by which one Trainer writes and reads checkpoints.

    Args:
        trainer (`Trainer`): the Trainer.
        changes (`Changes`): makes the changes, and undoes them.
    """

    def __init__(self, trainer: Trainer, changes: Changes) -> None:
        self.trainer = trainer
        self.changes = changes
        self._wait_for_save: Callable[[], None] | None = None

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
        self.changes.put_back(self.trainer, "_save_checkpoint")
        original = self.trainer._save_checkpoint
        self.changes.replace(self.trainer, "_save_checkpoint", save)
        self._wait_for_save = wait
        self.changes.at_end("save", lambda: setattr(self, "_wait_for_save", None))
        return original

    def wait_for_save(self) -> None:
        """Wait for the save that is being written in the background, if there is one. Every rank must call it.

        Raises:
            StorageError: on every rank: that save failed.
        """
        if self._wait_for_save is not None:
            self._wait_for_save()

    @property
    def has_saver(self) -> bool:
        """Whether `SpotCheckpointCallback` writes the checkpoints of this training, once all callbacks have begun."""
        return self._wait_for_save is not None

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

    def save_as_in_training(self) -> None:
        """Save between two steps as the training loop does, and tell the callbacks."""
        trainer = self.trainer
        trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

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

        return self.changes.methods_replaced({"_get_output_dir": output_dir})

    def methods_skipped(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Have calls of methods of the Trainer do nothing within the `with` block.

        Args:
            names (`Sequence[str]`): names of methods that write a part of a checkpoint.
        """
        return self.changes.methods_replaced(dict.fromkeys(names, lambda *args, **kwargs: None))

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

        return self.changes.methods_replaced(
            {name: showing(getattr(self.trainer, name)) for name in names}
        )

    def pushes_delayed(self, folders: list[str]) -> AbstractContextManager[None]:
        """Keep Trainer from uploading checkpoints within the `with` block.

        Args:
            folders (`list[str]`): gets the folders that Trainer would have uploaded.
        """
        return self.changes.methods_replaced({"_push_from_checkpoint": folders.append})

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
            self.changes.put_back(self.trainer, name)
        original: Callable[[str | None], None] = self.trainer._load_rng_state
        for name, method in methods.items():
            self.changes.replace(self.trainer, name, method)
        return original

    def keep_adapters_in_place(self) -> None:
        """Have Trainer load adapters into the parameters that the model has, at a resume and of the best model."""
        trainer = self.trainer
        load, load_best = trainer._load_from_checkpoint, trainer._load_best_model

        def load_in_place(checkpoint: str, model: Any = None) -> None:
            with adapters_in_place(trainer.model):
                load(checkpoint, model)

        def load_best_in_place() -> None:
            with adapters_in_place(trainer.model):
                load_best()

        self.changes.replace(trainer, "_load_from_checkpoint", load_in_place)
        self.changes.replace(trainer, "_load_best_model", load_best_in_place)

    def load_states_in(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Have Trainer load the optimizer and the scheduler of a checkpoint within a context.

        Args:
            context (`Callable`): returns the context.
        """
        load = self.trainer._load_optimizer_and_scheduler

        def load_in_context(checkpoint: str | None) -> None:
            with context():
                load(checkpoint)

        self.changes.replace(self.trainer, "_load_optimizer_and_scheduler", load_in_context)

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
        self.changes.replace(self.trainer, "_load_rng_state", load)
        return original

    def load_rng_state(self, checkpoint: str) -> None:
        """Restore the random number generators of this rank, as Trainer does after a resume.

        Args:
            checkpoint (`str`): the checkpoint folder to read from.
        """
        self.trainer._load_rng_state(checkpoint)
