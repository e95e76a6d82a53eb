"""Memory of the fullest rank at its peak, by part.

peak = (states + activations of the micro-batches in flight + the larger of the loss's peak and one layer's backward
pass + gathered parameters and buckets) x the allocator's fragmentation + CUDA context and communication buffers.
States are allocated once and stay, so only the rest is fragmented. While the device has room, the allocator also keeps
blocks that are free again: nvidia-smi counts them, but a run does not need them.

States are parameters, gradients and optimizer states. Mixed precision with AdamW takes 16 bytes per parameter before
sharding (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1): Hugging Face and FSDP2 hold parameters, gradients
and two moments in fp32; NeMo holds parameters and gradients in bf16 and a master copy and moments in fp32. DeepSpeed
needs 2 bytes more for gradients that are accumulated in fp32, as the shipped configs ask, and Megatron-DeepSpeed 4.

All byte counts are per rank unless a docstring states otherwise.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from hfscale.facts.hardware import Accelerator
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.adapters import Modules, target_modules
from hfscale.planner.experts import kept_share, layer_parameters
from hfscale.planner.frameworks import (
    Framework,
    SharedConstants,
    find_framework,
    shared_constants,
)
from hfscale.planner.frozen import QLORA_BYTES as QLORA_BYTES
from hfscale.planner.frozen import frozen_bytes, scale_bytes
from hfscale.planner.host_activations import pinned_bytes
from hfscale.planner.images import image_parameters
from hfscale.planner.job import OPTIMIZERS, Job, strategy_of
from hfscale.planner.peak import highest_moment
from hfscale.planner.tasks import reference_bytes
from hfscale.planner.teacher import teacher_bytes, teacher_width

AVERAGE_BYTES = 4.0
"""Bytes per trained parameter of an average, or of a snapshot of a mean."""

# -- states: what a rank keeps between steps --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Holds the bytes of the states on one rank."""

    parameters: float
    """Parameters, in the format in which the layers or the optimizer hold them."""
    gradients: float
    """All gradients, as they are at the end of the backward pass."""
    optimizer: float
    """Moments and master copies."""
    average: float = 0.0
    """Averaged weights in fp32."""


def trained_parameters(job: Job) -> float:
    """Count the parameters that get a gradient, on all ranks together.

    Args:
        job (`Job`): the run, which gives the method and the LoRA rank.

    Raises:
        UsageError: the LoRA rank is below 1.
    """
    if job.method == "full":
        return float(job.shape.total_parameters)
    return float(adapter_parameters(job))


def adapter_parameters(job: Job, *, active: bool = False) -> int:
    """Count the parameters of the LoRA adapters (`hfscale.planner.adapters.target_modules`).

    Args:
        job (`Job`): the run.
        active (`bool`): whether to count only the adapters that a token passes, for FLOPs.

    Raises:
        UsageError: the LoRA rank is below 1.
    """
    modules = target_modules(job)
    if not isinstance(modules, str):
        modules = tuple(modules)
    return _adapter_parameters(job.shape, job.lora_rank, modules, active)


@lru_cache(maxsize=512)
def _adapter_parameters(shape: ModelShape, rank: int, modules: Modules, active: bool) -> int:
    return shape.lora_parameters(rank, modules, active=active)


def local_parameters(job: Job) -> float:
    """Count the parameters of the fullest rank before data-parallel sharding.

    The rank holds its layers, and the embedding or the head if it is the first or the last pipeline rank.

    Args:
        job (`Job`): the run.
    """
    shape = job.shape
    layout = job.layout
    first, last = job.layer_split
    per_layer = sum(layer_parameters(job)) * layout.tp
    if layout.pp == 1:
        parameters = first * per_layer + shape.embedding_parameters + shape.head_parameters
    else:
        head = shape.vocab * shape.embedding_width if shape.tied else shape.head_parameters
        if job.is_v_shaped:
            head += shape.embedding_parameters
        if job.rank_layers:
            on_first = job.rank_layers[0]
        elif first != last:
            on_first = last
        else:
            on_first = first
        parameters = max(
            on_first * per_layer + shape.embedding_parameters,
            last * per_layer + head,
            first * per_layer,
        )
    return parameters / layout.tp


