"""How DDP stores and sends gradients; compression for slow networks, by a communication hook.

| name | sent per gradient element | error |
|---|---|---|
| `fp16`, `bf16` | 2 bytes instead of 4 | rounding |
| `powersgd` | rank x (rows + columns) instead of rows x columns (Vogels 2019, arXiv 1905.13727) | fed back |
| `topk` | the largest few, with their indices (Stich 2018, arXiv 1809.07599; Lin 2017, arXiv 1712.01887) | fed back |
| `onebit_adam`, `onebit_lamb` | 1 bit, of the optimizer's momentum (`hfscale.recipe.onebit`) | fed back |

What all but the first leave out of one step is added to the next (error feedback). This residual is not part of a
checkpoint: a resumed run starts with a residual of zero.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from hfscale.core.logging import get_logger
from hfscale.facts.support import check_support
from hfscale.recipe.onebit import OneBitAdam, OneBitLamb, WarmUp, average, leave_or_average
from hfscale.trainer.hooks import use_optimizer
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

ONE_BIT_OPTIMIZERS = {"onebit_adam": OneBitAdam, "onebit_lamb": OneBitLamb}
"""Methods that take the place of the optimizer."""
METHODS = ("none", "fp16", "bf16", "powersgd", "topk", *ONE_BIT_OPTIMIZERS)


def store_gradients_in_buckets(trainer: "Trainer") -> None:
    """Let DDP store gradients in its buckets instead of in a second copy: 4 bytes less per trained parameter.

    Args:
        trainer (`Trainer`): call it before `train()`. Without DDP it has no effect.
    """
    trainer.accelerator.ddp_handler.gradient_as_bucket_view = True


def compress_gradients(
    trainer: "Trainer", method: str, *, powersgd_rank: int, topk_fraction: float, start_step: int
) -> None:
    """Let DDP compress its gradients. Call it after the Trainer is created and before `train()`.

    Args:
        trainer (`Trainer`): the trainer whose gradients are compressed. The 1-bit methods also choose its optimizer.
        method (`str`): one of `METHODS`.
        powersgd_rank (`int`): rank of PowerSGD's approximation.
        topk_fraction (`float`): share of a bucket's elements that `topk` sends.
        start_step (`int`): steps before `powersgd`, `topk` and the 1-bit methods start; early gradients are large and
            change fast.

    Raises:
        UsageError: the run is not DDP, a method for GPUs is requested on CPUs, or a 1-bit method with fp16 or with
            another optimizer than AdamW.
    """
    if method == "none":
        return
    asked = replace(Strategy.of(trainer).combination(), compression=method)
    check_support(asked, "compression")
    if method in ONE_BIT_OPTIMIZERS:
        _use_one_bit_optimizer(trainer, method, start_step)
        return
    if method == "topk":
        # DDP rebuilds its buckets after the first step, and a residual belongs to a bucket.
        state = TopKState(fraction=topk_fraction, start_step=max(2, start_step))
        _register(trainer, topk_hook, state)
        return
    hook = {"powersgd": DDPCommunicationHookType.POWER_SGD}.get(method) or DDPCommunicationHookType(
        method
    )
    # PowerSGD starts at 2 at the earliest, because DDP rebuilds its buckets after the first step.
    state_options = {
        "matrix_approximation_rank": powersgd_rank,
        "start_powerSGD_iter": max(2, start_step),
    }
    trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(
        **trainer.accelerator.ddp_handler.to_kwargs(),
        comm_hook=hook,
        comm_state_option=state_options if method == "powersgd" else {},
    )


def _use_one_bit_optimizer(trainer: "Trainer", method: str, warm_up_steps: int) -> None:
    """Let the Trainer make a 1-bit optimizer with the options of its AdamW, and DDP average in the warm-up only."""
    adamw, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    assert adamw is AdamW  # the table of what works with what has refused the others
    warm_up = WarmUp(length=warm_up_steps)
    use_optimizer(trainer, ONE_BIT_OPTIMIZERS[method], {**options, "warm_up": warm_up})
    _register(trainer, leave_or_average, warm_up)
    logger.info(
        "%s: gradients are averaged in full up to step %d, which is its warm-up",
        method,
        warm_up_steps,
    )


def _register(trainer: "Trainer", hook: Callable[..., Any], state: Any) -> None:
    """Let DDP use a communication hook that Accelerate does not have."""
    options = trainer.accelerator.ddp_handler.to_kwargs()
    trainer.accelerator.ddp_handler = HookKwargs(**options, hook=hook, state=state)


@dataclass
class HookKwargs(DistributedDataParallelKwargs):  # type: ignore[misc]
    """DDP's options with a communication hook that Accelerate does not have."""

    hook: Callable[..., Any] | None = None
    """The hook."""
    state: Any = None
    """Its first argument."""

    def to_kwargs(self) -> dict[str, object]:
        """Return the keyword arguments of `DistributedDataParallel` itself."""
        return {
            name: value
            for name, value in super().to_kwargs().items()
            if name not in ("hook", "state")
        }

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the hook; Accelerate calls this.

        Args:
            model (`DistributedDataParallel`): the wrapped model.
        """
        assert self.hook is not None
        model.register_comm_hook(self.state, self.hook)


@dataclass(kw_only=True)
class TopKState:
    """The state that `topk_hook` keeps between steps."""

    fraction: float
    """Fraction of a bucket's elements that is sent."""
    start_step: int
    """Steps of plain averaging before the compression starts."""
    steps: int = 0
    """Number of steps so far."""
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)
    """By bucket index: the elements not sent yet, with the shape and dtype of the bucket."""


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the largest elements of a gradient and keep the rest of this rank for the next step, as a hook of DDP.

    Each rank selects its own k largest elements; all ranks gather all selections (values and indices) and add them.

    Args:
        state (`TopKState`): the residuals and options; changed in place.
        bucket (`dist.GradBucket`): the gradients of some parameters, as one flat tensor.

    Returns:
        `torch.futures.Future[torch.Tensor]`: the averaged bucket, of the same shape.
    """
    gradient = bucket.buffer()  # flat
    world_size = dist.get_world_size()
    if bucket.index() == 0:  # the first of a step, so that all its buckets start together
        state.steps += 1
    if state.steps <= state.start_step:
        return average(gradient)
    residual = state.residuals.get(bucket.index())
    if residual is not None and residual.shape != gradient.shape:
        residual = None  # DDP has rebuilt its buckets
    corrected = gradient if residual is None else gradient + residual
    k = max(1, int(state.fraction * corrected.numel()))
    indices = corrected.abs().topk(k, sorted=False).indices
    values = corrected[indices]
    state.residuals[bucket.index()] = corrected.index_fill(0, indices, 0)

    all_values = values.new_empty(world_size * k)
    all_indices = indices.new_empty(world_size * k)
    gathered_indices = dist.all_gather_into_tensor(all_indices, indices, async_op=True)
    gathered = dist.all_gather_into_tensor(all_values, values, async_op=True)

    def add(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        gathered_indices.wait()
        return gradient.zero_().index_add_(0, all_indices, all_values / world_size)

    averaged: torch.futures.Future[torch.Tensor] = gathered.get_future().then(add)
    return averaged
