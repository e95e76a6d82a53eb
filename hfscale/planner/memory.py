"""Memory of the fullest rank at its peak, by part.

peak = (states + activations of the micro-batches in flight + the larger of the loss's peak and one layer's backward
pass + gathered parameters and buckets) x the allocator's fragmentation + CUDA context and communication buffers.

States are parameters, gradients and optimizer states. Mixed precision with AdamW takes 16 bytes per parameter before
sharding (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1): Hugging Face and FSDP2 hold parameters, gradients
and two moments in fp32; NeMo holds parameters and gradients in bf16 and a master copy and moments in fp32;
Megatron-DeepSpeed needs 4 bytes more, for gradients that are accumulated in fp32.

All byte counts are per rank unless a docstring states otherwise.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from hfscale.facts.model_shape import ModelShape
from hfscale.facts.schedules import in_flight
from hfscale.planner.frameworks import Framework, SharedConstants, shared_constants
from hfscale.planner.job import OPTIMIZERS, Job
from hfscale.planner.tasks import (
    LOGIT_COPIES_BYTES,
    forward_bytes,
    generated_at_once,
    generation_weight_bytes,
    kv_cache_bytes,
    prompt_job,
    reference_buffer_bytes,
    reference_bytes,
)

# -- states: what a rank keeps between steps --------------------------------------------------------------------------


QLORA_BYTES = 0.5 + 0.127 / 8 + 1 / 64 / 8
"""Bytes per frozen parameter in NF4 with double quantisation: 4 bits and 0.127 bits for the scales (Dettmers et al.,
arXiv 2305.14314, section 3)."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Holds the bytes of the states on one rank."""

    parameters: float
    """Parameters, in the format in which the layers or the optimizer hold them."""
    gradients: float
    """All gradients, as they are at the end of the backward pass."""
    optimizer: float
    """Moments and master copies."""


def trained_parameters(job: Job) -> float:
    """Counts the parameters that get a gradient, on all ranks together.

    Args:
        job (`Job`): The run, which gives the method and the LoRA rank.

    Raises:
        `UsageError`: The LoRA rank is below 1.
    """
    if job.method == "full":
        return float(job.shape.total_parameters)
    return _adapter_parameters(job.shape, job.lora_rank)


@lru_cache(maxsize=512)
def _adapter_parameters(shape: ModelShape, rank: int) -> float:
    """Parameters of adapters on every linear layer; in a mixture of experts, whose adapters cannot be counted, on the
    attention's output projection alone."""
    modules = "all-linear" if shape.moe is None else [shape.attention.linears[-1].path]
    return float(shape.lora_parameters(rank, modules))


def local_parameters(job: Job) -> float:
    """Counts the parameters of the fullest rank before data-parallel sharding.

    The rank holds its layers, and the embedding or the head if it is the first or the last pipeline rank.

    Args:
        job (`Job`): The run.
    """
    shape = job.shape
    layout = job.layout
    first, last = job.layer_split
    per_layer = shape.mean_layer_parameters - shape.mean_expert_parameters * (1 - 1 / job.expert_parallel)
    if layout.pp == 1:
        parameters = first * per_layer + shape.embedding_parameters + shape.head_parameters
    else:
        head = shape.vocab * shape.embedding_width if shape.tied else shape.head_parameters
        if job.is_v_shaped:
            head += shape.embedding_parameters
        on_first = job.rank_layers[0] if job.rank_layers else last if first != last else first
        parameters = max(
            on_first * per_layer + shape.embedding_parameters,
            last * per_layer + head,
            first * per_layer,
        )
    return parameters / layout.tp


