"""Activations that wait for the backward pass in the CPU's memory (`activation_offloading` of TRL's trainers).

TRL copies what autograd saves to pinned memory in the forward pass, on a stream of its own, and back when the backward
pass of its operator runs (TRL 1.16, models/activation_offloading.py). Parameters stay, but copies of them that a pass
makes are saved too: those in bf16 under autocast, and those that FSDP2 gathers. Where a layer is recomputed, its input
alone is saved. What selective recomputation keeps is not seen by TRL, so it is refused (`facts/support.toml`).

All byte counts are those of one micro-batch on one rank.
"""

import math

from hfscale.planner.activations import end_activations, kept_and_working, regime_of
from hfscale.planner.experts import layer_parameters
from hfscale.planner.frameworks import Framework
from hfscale.planner.frozen import dense_bytes
from hfscale.planner.job import Job, strategy_of

STASHED_TENSORS = 5
"""Saved tensors that TRL keeps on the device while they are copied (`max_fwd_stash_size`)."""
PINNED_ROUNDING = 1 / math.log(2)
"""Pinned memory of a tensor relative to its size: torch rounds each block up to a power of two
(c10/core/CachingHostAllocator.h), which is 1.44 times for sizes that are spread evenly in their logarithm."""


def copied_bytes(job: Job, framework: Framework) -> float:
    """Compute the bytes of an average layer that are copied to the CPU, and back in the backward pass.

    Args:
        job (`Job`): the run; 0 where it offloads no activations.
        framework (`Framework`): constants of the training framework.
    """
    if not job.activation_offload:
        return 0.0
    kept, _ = kept_and_working(job, framework)
    if job.activation_checkpointing == "full":
        return kept
    dense, experts = layer_parameters(job)
    if strategy_of(job) == "fsdp2":
        return kept + dense_bytes(job) * dense + job.value_bytes * experts
    if regime_of(job) == "autocast":
        return kept + 2.0 * (dense + experts)
    return kept


def stashed_bytes(job: Job, framework: Framework) -> float:
    """Compute the bytes of saved tensors that are still on the device when the forward pass ends.

    Args:
        job (`Job`): the run, which offloads activations.
        framework (`Framework`): constants of the training framework.
    """
    kept, _ = kept_and_working(job, framework)
    if job.activation_checkpointing == "full":
        return STASHED_TENSORS * kept
    shape = job.shape
    widest = max(shape.hidden, shape.mlp_width, shape.attention.query_width)
    return min(kept, STASHED_TENSORS * job.value_bytes * job.tokens * widest)


def pinned_bytes(job: Job, framework: Framework) -> float:
    """Compute the pinned memory of the CPU that a rank needs for the activations of a micro-batch.

    Args:
        job (`Job`): the run; 0 where it offloads no activations.
        framework (`Framework`): constants of the training framework.
    """
    if not job.activation_offload:
        return 0.0
    copied = job.shape.layers * copied_bytes(job, framework) + end_activations(job, framework)
    return PINNED_ROUNDING * copied


def exposed_copies_s(
    job: Job, framework: Framework, host_bytes_s: float, forward: float, backward: float
) -> float:
    """Compute the seconds by which the copies of a layer exceed its computation, forward and backward.

    Args:
        job (`Job`): the run; 0 where it offloads no activations.
        framework (`Framework`): constants of the training framework.
        host_bytes_s (`float`): bandwidth to the CPU's memory, bytes/s.
        forward (`float`): seconds of the layer's forward pass.
        backward (`float`): seconds of its backward pass, with recomputation.
    """
    copy = copied_bytes(job, framework) / host_bytes_s
    return max(0.0, copy - forward) + max(0.0, copy - backward)
