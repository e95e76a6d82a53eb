"""The status file of a run, which tells schedulers and `hfscale watch` how far it is and how it ended."""

import sys
from contextlib import suppress
from pathlib import Path

from hfscale.checkpoint.store import read_status, write_status
from hfscale.core.alarms import raise_end
from hfscale.core.best_effort import best_effort
from hfscale.core.logging import get_logger

logger = get_logger(__name__)


class RunStatus:
    """Writes the status of one training: `running`, then `completed`, `preempted` or `failed`.

    Only the ranks that save call `set`; on the others nothing is written.

    Args:
        output_dir (`Path`): the output directory, which holds the file.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self.checkpoint: str | None = None
        """Path of the last committed checkpoint in the output directory."""
        self._running_step: int | None = None
        self._failure: str | None = None  # why the training raised

    def warn_if_completed(self, step: int) -> None:
        """Say that a run which has completed is trained again, as where its last checkpoints were not kept.

        Args:
            step (`int`): the step at which this training begins.
        """
        before = read_status(self._output_dir) or {}
        completed = before.get("step")
        if before.get("status") == "completed" and isinstance(completed, int) and step < completed:
            logger.warning(
                "this run has completed at step %d, and is trained again from step %d: the checkpoint of step %d is "
                "gone, or was not given",
                completed,
                step,
                completed,
            )

    def set(self, status: str, step: int, reason: str | None = None) -> None:
        """Write a status.

        Args:
            status (`str`): `running`, `completed` or `preempted`.
            step (`int`): the step.
            reason (`str`, *optional*): why the run ended.
        """
        self._running_step = step if status == "running" else None
        self._write(status, step, reason)

    def step_ended(self, step: int) -> None:
        """Note the last step of a running training.

        Args:
            step (`int`): the step.
        """
        if self._running_step is not None:
            self._running_step = step

    def committed(self, step: int) -> None:
        """Write that a checkpoint was committed; it may be after the training has raised.

        Args:
            step (`int`): the step of the checkpoint.
        """
        if self._failure is None:
            self._write("running", step)
        else:
            self._write("failed", self._running_step or step, self._failure)

    def report_failure(self) -> None:
        """Write `failed` if the run neither completed nor was preempted.

        It is called when `train` raises, and at interpreter exit. A status that a later run has reported for its own
        end is left alone.
        """
        if self._running_step is None:
            return
        if self._failure is None:
            error = sys.exc_info()[1] or getattr(sys, "last_value", None)
            reason = "the process ended before the run"
            if error is not None:
                reason = f"{type(error).__name__}: {error}"
            self._failure = " ".join(reason.split())
        reported = read_status(self._output_dir)
        if reported is None or reported.get("status") == "running":
            raise_end("failed", self._running_step, self._failure)
            with suppress(OSError):  # a full disk may be why it failed, and that has been logged
                write_status(
                    self._output_dir,
                    "failed",
                    step=self._running_step,
                    checkpoint=self.checkpoint,
                    reason=self._failure,
                )

    def _write(self, status: str, step: int, reason: str | None = None) -> None:
        with best_effort("writing the status file", self._output_dir):
            write_status(
                self._output_dir,
                status,
                step=step,
                checkpoint=self.checkpoint,
                reason=reason,
            )
