"""Smaller gradients on slow networks: what DDP exchanges, compressed by a communication hook.

| name | sent per gradient element | error |
|---|---|---|
| `fp16`, `bf16` | 2 bytes instead of 4 | rounding |
| `powersgd` | rank x (rows + columns) instead of rows x columns (Vogels 2019, arXiv 1905.13727) | fed back |
| `topk` | the largest few, with their places (Stich 2018, arXiv 1809.07599; Lin 2017, arXiv 1712.01887) | fed back |

What the last two leave out of one step is added to the next (error feedback). That rest is not part of a checkpoint: a
resumed run begins it from zero.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch.nn.parallel import DistributedDataParallel

from hfscale.errors import UsageError

if TYPE_CHECKING:
    from transformers import Trainer

METHODS = ("none", "fp16", "bf16", "powersgd", "topk")


def check_compression(method: str, *, is_ddp: bool, use_cpu: bool) -> None:
    """Make sure that the run can compress its gradients so.

    Raises:
        UsageError: the run is not DDP, or a method for GPUs is asked for on CPUs.
    """
    if method == "none":
        return
    if not is_ddp:
        raise UsageError(
            f"--gradient_compression {method} works on DDP's gradients: launch with accelerate_configs/ddp.yaml on "
            "two processes or more, or leave it out (DeepSpeed has 1-bit Adam: accelerate_configs/onebit_adam.yaml)"
        )
    if method in ("bf16", "powersgd") and use_cpu:
        # torch refuses bf16 on gloo, and there the collectives that PowerSGD chains in callbacks get out of order.
        raise UsageError(f"--gradient_compression {method} needs GPUs: torch's hook is for NCCL; give fp16 or topk")


def compress_gradients(
    trainer: "Trainer", method: str, *, powersgd_rank: int, topk_fraction: float, start_step: int
) -> None:
    """Let DDP compress its gradients. Call it between the making of the Trainer and `train()`.

    Args:
        method (`str`): one of `METHODS`.
        powersgd_rank (`int`): rank of PowerSGD's approximation.
        topk_fraction (`float`): share of a bucket's elements that `topk` sends.
        start_step (`int`): steps before `powersgd` and `topk` set in; early gradients are large and change fast.

    Raises:
        UsageError: the run is not DDP, or a method for GPUs is asked for on CPUs.
    """
    if method == "none":
        return
    ddp_types = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    is_ddp = trainer.accelerator.distributed_type in ddp_types and not trainer.is_distributed_loading_by_transformers
    check_compression(method, is_ddp=is_ddp, use_cpu=trainer.args.use_cpu)
    options = trainer.accelerator.ddp_handler.to_kwargs()
    if method == "topk":
        trainer.accelerator.ddp_handler = TopKKwargs(**options, fraction=topk_fraction, start_step=start_step)
        return
    hook = {"powersgd": DDPCommunicationHookType.POWER_SGD}.get(method) or DDPCommunicationHookType(method)
    # PowerSGD starts at 2 at the earliest: DDP lays out its buckets anew after the first step.
    state = {"matrix_approximation_rank": powersgd_rank, "start_powerSGD_iter": max(2, start_step)}
    trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(
        **options, comm_hook=hook, comm_state_option=state if method == "powersgd" else {}
    )


@dataclass
class TopKKwargs(DistributedDataParallelKwargs):
    """DDP's options with a top-k hook, which Accelerate does not know."""

    fraction: float = 0.01
    """Share of a bucket's elements that is sent."""
    start_step: int = 1000
    """Steps of plain averaging before."""

    def to_kwargs(self) -> dict[str, object]:
        """What goes to `DistributedDataParallel` itself."""
        return {name: value for name, value in super().to_kwargs().items() if name not in ("fraction", "start_step")}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called by Accelerate on the wrapped model."""
        model.register_comm_hook(TopKState(fraction=self.fraction, start_step=self.start_step), topk_hook)


@dataclass(kw_only=True)
class TopKState:
    """What `topk_hook` keeps from step to step."""

    fraction: float
    """Share of a bucket's elements that is sent."""
    start_step: int
    """Steps of plain averaging before."""
    steps: int = 0
    """Steps seen."""
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)
    """By bucket: what was not sent yet, of the bucket's shape and dtype."""


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: average the elements that are largest somewhere, remember the rest of this rank's.

    Each rank picks its own k elements; all ranks gather all picks (values and places) and add them up.
    """
    gradient = bucket.buffer()  # flat
    world_size = dist.get_world_size()
    if bucket.is_last():
        state.steps += 1
    if state.steps <= state.start_step:
        gradient.div_(world_size)
        return dist.all_reduce(gradient, async_op=True).get_future().then(lambda done: done.value()[0])
    residual = state.residuals.get(bucket.index())
    corrected = gradient if residual is None else gradient + residual
    k = max(1, int(state.fraction * corrected.numel()))
    places = corrected.abs().topk(k, sorted=False).indices
    values = corrected[places]
    state.residuals[bucket.index()] = corrected.index_fill(0, places, 0)

    all_values = values.new_empty(world_size * k)
    all_places = places.new_empty(world_size * k)
    sent = dist.all_gather_into_tensor(all_places, places, async_op=True)
    gathered = dist.all_gather_into_tensor(all_values, values, async_op=True)

    def average(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        sent.wait()
        return gradient.zero_().index_add_(0, all_places, all_values / world_size)

    return gathered.get_future().then(average)
