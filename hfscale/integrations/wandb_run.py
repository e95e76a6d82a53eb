"""One W&B run for one training, however often it is relaunched."""

import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.store import read_status
from hfscale.errors import HfScaleError
from hfscale.integrations.trainer import saved_state
from hfscale.utils.logging import get_logger
from hfscale.utils.redaction import redact_argv

logger = get_logger(__name__)

TOKENS_AXIS = "train/scaling/tokens_seen"
"""How transformers' WandbCallback names the key `scaling/tokens_seen`."""
REPORT_NAME = "hfscale_report.html"
_SUMMARY = (
    "scaling/tokens_seen",
    "scaling/tokens_per_s",
    "scaling/mfu",
    "scaling/efficiency",
    "scaling/goodput",
    "scaling/usd",
    "scaling/usd_per_million_tokens",
    "scaling/noise_scale",
)


class WandbRun(TrainerCallback):
    """Stands before transformers' WandbCallback and tells it, through W&B's own variables, which run to continue.

    The run's id travels in the checkpoints, so a resume continues the run that wrote the checkpoint and a fresh start
    begins another. A WANDB_RUN_ID set by the user, or a run they started themselves, is left alone. W&B keeps the
    command line of a run: it gets one without secrets.

    Every metric is drawn over tokens. W&B's history only grows: after a resume from an earlier step than had been
    logged, the steps between are in it twice, and the run's config says so under `hfscale_rewound`.
    """

    def __init__(self) -> None:
        self._set: list[str] = []
        self._argv: list[str] | None = None
        self._drawn: set[str] = set()
        self._run: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        clean = redact_argv(sys.argv)
        if clean != sys.argv:
            self._argv, sys.argv = sys.argv, clean  # until `settle`
        if "WANDB_RUN_ID" in os.environ:
            return
        run_id = saved_state(state, "wandb").setdefault("run_id", uuid.uuid4().hex[:8])
        self._set = ["WANDB_RUN_ID"]
        os.environ["WANDB_RUN_ID"] = run_id
        if "WANDB_RESUME" not in os.environ:
            self._set.append("WANDB_RESUME")
            os.environ["WANDB_RESUME"] = "allow"

    def settle(self, state: TrainerState, *, reached: int = 0) -> None:
        """Once W&B has started: put things back, note the run's id, draw over tokens, note a rewind.

        Args:
            reached (`int`): last step that an earlier launch of this run has logged.
        """
        for name in self._set:
            del os.environ[name]
        self._set = []
        if self._argv is not None:
            sys.argv, self._argv = self._argv, None
        self._run, self._drawn = None, set()
        if not state.is_world_process_zero:
            return
        import wandb

        if wandb.run is None:
            return
        self._run = wandb.run
        saved_state(state, "wandb")["run_id"] = wandb.run.id
        wandb.define_metric(TOKENS_AXIS)
        if reached > state.global_step > 0:
            rewound = [*wandb.config.get("hfscale_rewound", []), {"from_step": reached, "to_step": state.global_step}]
            wandb.config.update({"hfscale_rewound": rewound}, allow_val_change=True)
            logger.info(
                "W&B: steps %d to %d were logged before and are taken again: its charts hold them twice",
                state.global_step + 1,
                reached,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Draw each metric over tokens from its first log on; transformers would draw it over steps."""
        if self._run is None:
            return
        for key in logs or ():
            name = f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
            if name not in self._drawn and name != TOKENS_AXIS and not key.startswith("train_"):
                self._run.define_metric(name, step_metric=TOKENS_AXIS)
            self._drawn.add(name)

    def publish(self, args: TrainingArguments, state: TrainerState) -> None:
        """At the end of a training: the numbers of the whole run into W&B's summary, the report as an artifact."""
        if self._run is None:
            return
        if (read_status(Path(args.output_dir)) or {}).get("status") == "preempted":
            return  # the machine has seconds left, and the run goes on elsewhere
        import wandb

        from hfscale.report.page import write_page
        from hfscale.report.priorities import priorities
        from hfscale.report.run_data import load_run

        path = Path(args.output_dir) / REPORT_NAME
        try:
            run = load_run(Path(args.output_dir))
            write_page(run, path)
        except (HfScaleError, OSError) as error:  # a training that has succeeded does not fail for its report
            logger.warning("no report for W&B: %s", error)
            return
        summary = {key: value for key in _SUMMARY if (value := run.last(key)) is not None}
        first = next(iter(priorities(run)), None)
        if first is not None:
            summary["change_first"] = f"{first.title}: {first.numbers}; {first.mend}"
        self._run.summary.update({f"run/{key}": value for key, value in summary.items()})
        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(path), name="report.html")
        self._run.log_artifact(artifact)