def state_bytes(job: Job, framework: Framework) -> StateBytes:
    """Compute the bytes of the fullest rank's states on the device; what is offloaded is not counted.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
    """
    shape = job.shape
    layout = job.layout
    local = local_parameters(job)
    share = trained_parameters(job) / shape.total_parameters
    all_replicas = job.data_parallel * layout.cp
    shards = layout.dp_shard * layout.cp
    expert_part = _expert_part(job, local)

    def share_of(ranks: int) -> float:
        """The fraction of the local parameters that a rank keeps if `ranks` ranks shard them."""
        return (1 - expert_part) / ranks + expert_part * kept_share(job, ranks)

    if job.zero == 3:
        parameter_share = gradient_share = optimizer_share = share_of(shards)
    else:
        parameter_share = 1.0
        gradient_share = share_of(all_replicas) if job.zero == 2 else 1.0
        optimizer_share = share_of(all_replicas) if job.zero >= 1 else 1.0
    weight, gradient, master = _formats(job, framework)
    moments = OPTIMIZERS[job.optimizer]["state_bytes"]
    if job.has_pure_adamw:
        moments /= 2
    part = local / shape.total_parameters
    scales = scale_bytes(job) * part
    frozen = frozen_bytes(job) * part
    frozen -= scales
    trained = share * local
    parameters = scales + (frozen + weight * trained) * parameter_share
    gradients = gradient * trained * gradient_share
    optimizer = (master + moments) * trained * optimizer_share
    reading = image_parameters(job)
    of_frozen = weight if job.method == "full" else 2.0
    parameters += (weight * reading.trained + of_frozen * reading.frozen) * parameter_share
    gradients += gradient * reading.trained * gradient_share
    optimizer += (master + moments) * reading.trained * optimizer_share
    # The average is of what the rank's optimizer steps (hfscale/averaging/weights.py)
    average = 0.0
    if not job.averages_on_host:
        averaged = trained + reading.trained
        average = AVERAGE_BYTES * job.averages * averaged * optimizer_share
    if job.offload != "none":
        optimizer = 0.0
    if job.offload == "full":
        parameters = scales
        gradients = 0.0
    return StateBytes(
        parameters=parameters, gradients=gradients, optimizer=optimizer, average=average
    )


def update_bytes(job: Job, states: StateBytes) -> float:
    """Compute the bytes that the optimizer's update needs in addition to the states on one rank.

    Args:
        job (`Job`): the run; 0 with DeepSpeed and Megatron, which have optimizers of their own.
        states (`StateBytes`): the states of the rank.
    """
    if job.stack == "megatron" or strategy_of(job).startswith("zero"):
        return 0.0
    share: float = OPTIMIZERS[job.optimizer].get("update_share", 0.0)
    return share * states.optimizer


def _expert_part(job: Job, local: float) -> float:
    """Fraction of a rank's parameters that belong to routed experts."""
    shape = job.shape
    if not shape.mean_expert_parameters:
        return 0.0
    here = job.layer_split[0] * layer_parameters(job)[1]
    return min(1.0, here / local)


def _formats(job: Job, framework: Framework) -> tuple[float, float, float]:
    """Bytes per trained parameter of the parameter itself, its gradient and its master copy."""
    if job.precision == "fp32":
        return 4.0, 4.0, 0.0
    if job.pure_bf16:
        return 2.0, 2.0, 0.0
    if framework.name == "megatron" or (job.zero in (1, 2) and framework.name == "hf"):
        # DeepSpeed and Megatron hold low-precision parameters, and a master copy with the moments. The shipped
        # DeepSpeed configs accumulate gradients in fp32, ZeRO-1 before they are sharded (DeepSpeed 0.19.8,
        # runtime/bf16_optimizer.py; in fp16 it copies the rank's share). Megatron's fp16 gradients get an fp32 copy of
        # the rank's share at the update. With bf16 parameters it accumulates gradients in fp32, but NeMo's performance
        # recipes do so in bf16; DeepSpeed's BF16_Optimizer, when it trained BLOOM, kept those of the micro-batch too.
        if framework.name == "hf":
            return 2.0, 4.0, 8.0 if job.precision == "fp16" and job.zero == 1 else 4.0
        if job.precision == "fp16":
            return 2.0, 2.0, 8.0
        if job.is_megatron_deepspeed:
            return 2.0, 6.0, 4.0
        return 2.0, reduced_gradient_bytes(job, framework), 4.0
    return 4.0, 4.0, 0.0


def reduced_gradient_bytes(job: Job, framework: Framework) -> float:
    """Return the bytes of a gradient as it is accumulated and reduced.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
    """
    is_half = job.precision == "fp16" and framework.name == "megatron"
    if job.pure_bf16 or job.bf16_gradients or is_half:
        return 2.0
    return framework.gradient_bytes


# -- the peak ---------------------------------------------------------------------------------------------------------


