"""Compares the planner's estimate of a run with its measurements, and names the assumption that was off most."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfscale.errors import HfScaleError, UnknownHardwareError
from hfscale.facts.hardware import Accelerator, match_device_name
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.own_hardware import find_accelerator
from hfscale.facts.schedules import schedule_name
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.job import Job, splits_activations
from hfscale.planner.launchable import TRAINER_OPTIMIZERS
from hfscale.planner.memory import allocated_gib
from hfscale.planner.options import Schedule
from hfscale.report.run_data import Run

CLOSE = 0.1
"""Relative error up to which an estimate is as good as it is expected to be: about its median error against published
runs (docs/planner_trust.md)."""
LOCAL = "local-"
"""How the names of rows begin that were measured on a machine of the user."""
_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Holds an estimate beside what was measured."""

    estimate: Estimate
    """The estimate of the run."""
    tokens_per_s: float
    """Measured tokens per second of all processes together."""
    memory_gib: float | None
    """Measured peak memory that torch allocated on the fullest GPU, GiB; None on a CPU."""
    measured_s: Mapping[str, float]
    """Measured seconds per step by part: `computation`, and where they were measured `communication`, `bubble` and
    `data wait`."""

    @property
    def predicted_tokens_per_s(self) -> float:
        """Tokens per second of all processes together, according to the estimate."""
        return self.estimate.tokens_per_s_per_gpu * self.estimate.job.layout.world_size

    @property
    def predicted_memory_gib(self) -> float:
        """The part of the estimated peak that torch allocates, GiB."""
        return allocated_gib(self.estimate.memory)

    @property
    def predicted_s(self) -> dict[str, float]:
        """Estimated seconds per step by the parts of `measured_s`; parts that were not measured are in
        `computation`."""
        time = self.estimate.time
        parts = {"communication": time.communication, "bubble": time.bubble, "data wait": 0.0}
        known = {name: seconds for name, seconds in parts.items() if name in self.measured_s}
        return {"computation": time.total - sum(known.values()), **known}

    @property
    def speed_error(self) -> float:
        """Predicted over measured speed, minus 1."""
        return self.predicted_tokens_per_s / self.tokens_per_s - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory, minus 1; None where no memory was measured."""
        return None if self.memory_gib is None else self.predicted_memory_gib / self.memory_gib - 1

    @property
    def assumptions(self) -> list[str]:
        """Which assumption was off: a sentence for the speed, and one for the memory if its estimate was off."""
        lines = [self._of_the_speed()]
        error = self.memory_error
        if error is not None and abs(error) > CLOSE:
            part = max(vars(self.estimate.memory).items(), key=lambda item: item[1])
            lines.append(
                f"memory: {off(error)}; the largest part of the "
                f"estimate is {part[1]:.1f} GiB of {part[0]}"
            )
        return lines

    def _of_the_speed(self) -> str:
        if abs(self.speed_error) <= CLOSE:
            return f"the speed was estimated within {CLOSE:.0%}, the usual error of the estimates"
        predicted = self.predicted_s
        part = max(predicted, key=lambda name: abs(self.measured_s[name] - predicted[name]))
        instead = f"takes {self.measured_s[part]:.3g} s per step instead of {predicted[part]:.3g} s"
        gpu = self.estimate.job.gpu.name
        is_measured = gpu.startswith(LOCAL)
        correct = (
            "hfscale tune measures it again"
            if is_measured
            else "hfscale tune corrects it for this machine"
        )
        row = f"the row {gpu}, measured before," if is_measured else f"the row {gpu}"
        return {
            "computation": f"computation {instead}: the rates of {row} do not hold for this run ({correct})",
            "communication": f"exposed communication {instead}: the bandwidth of {row} or the assumed overlap does "
            f"not hold for this run ({correct})",
            "bubble": f"the bubble of the pipeline {instead}: the estimate assumes stages of equal duration",
            "data wait": f"waiting for data {instead}: the estimate assumes that no step waits for it",
        }[part]

    def to_dict(self) -> dict[str, Any]:
        """Return the element `prediction` of `hfscale report --json`."""
        return {
            "tokens_per_s": {
                "predicted": self.predicted_tokens_per_s,
                "measured": self.tokens_per_s,
                "error": self.speed_error,
            },
            "memory_gib": {
                "predicted": self.predicted_memory_gib,
                "measured": self.memory_gib,
                "error": self.memory_error,
            },
            "step_s": {"predicted": self.predicted_s, "measured": dict(self.measured_s)},
            "assumptions": self.assumptions,
            "absent": None,
        }


def predict(run: Run) -> Prediction | str:
    """Estimate a run from what it has recorded about itself.

    Args:
        run (`Run`): the data of the run.

    Returns:
        `Prediction`, or `str`: why there is none.
    """
    rate = run.median("scaling/tokens_per_s")
    if rate is None:
        return "no tokens per second were measured"
    if not run.job:
        return (
            "the run has not recorded its layout: it was trained with an earlier version, "
            "or its model has no config"
        )
    try:
        estimate = estimate_job(_job(run))
    except HfScaleError as error:
        return " ".join(str(error).split())
    except (KeyError, TypeError, ValueError, AttributeError):
        return "what the run has recorded about its layout is incomplete"
    step_s = estimate.job.tokens_per_step / rate
    measured = {
        "communication": run.median("scaling/comm_fraction"),
        "bubble": run.median("scaling/bubble_fraction"),
        "data wait": run.median("scaling/data_wait_fraction"),
    }
    parts = {name: share * step_s for name, share in measured.items() if share is not None}
    return Prediction(
        estimate=estimate,
        tokens_per_s=rate,
        memory_gib=run.last("gpu/memory_peak_gib"),
        measured_s={"computation": step_s - sum(parts.values()), **parts},
    )


def off(error: float) -> str:
    """Return how far an estimate is off, such as `the estimate is 12% too low` or `19 times too high`.

    Args:
        error (`float`): predicted over measured, minus 1.
    """
    ratio = 1 + error
    if round(abs(error), 2) == 0:
        return "the estimate is right"
    if ratio >= 2:
        return f"the estimate is {ratio:.2g} times too high"
    if 0 < ratio <= 0.5:
        return f"the estimate is {1 / ratio:.2g} times too low"
    return f"the estimate is {abs(error):.0%} too {'high' if error > 0 else 'low'}"


def comparison(found: Prediction) -> list[str]:
    """Return a line for the speed and, on a GPU, one for the memory: predicted, measured, error."""
    lines = [
        f"tokens per second: predicted {found.predicted_tokens_per_s:,.0f}, measured {found.tokens_per_s:,.0f} "
        f"on {found.estimate.job.gpu.name} ({off(found.speed_error)})"
    ]
    if found.memory_gib is not None and found.memory_error is not None:
        lines.append(
            f"peak memory that torch allocates: predicted {found.predicted_memory_gib:.1f} GiB, measured "
            f"{found.memory_gib:.1f} GiB ({off(found.memory_error)})"
        )
    return lines


def _job(run: Run) -> Job:
    """Return the job that the run has recorded, with the checks of a job that a user describes."""
    facts = run.facts
    own = run.job
    trainer = str(own["trainer"])
    is_other = bool(own.get("of_trl")) and "SFT" not in trainer  # not recorded by earlier versions
    if "DPO" in trainer or "GRPO" in trainer or is_other:
        raise UnknownHardwareError(f"steps of {trainer} are not estimated from what a run records")
    names = {trainer: name for name, trainer in TRAINER_OPTIMIZERS.items()}
    if own["optimizer"] not in names:
        known = ", ".join(sorted(names.values()))
        raise UnknownHardwareError(
            f"optimizer {own['optimizer']!r} of the run is unknown to the planner: it knows {known}"
        )
    stages = int(own["virtual_stages"])
    layout = ParallelLayout(
        **{
            axis: int(own["layout"][axis])
            for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        }
    )
    precision = str(facts["precision"])
    job = Job(
        shape=ModelShape.from_config(own["config"]),
        gpu=_accelerator(str(facts["device"])),
        layout=layout,
        seq_len=int(facts["sequence_length"]),
        micro_batch=int(own["micro_batch"]),
        global_batch=int(facts["global_batch_size"]),
        zero=int(own["zero"]) if layout.data_parallel_size * layout.cp > 1 else 0,
        activation_checkpointing=facts["recompute"],
        precision="fp32" if precision == "tf32" else precision,  # type: ignore[arg-type]
        method=own["method"],
        lora_rank=int(own["lora_rank"]),
        optimizer=names[own["optimizer"]],  # type: ignore[arg-type]
        compile=bool(own["compile"]),
        liger=bool(own["fused_loss"]),
        offload=own["offload"],
        gpus_per_node=int(own["gpus_per_node"]),
        virtual_stages=stages,
        expert_parallel=int(own.get("expert_parallel", 1)),  # absent in runs of earlier versions
        schedule=next(
            (one for one in _SCHEDULES if schedule_name(one, stages) == own["schedule"]), "1f1b"
        ),
        sequence_parallel=bool(own["sequence_parallel"]),
        loss_parallel=splits_activations("hf", layout, int(own.get("expert_parallel", 1))),
        task="sft" if "SFT" in trainer else "text",
    )
    job.check()
    return job


def _accelerator(device: str) -> Accelerator:
    """Return the hardware row of a device: the user's measured one, or that of the datasheet.

    Raises:
        UnknownHardwareError: there is none.
    """
    known = match_device_name(device)
    name = known.name if known is not None else device
    if device.startswith("cpu"):
        name = "cpu"
    try:
        return find_accelerator(f"{LOCAL}{name}")
    except UnknownHardwareError:
        if known is None:
            raise UnknownHardwareError(
                f"no hardware row for {device}: measure it with accelerate launch -m hfscale plan --calibrate"
            ) from None
        return known
