"""What a plan is for, and what it calls things."""

from dataclasses import dataclass

from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.job import Job, Method, Optimizer, Precision, is_fine_grained


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is for."""

    shape: ModelShape
    """The model."""
    gpu: Accelerator
    """The device."""
    gpus: int
    """How many there are."""
    gpus_per_node: int = 8
    """How many NVLink or PCIe joins."""
    seq_len: int = 4096
    """Tokens per sequence."""
    global_batch: int | None = None
    """Sequences per step; None takes `usual_batch`."""
    method: Method = "full"
    """Which parameters train."""
    lora_rank: int = 16
    """Rank of the adapters."""
    stack: str = "hf"
    """Software whose constants hold."""
    precision: Precision = "bf16"
    """Format of the matrix products."""
    optimizer: Optimizer = "adamw"
    """The optimizer."""
    compile: bool = False
    """Whether torch.compile is on."""
    fused_loss: bool = False
    """Whether logits are never held whole."""
    network_gb_s: float | None = None
    """Bandwidth between nodes per GPU; None takes the reference node's."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A kind of layout that does not work."""

    layout: ParallelLayout
    """The layout."""
    strategy: str
    """Its strategy."""
    reason: str
    """Why, in words."""
    needed_gib: float | None = None
    """Least memory it was found to need; None where memory is not the reason."""


def strategy_of(job: Job) -> str:
    """The strategy's name, as checkpoints and configs use it."""
    layout = job.layout
    if job.offload != "none":
        return f"zero{max(1, job.zero)}"
    if layout.world_size == 1:
        return "single"
    if layout.tp > 1 or layout.pp > 1:
        return "parallel"
    if job.zero == 3:
        return "fsdp2"
    return ("ddp", "zero1", "zero2")[job.zero]


def usual_batch(request: PlanRequest, gpus: int) -> int:
    """Sequences per step where none are given: 4M tokens as for Llama 2, 16M from 4,096 GPUs on as for Llama 3 405B
    (arXiv 2407.21783, section 3.4.1), 64M from 1,024 GPUs on for mixtures of many small experts as for DeepSeek-V3
    (15,360 x 4,096; arXiv 2412.19437, section 4.2), 128 sequences for adapters; a multiple of the GPUs where there are
    enough of them."""
    if request.method != "full":
        wanted = 128
    else:
        millions = 64 if gpus >= 1024 and is_fine_grained(request.shape) else 16 if gpus >= 4096 else 4
        wanted = millions * 2**20 // request.seq_len
    if wanted < gpus:
        return 1 << max(0, wanted.bit_length() - 1)
    return round(wanted / gpus) * gpus
