"""Reads the files of a run that say what it computed. They are not trusted: values of other types are left out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfscale.checkpoint.manifest import Manifest, read_manifest
from hfscale.checkpoint.store import checkpoint_step, list_checkpoints
from hfscale.core.records import read_events, read_records
from hfscale.core.run_files import FINGERPRINTS_NAME, JSONL_NAME, MANIFEST_NAME, TRACES_NAME
from hfscale.core.text_files import bounded_lines, parse_json, read_json
from hfscale.errors import CheckpointError, UsageError

CURVES = ("learning_rate", "loss", "grad_norm")
"""The numbers of each log that are compared."""
_STATE_NAME = "trainer_state.json"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Hashes of what a run has read and drawn in the steps of one log."""

    begun: int
    """The step after which the window begins."""
    step: int
    """The last step of the window."""
    inputs: int | None
    """Sum of the hashes of all rows, modulo 2^64."""
    labels: int | None
    """The same of the labels."""
    copies: int
    """How often each row is counted."""
    rng: str | None
    """Hash of the random states of all ranks after the window."""
    weights: Mapping[str, float]
    """Norm, sum and number of the weights at the start of the launch; empty except in its first line."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a run has left."""

    path: Path
    """Its output directory."""
    setup: Mapping[str, Any]
    """Arguments, versions, model and layout of its last launch; empty if it has not recorded them."""
    layouts: tuple[tuple[str, int], ...]
    """Strategy and number of processes of each launch, without repetitions."""
    numbers: Mapping[int, Mapping[str, float]]
    """The numbers of `CURVES` by step."""
    begins: Mapping[int, int]
    """For each logged step, the step after which the window of its mean loss begins."""
    fingerprints: tuple[Fingerprint, ...]
    """The windows of the logs, in order."""
    manifests: Mapping[int, Manifest]
    """The manifests of its checkpoints by step."""
    traces: Mapping[int, Path]
    """The folders of its traces by step."""

    def part(self, name: str) -> dict[str, Any]:
        """Return a part of the setup; {} if there is none.

        Args:
            name (`str`): such as `arguments`.
        """
        found = self.setup.get(name)
        return dict(found) if isinstance(found, Mapping) else {}


