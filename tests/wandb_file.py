"""Reads the records of an offline W&B run: `wandb_internal_pb2.Record` messages in LevelDB frames."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_FILE_HEADER = 7
_BLOCK = 32768
_FRAME_HEADER = struct.Struct("<IHB")  # checksum, length, type: 1 full, 2 first, 3 middle, 4 last


def run_files(folder: Path) -> list[Path]:
    """Return the `.wandb` files below a folder, oldest first."""
    return sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime)


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Yield every record of one file."""
    data = path.read_bytes()
    at = _FILE_HEADER
    parts = b""
    while at + _FRAME_HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _FRAME_HEADER.size:
            at += left
            continue
        _, length, kind = _FRAME_HEADER.unpack_from(data, at)
        at += _FRAME_HEADER.size
        parts += data[at : at + length]
        at += length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    """Return what was logged: one dictionary per call of `wandb.log`."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def config(path: Path) -> dict[str, Any]:
    """Return the config of the run as it was at the end."""
    found: dict[str, Any] = {}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        update = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        found |= {item.key: json.loads(item.value_json) for item in update if item.key}
    return found


def summary(path: Path) -> dict[str, Any]:
    """Return what was written explicitly into the summary of the run."""
    found: dict[str, Any] = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "summary":
            items = record.summary.update
            found |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    return found


def artifact_types(path: Path) -> list[str]:
    """Return the type of each artifact that was logged."""
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "artifact":
            found.append(record.artifact.type)
        elif record.WhichOneof("record_type") == "request" and record.request.HasField("log_artifact"):
            found.append(record.request.log_artifact.artifact.type)
    return found


def run_id(path: Path) -> str:
    """Return the id of the run."""
    return next(record.run.run_id for record in records(path) if record.WhichOneof("record_type") == "run")


def step_metrics(path: Path) -> set[str]:
    """Return each metric or pattern that has its own x-axis."""
    defined = (record.metric for record in records(path) if record.WhichOneof("record_type") == "metric")
    return {metric.name or metric.glob_name for metric in defined if metric.step_metric or metric.step_metric_index}
