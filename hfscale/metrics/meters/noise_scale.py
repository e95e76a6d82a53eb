"""Estimates the gradient noise scale: the batch size up to which a larger batch pays off.

With G_s and G_b the gradients of a small batch of B_s sequences and of a large one of B_b (McCandlish et al. 2018,
arXiv 1812.06162, appendix A.1):

    |G|^2   = (B_b |G_b|^2 - B_s |G_s|^2) / (B_b - B_s)
    tr(S)   = (|G_s|^2 - |G_b|^2) / (1/B_s - 1/B_b)
    B_noise = tr(S) / |G|^2         in sequences; numerator and denominator are averaged over steps separately

G_b is the gradient of the step, whose norm Trainer logs as it was before clipping. G_s is the gradient of one
micro-batch on one rank. Two probes see it before it is averaged over ranks: hooks on the parameters (one process, DDP)
and FSDP2's reduce-scatter. Only logged steps are measured, in which Trainer waits for the GPU anyway.

The noise scale is a proxy that changes during a training, and it is only used for advice. At B = B_noise a training
takes twice the smallest possible number of steps and twice the smallest possible number of tokens (ibid., equation
2.11).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger
from hfscale.core.versions import context_parallel_size, sequence_parallel_size
from hfscale.metrics.meters.meter import Meter, Window
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.collector import Columns
from hfscale.trainer.state import global_batch_size, micro_batch_size, model_of, saved_state
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.requested import gradient_compression
from hfscale.trainer.strategies.tensors import sharded_modules

logger = get_logger(__name__)

MIN_STEPS_BETWEEN_SAMPLES = 50
"""A noise-scale sample costs about 3% of a step of two small micro-batches, and the noise scale changes over thousands
of steps."""
DECAY = 0.95
MIN_SAMPLES = 10
"""With fewer samples, one unlucky step would decide the ratio."""


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
        why_not = probe if isinstance(probe, str) else None
        TrainerAdapter.of(trainer).announced.unmeasured["scaling/noise_scale"] = why_not
        if why_not is not None:
            logger.info("scaling/noise_scale is not logged: %s", why_not)

    def _make_probe(self, trainer: Trainer) -> "GradientProbe | str":
        """Return the probe for the running strategy, or the reason why there is none."""
        args = trainer.args
        strategy = Strategy.of(trainer)
        if args.fp16:
            return "fp16 scales the loss, and with it the gradients"
        if gradient_compression(args) not in ("none", "fp16", "bf16"):
            return f"with {gradient_compression(args)} the logged norm is not that of the averaged gradient"
        if (
            trainer.get_tp_size() * context_parallel_size(trainer) * sequence_parallel_size(trainer)
            > 1
        ):
            return "ranks that share a sequence or a matrix see only parts of the gradients"
        if self._global_batch_size <= micro_batch_size(trainer):
            return "it needs two micro-batches per step, from two ranks or by gradient accumulation"
        # Checked against a known answer; DeepSpeed's strategies are not
        if strategy.shares_data:
            return LeafProbe(model_of(trainer))
        if strategy.shares_layers and not strategy.runs_stages:
            return "experts that ranks share have the gradients of the tokens of several ranks"
        if not strategy.gathers_layers:
            return f"hfscale cannot measure it under {strategy.name}"
        if not strategy.reduces_by_scatter:
            return "without shards FSDP2 does not reduce gradients by a reduce-scatter, which would be measured"
        try:
            return ReduceScatterProbe(sharded_modules(trainer.model_wrapped))
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

    def end(self) -> None:
        """Remove the hooks of a step that has not ended."""
        if self._probe is not None:
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
            per_rank = micro_batch_size(self._trainer) * passes
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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Holds the squared gradient norms of one step."""

    small_square: float
    """|G_s|^2, averaged over micro-batches and ranks."""
    big_square: float
    """|G_b|^2."""
    small_batch: float
    """B_s, sequences."""
    big_batch: float
    """B_b, sequences."""

    def noise_and_signal(self) -> tuple[float, float]:
        """Return tr(S) and |G|^2 of this sample alone; either may be negative by chance."""
        signal = (self.big_batch * self.big_square - self.small_batch * self.small_square) / (
            self.big_batch - self.small_batch
        )
        noise = (self.small_square - self.big_square) / (1 / self.small_batch - 1 / self.big_batch)
        return noise, signal


class NoiseScale:
    """Averages samples of the noise and of the signal.

    Args:
        saved (`dict[str, Any]`): the dictionary that keeps the averages: empty in a fresh run, and as the checkpoint
            had it in a resumed run. It is updated in place.
        decay (`float`): weight of the earlier samples; 1 - 1/n averages over about n samples.
    """

    def __init__(self, saved: dict[str, Any], *, decay: float = DECAY) -> None:
        self._saved = saved
        self._decay = decay

    def add(self, sample: Sample) -> None:
        """Add the sample of one step to the averages.

        Args:
            sample (`Sample`): the squared gradient norms; the large batch must be larger than the small one.
        """
        noise, signal = sample.noise_and_signal()
        for name, value in (("noise", noise), ("signal", signal)):
            self._saved[name] = self._decay * self._saved.get(name, 0.0) + (1 - self._decay) * value
        self._saved["samples"] = self._saved.get("samples", 0) + 1

    def value(self) -> float | None:
        """Return the noise scale in sequences.

        It is None while there are too few samples, and if the average noise or signal is not positive.
        """
        if (
            self._saved.get("samples", 0) < MIN_SAMPLES
            or self._saved["signal"] <= 0
            or self._saved["noise"] <= 0
        ):
            return None
        return float(self._saved["noise"] / self._saved["signal"])


