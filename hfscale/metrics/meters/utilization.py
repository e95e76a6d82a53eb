"""Measures model and hardware FLOPs utilization, from a formula or from counted FLOPs."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger
from hfscale.core.replaying import is_replaying
from hfscale.errors import UnsupportedModelError
from hfscale.facts.hardware import peak_dtype
from hfscale.metrics.flop_counter import StepFlops, extends_loss, has_own_loss, reason_not_to_count
from hfscale.metrics.flops import FlopsFit
from hfscale.metrics.meters.meter import Meter, Window
from hfscale.metrics.throughput import FlopsModel, device_peak_tflops, training_dtype
from hfscale.metrics.tokens import TokenCounter
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.collector import Columns
from hfscale.trainer.state import model_of

logger = get_logger(__name__)

_AGREES = 0.10
"""For a trainer with its own loss, a formula is used if it gives the counted FLOPs up to this relative error. A
reference pass, or a second forward, adds more."""


class UtilizationMeter(Meter):
    """Measures `scaling/mfu` and `scaling/hfu`, and logs once where the FLOPs come from, or why the keys are absent.

    A formula is used for language models that hfscale knows. Otherwise the FLOPs of loss and backward are counted in a
    few steps; where a trainer has its own loss, this also checks the formula.

    Args:
        peak_tflops (`float`, *optional*): dense peak of one device in TFLOP/s; None: the peak in `hardware.toml`.
        counter (`TokenCounter`): counts the work of the steps.
    """

    def __init__(self, peak_tflops: float | None, counter: TokenCounter) -> None:
        self._peak_tflops = peak_tflops
        self._counter = counter
        self._formula: FlopsModel | None = None
        self._fit: FlopsFit | None = None
        self._step: StepFlops | None = None
        self._facts: dict[str, str] = {}
        self._peak_facts: dict[str, str] = {}

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Look up the peak of the device, and choose between the formula and counting."""
        self._adapter = TrainerAdapter.of(trainer)
        self._adapter.at_training_end(self.pause)
        self._end_counting()
        self._facts = {}
        self._length = 0
        self._logged_work = self._step_work = list(self._counter.work)
        args = trainer.args
        dtype = peak_dtype(training_dtype(trainer))
        self._peak_facts = {}
        peak_tflops = self._peak_tflops or device_peak_tflops(args.device, dtype)
        if peak_tflops is None:
            self._give_up(
                f"the {dtype} peak of this {args.device.type} is unknown (give peak_tflops)"
            )
            return
        self._peak_flops = peak_tflops * 1e12
        if self._peak_tflops is None:
            self._peak_facts = {"peak_dtype": dtype}
        self._why_no_formula = f"{type(trainer).__name__} has its own loss"
        try:
            self._formula = FlopsModel.of(
                model_of(trainer), args, sizes=getattr(trainer, "parameter_counts", None)
            )
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
            self._adapter.wrap_method("compute_loss", self._starting)

    def _starting(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compute_loss` with counting from its beginning on, in the steps that are counted."""

        @functools.wraps(compute_loss)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._step is not None and not is_replaying():
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
        work = [
            now - before for now, before in zip(self._counter.work, self._step_work, strict=True)
        ]
        if self._step is None:
            self._fit.note(work)
            return
        self.pause()
        step, self._step = self._step, None
        if step.not_counted:
            self._refuse_counting(
                f"the FLOPs of {', '.join(sorted(step.not_counted))} cannot be counted"
            )
        elif any(work) and step.model_flops:
            self._fit.add(work, step.model_flops, step.hardware_flops)
            if self._formula is not None and self._formula_agrees(work, step.model_flops):
                self._use_formula()
            elif self._fit.has_failed:
                self._give_up(
                    "the FLOPs of its steps cannot be predicted from the shapes of the inputs"
                )
            elif not self._facts:
                self._facts = {"flops_source": "counted"}
                logger.info("scaling/mfu is computed from counted FLOPs: %s", self._why_no_formula)

    def _formula_agrees(self, work: Sequence[float], counted: float) -> bool:
        """Return whether the formula gives the counted FLOPs, which means that the loss has no other part."""
        assert self._formula is not None
        tokens = work[1]
        attended = work[2]
        formula, self._formula = self._formula, None
        if (
            not tokens
            or abs(tokens * formula.model_flops_per_token(attended / tokens) / counted - 1)
            > _AGREES
        ):
            return False
        self._formula = formula
        return True

    def _use_formula(self) -> None:
        assert self._formula is not None
        self._end_counting(keep_formula=True)
        self._facts = {"flops_source": "formula"}
        logger.info(
            "scaling/mfu is computed from the formula for %s models", self._formula.shape.model_type
        )

    def _refuse_counting(self, reason: str) -> None:
        """Use the formula if it is plausible, else log nothing."""
        if self._formula is not None and self._extends_loss:
            self._use_formula()
        else:
            self._give_up(f"{self._why_no_formula}, and {reason}")

    def _give_up(self, reason: str) -> None:
        self._end_counting()
        self._facts = {"mfu_absent": reason}
        # Nobody measures the MFU of a CPU; the report says why there is none
        level = logging.DEBUG if self._adapter.trainer.args.device.type == "cpu" else logging.INFO
        logger.log(level, "scaling/mfu is not logged: %s", reason)

    def _end_counting(self, *, keep_formula: bool = False) -> None:
        self.pause()
        self._step = None
        self._fit = None
        self.watches_steps = False
        self._adapter.unwrap_method("compute_loss")
        if not keep_formula:
            self._formula = None

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return the model FLOPs and the executed FLOPs of this rank, if they are counted."""
        work = [
            now - before for now, before in zip(self._counter.work, self._logged_work, strict=True)
        ]
        self._logged_work = list(self._counter.work)
        known = self._fit.predict(work) if self._fit is not None else None
        model_flops, hardware_flops = known or (math.nan, math.nan)
        return {"model_flops": model_flops, "hardware_flops": hardware_flops}

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the FLOPs per second and GPU over the peak."""
        if self._facts.get("flops_source") == "counted":
            capacity = window.seconds * self._peak_flops * len(columns["model_flops"])
            mfu = sum(columns["model_flops"]) / capacity
            hfu = sum(columns["hardware_flops"]) / capacity
            return {} if math.isnan(mfu) else {"scaling/mfu": mfu, "scaling/hfu": hfu}
        if self._formula is None or "flops_source" not in self._facts or not window.tokens:
            return {}
        # Computed once per length, because it goes through all layers
        if window.sequence_length != self._length:
            self._length = window.sequence_length
            self._model_s_per_token = (
                self._formula.model_flops_per_token(self._length) / self._peak_flops
            )
            self._hardware_s_per_token = (
                self._formula.hardware_flops_per_token(self._length) / self._peak_flops
            )
        return {
            "scaling/mfu": window.tokens_per_s_per_gpu * self._model_s_per_token,
            "scaling/hfu": window.tokens_per_s_per_gpu * self._hardware_s_per_token,
        }

    def facts(self) -> dict[str, str]:
        """Return what the timeline records about MFU.

        Returns:
            `dict[str, str]`: `flops_source` (`formula` or `counted`), or `mfu_absent` with the reason; also
            `peak_dtype` if the peak comes from `hardware.toml`.
        """
        return self._facts | self._peak_facts
