"""Everything a report says about a run, read from its output directory and nowhere else.

The files may come from anywhere: numbers are taken only where they are finite numbers, text is kept short and without
secrets, and nothing but the known names is opened.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from hfscale.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hfscale.checkpoint.store import checkpoint_step, list_checkpoints, read_status
from hfscale.errors import CheckpointError, UsageError
from hfscale.metrics.goodput import DOWN, LOST, USEFUL_PHASE
from hfscale.metrics.records import JSONL_NAME, RANKS_NAME, read_events, read_records
from hfscale.utils.redaction import redact

MOST_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One launch of the run."""

    begun: float
    """Unix seconds."""
    ended: float
    """Last sign of life."""
    first_step: int
    """Steps done before it."""
    kept_until: float
    """Its work up to here is in the training; what came after was done again."""
    world_size: int | None
    """Processes."""
    saves: tuple[float, ...]
    """When checkpoints were written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint folder."""

    name: str
    """`checkpoint-N`."""
    step: int
    """N."""
    is_committed: bool
    """Whether its manifest is there."""
    bytes: int | None
    """Size by the manifest."""
    world_size: int | None
    """Processes that wrote it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its files tell it."""

    name: str
    """Of the folder."""
    status: str
    """`running`, `completed`, `preempted`, `failed` or `unknown`."""
    reason: str | None
    """Why it ended so."""
    facts: Mapping[str, Any]
    """What it does, from the timeline's `workload`."""
    records: Sequence[Mapping[str, float]]
    """`scaling.jsonl`, numbers only."""
    ranks: Mapping[str, Sequence[tuple[float, Sequence[float]]]]
    """Per measure: step and a number per rank."""
    attempts: Sequence[Attempt]
    """Launches, oldest first."""
    checkpoints: Sequence[Checkpoint]
    """By rising step."""
    split: Mapping[str, float]
    """Seconds by phase, of all attempts; empty where nobody has kept them."""
    findings: Sequence[Mapping[str, Any]]
    """What the triage said while it ran."""
    notes: Sequence[str] = field(default=())
    """Advice that was computed in the run."""

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a metric."""
        return [(record["step"], record[key]) for record in self.records if key in record]

    def last(self, key: str) -> float | None:
        """The newest value of a metric; None where there is none."""
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def median(self, key: str) -> float | None:
        """The median of a metric without its first value, in which start-up is; None where there is none."""
        values = [value for _, value in self.series(key)]
        return statistics.median(values[1:] or values) if values else None

    @property
    def wall_s(self) -> float | None:
        """Seconds from the first launch to the last sign of life."""
        return self.attempts[-1].ended - self.attempts[0].begun if self.attempts else None


def load_run(output_dir: Path) -> Run:
    """Read a run's output directory.

    Raises:
        UsageError: it is no folder, or no run has left measurements in it.
    """
    if not output_dir.is_dir():
        raise UsageError(f"{output_dir} is no folder: give the --output_dir of a run")
    raw = read_records(output_dir / JSONL_NAME)
    events = [_clean(event) for event in read_events(output_dir)]
    if not raw and not events:
        raise UsageError(
            f"{output_dir} has no {JSONL_NAME}: give the --output_dir of a run with ScalingCallback or "
            "ScalingMetricsCallback"
        )
    records = [numbers for numbers in map(_numbers, raw) if "step" in numbers]
    status = read_status(output_dir) or {}
    said = status.get("status")
    checkpoints = [_checkpoint(path) for path in list_checkpoints(output_dir)]
    workload: Mapping[str, Any] = next((event for event in reversed(events) if event["event"] == "workload"), {})
    attempts = _attempts(events, records)
    return Run(
        name=redact(output_dir.resolve().name),
        status=said if said in ("running", "completed", "preempted", "failed") else "unknown",
        reason=_text(status.get("reason")),
        facts=workload,
        records=records,
        ranks=_ranks(output_dir / RANKS_NAME),
        attempts=attempts,
        checkpoints=checkpoints,
        split=_split(output_dir, events, records),
        findings=[event for event in events if event["event"] == "finding"],
        notes=[note for event in events if (note := event.get("advice")) is not None],
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in record.items() if _is_number(value)}


def _text(value: object) -> str | None:
    return redact(" ".join(value.split()))[:MOST_TEXT] if isinstance(value, str) else None


def _clean(event: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, short texts, and dictionaries of numbers."""
    clean: dict[str, Any] = {}
    for key, value in event.items():
        if _is_number(value):
            clean[key] = value
        elif isinstance(value, str):
            clean[key] = _text(value)
        elif isinstance(value, dict):
            clean[key] = _numbers(value)
    for key in ("time", "step", "previous_alive"):
        if key in clean and not _is_number(clean[key]):
            del clean[key]
    if isinstance(clean.get("seconds"), dict) != (clean["event"] == "end"):
        clean.pop("seconds", None)
    return {"time": 0.0, "step": 0, **clean}