def state_bytes(job: Job, framework: Framework) -> StateBytes:
    """Computes the bytes of the fullest rank's states on the device; what is offloaded is not counted.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
    """
    shape = job.shape
    layout = job.layout
    local = local_parameters(job)
    share = trained_parameters(job) / shape.total_parameters
    all_replicas = job.data_parallel * layout.cp
    shards = layout.dp_shard * layout.cp
    # Expert parallelism already spreads experts over some of the data-parallel ranks, so fewer ranks share each.
    expert_part = _expert_part(job, local)

    def share_of(ranks: int) -> float:
        """The fraction of the local parameters that a rank keeps if `ranks` ranks shard them."""
        return (1 - expert_part) / ranks + expert_part / max(1.0, ranks / job.expert_parallel)

    if job.zero == 3:
        parameter_share = gradient_share = optimizer_share = share_of(shards)
    else:
        parameter_share = 1.0
        gradient_share = share_of(all_replicas) if job.zero == 2 else 1.0
        optimizer_share = share_of(all_replicas) if job.zero >= 1 else 1.0
    weight, gradient, master = _formats(job, framework)
    moments = OPTIMIZERS[job.optimizer]["state_bytes"] / (2 if job.pure and job.optimizer == "adamw" else 1)
    frozen = {"full": 0.0, "lora": 2.0, "qlora": QLORA_BYTES}[job.method]
    trained = share * local
    parameters = (frozen * local + weight * trained) * parameter_share
    if job.method == "qlora":
        ends = shape.embedding_parameters + shape.head_parameters
        parameters += (2.0 - QLORA_BYTES) * ends / layout.tp / layout.pp * parameter_share
    gradients = gradient * trained * gradient_share
    optimizer = (master + moments) * trained * optimizer_share
    if job.offload != "none":
        optimizer = 0.0
    if job.offload == "full":
        parameters = gradients = 0.0
    return StateBytes(parameters=parameters, gradients=gradients, optimizer=optimizer)


def _expert_part(job: Job, local: float) -> float:
    """Fraction of a rank's parameters that belong to routed experts."""
    shape = job.shape
    if not shape.mean_expert_parameters:
        return 0.0
    here = job.layer_split[0] * shape.mean_expert_parameters / job.expert_parallel / job.layout.tp
    return min(1.0, here / local)


def _formats(job: Job, framework: Framework) -> tuple[float, float, float]:
    """Bytes per trained parameter of the parameter itself, its gradient and its master copy."""
    if job.precision == "fp32":
        return 4.0, 4.0, 0.0
    if job.pure:
        return 2.0, 2.0, 0.0
    if framework.name == "megatron" or (job.zero in (1, 2) and framework.name == "hf"):
        # DeepSpeed and Megatron hold low-precision parameters, and a master copy with the moments. At the update fp16
        # gradients get an fp32 copy of the rank's share. NeMo's recipes keep bf16 gradients; DeepSpeed's
        # BF16_Optimizer, which trained BLOOM, accumulates them in fp32 and keeps those of the micro-batch too.
        if job.precision == "fp16":
            return 2.0, 2.0, 8.0
        if job.is_megatron_deepspeed:
            return 2.0, 6.0, 4.0
        return 2.0, framework.gradient_bytes if framework.name == "megatron" else 2.0, 4.0
    return 4.0, 4.0, 0.0


# -- activations: what the forward pass keeps for the backward pass ---------------------------------------------------


SCORE_BYTES_KEPT = 5.0
"""Bytes kept per attention score without flash attention: 2 each for the scores and their softmax, 1 for the dropout
mask (Korthikanti et al., arXiv 2205.05198, section 4.1)."""
LOSS_TILE = (4096, 32768)
"""Tokens and vocabulary entries of a tile of TRL's loss (TRL 1.16, kernels/chunked_logprob.py, trainer/utils.py)."""
FUSED_LOSS_CHUNKS = 8
"""Parts in which a fused loss processes the logits (Liger's default grows with the vocabulary; torchtune uses 8)."""


