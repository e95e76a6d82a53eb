"""Reads and writes baselines: the speed of the same work on fewer GPUs, as `hfscale sweep` measured it.

Scaling efficiency is tokens/s/GPU of this run over tokens/s/GPU of the baseline. It is only meaningful if model,
sequence length, precision, recomputation and device are the same. With equal tokens per GPU and step it is weak
scaling; with equal tokens per step in total it is strong scaling. Anything else is not scaling efficiency, and no
number is given for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hfscale.core import tables
from hfscale.core.counts import counted
from hfscale.core.text_files import read_json
from hfscale.errors import ConfigFileError

FORMAT = 1
"""The file format that this version reads and writes."""
Mode = Literal["weak", "strong"]
_MUST_BE_EQUAL = (
    "model_type",
    "parameters",
    "trainable_parameters",
    "device",
    "sequence_length",
    "precision",
    "recompute",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Describes the work of a run, which must be equal for two speeds to be compared."""

    model_type: str
    """The `model_type` of the model's config, such as `llama`."""
    parameters: int
    """Parameters of the whole model."""
    trainable_parameters: int
    """Trainable parameters; fewer than `parameters` with adapters."""
    device: str
    """`torch.cuda.get_device_name()`, or `cpu` and its number of threads."""
    sequence_length: int
    """Tokens per sequence."""
    tokens_per_gpu: int
    """Tokens per GPU and optimizer step."""
    precision: str
    """Format of the matrix products: `bf16`, `fp16`, `fp8`, `tf32` or `fp32`."""
    recompute: str
    """`none`, `full` or `selective` activation checkpointing."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Holds a measured speed and the work that it was measured on."""

    workload: Workload
    """The work that was measured."""
    world_size: int
    """Number of GPUs."""
    tokens_per_s_per_gpu: float
    """Measured tokens per second and GPU."""
    strategy: str
    """`single`, `ddp`, `fsdp2`, `zero3` and so on."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Holds the baseline that a run is compared with."""

    baseline: Baseline
    """The baseline with the fewest GPUs of those that can be compared."""
    mode: Mode
    """`weak`: equal tokens per GPU and step; `strong`: equal tokens per step in total."""

    def efficiency(self, tokens_per_s_per_gpu: float) -> float:
        """Return the scaling efficiency; it is 1 if every GPU is as fast as those of the baseline.

        Args:
            tokens_per_s_per_gpu (`float`): the speed of the run in tokens per second and GPU.
        """
        return tokens_per_s_per_gpu / self.baseline.tokens_per_s_per_gpu

    def describe(self) -> str:
        """Return the baseline as text for the log."""
        per_gpu = self.baseline.workload.tokens_per_gpu
        scaling = (
            f"weak scaling, {per_gpu:,} tokens per GPU and step"
            if self.mode == "weak"
            else f"strong scaling, {per_gpu * self.baseline.world_size:,} tokens per step"
        )
        gpus = counted(self.baseline.world_size, "GPU")
        return f"{self.baseline.tokens_per_s_per_gpu:,.0f} tokens/s/GPU on {gpus} ({scaling})"


def user_file() -> Path:
    """Return the default path of the baselines file; the file need not exist."""
    return tables.user_file("baselines.json")


def find(baselines: Sequence[Baseline], workload: Workload, world_size: int) -> Match | str:
    """Find the baseline to compare a run with.

    Args:
        baselines (`Sequence[Baseline]`): the recorded baselines.
        workload (`Workload`): what the run does.
        world_size (`int`): its number of GPUs.

    Returns:
        `Match | str`: the baseline, or the reason why none can be compared.
    """
    if not baselines:
        return "no baseline is recorded"
    comparable = [row for row in baselines if not _differences(row.workload, workload)]
    if not comparable:
        nearest = min(baselines, key=lambda row: len(_differences(row.workload, workload))).workload
        name = _differences(nearest, workload)[0]
        return (
            f"no baseline has this run's {name.replace('_', ' ')} {getattr(workload, name)} "
            f"(nearest: {getattr(nearest, name)})"
        )
    fewest_first = sorted(comparable, key=lambda row: row.world_size)
    for row in fewest_first:
        if row.workload.tokens_per_gpu == workload.tokens_per_gpu:
            return Match(baseline=row, mode="weak")
    total = workload.tokens_per_gpu * world_size
    for row in fewest_first:
        if row.workload.tokens_per_gpu * row.world_size == total:
            return Match(baseline=row, mode="strong")
    recorded = ", ".join(
        f"{row.workload.tokens_per_gpu:,} on {row.world_size}" for row in fewest_first
    )
    return (
        f"no baseline has {workload.tokens_per_gpu:,} tokens per GPU and step, or {total:,} in total "
        f"(recorded: {recorded})"
    )


def _differences(one: Workload, other: Workload) -> list[str]:
    """Return the fields that must be equal and are not."""
    return [name for name in _MUST_BE_EQUAL if getattr(one, name) != getattr(other, name)]


def read_baselines(path: Path) -> list[Baseline]:
    """Read the baselines of a file.

    Args:
        path (`Path`): a file that `hfscale sweep` has written.

    Returns:
        `list[Baseline]`: the baselines, in the order of the file.

    Raises:
        ConfigFileError: the file is missing, or is not a file that `hfscale sweep` writes.
    """
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise ConfigFileError(
                f"baseline {path} has format {content['format']}, but this version of hfscale reads format {FORMAT}: "
                "record it again with hfscale sweep"
            )
        return [_parse(row) for row in content["baselines"]]
    except OSError as error:
        raise ConfigFileError(
            f"baseline {path} cannot be read: {error.strerror}; record one with hfscale sweep"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigFileError):
            raise
        raise ConfigFileError(
            f"baseline {path} is not a file of hfscale sweep: {error}; record it again with hfscale sweep"
        ) from None


def _parse(row: dict[str, Any]) -> Baseline:
    workload = Workload(**{field.name: row["workload"][field.name] for field in fields(Workload)})
    speed = row["tokens_per_s_per_gpu"]
    if (
        not isinstance(speed, int | float)
        or isinstance(speed, bool)
        or not 0 < speed < float("inf")
    ):
        raise ValueError(f"tokens_per_s_per_gpu is {speed!r}: it must be a positive number")
    return Baseline(
        workload=workload,
        world_size=int(row["world_size"]),
        tokens_per_s_per_gpu=float(speed),
        strategy=str(row["strategy"]),
    )
