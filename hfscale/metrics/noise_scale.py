"""Gradient noise scale: how large a batch the gradient's noise is worth.

With G_s and G_b the gradients of a small batch of B_s sequences and of a large one of B_b (McCandlish et al. 2018,
arXiv 1812.06162, appendix A.1):

    |G|^2   = (B_b |G_b|^2 - B_s |G_s|^2) / (B_b - B_s)
    tr(S)   = (|G_s|^2 - |G_b|^2) / (1/B_s - 1/B_b)
    B_noise = tr(S) / |G|^2         in sequences, numerator and denominator averaged over steps each by itself

G_b is the step's own gradient, whose norm Trainer logs as it was before clipping. G_s is the gradient of one
micro-batch on one rank, which two routes see before ranks are averaged: hooks on the parameters (one process, DDP)
and FSDP2's reduce-scatter. Only steps that are logged are looked at, so nothing waits for the GPU that
would not anyway.

It is a proxy that moves during a training, and it only ever leads to advice. At B = B_noise a training takes twice the
fewest steps and twice the fewest tokens that are possible (ibid., equation 2.11).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

DECAY = 0.95
MIN_SAMPLES = 10
"""Before it, one unlucky step decides the ratio."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Squared gradient norms of one step."""

    small_square: float
    """|G_s|^2, averaged over micro-batches and ranks."""
    big_square: float
    """|G_b|^2."""
    small_batch: float
    """B_s, sequences."""
    big_batch: float
    """B_b, sequences."""

    def noise_and_signal(self) -> tuple[float, float]:
        """tr(S) and |G|^2 by this sample alone; either may be negative by chance."""
        signal = (self.big_batch * self.big_square - self.small_batch * self.small_square) / (
            self.big_batch - self.small_batch
        )
        noise = (self.small_square - self.big_square) / (1 / self.small_batch - 1 / self.big_batch)
        return noise, signal


class NoiseScale:
    """Averages samples.

    Args:
        saved (`dict[str, Any]`): where the averages are kept; as a checkpoint had them in a resumed run.
        decay (`float`): weight of what came before, per sample; 1 - 1/n averages over about n.
    """

    def __init__(self, saved: dict[str, Any], *, decay: float = DECAY) -> None:
        self._saved = saved
        self._decay = decay

    def add(self, sample: Sample) -> None:
        """Take one step's sample in."""
        noise, signal = sample.noise_and_signal()
        for name, value in (("noise", noise), ("signal", signal)):
            self._saved[name] = self._decay * self._saved.get(name, 0.0) + (1 - self._decay) * value
        self._saved["samples"] = self._saved.get("samples", 0) + 1

    def value(self) -> float | None:
        """Sequences; None while there are too few samples, or where the noise drowns the signal."""
        if self._saved.get("samples", 0) < MIN_SAMPLES or self._saved["signal"] <= 0 or self._saved["noise"] <= 0:
            return None
        return float(self._saved["noise"] / self._saved["signal"])


def advice(noise_scale: float, global_batch_size: int) -> str:
    """What a noise scale says about the batch, in one line; hfscale changes neither batch nor learning rate by it."""
    kappa = noise_scale / global_batch_size
    # A batch B takes 1 + B_noise/B times the fewest steps that are possible, and 1 + B/B_noise the fewest tokens.
    steps, tokens = 1 + kappa, 1 + 1 / kappa
    sizes = f"the noise scale is {noise_scale:,.0f} sequences and the global batch {global_batch_size:,}"
    if kappa > 2:
        return (
            f"{sizes}: a larger batch, up to about {noise_scale:,.0f}, would take nearly as many fewer steps (now "
            f"{steps:.1f} times the fewest); at {kappa:.1f} times the batch Adam's learning rate would be "
            f"x {kappa**0.5:.2g} (square root)"
        )
    if kappa < 0.5:
        return (
            f"{sizes}: a smaller one would reach the same loss with fewer tokens (now {tokens:.1f} times the fewest); "
            "keep it only where the wall-clock time matters more"
        )
    return f"{sizes}: near the balance of steps ({steps:.1f} times the fewest) and tokens ({tokens:.1f} times)"


class LeafProbe:
    """Sums the squared gradients that reach the parameters in each backward, before ranks are averaged.

    Its hooks are there for the steps that are looked at, and cost the others nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._handles: list[Any] = []
        self._norms: list[torch.Tensor] = []

    def open(self) -> None:
        """Look at the backward passes that follow."""
        self._norms = []
        self._handles = [p.register_hook(self._see) for p in self._parameters]

    def close(self) -> None:
        """Look away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _see(self, gradient: torch.Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    def read(self, backward_passes: int) -> tuple[float, int] | None:
        """Sum of the squares over the passes, and how many exchanges those were; waits for the GPU."""
        norms, self._norms = self._norms, []
        return (float(torch.stack(norms).square().sum()), backward_passes) if norms else None


class ReduceScatterProbe:
    """FSDP2's reduce-scatter with a look at what goes into it: this rank's gradient, not yet averaged.

    Takes the place of the groups' own reduce-scatter by FSDP2's public `set_custom_reduce_scatter`.

    Raises:
        ValueError: a model whose groups cannot take one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_open = False
        self._norms: dict[int, list[torch.Tensor]] = {}
        for number, module in enumerate(m for m in model.modules() if isinstance(m, FSDPModule)):
            module.set_custom_reduce_scatter(_Exchange(self, number))

    def open(self) -> None:
        """Look at the exchanges that follow."""
        self._norms, self._is_open = {}, True

    def close(self) -> None:
        """Look away."""
        self._is_open = False

    def see(self, number: int, gradient: torch.Tensor) -> None:
        """One group's gradients of this rank, flat."""
        if self._is_open:
            self._norms.setdefault(number, []).append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    def read(self, backward_passes: int) -> tuple[float, int] | None:
        """As `LeafProbe.read`: without an exchange per backward, the passes of a step count as one."""
        groups, self._norms = self._norms, {}
        if not groups:
            return None
        norms = [norm for group in groups.values() for norm in group]
        return float(torch.stack(norms).square().sum()), max(len(group) for group in groups.values())


class _Exchange:
    """What FSDP2 calls: the default allocation, the default exchange, one look."""

    def __init__(self, probe: ReduceScatterProbe, number: int) -> None:
        self._see: Callable[[int, torch.Tensor], None] = probe.see
        self._number = number

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._see(self._number, input_tensor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