def layer_bytes(job: Job, framework: Framework) -> float:
    """Computes the bytes of the activations of one layer and micro-batch without recomputation.

    Attention scores are not counted. The activations are the layer's widths times the framework's bytes: hidden (norms
    and residuals), queries and the attention's output, keys and values, the MLP, and the copies of a token that its
    experts get. The bytes are those of Korthikanti et al., arXiv 2205.05198, section 4.1, for Megatron; for Hugging
    Face's layers they are 26 to 28 h + 8 f, and 4 h more for each expert, measured with torch's MemTracker. Sequence
    parallelism splits the hidden part too. With frozen weights the input of the MLP's last matrix is not kept.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
    """
    shape = job.shape
    attention = shape.attention
    tp = job.layout.tp
    mlp = framework.kept_f if shape.gated else framework.kept_f_plain
    if job.method != "full":
        mlp -= 2.0
    split = tp if job.sequence_parallel else 1
    inside = framework.kept_q * attention.query_width + framework.kept_kv * attention.kv_width + mlp * shape.mlp_width
    widths = framework.kept_h * shape.hidden / split + inside / tp
    widths += framework.kept_e * shape.moe_share * shape.top_k * shape.hidden / split
    return job.tokens * (framework.compiled_kept if job.compile else 1.0) * widths


def selective_bytes(job: Job) -> float:
    """Computes the bytes that selective recomputation keeps of one layer and micro-batch.

    It keeps the layer's input, the attention's output, and every second matrix product (queries, values, the MLP's
    first, and the last of a gated MLP), 2 bytes each, as torchtitan's policy and hfscale/recipe/arguments.py do. A
    compiled backward pass does not read the output of the last product.

    Args:
        job (`Job`): The run.
    """
    shape = job.shape
    attention = shape.attention
    tp = job.layout.tp
    boundary = shape.hidden / (tp if job.sequence_parallel else 1)
    last = shape.hidden if shape.gated and not job.compile else 0.0
    inside = (2 * attention.query_width + attention.kv_width / 2 + shape.mlp_width) / tp
    return 2.0 * job.tokens * (boundary + inside + last)


def _megatron_dropped(job: Job, framework: Framework) -> float:
    """Bytes that Megatron's selective recomputation drops of one layer and micro-batch, without attention scores.

    It drops nothing else of a dense model. Of a mixture of experts it drops the outputs of norms and activation
    functions, and latent attention's queries, keys and values, which are expanded again (`--recompute-modules
    layernorm moe_act mla_up_proj`; arXiv 2412.19437, section 3.2.3).
    """
    shape = job.shape
    attention = shape.attention
    if shape.moe is None:
        return 0.0
    tp = job.layout.tp
    norms = 2 * 2.0 * shape.hidden / (tp if job.sequence_parallel else 1)
    inner = 2.0 * shape.moe_share * shape.mlp_width / tp
    latent = 0.0
    if attention.latent_width:
        kept = 2.0 * attention.query_width + framework.kept_kv * attention.kv_width
        latent = (kept - 2.0 * attention.latent_width) / tp
    return job.tokens * (norms + inner + latent)


def kept_and_working(job: Job, framework: Framework) -> tuple[float, float]:
    """Computes the bytes of one layer and micro-batch under the job's recomputation.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.

    Returns:
        `tuple[float, float]`: Bytes kept until the backward pass, and further bytes that exist only while the layer's
            backward pass runs.
    """
    shape = job.shape
    all_activations = layer_bytes(job, framework) + _gathered_inputs(job, framework)
    tp = job.layout.tp
    scores = 0.0 if job.flash_attention else SCORE_BYTES_KEPT * job.tokens * shape.attention.heads / tp * job.seq_len
    boundary = 2.0 * job.tokens * shape.hidden / (tp if job.sequence_parallel else 1)
    if job.recompute == "none":
        return all_activations + scores, 0.0
    if job.recompute == "full":
        return boundary, all_activations + scores
    if framework.name == "megatron":
        return all_activations - _megatron_dropped(job, framework), scores
    kept = min(all_activations, selective_bytes(job))
    return kept, all_activations + scores - kept


def _gathered_inputs(job: Job, framework: Framework) -> float:
    """Bytes of one layer and micro-batch that `ParallelTrainer` keeps and Megatron does not.

    With sequence parallelism these are the inputs of attention and MLP, which it keeps gathered, whereas Megatron
    gathers them again for the backward pass; with context parallelism the other ranks' keys and values.
    """
    shape = job.shape
    if framework.name != "hf":
        return 0.0
    tp = job.layout.tp
    cp = job.layout.cp
    inputs = 2 * 2.0 * shape.hidden * (1 - 1 / tp) if job.sequence_parallel else 0.0
    others = 2.0 * shape.attention.kv_width / tp * (cp - 1) if job.layout.pp > 1 else 0.0
    return job.tokens * (inputs + others)