GIB = 2.0**30
"""Bytes of a GiB."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Holds the peak memory of the fullest rank by part, in GiB."""

    parameters: float
    """Parameters, after sharding."""
    gradients: float
    """Gradients, after sharding."""
    optimizer: float
    """Moments and master copies, and averaged weights."""
    activations: float
    """Activations kept for the backward pass, of all micro-batches in flight."""
    loss: float
    """Logits and their gradient at the loss."""
    buffers: float
    """Gathered parameters, gradient buckets, fragmentation."""
    context: float
    """CUDA context, libraries and NCCL's buffers."""
    cached: float = 0.0
    """Blocks that are free again, which the allocator keeps while the device has room for them."""

    @property
    def total(self) -> float:
        """Sum of all parts: what nvidia-smi shows."""
        return float(sum(vars(self).values()))

    @property
    def needed(self) -> float:
        """Sum of all parts without `cached`: with less memory the run ends."""
        return self.total - self.cached

    @property
    def needed_parts(self) -> dict[str, float]:
        """The parts of `needed` by name."""
        return {name: gib for name, gib in vars(self).items() if name != "cached"}

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states, and those of a reference model."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class DpoMemory(Memory):
    """Holds the peak memory of the fullest rank with a reference model by part, in GiB."""

    reference: float
    """Parameters of the reference model, after sharding; 0 where it is the policy without its adapters."""

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states, and those of a reference model."""
        return super().states + self.reference


@dataclass(frozen=True, kw_only=True)
class DistillationMemory(Memory):
    """Holds the peak memory of the fullest rank of a distillation by part, in GiB."""

    teacher: float
    """Parameters of the teacher, after sharding."""
    kv_cache: float
    """Keys and values that generation caches; 0 where the peak is at training, when they are freed."""

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states, and the teacher's parameters."""
        return super().states + self.teacher


@dataclass(frozen=True, kw_only=True)
class GrpoMemory(DpoMemory):
    """Holds the peak memory of the fullest rank with generation by part, in GiB."""

    kv_cache: float
    """Keys and values that generation caches; 0 where the peak is at training, when they are freed."""


def allocated_gib(memory: Memory, common: SharedConstants | None = None) -> float:
    """Compute the part of a peak that `torch.cuda.max_memory_allocated` reports, in GiB.

    It includes neither what the allocator reserves in addition nor memory outside the allocator.

    Args:
        memory (`Memory`): the peak.
        common (`SharedConstants`, *optional*): constants of hardware and networks; by default those of
            `frameworks.toml`.
    """
    others = memory.needed - memory.context - memory.states
    return memory.states + others / (common or shared_constants()).fragmentation


