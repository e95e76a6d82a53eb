"""Reads a run while it goes on, and describes it for programs as JSON.

Every number is one that `hfscale report` computes too; here it is only put into JSON. The page of `hfscale watch`
shows the report's sections instead (`hfscale.report.watch.page`).
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfscale.core.run_files import SAVE_NAME
from hfscale.errors import StorageError, UsageError
from hfscale.report.forecast import Forecast, forecast
from hfscale.report.formatting import duration, percent, size, usd
from hfscale.report.html import heat_cells
from hfscale.report.prediction import Prediction, comparison, predict
from hfscale.report.run_data import Run, RunFiles
from hfscale.report.sections import alarms_of
from hfscale.report.summary import (
    MAX_BOTTLENECKS,
    Tile,
    bottlenecks,
    failures,
    headline,
    left_out,
    rank_measures,
    recoveries,
    subtitle,
)

REFRESH_S = 1.0
"""Least seconds between two readings of the files of a run, however many pages ask."""
MAX_NEW_POINTS = 2000
"""Number of logs in one answer; of more than that, evenly spaced ones are sent."""
MAX_ROWS = 20
"""Number of checkpoints, launches and so on that are listed, the newest."""
CHARTS = (
    {"key": "loss", "label": "Loss"},
    {"key": "learning_rate", "label": "Learning rate"},
    {
        "key": "scaling/tokens_per_s",
        "label": "Tokens per second",
        "from_zero": True,
        "plan": "tokens_per_s",
    },
    {
        "key": "scaling/samples_per_s",
        "label": "Samples per second",
        "from_zero": True,
        "unless": "scaling/tokens_per_s",
    },
    {"key": "scaling/mfu", "label": "MFU", "from_zero": True, "percent": True, "plan": "mfu"},
    {"key": "scaling/goodput", "label": "Goodput", "from_zero": True, "percent": True},
    {"key": "scaling/usd", "label": "Cost, USD", "from_zero": True},
    {"key": "gpu/temperature_c_max", "label": "Hottest GPU, °C"},
)
"""The charts for programs: the metric key, its caption, and how its axis is drawn; `plan` is the key of the line that
the plan predicts, `unless` another key that makes the chart superfluous."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Holds a run as its files were at one moment."""

    run: Run
    """The data of the run."""
    generation: int
    """How often its records have begun anew."""
    plan: Prediction | str
    """The planner's estimate of the run, or why there is none."""
    left: Forecast | None
    """What is left of the run; None if it is not known."""

    @property
    def alive_at(self) -> float | None:
        """Unix seconds of the newest record; None without one."""
        return self.run.attempts[-1].ended if self.run.attempts else self.run.last("time")