def micro_batches_in_flight(job: Job, *, last: bool = False) -> float:
    """Counts the micro-batches whose activations the first or the last pipeline rank holds at once.

    The formulas are those of `hfscale.facts.schedules.in_flight`, except that the last rank of an interleaved schedule
    holds (p (v-1) + 1)/v (Narayanan et al., arXiv 2104.04473, section 2.2).

    Args:
        job (`Job`): The run.
        last (`bool`): Whether to count those of the rank with the head instead of the first rank.
    """
    pp = job.layout.pp
    m = job.micro_batches
    v = job.virtual_stages
    if job.overlapped_experts:
        # The forward pass of one more chunk runs at the same time as each backward pass.
        return min(micro_batches_in_flight(replace(job, overlapped_experts=False), last=last) + 1 / v, float(m))
    if last and pp > 1 and job.schedule == "1f1b":
        return min((pp * (v - 1) + 1) / v, float(m))
    return in_flight(job.schedule_name, pp=pp, stages_per_rank=v, micro_batches=m, rank=0)


def layers_in_flight(job: Job) -> float:
    """Computes layers times micro-batches in flight on the pipeline rank where this product is largest."""
    if job.rank_layers is None:
        return micro_batches_in_flight(job) * job.layer_split[0]
    pp = job.layout.pp
    m = job.micro_batches
    v = job.virtual_stages
    return max(
        in_flight(job.schedule_name, pp=pp, stages_per_rank=v, micro_batches=m, rank=rank) * layers
        for rank, layers in enumerate(job.rank_layers)
    )


def loss_bytes(job: Job, framework: Framework) -> float:
    """Computes the bytes of the logits, their log-probabilities and their gradient at the peak of the cross-entropy.

    TRL computes the log-probabilities in tiles, without all logits: its kernel keeps a tile, and the gradients of the
    hidden states and, unless it is frozen, of the head, each in fp32 and in the training format (TRL 1.16,
    kernels/chunked_logprob.py). All tokens are counted, though only those with a loss are projected.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
    """
    shape = job.shape
    if job.task != "text":
        head = shape.vocab * shape.embedding_width if job.method == "full" else 0
        width = 4.0 if job.precision == "fp32" else 2.0
        tile = width * min(job.tokens, LOSS_TILE[0]) * min(shape.vocab, LOSS_TILE[1])
        return tile + (4.0 + width) * (job.tokens * shape.hidden + head)
    logits = job.tokens * shape.vocab / (job.layout.tp if job.loss_parallel else 1)
    if job.fused_loss:
        return framework.loss_kept * logits / FUSED_LOSS_CHUNKS + 2.0 * job.tokens * shape.hidden
    if job.loss_parallel and job.layout.tp > 1:
        return framework.split_loss_kept * logits
    return (framework.compiled_loss_kept if job.compile and job.compiled_loss else framework.loss_kept) * logits


# -- the peak ---------------------------------------------------------------------------------------------------------


