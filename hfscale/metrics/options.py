"""The options of `ScalingMetricsCallback` and `ProfilerCallback`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hfscale.core.options import Options, option, positive
from hfscale.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class MetricsOptions(Options):
    """The options of `ScalingMetricsCallback`."""

    peak_tflops: float | None = option(
        None,
        check=positive,
        unit="TFLOP/s",
        help="Dense peak of one device in TFLOP/s, for MFU on hardware that is not in the table",
    )
    usd_per_gpu_hour: float | None = option(
        None,
        check=positive,
        unit="USD",
        help="Price of one device and hour in USD, for scaling/usd",
        unset="from the price list",
    )
    baseline: str | Path | None = option(
        None,
        flag="scaling_baseline",
        flag_type=str,
        help="File of `hfscale sweep` with which scaling/efficiency is compared",
        unset="~/.config/hfscale/baselines.json, if it exists",
    )
    noise_scale: bool = option(
        False,
        help="The gradient noise scale is measured at steps that are logged, at most one in fifty",
        details="It puts hooks on the parameters or, under FSDP2, on the communication.",
    )
    wandb_x_axis: Literal["steps", "tokens"] = option(
        "steps",
        help="What W&B draws all metrics of the run over",
        details="Over tokens, runs with other batch sizes can be compared.",
    )


def from_step_1(name: str, value: Any) -> None:
    """Check that steps are counted from 1."""
    for step in value:
        if step < 1:
            rule = f"{step} is below 1, and steps are counted from 1"
            raise ParameterError(name, list(value), rule)


@dataclass(frozen=True)
class ProfilerOptions(Options):
    """The options of `ProfilerCallback`."""

    steps: Sequence[int] = option(
        (),
        flag="profile_steps",
        check=from_step_1,
        help="Optimizer steps whose trace is written to output_dir/profile, counted from 1",
    )
    nvtx: bool = option(
        False,
        flag="nvtx",
        help="Mark forward, backward and optimizer as NVTX ranges, for Nsight Systems",
    )