class LiveRun:
    """Follows one run. Several threads may ask it.

    Args:
        output_dir (`Path`): the `--output_dir` of the run.
        now (`Callable[[], float]`): seconds of a clock that does not go back.

    Raises:
        UsageError: it is not a directory.
    """

    def __init__(self, output_dir: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self._files = RunFiles(output_dir)
        self._save_path = output_dir / SAVE_NAME
        self._now = now
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._view: View | None = None

    @property
    def is_save_asked(self) -> bool:
        """Whether a checkpoint has been asked for, which the run has not begun to save."""
        return self._save_path.exists()

    def ask_for_save(self) -> None:
        """Ask the run for a checkpoint of its next step.

        Raises:
            UsageError: the run is not going on.
            StorageError: its folder cannot be written to.
        """
        if self.view().run.status != "running":
            raise UsageError(
                "the run is not going on: it takes no step of which it could save a checkpoint"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        try:
            os.close(os.open(self._save_path, flags, 0o644))
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"{self._save_path} cannot be written: {reason}") from None

    def view(self) -> View:
        """Return the run as its files are, or were up to `REFRESH_S` seconds ago.

        Raises:
            StorageError: a file cannot be read.
        """
        with self._lock:
            if self._view is None or self._now() - self._read_at >= REFRESH_S:
                run = self._files.read()
                self._view = View(
                    run=run,
                    generation=self._files.generation,
                    plan=predict(run),
                    left=forecast(run),
                )
                self._read_at = self._now()
            return self._view


def describe(
    view: View, *, after: int = 0, generation: int = -1, version: str = ""
) -> dict[str, Any]:
    """Return what the page shows of a run, as JSON can represent it, for programs that follow a run.

    Args:
        view (`View`): the run.
        after (`int`): number of records that the program has.
        generation (`int`): the generation that they are of; the records of another one are sent from the first on.
        version (`str`): the version of the summary that the program has; the same one is not sent again.

    Returns:
        `dict[str, Any]`: `generation`, `first` (number of records before the new ones), `next` (number of records that
            the program has then), `points` (for each key the values of the new records), `now` and `alive_at` (Unix
            seconds), `version`, and `summary`, which is None if the program has it.
    """
    records = view.run.records
    first = after if generation == view.generation and 0 <= after <= len(records) else 0
    new = records[first:]
    stride = -(-len(new) // MAX_NEW_POINTS) or 1
    new = new[::-1][::stride][::-1]  # with the newest one
    keys = ["step", *(str(chart["key"]) for chart in CHARTS)]
    summary = _summary(view)
    new_version = hashlib.sha256(json.dumps(summary).encode()).hexdigest()[:16]
    return {
        "generation": view.generation,
        "first": first,
        "next": len(records),
        "points": {
            key: [record.get(key) for record in new]
            for key in keys
            if any(key in record for record in new)
        },
        "now": time.time(),
        "alive_at": view.alive_at,
        "version": new_version,
        "summary": None if new_version == version else summary,
    }


def _summary(view: View) -> dict[str, Any]:
    run = view.run
    tiles = [*headline(run), *left_tiles(view.left)]
    last = {key: run.last(key) for key in ("step", "loss", "learning_rate")}
    return {
        "name": run.name,
        "status": run.status,
        "reason": run.reason,
        "subtitle": subtitle(run),
        "last": last,
        "max_steps": run.max_steps,
        "tiles": [asdict(tile) | {"is_known": tile.is_known} for tile in tiles],
        "advice": [
            {
                "check": one.check,
                "share": f"{percent(one.share)} of the time" if one.share is not None else "",
                "problem": one.problem,
                "fix": one.fix,
            }
            for one in bottlenecks(run)[:MAX_BOTTLENECKS]
        ],
        "notes": [*run.notes[-1:], *filter(None, [failures(run), left_out(run)])],
        "alarms": alarms_of(run),
        "plan": _plan(view.plan),
        "marks": [attempt.first_step for attempt in run.attempts[1:]],
        "ranks": _ranks(run),
        "launches": _launches(run),
        "recoveries": [list(row) for row in recoveries(run)[-MAX_ROWS:]],
        "checkpoints": [
            [
                one.name,
                size(one.bytes) if one.bytes is not None else "",
                str(one.world_size or ""),
                one.state,
            ]
            for one in run.checkpoints[-MAX_ROWS:]
        ],
    }


def left_tiles(left: Forecast | None) -> list[Tile]:
    """Return the tiles about the rest of the run."""
    if left is None:
        return []
    time_left = Tile(
        name="Time left",
        value=duration(left.seconds_left),
        note="at the speed of the newest logs",
        number=left.seconds_left,
    )
    if left.usd_to_end is None:
        return [time_left]
    total = ""
    if left.usd_total is not None:
        total = f"{usd(left.usd_total)} for the whole run"
    cost = Tile(
        name="Cost to the end", value=usd(left.usd_to_end), note=total, number=left.usd_to_end
    )
    return [time_left, cost]


def _plan(found: Prediction | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"lines": [f"not compared: {found}"]}
    return {
        "tokens_per_s": found.predicted_tokens_per_s,
        "mfu": found.estimate.mfu,
        "lines": [*comparison(found), *found.assumptions],
    }


def _ranks(run: Run) -> list[dict[str, Any]]:
    """Return a heat map for each measure; a text for each different number would be too long, so it has their form."""
    maps = []
    for measure, samples in rank_measures(run):
        cells = heat_cells(samples)
        maps.append(
            {
                "label": measure.label,
                "largest": measure.form.format(max(max(column) for column in cells.values)),
                "is_share": "%" in measure.form,
                "unit": measure.form.partition("}")[2].strip(" %"),
                "steps": list(cells.steps),
                "ranks": [cells.first_rank(row) for row in range(cells.rows)],
                "values": _rounded(cells.values),
            }
        )
    return maps


def _rounded(values: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[float(f"{value:.3g}") for value in column] for column in values]


def _launches(run: Run) -> list[list[str]]:
    """Return the newest launches: number, first step, processes, time, and what was lost."""
    rows = []
    for number, attempt in list(enumerate(run.attempts, run.lost_launches + 1))[-MAX_ROWS:]:
        lost_s = attempt.ended - attempt.kept_until
        rows.append(
            [
                str(number),
                str(attempt.first_step),
                str(attempt.world_size or ""),
                duration(max(attempt.ended - attempt.begun, 0.0)),
                duration(lost_s) if lost_s > 0 else "",
            ]
        )
    return rows


def names_of(runs: Sequence[LiveRun]) -> list[str]:
    """Return a name for each run: that of its folder, with a number where several have the same."""
    names = [run.view().run.name for run in runs]
    return [
        f"{name} ({number})" if names.count(name) > 1 else name
        for number, name in enumerate(names, 1)
    ]


Runs = Mapping[str, LiveRun]
"""The runs that are shown, by name."""