GIB = 2.0**30
"""Bytes of a GiB."""
GATHERED_ACTIVATIONS = 2
"""Unsplit activations that the current layer holds under sequence parallelism: its input and a gradient."""
DEEPSPEED_BUCKET_BYTES = 3e9
"""DeepSpeed's default buckets of 5e8 elements of 2 bytes: two to reduce (`overlap_comm`) and one to gather into."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Holds the peak memory of the fullest rank by part, in GiB."""

    parameters: float
    """Parameters, after sharding."""
    gradients: float
    """Gradients, after sharding."""
    optimizer: float
    """Moments and master copies."""
    activations: float
    """Activations kept for the backward pass, of all micro-batches in flight."""
    loss: float
    """Logits and their gradient at the loss."""
    buffers: float
    """Gathered parameters, gradient buckets, fragmentation."""
    context: float
    """CUDA context, libraries and NCCL's buffers."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class DpoMemory(Memory):
    """Holds the peak memory of the fullest rank with a reference model by part, in GiB."""

    reference: float
    """Parameters of the reference model, after sharding; 0 where it is the policy without its adapters."""


@dataclass(frozen=True, kw_only=True)
class GrpoMemory(DpoMemory):
    """Holds the peak memory of the fullest rank with generation by part, in GiB."""

    kv_cache: float
    """Keys and values that generation caches; 0 where the peak is at training, when they are freed."""


def allocated_gib(memory: Memory, common: SharedConstants | None = None) -> float:
    """Computes the part of a peak that `torch.cuda.max_memory_allocated` reports, in GiB.

    It includes neither what the allocator reserves in addition nor memory outside the allocator.

    Args:
        memory (`Memory`): The peak.
        common (`SharedConstants`, *optional*): Constants of hardware and networks; by default those of
            `frameworks.toml`.
    """
    return (memory.total - memory.context) / (common or shared_constants()).fragmentation


def memory_of(job: Job, framework: Framework, common: SharedConstants | None = None) -> Memory:
    """Estimates the peak memory of the fullest rank by part, in GiB.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
        common (`SharedConstants`, *optional*): Constants of hardware and networks; by default those of
            `frameworks.toml`.

    Raises:
        `UsageError`: The LoRA rank is below 1.
    """
    common = common or shared_constants()
    states = state_bytes(job, framework)
    activations, loss, gradients, buffers, kv_cache = _peak(job, framework, states.gradients)
    reference = reference_bytes(job)
    used = states.parameters + gradients + states.optimizer + activations + loss + buffers + reference + kv_cache
    parts = {
        "parameters": states.parameters / GIB,
        "gradients": gradients / GIB,
        "optimizer": states.optimizer / GIB,
        "activations": activations / GIB,
        "loss": loss / GIB,
        "buffers": (buffers + (common.fragmentation - 1) * used) / GIB,
        "context": framework.context_gib + common.group_gib * groups(job),
    }
    if job.task == "dpo":
        return DpoMemory(**parts, reference=reference / GIB)
    if job.task == "grpo":
        return GrpoMemory(**parts, reference=reference / GIB, kv_cache=kv_cache / GIB)
    return Memory(**parts)


def groups(job: Job) -> int:
    """Counts the process groups of a rank, each of which has communication buffers of its own.

    There is one of all ranks; with several axes one per axis; with a pipeline one of its first and last rank, which
    share the embedding.
    """
    layout = job.layout
    axes = sum(size > 1 for size in (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp))
    return min(1, axes) + (axes if axes > 1 else 0) + (layout.pp > 1)


class _Moment(NamedTuple):
    """Bytes in use at a moment of a step, in addition to parameters and optimizer states."""

    activations: float
    loss: float
    gradients: float
    buffers: float
    kv_cache: float = 0.0


def _peak(job: Job, framework: Framework, gradients: float) -> _Moment:
    """The moment of a step at which most memory is in use.

    Without a pipeline this moment is the loss of the last micro-batch, the backward pass of the last layer, or that of
    the first layer. At the loss the gradients of a single micro-batch do not exist yet, unless the framework keeps a
    buffer for them (Megatron) or they are sharded: the memory that the previous step's shards left free is too small
    to be reused for activations (torchtitan's peaks fall by 16 bytes per parameter and shard from 8 to 128 ranks,
    gradients included). With a pipeline the rank with most micro-batches in flight or the one with the loss is the
    fullest.
    """
    kept, working = kept_and_working(job, framework)
    loss = loss_bytes(job, framework)
    first, last = job.layer_split
    at_loss, at_layer = _buffer_bytes(job, framework)
    if job.layout.pp > 1:
        opening = layers_in_flight(job) * kept + working
        closing = micro_batches_in_flight(job, last=True) * last * kept
        if opening >= closing + max(loss, working):
            return _Moment(opening, 0.0, gradients, at_layer)
        return _Moment(closing + max(0.0, working - loss), loss, gradients, at_layer)
    is_shared = job.zero == 3 and job.layout.dp_shard * job.layout.cp > 1
    is_allocated_late = job.micro_batches == 1 and framework.name != "megatron" and not is_shared
    before = 0.0 if is_allocated_late else gradients
    moments = [
        _Moment(first * kept, loss, before, at_loss),
        _Moment(first * kept + working, 0.0, before, at_layer),
        _Moment(kept + working, 0.0, gradients, at_layer),
    ]
    if job.task == "dpo" and job.has_reference_pass:
        moments.append(_of_the_reference(job, first * kept, before, at_loss))
    if job.task == "grpo":
        earlier = gradients if job.generation_rounds > 1 or job.zero in (1, 2) else 0.0
        moments += _of_generation(job, earlier)
        if job.has_reference_pass:
            moments.append(_of_the_reference(job, 0.0, earlier, 0.0))
    return max(moments, key=sum)


def _of_the_reference(job: Job, kept: float, gradients: float, buffers: float) -> _Moment:
    """The reference's forward pass. In DPO the policy's activations are kept meanwhile; in GRPO it runs after
    generation."""
    return _Moment(kept + forward_bytes(job), 0.0, gradients, buffers + reference_buffer_bytes(job))


def _of_generation(job: Job, gradients: float) -> tuple[_Moment, _Moment]:
    """The start of generation, with one layer's tensors of all prompts, and its end, with the complete cache and the
    logits of the last token."""
    weights = generation_weight_bytes(job)
    prompts = prompt_job(job)
    logits = LOGIT_COPIES_BYTES * generated_at_once(job) * job.shape.vocab
    start = _Moment(forward_bytes(prompts), 0.0, gradients, weights, kv_cache_bytes(job, prompts.seq_len))
    return start, _Moment(0.0, logits, gradients, weights, kv_cache_bytes(job, job.seq_len))


def _buffer_bytes(job: Job, framework: Framework) -> tuple[float, float]:
    """Bytes of gathered parameters, unreduced gradients, buckets and gathered activations.

    Returns:
        `tuple`: Bytes at the loss, and bytes during a layer's backward pass.
    """
    shape = job.shape
    layout = job.layout
    per_layer = shape.mean_layer_parameters / layout.tp
    ends = (shape.embedding_parameters + shape.head_parameters) / layout.tp
    gathered = 0.0
    if layout.tp > 1 and job.sequence_parallel:
        gathered = GATHERED_ACTIVATIONS * 2.0 * job.tokens * shape.hidden
    if job.zero == 3 and layout.dp_shard * layout.cp > 1:
        trained = 1.0 if job.method == "full" else 0.0
        width = 4.0 if job.precision == "fp32" else 2.0
        scattered = trained * (width + framework.gradient_bytes) * per_layer
        if layout.pp > 1:
            # With a pipeline, layers stay gathered and gradients stay unreduced until the last micro-batch.
            per_parameter = width + trained * framework.gradient_bytes
            stages = per_parameter * job.layer_split[0] * per_layer + width * ends
            return gathered + stages, gathered + stages
        # FSDP2 holds the gathered root group (embedding and head), the layer that is prefetched, the current layer,
        # and the current layer's gradients.
        if not job.reshard:
            model = gathered + width * (ends + job.layer_split[0] * per_layer)
            return model, model + scattered
        return gathered + width * (ends + per_layer), gathered + width * (ends + 2 * per_layer) + scattered
    if job.zero in (1, 2) and job.precision == "fp16":
        gathered += DEEPSPEED_BUCKET_BYTES
    elif (
        framework.name != "megatron"
        and job.zero == 0
        and not job.pure
        and job.precision != "fp32"
        and job.method == "full"
    ):
        # bf16 copies of the weights: autocast keeps all of them until the end of the forward pass, autograd until the
        # backward pass.
        gathered += 2.0 * (job.layer_split[0] * per_layer + shape.head_parameters / layout.tp)
    return gathered, gathered


def host_gib(job: Job) -> float:
    """Computes the CPU memory that offload needs per GPU, in GiB.

    The states take 12 bytes per trained parameter, or 16 with parameters and gradients (Ren et al., ZeRO-Offload,
    arXiv 2101.06840).
    """
    if job.offload == "none":
        return 0.0
    each = 12.0 if job.offload == "optimizer" else 16.0
    return each * trained_parameters(job) / job.layout.world_size / GIB