def read_run(path: Path) -> RunFolder:
    """Read the output directory of a run, finished or not.

    Args:
        path (`Path`): the `--output_dir` of the run.

    Returns:
        `RunFolder`: what it has left.

    Raises:
        UsageError: it is not a directory, or no run has left anything in it.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory: give the --output_dir of a run")
    events = read_events(path)
    traces = trace_folders(path)
    numbers = _numbers(path)
    if not events and not numbers and not traces:
        raise UsageError(
            f"{path} has neither {JSONL_NAME} nor {_STATE_NAME} nor {TRACES_NAME}: give the --output_dir of a run "
            "with ScalingCallback or TraceCallback"
        )
    setups = [event for event in events if event["event"] == "setup"]
    setup = setups[-1] if setups else _setup_of_trace(traces)
    fingerprints = tuple(_fingerprints(path))
    logged = sorted(numbers)
    begins = dict(zip(logged, [0, *logged], strict=False)) | {
        one.step: one.begun for one in fingerprints
    }
    return RunFolder(
        path=path,
        setup=setup,
        layouts=_layouts(events, setup),
        numbers=numbers,
        begins=begins,
        fingerprints=fingerprints,
        manifests=_manifests(path),
        traces=traces,
    )


def trace_folders(path: Path) -> dict[int, Path]:
    """Return the folders of the traces in an output directory, by step.

    Args:
        path (`Path`): the output directory of a run.
    """
    found = {}
    for folder in (path / TRACES_NAME).glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdecimal() and any(folder.glob("rank-*.jsonl")):
            found[int(number)] = folder
    return dict(sorted(found.items()))


def _setup_of_trace(traces: Mapping[int, Path]) -> dict[str, Any]:
    """Return the setup that the newest trace has in its first line, of a run without other records."""
    for folder in reversed(list(traces.values())):
        first = folder / "rank-0.jsonl"
        if first.is_file():
            try:
                header = parse_json(next(bounded_lines(first, errors="replace"), ""))
            except (OSError, ValueError):
                continue
            if isinstance(header, dict) and isinstance(header.get("setup"), dict):
                return dict(header["setup"])
    return {}


def _layouts(events: list[dict[str, Any]], setup: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    found: dict[tuple[str, int], None] = {}
    launches: list[Mapping[str, Any]] = [event for event in events if event["event"] == "launch"]
    layout = setup.get("layout")
    for launch in launches or [layout if isinstance(layout, Mapping) else {}]:
        strategy, ranks = launch.get("strategy"), launch.get("world_size")
        if isinstance(strategy, str) and isinstance(ranks, int):
            found[strategy, ranks] = None
    return tuple(found)


def _numbers(path: Path) -> dict[int, dict[str, float]]:
    """Return the numbers of each step, from the records of hfscale or else from the state of Trainer."""
    own = read_records(path / JSONL_NAME)
    found: dict[int, dict[str, float]] = {}
    for record in own or _logs_of_trainer(path):
        step = record.get("step")
        if not (own or "loss" in record) or not _is_number(step):
            continue
        if not math.isfinite(float(record["step"])):
            continue
        values = {key: float(record[key]) for key in CURVES if _is_number(record.get(key))}
        if not values:  # the record that ends a training has none of them
            continue
        if own:
            values.setdefault("loss", math.nan)  # `append_record` leaves out what is not finite
        found[int(record["step"])] = values
    return dict(sorted(found.items()))


_TOO_LARGE = 10**300


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not isinstance(value, int) or abs(value) < _TOO_LARGE


def _logs_of_trainer(path: Path) -> list[dict[str, Any]]:
    for folder in (path, *reversed(list_checkpoints(path))):
        try:
            history = read_json(folder / _STATE_NAME)["log_history"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(history, list):
            return [record for record in history if isinstance(record, dict)]
    return []


def _fingerprints(path: Path) -> list[Fingerprint]:
    found = []
    for record in read_records(path / FINGERPRINTS_NAME):
        begun, step = record.get("from"), record["step"]
        if not isinstance(begun, int) or not isinstance(step, int):
            continue
        weights = record.get("weights")
        numbers = weights if isinstance(weights, dict) else {}
        copies = record.get("copies", 1)
        found.append(
            Fingerprint(
                begun=begun,
                step=step,
                inputs=_hash(record.get("inputs")),
                labels=_hash(record.get("labels")),
                copies=copies if isinstance(copies, int) and copies > 0 else 1,
                rng=record["rng"] if isinstance(record.get("rng"), str) else None,
                weights={
                    k: float(v) for k, v in numbers.items() if _is_number(v) and math.isfinite(v)
                },
            )
        )
    return found


def _hash(value: object) -> int | None:
    try:
        return int(value, 16) if isinstance(value, str) else None
    except ValueError:
        return None


def _manifests(path: Path) -> dict[int, Manifest]:
    found = {}
    for checkpoint in list_checkpoints(path):
        if (checkpoint / MANIFEST_NAME).is_file():
            try:
                found[checkpoint_step(checkpoint)] = read_manifest(checkpoint)
            except CheckpointError:
                continue
    return found


def elements_on_cpu(a: RunFolder, b: RunFolder) -> int:
    """Return the largest number of parameters of a run on a CPU; 0 if none is on a CPU, or none has recorded it.

    Args:
        a (`RunFolder`): the first run.
        b (`RunFolder`): the second run.
    """
    on_cpu = [run for run in (a, b) if run.part("numerics").get("device") == "cpu"]
    counts = [run.part("model").get("elements") for run in on_cpu]
    return max((sum(one.values()) for one in counts if isinstance(one, Mapping)), default=0)
