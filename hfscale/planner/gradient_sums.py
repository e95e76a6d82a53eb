"""Memory traffic with which a rank adds up the gradients of its micro-batches, outside the products that compute them.

The bytes are those that operators read and write, counted on CPUs (`benchmarks/step_traffic.py`,
`benchmarks/results/step_traffic.json`).
"""

from hfscale.planner.activations import regime_of
from hfscale.planner.job import Job
from hfscale.planner.kernels import Rates
from hfscale.planner.memory import trained_parameters

SUM_BYTES = 12.0
"""Per parameter whose fp32 gradient is added to another: both are read, and the sum is written."""
CAST_BYTES = 6.0
"""Per gradient in bf16 that is cast to fp32."""
ZERO1_STEP_BYTES = 56.0
"""Per parameter and step, on each rank: DeepSpeed's BF16_Optimizer copies all gradients to one buffer, divides, clips
and clears them, and copies the updated parameters (DeepSpeed 0.19.8, runtime/bf16_optimizer.py)."""
ZERO_SHARD_BYTES = 24.0
"""Per parameter and micro-batch that the rank keeps: ZeRO-2 casts and copies its part of the reduced gradient and adds
it to an fp32 sum (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py)."""


def gradient_sums_s(job: Job, rates: Rates) -> float:
    """Return the seconds of a step in which gradients are added up, divided and copied on the device.

    FSDP2's copies come with its communication, and are not counted here.

    Args:
        job (`Job`): the training.
        rates (`Rates`): what its device reaches.
    """
    if job.stack != "hf":
        return 0.0
    per_parameter = 0.0
    if regime_of(job) == "autocast":
        per_parameter = SUM_BYTES * (job.micro_batches - 1)
    ranks = job.data_parallel * job.layout.cp
    if ranks > 1 and job.zero in (1, 2):
        per_parameter = _of_deepspeed(job, ranks)
    return per_parameter * trained_parameters(job) / rates.memory


def _of_deepspeed(job: Job, ranks: int) -> float:
    """Bytes per trained parameter."""
    divided = 2.0 * job.value_bytes
    if job.precision != "bf16":
        return divided * job.micro_batches if job.zero == 2 else 0.0
    if job.zero == 1:
        return (CAST_BYTES + SUM_BYTES) * job.micro_batches + ZERO1_STEP_BYTES
    return (divided + ZERO_SHARD_BYTES / ranks) * job.micro_batches