def _checkpoint(path: Path) -> Checkpoint:
    is_committed = (path / MANIFEST_NAME).is_file()
    size = world_size = None
    if is_committed:
        try:
            manifest = read_manifest(path)
            size, world_size = sum(record.bytes for record in manifest.files.values()), manifest.world_size
        except (CheckpointError, TypeError):
            is_committed = False
    return Checkpoint(
        name=path.name, step=checkpoint_step(path), is_committed=is_committed, bytes=size, world_size=world_size
    )


def _attempts(events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, float]]) -> list[Attempt]:
    launches = [index for index, event in enumerate(events) if event["event"] == "launch"]
    attempts = []
    for number, at in enumerate(launches):
        launch = events[at]
        following = events[launches[number + 1]] if number + 1 < len(launches) else None
        own = events[at + 1 : launches[number + 1]] if following is not None else events[at + 1 :]
        ended = max([launch["time"], *(event["time"] for event in own)])
        saves = [event for event in own if event["event"] == "save"]
        if following is None:
            ended = max([ended, *(record["time"] for record in records if "time" in record)])
            kept = ended
        else:
            ended = max(ended, following.get("previous_alive", ended))
            kept_saves = [save["time"] for save in saves if save["step"] <= following["step"]]
            nothing = launch["time"] if following["step"] <= launch["step"] else ended
            kept = max(kept_saves, default=nothing)
        attempts.append(
            Attempt(
                begun=launch["time"],
                ended=ended,
                first_step=int(launch["step"]),
                kept_until=min(kept, ended),
                world_size=int(launch["world_size"]) if _is_number(launch.get("world_size")) else None,
                saves=tuple(save["time"] for save in saves),
            )
        )
    return attempts


def _ranks(path: Path) -> dict[str, list[tuple[float, list[float]]]]:
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for record in read_records(path):
        for key, values in record.items():
            if isinstance(values, list) and values and all(map(_is_number, values)) and _is_number(record["step"]):
                found.setdefault(key, []).append((float(record["step"]), [float(value) for value in values]))
    return found


def _split(
    output_dir: Path, events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """From the end of the run, or from the newest checkpoint with what has been measured since."""
    last_launch = max((i for i, event in enumerate(events) if event["event"] == "launch"), default=-1)
    ends = [event for event in events[last_launch + 1 :] if event["event"] == "end"]
    if ends:
        split = dict(ends[-1].get("seconds", {}))
    else:
        goodput_tracker = _ledger(output_dir)
        split = _numbers(goodput_tracker.get("seconds") or {})
        as_of = goodput_tracker.get("as_of")
        alive = max((record["time"] for record in records if "time" in record), default=None)
        if split and _is_number(as_of) and alive is not None and alive > as_of:
            split["since the last checkpoint"] = alive - as_of
    split = {phase: s for phase, s in split.items() if s > 0}
    shares = {"exposed communication": "scaling/comm_fraction", "bubble": "scaling/bubble_fraction"}
    inside = split.get(USEFUL_PHASE, 0.0)
    for phase, key in shares.items():
        values = [record[key] for record in records if key in record]
        if values and inside:
            split[phase] = inside * min(max(statistics.median(values), 0.0), 1.0)
            split[USEFUL_PHASE] -= split[phase]
    return split


def _ledger(output_dir: Path) -> dict[str, Any]:
    for checkpoint in reversed(list_checkpoints(output_dir)):
        try:
            state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            goodput_tracker = state["stateful_callbacks"]["hfscale"]["goodput"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(goodput_tracker, dict) and isinstance(goodput_tracker.get("seconds"), dict):
            return goodput_tracker
    return {}


def restart_overhead(split: Mapping[str, float]) -> float:
    """Seconds between attempts, and of work that was done twice."""
    return split.get(LOST, 0.0) + split.get(DOWN, 0.0)
