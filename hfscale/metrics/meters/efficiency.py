"""Measures the efficiency: the throughput relative to a recorded baseline of the same work."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger
from hfscale.metrics.baseline import Match, Workload, find, read_baselines, user_file
from hfscale.metrics.job_facts import job_facts
from hfscale.metrics.meters.meter import Meter, Window
from hfscale.metrics.throughput import describe_workload
from hfscale.trainer.collector import Columns
from hfscale.trainer.state import global_batch_size
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)


class EfficiencyMeter(Meter):
    """Measures `scaling/efficiency`: tokens/s/GPU over those of a recorded baseline of the same work.

    Args:
        path (`Path` or `str`, *optional*): the baselines file; None: the user's own, if it exists.
    """

    def __init__(self, path: Path | str | None) -> None:
        self._path: Path | None = None
        if path is not None:
            self._path = Path(path)
        self._match: Match | None = None
        self.workload: Workload | None = None
        """What the run does; None before the first log."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Read the baselines file, on the main process only."""
        self._trainer = trainer
        self.workload = None
        self._match = None
        path = self._path or user_file()
        is_given = self._path is not None or path.is_file()
        # Only the main process logs, so the file need not exist on other machines.
        self._baselines = read_baselines(path) if is_given and state.is_world_process_zero else None

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Look for a matching baseline at the first log, and return the efficiency relative to it."""
        if self.workload is None:
            self._look_up(window)
        if self._match is None:
            return {}
        return {"scaling/efficiency": self._match.efficiency(window.tokens_per_s_per_gpu)}

    def _look_up(self, window: Window) -> None:
        args = self._trainer.args
        self.workload = describe_workload(
            self._trainer,
            sequence_length=window.sequence_length,
            tokens_per_gpu=round(window.tokens / window.steps / args.world_size),
        )
        if self._baselines is None or not window.tokens:
            return
        found = find(self._baselines, self.workload, args.world_size)
        if isinstance(found, Match):
            self._match = found
            logger.info("scaling/efficiency is relative to %s", found.describe())
        else:
            logger.info("scaling/efficiency is not logged: %s", found)

    def facts(self) -> dict[str, Any]:
        """Return what the run does, for the timeline.

        Returns:
            `dict[str, Any]`: the fields of `Workload` from the first log on, `world_size`, `strategy`,
            `global_batch_size` (sequences), and `baseline` (a description) if one matches.
        """
        args = self._trainer.args
        work = asdict(self.workload) if self.workload is not None else {}
        facts: dict[str, Any] = {
            # Without tokens, two fields are 0
            **{key: value for key, value in work.items() if value != 0},
            "world_size": args.world_size,
            "strategy": Strategy.of(self._trainer).name,
            "global_batch_size": global_batch_size(self._trainer),
        }
        if self._match is not None:
            facts["baseline"] = self._match.describe()
        return facts

    def job_facts(self) -> dict[str, Any]:
        """Return the run as the planner describes it, for the comparison in the report."""
        return job_facts(self._trainer)
