"""Bytes per rank of what a run keeps between steps: parameters, gradients, optimizer states.

Mixed precision with AdamW costs 16 bytes per parameter before sharding (Rajbhandari et al., ZeRO, arXiv 1910.02054,
section 3.1): by Hugging Face and FSDP2 fp32 parameters, gradients and two moments; by NeMo bf16 parameters and
gradients with fp32 master copy and moments; by Megatron-DeepSpeed 4 more for gradients that add up in fp32.
"""

from dataclasses import dataclass

from hfscale.planner.frameworks import Stack
from hfscale.planner.job import Job
from hfscale.planner.model_view import ModelView

MOMENTS = {
    "adamw": 8.0,
    "adamw_bf16": 4.0,
    "adamw_8bit": 2.0 + 2 * 4 / 256,
    "sgd": 0.0,
    "sgd_momentum": 4.0,
    "adafactor": 0.01,
    "muon": 4.0,
}
"""Bytes of optimizer states per parameter: two fp32 or bf16 moments; 8 bits with an fp32 scale per 256 (Dettmers et
al., arXiv 2110.02861); rows and columns only in Adafactor (Shazeer & Stern, arXiv 1804.04235); one moment in Muon."""
QLORA_BYTES = 0.5 + 0.127 / 8 + 1 / 64 / 8
"""Of a frozen parameter in NF4 with double quantisation: 4 bits and 0.127 for the scales (Dettmers et al., arXiv
2305.14314, section 3)."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one rank."""

    parameters: float
    """Parameters in the format the optimizer or the layers hold them."""
    gradients: float
    """Gradients, all of them, at the end of the backward pass."""
    optimizer: float
    """Moments and master copies."""


def trained_parameters(view: ModelView, job: Job) -> float:
    """Parameters that get a gradient."""
    if job.method == "full":
        return float(view.total_parameters)
    return view.lora_parameters(job.lora_rank)


def local_parameters(view: ModelView, job: Job) -> float:
    """Parameters of the fullest rank before any data-parallel sharding: its layers, and the larger end."""
    layout = job.layout
    first, last = job.layer_split
    per_layer = view.layer_parameters - view.expert_parameters * (1 - 1 / job.expert_parallel)
    if layout.pp == 1:
        whole = first * per_layer + view.embedding_parameters + view.head_parameters
    else:
        head = view.shape.vocab * view.shape.embedding_width if view.shape.tied else view.head_parameters
        if job.is_v_shaped:
            head += view.embedding_parameters
        on_first = job.rank_layers[0] if job.rank_layers else last if first != last else first
        opening = on_first * per_layer + view.embedding_parameters
        whole = max(opening, last * per_layer + head, first * per_layer)
    return whole / layout.tp


def state_bytes(view: ModelView, job: Job, stack: Stack) -> StateBytes:
    """States of the fullest rank."""
    layout = job.layout
    local = local_parameters(view, job)
    share = trained_parameters(view, job) / view.total_parameters
    everyone = job.data_parallel * layout.cp
    shards = layout.dp_shard * layout.cp
    # Experts are spread over some of the data-parallel ranks already, so that fewer are left to share each.
    expert_part = _expert_part(view, job, local)

    def over(ranks: int) -> float:
        """What sharing over `ranks` leaves of a byte per parameter."""
        return (1 - expert_part) / ranks + expert_part / max(1.0, ranks / job.expert_parallel)

    if job.zero == 3:
        parameter_share = gradient_share = optimizer_share = over(shards)
    else:
        parameter_share = 1.0
        gradient_share = over(everyone) if job.zero == 2 else 1.0
        optimizer_share = over(everyone) if job.zero >= 1 else 1.0
    weight, gradient, master = _formats(job, stack)
    moments = MOMENTS[job.optimizer] / (2 if job.pure and job.optimizer == "adamw" else 1)
    frozen = {"full": 0.0, "lora": 2.0, "qlora": QLORA_BYTES}[job.method]
    trained = share * local
    parameters = (frozen * local + weight * trained) * parameter_share
    if job.method == "qlora":
        ends = view.embedding_parameters + view.head_parameters
        parameters += (2.0 - QLORA_BYTES) * ends / layout.tp / layout.pp * parameter_share
    gradients = gradient * trained * gradient_share
    optimizer = (master + moments) * trained * optimizer_share
    if job.offload != "none":
        optimizer = 0.0
    if job.offload == "full":
        parameters = gradients = 0.0
    return StateBytes(parameters=parameters, gradients=gradients, optimizer=optimizer)


def _expert_part(view: ModelView, job: Job, local: float) -> float:
    """Part of a rank's parameters that are routed experts."""
    if not view.expert_parameters:
        return 0.0
    here = job.layer_split[0] * view.expert_parameters / job.expert_parallel / job.layout.tp
    return min(1.0, here / local)


def _megatron_gradient(job: Job, stack: Stack) -> float:
    """Bytes per parameter of Megatron's bf16 gradients. NeMo's recipes keep and reduce them as they are; DeepSpeed's
    BF16_Optimizer, with which BLOOM was trained, adds them up in fp32 and keeps the micro-batch's own beside the
    sum."""
    return 6.0 if job.is_megatron_deepspeed else stack.gradient_bytes


def _formats(job: Job, stack: Stack) -> tuple[float, float, float]:
    """Bytes per trained parameter of the parameter, its gradient and its master copy."""
    if job.precision == "fp32":
        return 4.0, 4.0, 0.0
    if job.pure:
        return 2.0, 2.0, 0.0
    if stack.name == "megatron" or (job.zero in (1, 2) and stack.name == "hf"):
        # DeepSpeed and Megatron hold low-precision parameters, and masters beside the moments.
        # fp16 gradients get an fp32 copy of the rank's share at the update.
        if job.precision == "fp16":
            return 2.0, 2.0, 8.0
        return 2.0, _megatron_gradient(job, stack) if stack.name == "megatron" else 2.0, 4.0
    return 4.0, 4.0, 0.0