def advice(noise_scale: float, global_batch_size: int) -> str:
    """Return one line of advice on the batch size. hfscale itself changes neither the batch nor the learning rate.

    Args:
        noise_scale (`float`): the noise scale in sequences.
        global_batch_size (`int`): sequences per optimizer step.

    Returns:
        `str`: the advice, with its numbers.
    """
    kappa = noise_scale / global_batch_size
    # A batch B takes 1 + B_noise/B times the fewest steps that are possible, and 1 + B/B_noise the fewest tokens.
    steps = 1 + kappa
    tokens = 1 + 1 / kappa
    sizes = f"the noise scale is {noise_scale:,.0f} sequences and the global batch is {global_batch_size:,}"
    if kappa > 2:
        return (
            f"{sizes}: a larger batch, up to about {noise_scale:,.0f}, would need almost proportionally fewer steps "
            f"(now {steps:.1f} times the fewest possible); with {kappa:.1f} times the batch, Adam's learning rate "
            f"would be x {kappa**0.5:.2g} (square-root rule)"
        )
    if kappa < 0.5:
        return (
            f"{sizes}: a smaller batch would reach the same loss with fewer tokens (now {tokens:.1f} times the fewest "
            "possible); keep this one only if the wall-clock time matters more"
        )
    return (
        f"{sizes}: this is near the balance of steps ({steps:.1f} times the fewest possible) and tokens "
        f"({tokens:.1f} times the fewest possible)"
    )


class GradientProbe(Protocol):
    """Sums the squared gradients of one rank in a step, before they are averaged over ranks."""

    def open(self) -> None:
        """Measure the backward passes that follow."""

    def close(self) -> None:
        """Stop measuring."""

    def read(self, backward_passes: int) -> tuple[float, int] | None:
        """Return what was measured since `open`; this waits for the GPU.

        Args:
            backward_passes (`int`): backward passes of the step.

        Returns:
            `tuple[float, int] | None`: the sum of the squared gradients, and in how many parts the step's gradient was
            measured; None if nothing was measured.
        """


class LeafProbe(GradientProbe):
    """Measures the gradients that reach the parameters in each backward pass, by hooks on the parameters.

    The hooks exist only during the measured steps, so other steps pay nothing.

    Args:
        model (`torch.nn.Module`): the model whose trainable parameters are measured.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._handles: list[Any] = []
        self._norms: list[torch.Tensor] = []

    def open(self) -> None:
        self._norms = []
        self._handles = [p.register_hook(self._measure) for p in self._parameters]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _measure(self, gradient: torch.Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    def read(self, backward_passes: int) -> tuple[float, int] | None:
        """Return the sum of the squared gradients, with one part for each backward pass of the step."""
        norms = self._norms
        self._norms = []
        return (float(torch.stack(norms).square().sum()), backward_passes) if norms else None


class ReduceScatterProbe(GradientProbe):
    """Measures the input of FSDP2's reduce-scatter: the gradient of this rank before it is averaged.

    It replaces the reduce-scatter of each FSDP2 group, by the public method `set_custom_reduce_scatter`. If the model
    communicates only once per step, all its backward passes count as one part.

    Args:
        modules (`list[FSDPModule]`): the modules of the model to which `fully_shard` has been applied.

    Raises:
        ValueError: a group of the model does not accept a custom reduce-scatter.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._is_open = False
        self._norms: dict[int, list[torch.Tensor]] = {}
        for number, module in enumerate(modules):
            # torch exports no base class
            reduce_scatter: Any = _MeasuredReduceScatter(self._measure, number)
            module.set_custom_reduce_scatter(reduce_scatter)

    def open(self) -> None:
        self._norms = {}
        self._is_open = True

    def close(self) -> None:
        self._is_open = False

    def _measure(self, number: int, gradient: torch.Tensor) -> None:
        """Measure the flat gradient of group `number`."""
        if self._is_open:
            self._norms.setdefault(number, []).append(
                torch.linalg.vector_norm(gradient, dtype=torch.float32)
            )

    def read(self, backward_passes: int) -> tuple[float, int] | None:
        """Return the sum of the squared gradients, with one part for each reduction of the gradients."""
        groups = self._norms
        self._norms = {}
        if not groups:
            return None
        norms = [norm for group in groups.values() for norm in group]
        return float(torch.stack(norms).square().sum()), max(
            len(group) for group in groups.values()
        )


class _MeasuredReduceScatter:
    """What FSDP2 calls: the default allocation and the default reduce-scatter, with a measurement of the input."""

    def __init__(self, measure: Callable[[int, torch.Tensor], None], number: int) -> None:
        self._measure = measure
        self._number = number

    def allocate(
        self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._measure(self._number, input_tensor)
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )
