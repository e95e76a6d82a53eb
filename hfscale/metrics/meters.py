"""The meters of `ScalingMetricsCallback`: each measures one thing besides throughput.

A meter sees the beginning and the end of each step. At each log it gives a few named numbers of its rank, and makes
metric keys from the numbers of all ranks. One exchange carries the numbers of all meters. An unknown number is NaN in
the exchange, and has no metric key.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger
from hfscale.core.versions import context_parallel_size, sequence_parallel_size
from hfscale.errors import UnsupportedModelError
from hfscale.metrics.baseline import Match, Workload, find, read_baselines, user_file
from hfscale.metrics.communication import DdpCounters, Exposed, SampledSteps
from hfscale.metrics.flop_counter import StepFlops, extends_loss, has_own_loss, reason_not_to_count
from hfscale.metrics.flops import FlopsFit
from hfscale.metrics.goodput import GoodputTracker, Rate, rate
from hfscale.metrics.job_facts import job_facts
from hfscale.metrics.noise_scale import GradientProbe, LeafProbe, NoiseScale, ReduceScatterProbe, Sample, advice
from hfscale.metrics.throughput import (
    FlopsModel,
    describe_workload,
    device_name,
    device_peak_tflops,
    training_dtype,
)
from hfscale.metrics.tokens import TokenCounter
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.collector import Columns
from hfscale.trainer.state import global_batch_size, saved_state
from hfscale.trainer.strategy import running_strategy, unwrap_compiled

logger = get_logger(__name__)

MIN_STEPS_BETWEEN_SAMPLES = 50
"""A noise-scale sample costs about 3% of a step of two small micro-batches, and the noise scale changes over thousands
of steps."""
_AGREES = 0.10
"""For a trainer with its own loss, a formula is used if it gives the counted FLOPs up to this relative error. A
reference pass, or a second forward, adds more."""
_LEAF_PROBE_STRATEGIES = ("single", "ddp")  # checked against a known answer; DeepSpeed's strategies are not


@dataclass(frozen=True, kw_only=True)
class Window:
    """The part of a run between two logs, over all ranks."""

    steps: int
    """Optimizer steps."""
    seconds: float
    """Seconds of training on the rank that took longest."""
    tokens: float
    """Tokens trained on; 0 if the model has no token sequences."""
    tokens_seen: int
    """Tokens trained on since step 0."""
    tokens_per_s_per_gpu: float
    """Tokens / seconds / processes."""
    sequence_length: int
    """Tokens per sequence, mean over tokens; 0 without tokens."""
    grad_norm: float | None = None
    """Gradient norm that Trainer logs; None: it logs none."""


class Meter:
    """Defines the methods of a meter; this base class measures nothing."""

    watches_steps = False
    """Whether `step_begin` and `step_end` must be called; it is set by `begin`."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Prepare for a training. It is called on every rank when training begins.

        Args:
            trainer (`Trainer`): The Trainer that trains, with its model prepared.
            state (`TrainerState`): State of the Trainer.

        Raises:
            ConfigFileError: A file that the meter needs (baselines, prices) cannot be read.
        """

    def step_begin(self, state: TrainerState) -> None:
        """Start to measure a step, before its first forward.

        Args:
            state (`TrainerState`): State of the Trainer; the step is number `state.global_step + 1`.
        """

    def step_end(self, state: TrainerState) -> None:
        """Stop measuring a step, after its optimizer step.

        Args:
            state (`TrainerState`): State of the Trainer; the step is number `state.global_step`.
        """

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return the numbers of this rank in the window that ends now.

        Args:
            state (`TrainerState`): State of the Trainer.

        Returns:
            `dict[str, float]`: The numbers by name; NaN for an unknown one. No other meter uses these names, and they
            are the same on every rank and at every log.
        """
        return {}

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the metric keys of this meter, computed from the numbers of all ranks.

        Args:
            columns (`Mapping[str, Sequence[float]]`): The numbers of every rank, by name.
            window (`Window`): The window that ends now.
            state (`TrainerState`): State of the Trainer.

        Returns:
            `dict[str, float]`: The metric keys that are known.
        """
        return {}

    def end(self) -> None:
        """Release the resources that `begin` has acquired. It is called when training ends."""


class UtilizationMeter(Meter):
    """Measures `scaling/mfu` and `scaling/hfu`, and logs once where the FLOPs come from, or why the keys are absent.

    A formula is used for language models that hfscale knows. Otherwise the FLOPs of loss and backward are counted in a
    few steps; where a trainer has its own loss, this also checks the formula.

    Args:
        peak_tflops (`float`, *optional*): Dense peak of one device in TFLOP/s; None: the peak in `hardware.toml`.
        counter (`TokenCounter`): Counts the work of the steps.
    """

    def __init__(self, peak_tflops: float | None, counter: TokenCounter) -> None:
        self._peak_tflops = peak_tflops
        self._counter = counter
        self._formula: FlopsModel | None = None
        self._fit: FlopsFit | None = None
        self._step: StepFlops | None = None
        self._facts: dict[str, str] = {}

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Look up the peak of the device, and choose between the formula and counting."""
        self._adapter = TrainerAdapter.of(trainer)
        self._adapter.at_training_end(self.pause)
        self._end_counting()
        self._facts = {}
        self._length = 0
        self._logged_work = self._step_work = list(self._counter.work)
        args = trainer.args
        dtype = training_dtype(trainer.model, args)
        peak_tflops = self._peak_tflops or device_peak_tflops(args.device, dtype)
        if peak_tflops is None:
            self._give_up(f"the {dtype} peak of this {args.device.type} is unknown (give peak_tflops)")
            return
        self._peak_flops = peak_tflops * 1e12
        self._why_no_formula = f"{type(trainer).__name__} has its own loss"
        try:
            self._formula = FlopsModel.of(trainer.model, args, sizes=getattr(trainer, "parameter_counts", None))
        except UnsupportedModelError as error:
            self._why_no_formula = f"no formula holds: {str(error).partition(':')[0]}"
        self._extends_loss = has_own_loss(trainer) and extends_loss(trainer)
        if self._formula is not None and not has_own_loss(trainer):
            self._use_formula()
        elif (reason := reason_not_to_count(trainer)) is not None:
            self._refuse_counting(reason)
        else:
            self._fit = FlopsFit()
            self.watches_steps = True
            self._adapter.wrap_compute_loss(self._starting)

    def _starting(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compute_loss` with counting from its beginning on, in the steps that are counted."""

        @functools.wraps(compute_loss)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._step is not None:
                self._step.start()
            return compute_loss(*args, **kwargs)

        return counted

    def step_begin(self, state: TrainerState) -> None:
        """Count this step if the fit needs it."""
        self._step_work = list(self._counter.work)
        if self._fit is not None and self._fit.wants_count:
            self._step = StepFlops(self._counter)

    def pause(self) -> None:
        """Stop counting until the next loss: a backward has ended, or the training."""
        if self._step is not None:
            self._step.stop()

    def step_end(self, state: TrainerState) -> None:
        """Add a counted step to the fit, and decide where the FLOPs come from."""
        if self._fit is None:
            return
        work = [now - before for now, before in zip(self._counter.work, self._step_work, strict=True)]
        if self._step is None:
            self._fit.note(work)
            return
        self.pause()
        step, self._step = self._step, None
        if step.not_counted:
            self._refuse_counting(f"the FLOPs of {', '.join(sorted(step.not_counted))} cannot be counted")
        elif any(work) and step.model_flops:
            self._fit.add(work, step.model_flops, step.hardware_flops)
            if self._formula is not None and self._formula_agrees(work, step.model_flops):
                self._use_formula()
            elif self._fit.has_failed:
                self._give_up("the FLOPs of its steps cannot be predicted from the shapes of the inputs")
            elif not self._facts:
                self._facts = {"flops_source": "counted"}
                logger.info("scaling/mfu is computed from counted FLOPs: %s", self._why_no_formula)

    def _formula_agrees(self, work: Sequence[float], counted: float) -> bool:
        """Whether the formula gives the FLOPs that were counted, which means that the loss has no other part."""
        assert self._formula is not None
        tokens, attended = work[1], work[2]
        formula, self._formula = self._formula, None
        if not tokens or abs(tokens * formula.model_flops_per_token(attended / tokens) / counted - 1) > _AGREES:
            return False
        self._formula = formula
        return True

    def _use_formula(self) -> None:
        assert self._formula is not None
        self._end_counting(keep_formula=True)
        self._facts = {"flops_source": "formula"}
        logger.info("scaling/mfu is computed from the formula for %s models", self._formula.shape.model_type)

    def _refuse_counting(self, reason: str) -> None:
        """Use the formula if it is plausible, else log nothing."""
        if self._formula is not None and self._extends_loss:
            self._use_formula()
        else:
            self._give_up(f"{self._why_no_formula}, and {reason}")

    def _give_up(self, reason: str) -> None:
        self._end_counting()
        self._facts = {"mfu_absent": reason}
        logger.info("scaling/mfu is not logged: %s", reason)

    def _end_counting(self, *, keep_formula: bool = False) -> None:
        self.pause()
        self._step = None
        self._fit = None
        self.watches_steps = False
        self._adapter.unwrap_compute_loss()
        if not keep_formula:
            self._formula = None

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return the model FLOPs and the executed FLOPs of this rank, if they are counted."""
        work = [now - before for now, before in zip(self._counter.work, self._logged_work, strict=True)]
        self._logged_work = list(self._counter.work)
        known = self._fit.predict(work) if self._fit is not None else None
        model_flops, hardware_flops = known or (math.nan, math.nan)
        return {"model_flops": model_flops, "hardware_flops": hardware_flops}

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the FLOPs per second and GPU over the peak."""
        if self._facts.get("flops_source") == "counted":
            capacity = window.seconds * self._peak_flops * len(columns["model_flops"])
            mfu, hfu = sum(columns["model_flops"]) / capacity, sum(columns["hardware_flops"]) / capacity
            return {} if math.isnan(mfu) else {"scaling/mfu": mfu, "scaling/hfu": hfu}
        if self._formula is None or "flops_source" not in self._facts or not window.tokens:
            return {}
        if window.sequence_length != self._length:  # computed once per length, because it goes through all layers
            self._length = window.sequence_length
            self._model_s_per_token = self._formula.model_flops_per_token(self._length) / self._peak_flops
            self._hardware_s_per_token = self._formula.hardware_flops_per_token(self._length) / self._peak_flops
        return {
            "scaling/mfu": window.tokens_per_s_per_gpu * self._model_s_per_token,
            "scaling/hfu": window.tokens_per_s_per_gpu * self._hardware_s_per_token,
        }

    def facts(self) -> dict[str, str]:
        """Return `flops_source` (`formula` or `counted`), or `mfu_absent` with the reason, for the timeline."""
        return self._facts


class CommunicationMeter(Meter):
    """Measures `scaling/comm_fraction`, by DDP's counters or by profiled steps on the first and the last rank."""

    def __init__(self) -> None:
        self.comm_over_backward: float | None = None
        """Communication time over backward time, where DDP measures it."""
        self.shares: list[float] = []
        """Share of its time that each rank communicates or waits; empty unless every rank has measured it."""
        self._ddp: DdpCounters | None = None
        self._sampled: SampledSteps | None = None

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """With several ranks, use DDP's counters, or else profile steps on the first and the last rank."""
        self._ddp = None
        self._sampled = None
        if trainer.args.world_size > 1:
            self._ddp = DdpCounters.find(unwrap_compiled(trainer.model_wrapped))
            if self._ddp is None and trainer.args.process_index in (0, trainer.args.world_size - 1):
                self._sampled = SampledSteps()
        self.watches_steps = self._sampled is not None

    def step_begin(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.step_begin()

    def step_end(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.step_end()

    def end(self) -> None:
        """Discard a profiled step that has begun."""
        if self._sampled is not None:
            self._sampled.stop()

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return the exposed communication in seconds, the length of the measured step in seconds, and a ratio.

        The ratio is communication time over the time of the backward that can hide it.
        """
        exposed: Exposed | None = None
        if self._ddp is not None:
            exposed = self._ddp.read()
        elif self._sampled is not None:
            exposed = self._sampled.last
        return {
            "exposed_comm_s": _or_nan(exposed.seconds if exposed is not None else None),
            "exposed_comm_step_s": _or_nan(exposed.step_s if exposed is not None else None),
            "comm_over_backward": _or_nan(exposed.comm_over_backward if exposed is not None else None),
        }

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the smallest share of the ranks: the other ranks also wait for slower ones in their collectives."""
        mean_step_s = window.seconds / window.steps
        shares = [
            min(exposed_s / (mean_step_s if math.isnan(step_s) else step_s), 1.0)
            for exposed_s, step_s in zip(columns["exposed_comm_s"], columns["exposed_comm_step_s"], strict=True)
            if not math.isnan(exposed_s)
        ]
        self.shares = shares if len(shares) == len(columns["exposed_comm_s"]) else []
        known = [ratio for ratio in columns["comm_over_backward"] if not math.isnan(ratio)]
        self.comm_over_backward = min(known, default=None)
        return {"scaling/comm_fraction": min(shares)} if shares else {}


class EfficiencyMeter(Meter):
    """Measures `scaling/efficiency`: tokens/s/GPU over those of a recorded baseline of the same work.

    Args:
        path (`Path`, *optional*): The baselines file; None: the user's own, if it exists.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
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
            self._trainer.model,
            args,
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
            `dict[str, Any]`: The fields of `Workload` from the first log on, `world_size`, `strategy`,
            `global_batch_size` (sequences), and `baseline` (a description) if one matches.
        """
        args = self._trainer.args
        work = asdict(self.workload) if self.workload is not None else {}
        facts: dict[str, Any] = {
            **{key: value for key, value in work.items() if value != 0},  # without tokens, two fields are 0
            "world_size": args.world_size,
            "strategy": running_strategy(self._trainer),
            "global_batch_size": global_batch_size(self._trainer),
        }
        if self._match is not None:
            facts["baseline"] = self._match.describe()
        return facts

    def job_facts(self) -> dict[str, Any]:
        """Return the run as the planner describes it, for the comparison in the report."""
        return job_facts(self._trainer)


class GoodputMeter(Meter):
    """Measures `scaling/goodput`, `scaling/usd` and `scaling/usd_per_million_tokens`, from the times of the run.

    Args:
        usd_per_gpu_hour (`float`, *optional*): Price of one device; None: the price in the price list.
    """

    def __init__(self, usd_per_gpu_hour: float | None) -> None:
        self._usd_per_gpu_hour = usd_per_gpu_hour
        self.goodput_tracker: GoodputTracker | None = None
        """The tracker of the run's times, which the callback sets; None before training begins."""
        self.rate: Rate | None = None
        """The price of a GPU-hour; None if it is unknown."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Look up the price of the device, and log it if it comes from the price list."""
        self.rate = rate(device_name(trainer.args.device), self._usd_per_gpu_hour)
        if self.rate is not None and self._usd_per_gpu_hour is None:
            logger.info(
                "scaling/usd assumes %.4g USD per GPU and hour: %s (give usd_per_gpu_hour for your own price)",
                self.rate.usd_per_gpu_hour,
                self.rate.source,
            )

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the ratio and the costs; without a price, only the ratio."""
        keys: dict[str, float] = {}
        if self.goodput_tracker is None:
            return keys
        goodput = self.goodput_tracker.goodput()
        if goodput is not None:
            keys["scaling/goodput"] = goodput
        if self.rate is not None:
            keys["scaling/usd"] = self.goodput_tracker.gpu_hours() * self.rate.usd_per_gpu_hour
            if window.tokens_seen:
                keys["scaling/usd_per_million_tokens"] = keys["scaling/usd"] / window.tokens_seen * 1e6
        return keys


class NoiseScaleMeter(Meter):
    """Measures `scaling/noise_scale` in logged steps, and logs once why a strategy does not allow it."""

    def __init__(self) -> None:
        self.min_steps_between = MIN_STEPS_BETWEEN_SAMPLES
        """Smallest number of steps between two samples, even if the Trainer logs more often."""
        self.advice: str | None = None
        """One line of advice on the batch size; None while the noise scale is unknown."""
        self._probe: GradientProbe | None = None

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Choose the probe for the running strategy; log the reason if there is none."""
        self._trainer = trainer
        self.advice = None
        self._sampled_step = -self.min_steps_between
        self._scale = NoiseScale(saved_state(state, "noise_scale"))
        self._global_batch_size = global_batch_size(trainer)
        probe = self._make_probe(trainer)
        self._probe = None if isinstance(probe, str) else probe
        self.watches_steps = self._probe is not None
        if isinstance(probe, str):
            logger.info("scaling/noise_scale is not logged: %s", probe)

    def _make_probe(self, trainer: Trainer) -> GradientProbe | str:
        """Return the probe for the running strategy, or the reason why there is none."""
        args = trainer.args
        strategy = running_strategy(trainer)
        if args.fp16:
            return "fp16 scales the loss, and with it the gradients"
        if trainer.get_tp_size() * context_parallel_size(trainer) * sequence_parallel_size(trainer) > 1:
            return "ranks that share a sequence or a matrix see only parts of the gradients"
        if self._global_batch_size <= args.per_device_train_batch_size:
            return "it needs two micro-batches per step, from two ranks or by gradient accumulation"
        if strategy in _LEAF_PROBE_STRATEGIES:
            return LeafProbe(trainer.model)
        if strategy != "fsdp2":
            return f"hfscale cannot measure it under {strategy}"
        try:
            return ReduceScatterProbe(trainer.model_wrapped)
        except ValueError as error:
            return f"FSDP2 does not accept a custom reduce-scatter: {error}"

    def step_begin(self, state: TrainerState) -> None:
        """Measure the step if it will be logged and the last sample is at least `min_steps_between` steps back."""
        step = state.global_step + 1
        is_logged = bool(state.logging_steps) and step % state.logging_steps == 0
        assert self._probe is not None
        if is_logged and step - self._sampled_step >= self.min_steps_between:
            self._probe.open()
            self._sampled_step = step

    def step_end(self, state: TrainerState) -> None:
        assert self._probe is not None
        if state.global_step == self._sampled_step:
            self._probe.close()

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return |G_s|^2 of this rank, or NaN if this step was not measured.

        It is n times the measured sum of squares, because each of the n parts of a step carries 1/n of the mean.
        """
        self._parts = self._trainer.current_gradient_accumulation_steps
        measured = self._probe.read(self._parts) if self._probe is not None else None
        # A log at the end of an epoch may be of another step, whose gradient norm it has.
        if measured is None or state.global_step != self._sampled_step:
            return {"small_batch_square": math.nan}
        sum_of_squares, self._parts = measured
        return {"small_batch_square": self._parts * sum_of_squares}

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Add this step's sample, if all ranks measured it, and return the noise scale averaged over the samples."""
        norm = window.grad_norm
        squares = columns["small_batch_square"]
        if norm is not None and all(map(math.isfinite, [*squares, norm])):
            passes = self._trainer.current_gradient_accumulation_steps
            per_rank = self._trainer.args.per_device_train_batch_size * passes
            self._scale.add(
                Sample(
                    small_square=sum(squares) / len(squares),
                    big_square=float(norm) ** 2,
                    small_batch=per_rank / self._parts,
                    big_batch=per_rank * len(squares),
                )
            )
        value = self._scale.value()
        if value is None:
            return {}
        self.advice = advice(value, self._global_batch_size)
        return {"scaling/noise_scale": value}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
