"""Writes the newest numbers of runs in the OpenMetrics text format (openmetrics.io, version 1.0).

The metric keys of hfscale keep their names: `scaling/tokens_per_s` becomes `hfscale_tokens_per_s`, `gpu/power_w`
becomes `hfscale_gpu_power_w`, and so on. All are gauges, since a launch that repeats steps also sets them back. A
number that is not known is absent. Prometheus' older text format reads the same lines, so that node_exporter does too.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

from hfscale.core.best_effort import best_effort
from hfscale.core.disk_errors import writing
from hfscale.core.durable_files import write_atomically
from hfscale.core.records import METRIC_PREFIXES
from hfscale.errors import ParameterError
from hfscale.report.html import heat_cells
from hfscale.report.prediction import Prediction
from hfscale.report.summary import rank_measures
from hfscale.report.watch.live import Runs, View

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXTFILE_EVERY_S = 15.0
"""Seconds between two writings of a textfile: node_exporter is usually asked that often."""
WRITING_TEXTFILE = "writing the textfile"
READING_RUN = "reading the metrics of a run"
"""Names of this work in warnings."""
STATUSES = ("running", "completed", "preempted", "failed", "unknown")
_TRAINER_KEYS = ("loss", "grad_norm", "learning_rate", "epoch")
_KEY = re.compile(r"[a-z0-9_]+(?:/[a-z0-9_]+)?")
DESCRIPTIONS = {
    "step": "Optimizer steps completed.",
    "max_steps": "Optimizer step at which the run ends.",
    "seconds_left": "Seconds to the last step, at the speed of the newest logs.",
    "usd_to_end": "USD that the rest of the run costs.",
    "launches": "Launches of the run; restarts are one less.",
    "checkpoints": "Committed checkpoints in the output directory.",
    "checkpoint_step": "Step of the newest committed checkpoint.",
    "alarms": "Alarms of the run: hangs, losses, preemptions, restarts and so on.",
    "last_record_timestamp_seconds": "Unix time of the newest record of the run.",
    "status": "1 for the status of the run, 0 for the others.",
    "plan_tokens_per_s": "Tokens per second that the planner estimates.",
    "plan_mfu": "MFU that the planner estimates.",
}
"""The description of each metric that is not a metric key."""
_Labels = tuple[tuple[str, str], ...]


def exposition(runs: Runs) -> str:
    """Return the newest numbers of runs. A run that cannot be read is left out, with one warning.

    Args:
        runs (`Runs`): the runs by name.

    Returns:
        `str`: one family after another, each with its samples, and `# EOF`.
    """
    families: dict[str, dict[str, str]] = {}
    described: dict[str, str] = {}
    for run_name, run in runs.items():
        with best_effort(READING_RUN, _escaped(run_name), errors=(Exception,)):
            # All of a run is written before any of it is taken: what one run has must not hide the others
            of_run = [
                (name, description, _labels((("run", run_name), *labels)), repr(float(value)))
                for name, description, labels, value in _samples(run.view())
            ]
            for name, description, labels, value in of_run:
                described.setdefault(name, description)
                families.setdefault(name, {}).setdefault(labels, value)
    lines = []
    for name, by_labels in sorted(families.items()):
        lines += [f"# TYPE hfscale_{name} gauge", f"# HELP hfscale_{name} {described[name]}"]
        lines += [f"hfscale_{name}{{{labels}}} {value}" for labels, value in by_labels.items()]
    return "\n".join([*lines, "# EOF", ""])


def metric_name(key: str) -> str | None:
    """Return the name of a metric key without its prefix `hfscale_`, or None if the key is not one that is exported.

    Args:
        key (`str`): a key of `scaling.jsonl`.
    """
    if not _KEY.fullmatch(key) or not (key.startswith(METRIC_PREFIXES) or key in _TRAINER_KEYS):
        return None
    return key.removeprefix("scaling/").replace("/", "_")


def _labels(labels: _Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(text: str) -> str:
    # A name of a folder may have bytes that are not UTF-8
    written = text.encode("utf-8", "backslashreplace").decode()
    return written.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _samples(view: View) -> Iterator[tuple[str, str, _Labels, float]]:
    """Yield name, description, labels and value of each metric of a run."""
    for name, known in _state(view).items():
        if known is not None:
            yield name, DESCRIPTIONS[name], (), float(known)
    for status in STATUSES:
        yield (
            "status",
            DESCRIPTIONS["status"],
            (("status", status),),
            float(status == view.run.status),
        )
    for key in view.run.records.keys():  # noqa: SIM118  it is no mapping
        metric = metric_name(key)
        value = view.run.last(key)
        if metric is not None and value is not None:
            yield metric, f"Metric key {key}.", (), value
    for measure, samples in rank_measures(view.run):
        cells = heat_cells(samples[-1:])
        for row, value in enumerate(cells.values[0]):
            labels = (("rank", str(cells.first_rank(row))),)
            yield f"rank_{measure.key}", f"{measure.label}.", labels, value


def _state(view: View) -> dict[str, float | None]:
    """Return the numbers that are not metric keys; None if one is unknown."""
    run = view.run
    committed = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.is_committed]
    plan = view.plan if isinstance(view.plan, Prediction) else None
    return {
        "step": run.last("step"),
        "max_steps": run.max_steps,
        "seconds_left": view.left.seconds_left if view.left is not None else None,
        "usd_to_end": view.left.usd_to_end if view.left is not None else None,
        "launches": run.launches or None,
        "checkpoints": len(committed),
        "checkpoint_step": max(committed, default=None),
        "alarms": len(run.alarms),
        "last_record_timestamp_seconds": view.alive_at,
        "plan_tokens_per_s": plan.predicted_tokens_per_s if plan is not None else None,
        "plan_mfu": plan.estimate.mfu if plan is not None else None,
    }


class Textfile:
    """Writes the metrics to a file that node_exporter's textfile collector reads.

    Args:
        path (`Path`): the file, in the folder of `--collector.textfile.directory`; its name ends in `.prom`.
        runs (`Runs`): the runs by name.

    Raises:
        ParameterError: node_exporter does not read files of this name.
    """

    def __init__(self, path: Path, runs: Runs) -> None:
        if path.suffix != ".prom":
            raise ParameterError(
                "textfile", str(path), "node_exporter reads only names that end in .prom"
            )
        self._path = path
        self._runs = runs
        self._written_at = float("-inf")

    def write(self) -> None:
        """Write the file; readers find either the old or the new content.

        Raises:
            StorageError: it cannot be written.
        """
        text = exposition(self._runs)
        with writing(
            f"--textfile {self._path}", "give a file in a folder that exists and is writable"
        ):
            write_atomically(self._path, text)
        self._written_at = time.monotonic()

    def write_if_due(self) -> None:
        """Write the file if the last time is `TEXTFILE_EVERY_S` ago; a failure is one warning."""
        if time.monotonic() - self._written_at >= TEXTFILE_EVERY_S:
            self._written_at = time.monotonic()
            with best_effort(WRITING_TEXTFILE, self._path, errors=(Exception,)):
                self.write()
