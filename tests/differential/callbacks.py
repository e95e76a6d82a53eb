"""The callbacks that users write."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import TrainerCallback


class Asking(TrainerCallback):
    """A user's callback that decides by the step.

    Args:
        kind (`str`): what it does, one of `KINDS`.
        steps (`int`): the steps of the whole training.
    """

    trainer: Any = None
    """The Trainer, once it is made."""

    def __init__(self, kind: str, steps: int) -> None:
        self.kind = kind
        self.steps = steps

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Change the rate or what is trained."""
        if self.kind == "rate_set_by_hand" and state.global_step % 4 == 3:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if self.kind == "frozen_at_first":
            first = next(iter(model.parameters()))
            first.requires_grad_(state.global_step >= 3 and first.is_floating_point())
        if self.kind == "changes_settings" and state.global_step == 2:
            args.max_grad_norm = 0.05
            next(iter(model.parameters())).requires_grad_(False)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.3

    def on_step_end(self, args, state, control, **kwargs):
        """Ask for a save, an evaluation or the end."""
        if self.kind == "saves_when_asked" and state.global_step % 4 == 1:
            control.should_save = True
        if self.kind == "evaluates_when_asked" and state.global_step % 4 == 1:
            control.should_evaluate = True
        if self.kind == "stops_when_asked" and state.global_step >= self.steps * 3 // 4:
            control.should_training_stop = True


class DrawsBetweenSteps(Asking):
    """Draws random numbers after saves, and where epochs begin and end."""

    def on_save(self, args, state, control, **kwargs):
        """As a text that is generated for each save."""
        torch.rand(2)

    def on_epoch_begin(self, args, state, control, **kwargs):
        """As another order of the data."""
        np.random.rand(2)

    def on_epoch_end(self, args, state, control, **kwargs):
        """As an evaluation of the callback's own."""
        torch.rand(3)
        random.random()


class CallsTrainer(Asking):
    """Evaluates or predicts by itself where epochs end."""

    def on_epoch_end(self, args, state, control, **kwargs):
        """With rows of its own."""
        if self.kind == "evaluates_itself":
            self.trainer.evaluate(metric_key_prefix="test")
        else:
            self.trainer.predict(self.trainer.eval_dataset, metric_key_prefix="sample")


class ChangesRun(Asking):
    """Changes how often something is done, what a checkpoint contains, the seed or the weights."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Seed each epoch."""
        if self.kind == "seeds_each_epoch":
            transformers.set_seed(100 + round(state.epoch or 0))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Save and log more often from a step on; keep weights in bounds."""
        if self.kind == "changes_cadence" and state.global_step == 4:
            state.save_steps = state.eval_steps = state.logging_steps = 2
        if self.kind == "clamps_weights":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.5, 0.5)

    def on_save(self, args, state, control, **kwargs):
        """Remove what the user has no need of, as callbacks that save adapters do, and add a folder."""
        if self.kind == "removes_a_file" and state.is_world_process_zero:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / "more").mkdir(exist_ok=True)
            (folder / "more" / "words.json").write_text("{}")
            (folder / "training_args.bin").unlink(missing_ok=True)

    def on_evaluate(self, args, state, control, **kwargs):
        """Stop as the log says."""
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        if self.kind == "stops_by_log" and len(losses) > 2 and losses[-1] > 0.99 * min(losses[:-1]):
            control.should_training_stop = True


class AveragesModel(Asking):
    """Follows the model with an average of its weights, which changes nothing in the training."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Begin with the weights that there are."""
        self.average = torch.optim.swa_utils.AveragedModel(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Add the weights of a step."""
        self.average.update_parameters(model)


class MakesHarder(TrainerCallback):
    """Moves the level of a dataset with the steps.

    Args:
        dataset (`Any`): the dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_step_end(self, args, state, control, **kwargs):
        """Make the next rows harder."""
        self.dataset.level += 1


KINDS = {
    "saves_when_asked": Asking,
    "stops_when_asked": Asking,
    "evaluates_when_asked": Asking,
    "rate_set_by_hand": Asking,
    "frozen_at_first": Asking,
    "changes_settings": Asking,
    "draws_between_steps": DrawsBetweenSteps,
    "evaluates_itself": CallsTrainer,
    "predicts_itself": CallsTrainer,
    "changes_cadence": ChangesRun,
    "removes_a_file": ChangesRun,
    "averaged_model": AveragesModel,
    "seeds_each_epoch": ChangesRun,
    "clamps_weights": ChangesRun,
    "stops_by_log": ChangesRun,
}
"""The class of what a program has in `extra`, where that is a callback."""
