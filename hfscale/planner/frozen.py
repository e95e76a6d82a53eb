"""Bytes of the frozen weights that adapters are added to, as they are kept, gathered and read.

QLoRA keeps in 4 bits only what bitsandbytes replaces (`ModelShape.quantized_parameters`); all else is in 16 bits, such
as the experts of a mixture, embedding, head and norms.
"""

from hfscale.planner.job import Job

SCALE_BYTES = 0.127 / 8
"""Bytes per parameter in NF4 of the doubly quantised scales. bitsandbytes keeps them beside the weight (`QuantState`),
where neither FSDP nor DeepSpeed shards or offloads them: every rank has all of them on its device."""
QLORA_BYTES = 0.5 + SCALE_BYTES + 1 / 64 / 8
"""Bytes per parameter in NF4 with double quantisation: 4 bits and 0.127 bits for the scales (Dettmers et al., arXiv
2305.14314, section 3)."""
QLORA_READ_BYTES = QLORA_BYTES + 4.0
"""Bytes of memory traffic per parameter in NF4 that is read: it is written and read in 16 bits too."""


def frozen_bytes(job: Job) -> float:
    """Compute the bytes of all frozen parameters, on all ranks together; 0 where every parameter trains.

    Args:
        job (`Job`): the run.
    """
    if job.method == "full":
        return 0.0
    return mean_bytes(job) * job.shape.total_parameters


def scale_bytes(job: Job) -> float:
    """Compute the bytes of the scales of all weights in 4 bits; 0 without QLoRA.

    Args:
        job (`Job`): the run.
    """
    return SCALE_BYTES * _quantized(job)


def mean_bytes(job: Job) -> float:
    """Compute the bytes of an average parameter of the model in the format in which it is gathered.

    Args:
        job (`Job`): the run.
    """
    if job.method == "full":
        return job.value_bytes
    shape = job.shape
    return 2.0 - (2.0 - QLORA_BYTES) * _quantized(job) / shape.total_parameters


def dense_bytes(job: Job) -> float:
    """Compute the bytes of an average parameter of a layer, without its routed experts, as it is gathered.

    Args:
        job (`Job`): the run.
    """
    if job.method == "full":
        return job.value_bytes
    shape = job.shape
    dense = shape.mean_layer_parameters - shape.mean_expert_parameters
    return 2.0 - (2.0 - QLORA_BYTES) * _quantized(job) / shape.layers / dense


def expanded_bytes(job: Job) -> float:
    """Compute the bytes of the largest matrix in 4 bits, of which each product makes a copy in 16 bits.

    Args:
        job (`Job`): the run; 0 without QLoRA.
    """
    if job.method != "qlora":
        return 0.0
    return 2.0 * job.shape.largest_quantized


def read_bytes(job: Job) -> float:
    """Compute the memory traffic of an average parameter of frozen weights that is read once, in bytes.

    Args:
        job (`Job`): the run, with adapters.
    """
    share = _quantized(job) / job.shape.total_parameters
    return 2.0 + (QLORA_READ_BYTES - 2.0) * share


def _quantized(job: Job) -> float:
    """Parameters in 4 bits, on all ranks together."""
    return float(job.shape.quantized_parameters) if job.method == "qlora" else 0.0
