"""Baselines: how fast the same work went on fewer GPUs, recorded by `hfscale sweep`.

Scaling efficiency is tokens/s/GPU now over tokens/s/GPU of the baseline, and means something only where model,
sequence length, precision, recomputation and device are the same. With as many tokens per GPU and step it is weak
scaling; with as many tokens per step in total, strong. Anything else is no scaling efficiency, and none is given.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hfscale.checkpoint.store import write_atomically
from hfscale.errors import ConfigFileError, StorageError

FORMAT = 1
Mode = Literal["weak", "strong"]
_SAME = ("model_type", "parameters", "trainable_parameters", "device", "sequence_length", "precision", "recompute")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What must be equal for two speeds to be compared."""

    model_type: str
    """As in the model's config: `llama`."""
    parameters: int
    """Of the whole model."""
    trainable_parameters: int
    """Fewer than `parameters` with adapters."""
    device: str
    """`torch.cuda.get_device_name()`, or `cpu`."""
    sequence_length: int
    """Tokens per sequence."""
    tokens_per_gpu: int
    """Per optimizer step."""
    precision: str
    """`bf16`, `fp16`, `tf32` or `fp32`."""
    recompute: str
    """`none`, `full` or `selective` activation checkpointing."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A speed that was measured."""

    workload: Workload
    """Of what."""
    world_size: int
    """On how many GPUs."""
    tokens_per_s_per_gpu: float
    """How fast."""
    strategy: str
    """`single`, `ddp`, `fsdp2`, `zero3`, …"""


@dataclass(frozen=True, kw_only=True)
class Match:
    """The baseline that a run is compared with."""

    baseline: Baseline
    """The one of fewest GPUs."""
    mode: Mode
    """`weak`: as many tokens per GPU and step; `strong`: as many in total."""

    def efficiency(self, tokens_per_s_per_gpu: float) -> float:
        """A ratio, 1 where every GPU is as fast as the baseline's."""
        return tokens_per_s_per_gpu / self.baseline.tokens_per_s_per_gpu

    def describe(self) -> str:
        """In words, for the log."""
        per_gpu = self.baseline.workload.tokens_per_gpu
        held = (
            f"weak scaling, {per_gpu:,} tokens per GPU and step"
            if self.mode == "weak"
            else f"strong scaling, {per_gpu * self.baseline.world_size:,} tokens per step"
        )
        gpus = f"{self.baseline.world_size} GPU{'s' if self.baseline.world_size > 1 else ''}"
        return f"{self.baseline.tokens_per_s_per_gpu:,.0f} tokens/s/GPU on {gpus} ({held})"


def user_file() -> Path:
    """Where `hfscale sweep` records and every run looks unless told otherwise; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "hfscale" / "baselines.json"


def find(baselines: Sequence[Baseline], workload: Workload, world_size: int) -> Match | str:
    """The baseline to compare a run with, or in words why there is none."""
    if not baselines:
        return "no baseline is recorded"
    alike = [row for row in baselines if all(_of(row.workload, name) == _of(workload, name) for name in _SAME)]
    if not alike:
        nearest = max(baselines, key=lambda row: sum(_of(row.workload, n) == _of(workload, n) for n in _SAME))
        name = next(name for name in _SAME if _of(nearest.workload, name) != _of(workload, name))
        words = name.replace("_", " ")
        return f"no baseline has this run's {words} {_of(workload, name)} (nearest: {_of(nearest.workload, name)})"
    fewest = sorted(alike, key=lambda row: row.world_size)
    for row in fewest:
        if row.workload.tokens_per_gpu == workload.tokens_per_gpu:
            return Match(baseline=row, mode="weak")
    total = workload.tokens_per_gpu * world_size
    for row in fewest:
        if row.workload.tokens_per_gpu * row.world_size == total:
            return Match(baseline=row, mode="strong")
    recorded = ", ".join(f"{row.workload.tokens_per_gpu:,} on {row.world_size}" for row in fewest)
    return (
        f"no baseline has {workload.tokens_per_gpu:,} tokens per GPU and step, or {total:,} in total "
        f"(recorded: {recorded})"
    )


def _of(workload: Workload, name: str) -> object:
    return getattr(workload, name)


def read_baselines(path: Path) -> list[Baseline]:
    """The baselines of a file.

    Raises:
        ConfigFileError: it is missing, or not a file that `hfscale sweep` writes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ConfigFileError(f"{path} has format {content['format']}, this version of hfscale reads {FORMAT}")
        return [_parse(row) for row in content["baselines"]]
    except OSError as error:
        raise ConfigFileError(
            f"baseline {path} cannot be read: {error.strerror}; record one with hfscale sweep"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigFileError):
            raise
        raise ConfigFileError(f"baseline {path} is not what hfscale sweep writes: {error}; record it anew") from None


def _parse(row: dict[str, Any]) -> Baseline:
    workload = Workload(**{field.name: row["workload"][field.name] for field in fields(Workload)})
    speed = row["tokens_per_s_per_gpu"]
    if not isinstance(speed, int | float) or isinstance(speed, bool) or not 0 < speed < float("inf"):
        raise ValueError(f"tokens_per_s_per_gpu {speed!r} is not a speed")
    return Baseline(
        workload=workload,
        world_size=int(row["world_size"]),
        tokens_per_s_per_gpu=float(speed),
        strategy=str(row["strategy"]),
    )


def record_baseline(path: Path, baseline: Baseline) -> None:
    """Add a baseline to a file, in the place of an earlier one of the same work on as many GPUs.

    Raises:
        ConfigFileError: the file is there, and none of ours.
        StorageError: it cannot be written.
    """
    rows = read_baselines(path) if path.exists() else []
    key = (baseline.workload, baseline.world_size)
    kept = [row for row in rows if (row.workload, row.world_size) != key]
    content = {"format": FORMAT, "baselines": [asdict(row) for row in [*kept, baseline]]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"baseline {path} cannot be written: {error.strerror}; give --baseline another") from None
