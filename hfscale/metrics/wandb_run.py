"""Keeps one W&B run for one training, even if it is relaunched."""

import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.core.logging import get_logger
from hfscale.core.records import read_status
from hfscale.core.redaction import redact_argv
from hfscale.core.run_reader import run_reader
from hfscale.errors import HfScaleError
from hfscale.trainer.state import output_folder, saved_state

logger = get_logger(__name__)

TOKENS_AXIS = "train/scaling/tokens_seen"
"""The name that transformers' WandbCallback gives to the key `scaling/tokens_seen`."""
REPORT_NAME = "hfscale_report.html"
_SUMMARY_KEYS = (
    "scaling/tokens_seen",
    "scaling/tokens_per_s",
    "scaling/samples_per_s",
    "scaling/padding_fraction",
    "scaling/mfu",
    "scaling/efficiency",
    "scaling/goodput",
    "scaling/usd",
    "scaling/usd_per_million_tokens",
    "scaling/noise_scale",
)


class WandbRun(TrainerCallback):
    """Makes transformers' WandbCallback continue one W&B run, through W&B's own environment variables.

    It must be called before WandbCallback. The id of the run is kept in the checkpoints, so that a resumed training
    continues the run that wrote the checkpoint, and a fresh one starts another run. A WANDB_RUN_ID that the user has
    set, and a run that the user has started, are left alone. W&B stores the command line, and gets it without secrets.

    The charts stay as the user has them, unless `over_tokens` asks for another x-axis.

    The history of a W&B run only grows: after a resume
    from an earlier step than was logged, the steps between are in it twice, which the config of the run records under
    `hfscale_rewound`.

    Args:
        over_tokens (`bool`): whether every metric is drawn over tokens, if the batches have tokens.
    """

    def __init__(self, *, over_tokens: bool = False) -> None:
        self._over_tokens = over_tokens
        self._set_variables: list[str] = []
        self._argv: list[str] | None = None
        self._drawn: set[str] = set()
        self._has_tokens = False
        self._run: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        clean = redact_argv(sys.argv)
        if clean != sys.argv:
            self._argv = sys.argv
            sys.argv = clean  # until `restore_environment`
        if "WANDB_RUN_ID" in os.environ:
            return
        run_id = saved_state(state, "wandb").setdefault("run_id", uuid.uuid4().hex[:8])
        self._set_variables = ["WANDB_RUN_ID"]
        os.environ["WANDB_RUN_ID"] = run_id
        if "WANDB_RESUME" not in os.environ:
            self._set_variables.append("WANDB_RESUME")
            os.environ["WANDB_RESUME"] = "allow"

    def restore_environment(self) -> None:
        """Undo what `on_train_begin` has changed in the environment variables and in `sys.argv`."""
        for name in self._set_variables:
            del os.environ[name]
        self._set_variables = []
        if self._argv is not None:
            sys.argv = self._argv
            self._argv = None

    def settle(self, state: TrainerState, *, last_logged_step: int = 0) -> None:
        """Restore the environment once W&B has started, and prepare the run.

        The id of the run is stored, and a resume from an earlier step is recorded.

        Args:
            state (`TrainerState`): the state of the Trainer at the beginning of the training.
            last_logged_step (`int`): the last step that an earlier launch of this run has logged.
        """
        self.restore_environment()
        self._run = None
        self._drawn = set()
        self._has_tokens = False
        if not state.is_world_process_zero:
            return
        import wandb

        if wandb.run is None:
            return
        self._run = wandb.run
        saved_state(state, "wandb")["run_id"] = wandb.run.id
        if self._over_tokens:
            wandb.define_metric(TOKENS_AXIS)
        config: Any = wandb.config  # its methods have no annotations
        if last_logged_step > state.global_step > 0:
            rewind = {"from_step": last_logged_step, "to_step": state.global_step}
            rewound = [*config.get("hfscale_rewound", []), rewind]
            config.update({"hfscale_rewound": rewound}, allow_val_change=True)
            logger.info(
                "W&B: steps %d to %d were logged before and are repeated: the charts of the run show them twice",
                state.global_step + 1,
                last_logged_step,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """With `over_tokens`, draw each metric over tokens from its first log on; transformers draws it over steps."""
        if not self._over_tokens:
            return
        if logs is not None and "scaling/tokens_seen" in logs:
            self._has_tokens = True
        if self._run is None or not self._has_tokens:
            return
        for key in logs or ():
            name = (
                f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
            )
            if name not in self._drawn and name != TOKENS_AXIS and not key.startswith("train_"):
                self._run.define_metric(name, step_metric=TOKENS_AXIS)
            self._drawn.add(name)

    def publish(self, args: TrainingArguments, state: TrainerState) -> None:
        """Write the numbers of the run into W&B's summary, and upload the report. Call it at the end of a training.

        After a preemption nothing is published. If the report cannot be made, a warning is logged.

        Args:
            args (`TrainingArguments`): the training arguments, with the output directory.
            state (`TrainerState`): the state of the Trainer; it is not used.
        """
        if self._run is None:
            return
        if (read_status(output_folder(args)) or {}).get("status") == "preempted":
            return  # the machine has only seconds left, and the run will continue on another one
        import wandb

        path = output_folder(args) / REPORT_NAME
        try:
            summary = run_reader().write_report(output_folder(args), path, _SUMMARY_KEYS)
        # A training that has succeeded must not fail because of its report
        except (HfScaleError, OSError) as error:
            logger.warning("no report is uploaded to W&B: %s", error)
            return
        self._run.summary.update({f"run/{key}": value for key, value in summary.items()})
        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(path), name="report.html")
        self._run.log_artifact(artifact)
