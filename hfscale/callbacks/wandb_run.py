"""One W&B run for one training, however often it is relaunched."""

import os
import uuid
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.callbacks.trainer_access import saved_state

TOKENS_AXIS = "train/scaling/tokens_seen"
"""How transformers' WandbCallback names the key `scaling/tokens_seen`."""


class WandbRun(TrainerCallback):
    """Stands before transformers' WandbCallback and tells it, through W&B's own variables, which run to continue.

    The run's id travels in the checkpoints, so a resume continues the run that wrote the checkpoint and a fresh start
    begins another. A WANDB_RUN_ID set by the user, or a run they started themselves, is left alone.
    """

    def __init__(self) -> None:
        self._set: list[str] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if "WANDB_RUN_ID" in os.environ:
            return
        run_id = saved_state(state, "wandb").setdefault("run_id", uuid.uuid4().hex[:8])
        self._set = ["WANDB_RUN_ID"]
        os.environ["WANDB_RUN_ID"] = run_id
        if "WANDB_RESUME" not in os.environ:
            self._set.append("WANDB_RESUME")
            os.environ["WANDB_RESUME"] = "allow"

    def settle(self, state: TrainerState) -> None:
        """Once W&B has started: note the id it uses, clear the variables, and draw the loss over tokens."""
        for name in self._set:
            del os.environ[name]
        self._set = []
        if not state.is_world_process_zero:
            return
        import wandb

        if wandb.run is not None:
            saved_state(state, "wandb")["run_id"] = wandb.run.id
            wandb.define_metric(TOKENS_AXIS)
            wandb.define_metric("train/loss", step_metric=TOKENS_AXIS)