def memory_of(job: Job, framework: Framework, common: SharedConstants | None = None) -> Memory:
    """Estimate the peak memory of the fullest rank by part, in GiB.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        common (`SharedConstants`, *optional*): constants of hardware and networks; by default those of
            `frameworks.toml`.

    Raises:
        UsageError: the LoRA rank is below 1.
    """
    common = common or shared_constants()
    states = state_bytes(job, framework)
    peak = highest_moment(job, framework, states.gradients, update_bytes(job, states))
    reference = reference_bytes(job)
    others = peak.total - peak.gradients
    parts = {
        "parameters": states.parameters / GIB,
        "gradients": peak.gradients / GIB,
        "optimizer": (states.optimizer + states.average) / GIB,
        "activations": peak.activations / GIB,
        "loss": peak.loss / GIB,
        "buffers": (peak.buffers + (common.fragmentation - 1) * others) / GIB,
        "context": framework.context_gib + common.group_gib * groups(job),
    }
    if job.task == "dpo":
        memory: Memory = DpoMemory(**parts, reference=reference / GIB)
    elif job.task == "grpo":
        memory = GrpoMemory(**parts, reference=reference / GIB, kv_cache=peak.kv_cache / GIB)
    elif job.task == "distillation":
        teacher = teacher_bytes(job) / GIB
        memory = DistillationMemory(**parts, teacher=teacher, kv_cache=peak.kv_cache / GIB)
    else:
        memory = Memory(**parts)
    # Compiled layers allocate fewer and larger blocks; no published peak says how many of them are kept.
    kept = 0.0 if job.compile else framework.cached * others / GIB
    room = max(0.0, job.gpu.memory_gib - memory.total)
    return replace(memory, cached=min(kept, room))


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Says where and when the memory of a run is at its peak."""

    rank: str
    """The fullest rank: `every rank`, or the pipeline rank."""
    at: str
    """The moment of a step, such as `loss`."""

    @property
    def description(self) -> str:
        """Moment and rank; without the rank where it is every rank."""
        return self.at if self.rank == "every rank" else f"{self.at}, {self.rank}"


def peak_of(job: Job, framework: Framework) -> Peak:
    """Find the rank and the moment of a step with the highest peak.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
    """
    states = state_bytes(job, framework)
    peak = highest_moment(job, framework, states.gradients, update_bytes(job, states))
    return Peak(rank=peak.rank, at=peak.at)


def groups(job: Job) -> int:
    """Count the process groups of a rank, each of which has communication buffers of its own.

    There is one of all ranks; with several axes one per axis; with a pipeline one of its first and last rank, which
    share the embedding; with expert parallelism one of the ranks that share experts.
    """
    layout = job.layout
    axes = sum(
        size > 1 for size in (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp)
    )
    return min(1, axes) + (axes if axes > 1 else 0) + (layout.pp > 1) + (job.expert_parallel > 1)


def host_gib(job: Job) -> float:
    """Compute the CPU memory that offload needs per GPU, in GiB.

    Master weights, moments and the gradients that the optimizer on the CPU reads are in fp32: 16 bytes per trained
    parameter. ZeRO-1 and 2 need 2 more for updated weights on their way to the GPU (DeepSpeed 0.19.8,
    runtime/zero/stage_1_and_2.py); ZeRO-3 4 more to accumulate gradients in fp32, and 2 for offloaded parameters
    (runtime/zero/stage3.py). Frozen parameters take the bytes of their format (`frozen_bytes`). All ranks share them.
    Each rank has the activations of a micro-batch where these are offloaded (`host_activations.pinned_bytes`).

    Args:
        job (`Job`): the run.
    """
    activations = pinned_bytes(job, find_framework(job.stack)) / GIB
    if job.offload == "none":
        return activations
    trained = (16.0 + (4.0 if job.zero == 3 else 2.0)) * trained_parameters(job)
    if job.offload == "optimizer":
        return activations + trained / job.layout.world_size / GIB
    parameters = 2.0 * trained_parameters(job) + frozen_bytes(job)
    return activations + (trained + parameters) / job.layout.world_size / GIB


HOST_GIB_PER_GPU = 256.0
"""CPU memory per GPU of a server with NVLink: 2 TB for eight GPUs (DGX H100 datasheet)."""
HOST_GIB_PER_CARD = 64.0
"""CPU memory per GPU of a machine with PCIe cards, assumed."""


def assumed_host_gib(gpu: Accelerator) -> float:
    """Return the CPU memory per GPU that a machine is assumed to have, in GiB.

    Args:
        gpu (`Accelerator`): the device.
    """
    return HOST_GIB_PER_GPU if gpu.link_gb_s else HOST_GIB_PER_CARD


def node_host_gib(job: Job, *, saves: bool = True) -> float:
    """Compute the CPU memory that the ranks of the fullest node need, in GiB, without that of their processes.

    It is what offload keeps there, and in addition the larger of the weights while they are loaded and the copy of the
    states that a background save keeps. Loading: every rank reads all weights without sharding, with ZeRO-1 and 2, and
    with fp8, for which Accelerate supports nothing else; rank 0 alone with FSDP2, each rank its part with offload
    (DeepSpeed), in `ParallelTrainer` and where transformers shards the model itself. Saving: rank 0
    copies weights and optimizer states that are not sharded, otherwise each rank its part. What is offloaded is copied
    too.

    Averaged weights in the CPU's memory are there all the time.

    Args:
        job (`Job`): the run.
        saves (`bool`): whether a background save is to have its copy. Where it does not fit, training waits for each
            save instead.
    """
    local = min(job.gpus_per_node, job.layout.world_size)
    share = local / job.layout.world_size
    parameters = float(job.shape.total_parameters)
    trained = trained_parameters(job)
    weights = 4.0 * parameters if job.method == "full" else frozen_bytes(job) + 4.0 * trained
    reading = image_parameters(job)
    weights += 4.0 * reading.trained + (4.0 if job.method == "full" else 2.0) * reading.frozen
    trained += reading.trained
    saved = (4.0 + OPTIMIZERS[job.optimizer]["state_bytes"]) * trained
    is_split = job.layout.tp * job.layout.pp > 1 or job.spreads_experts
    readers = 1 if job.zero == 3 and job.precision != "fp8" else local
    loading = weights * (share if job.offload != "none" or is_split else readers)
    if job.teacher_shape is not None:  # each rank reads it, before its part alone is kept
        loading += local * teacher_width(job) * job.teacher_shape.total_parameters
    saving = saved if job.zero == 0 and not is_split else saved * share
    if not saves:
        saving = 0.0
    averages = 0.0
    if job.averages_on_host:
        # Every rank has one of what its optimizer steps; without sharding that is all of it
        averages = AVERAGE_BYTES * job.averages * trained
        averages *= local if job.zero == 0 and not is_split else share
    return host_gib(job) * local + float(max(loading, saving) + averages) / GIB
