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

from hfscale.facts.activations import KeptBytes, Regime, has_scores, kept_bytes
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

FROZEN_BYTES = {"full": 0.0, "lora": 2.0, "qlora": QLORA_BYTES}
"""Bytes per frozen parameter of each method."""


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
    frozen = FROZEN_BYTES[job.method]
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


SCORE_BYTES_KEPT = {"megatron": 5.0, "titan": 6.0, "hf": 6.0}
"""Bytes kept per attention score without flash attention. Megatron: 2 each for the scores and their softmax, 1 for the
dropout mask (Korthikanti et al., arXiv 2205.05198, section 4.1). Hugging Face: the softmax in fp32, and in bf16 for
the product with the values (`activations.csv`, factor `scores`)."""
LOSS_TILE = (4096, 32768)
"""Tokens and vocabulary entries of a tile of TRL's loss (TRL 1.16, kernels/chunked_logprob.py, trainer/utils.py)."""
FUSED_LOSS_CHUNKS = 8
"""Parts in which a fused loss processes the logits (Liger's default grows with the vocabulary; torchtune uses 8)."""


FP8_SAVED = {"hidden": 2.0, "query": -1.0, "mlp": 1.0, "plain_mlp": 1.0, "routed": 1.0}
"""Bytes per unit of a width that Transformer Engine keeps less with fp8 than with bf16: a matrix product keeps its
input in one byte. The attention's output is kept in bf16 too, for attention itself."""


def regime_of(job: Job) -> Regime:
    """Returns the formats in which Hugging Face's layers compute.

    DDP keeps fp32 weights under autocast. FSDP2 and `ParallelTrainer` gather bf16 weights, also under Accelerate's
    autocast. DeepSpeed's weights are in bf16, without autocast. Adapters are in fp32 only under DDP.

    Args:
        job (`Job`): The run.
    """
    if job.method != "full":
        return "lora" if job.zero == 0 and not job.pure else "lora_bf16"
    if job.precision == "fp32":
        return "fp32"
    if job.pure or job.zero in (1, 2) or job.offload != "none":
        return "bf16"
    return "autocast" if job.zero == 0 and job.layout.tp * job.layout.pp == 1 else "mixed"


def layer_bytes(job: Job, framework: Framework) -> float:
    """Computes the bytes of the activations of one layer and micro-batch without recomputation.

    For Hugging Face's layers autograd's bytes are counted per family (`hfscale.facts.activations`), including
    attention scores where the family has no other attention. For Megatron and torchtitan they are the layer's widths
    times the framework's bytes, without attention scores: hidden (norms and residuals), queries and the attention's
    output, keys and values, the MLP, and the copies of a token that its experts get, as in Korthikanti et al., arXiv
    2205.05198, section 4.1. Sequence parallelism splits the hidden part too. With frozen weights the input of the
    MLP's last matrix is not kept.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
    """
    compiled = framework.compiled_kept if job.compile else 1.0
    if framework.kept is None:
        return compiled * _hugging_face_bytes(job, "none")
    shape = job.shape
    attention = shape.attention
    tp = job.layout.tp
    kept = framework.kept
    if framework.name == "megatron" and job.precision == "fp8":
        kept = {width: size - FP8_SAVED.get(width, 0.0) for width, size in kept.items()}
    mlp = kept["mlp"] if shape.gated else kept["plain_mlp"]
    if job.method != "full":
        mlp -= 2.0
    split = tp if job.sequence_parallel else 1
    inside = kept["query"] * attention.query_width + kept["kv"] * attention.kv_width + mlp * shape.mlp_width
    widths = kept["hidden"] * shape.hidden / split + inside / tp
    widths += kept["routed"] * shape.moe_share * shape.top_k * shape.hidden / split
    return job.tokens * compiled * widths


def _hugging_face_bytes(job: Job, recompute: str) -> float:
    """Bytes of one layer and micro-batch in Hugging Face's models."""
    kept = _per_token(job, recompute)
    tp = job.layout.tp
    return job.tokens * (kept.unsplit / (tp if job.sequence_parallel else 1) + kept.split / tp)


def _per_token(job: Job, recompute: str) -> KeptBytes:
    rank = job.lora_rank if job.method != "full" else 0
    return kept_bytes(job.shape, regime_of(job), recompute, job.seq_len, rank)


def end_activations(job: Job, framework: Framework) -> float:
    """Computes the bytes that Hugging Face's embedding and last norm keep of a micro-batch; 0 for other frameworks.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
    """
    if framework.kept is not None:
        return 0.0
    split = job.layout.tp if job.sequence_parallel else 1
    return job.tokens * _per_token(job, job.recompute).ends / split


def selective_bytes(job: Job, framework: Framework) -> float:
    """Computes the bytes that selective recomputation keeps of one layer and micro-batch.

    It keeps the layer's input, the attention's output, and every second matrix product (queries, values, the MLP's
    first, and the last of a gated MLP), 2 bytes each, as torchtitan's policy and hfscale/recipe/arguments.py do; for
    Hugging Face's layers they are counted per family. A compiled backward pass does not read the output of the last
    product.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
    """
    shape = job.shape
    attention = shape.attention
    tp = job.layout.tp
    if framework.kept is None:
        unread = 2.0 * job.tokens * shape.hidden if job.compile and shape.gated else 0.0
        return _hugging_face_bytes(job, "selective") - unread
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
    if shape.moe is None or framework.kept is None:
        return 0.0
    tp = job.layout.tp
    width = 1.0 if job.precision == "fp8" else 2.0
    norms = 2 * width * shape.hidden / (tp if job.sequence_parallel else 1)
    inner = width * shape.moe_share * shape.mlp_width / tp
    latent = 0.0
    if attention.latent_width:
        kept = 2.0 * attention.query_width + framework.kept["kv"] * attention.kv_width
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
    scores = _score_bytes(job, framework)
    residual = 4.0 if framework.kept is None and regime_of(job) in ("fp32", "autocast") else 2.0
    boundary = residual * job.tokens * shape.hidden / (tp if job.sequence_parallel else 1)
    if job.recompute == "none":
        return all_activations + scores, 0.0
    if job.recompute == "full":
        return boundary, all_activations + scores
    if framework.name == "megatron":
        return all_activations - _megatron_dropped(job, framework), scores
    kept = min(all_activations, selective_bytes(job, framework))
    return kept, all_activations + scores - kept


def _score_bytes(job: Job, framework: Framework) -> float:
    """Bytes of one layer's attention scores and micro-batch that `layer_bytes` does not count."""
    if job.flash_attention or (framework.kept is None and has_scores(job.shape.model_type)):
        return 0.0
    scores = job.tokens * job.shape.attention.heads / job.layout.tp * job.seq_len
    return SCORE_BYTES_KEPT[framework.name] * scores


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
    pp = job.layout.pp
    m = job.micro_batches
    v = job.virtual_stages
    if job.rank_layers is None:
        most = micro_batches_in_flight(job) * job.layer_split[0]
        if not job.embedding_is_a_layer:
            return most
        # The first rank has a layer less than the second, which holds fewer micro-batches.
        second = in_flight(job.schedule_name, pp=pp, stages_per_rank=v, micro_batches=m, rank=1) * job.layer_split[0]
        return max(most - micro_batches_in_flight(job), min(second, most))
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
    peak = _peak(job, framework, states.gradients)
    reference = reference_bytes(job)
    used = states.parameters + states.optimizer + peak.total + reference
    parts = {
        "parameters": states.parameters / GIB,
        "gradients": peak.gradients / GIB,
        "optimizer": states.optimizer / GIB,
        "activations": peak.activations / GIB,
        "loss": peak.loss / GIB,
        "buffers": (peak.buffers + (common.fragmentation - 1) * used) / GIB,
        "context": framework.context_gib + common.group_gib * groups(job),
    }
    if job.task == "dpo":
        return DpoMemory(**parts, reference=reference / GIB)
    if job.task == "grpo":
        return GrpoMemory(**parts, reference=reference / GIB, kv_cache=peak.kv_cache / GIB)
    return Memory(**parts)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Says where and when the memory of a run is at its peak."""

    rank: str
    """The fullest rank: `every rank`, or the pipeline rank."""
    at: str
    """The moment of a step, such as `loss`."""


def peak_of(job: Job, framework: Framework) -> Peak:
    """Finds the rank and the moment of a step with the highest peak.

    Args:
        job (`Job`): The run.
        framework (`Framework`): Constants of the training framework.
    """
    peak = _peak(job, framework, state_bytes(job, framework).gradients)
    return Peak(rank=peak.rank, at=peak.at)


def groups(job: Job) -> int:
    """Counts the process groups of a rank, each of which has communication buffers of its own.

    There is one of all ranks; with several axes one per axis; with a pipeline one of its first and last rank, which
    share the embedding.
    """
    layout = job.layout
    axes = sum(size > 1 for size in (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp))
    return min(1, axes) + (axes if axes > 1 else 0) + (layout.pp > 1)


@dataclass(frozen=True)
class _Moment:
    """Bytes in use at a moment of a step, in addition to parameters and optimizer states."""

    activations: float
    loss: float
    gradients: float
    buffers: float
    kv_cache: float = 0.0
    at: str = "loss"
    rank: str = "every rank"

    @property
    def total(self) -> float:
        return self.activations + self.loss + self.gradients + self.buffers + self.kv_cache


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
    ends = end_activations(job, framework)
    loss = loss_bytes(job, framework)
    first, last = job.layer_split
    at_loss, at_layer = _buffer_bytes(job, framework)
    if job.layout.pp > 1:
        opening = layers_in_flight(job) * kept + working
        closing = micro_batches_in_flight(job, last=True) * (last * kept + ends)
        if opening >= closing + max(loss, working):
            most = "first pipeline rank" if job.rank_layers is None else "pipeline rank with most layers in flight"
            return _Moment(opening, 0.0, gradients, at_layer, at="backward pass", rank=most)
        last_rank = "first pipeline rank" if job.is_v_shaped else "last pipeline rank"
        return _Moment(closing + max(0.0, working - loss), loss, gradients, at_layer, rank=last_rank)
    is_shared = job.zero == 3 and job.layout.dp_shard * job.layout.cp > 1
    is_allocated_late = job.micro_batches == 1 and framework.name != "megatron" and not is_shared
    before = 0.0 if is_allocated_late else gradients
    moments = [
        _Moment(first * kept + ends, loss, before, at_loss),
        _Moment(first * kept + ends + working, 0.0, before, at_layer, at="last layer's backward pass"),
        _Moment(kept + working, 0.0, gradients, at_layer, at="first layer's backward pass"),
    ]
    if job.task == "dpo" and job.has_reference_pass:
        moments.append(_of_the_reference(job, first * kept, before, at_loss))
    if job.task == "grpo":
        earlier = gradients if job.generation_rounds > 1 or job.zero in (1, 2) else 0.0
        moments += _of_generation(job, earlier)
        if job.has_reference_pass:
            moments.append(_of_the_reference(job, 0.0, earlier, 0.0))
    return max(moments, key=lambda moment: moment.total)


def _of_the_reference(job: Job, kept: float, gradients: float, buffers: float) -> _Moment:
    """The reference's forward pass. In DPO the policy's activations are kept meanwhile; in GRPO it runs after
    generation."""
    gathered = buffers + reference_buffer_bytes(job)
    return _Moment(kept + forward_bytes(job), 0.0, gradients, gathered, at="reference's forward pass")


def _of_generation(job: Job, gradients: float) -> tuple[_Moment, _Moment]:
    """The start of generation, with one layer's tensors of all prompts, and its end, with the complete cache and the
    logits of the last token."""
    weights = generation_weight_bytes(job)
    prompts = prompt_job(job)
    logits = LOGIT_COPIES_BYTES * generated_at_once(job) * job.shape.vocab
    cached = kv_cache_bytes(job, prompts.seq_len)
    start = _Moment(forward_bytes(prompts), 0.0, gradients, weights, cached, at="start of generation")
    return start, _Moment(0.0, logits, gradients, weights, kv_cache_bytes(job, job.seq_len), at="end of generation")


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
        head = shape.vocab * shape.embedding_width / layout.tp if layout.pp == 1 else shape.head_parameters / layout.tp
        gathered += 2.0 * (job.layer_split[0] * per_layer + head)
    return gathered, gathered


def host_gib(job: Job) -> float:
    """Computes the CPU memory that offload needs per GPU, in GiB.

    Optimizer states take 12 bytes per trained parameter; with parameters and gradients it is 16 (Ren et al.,
    ZeRO-Offload, arXiv 2101.06840), and frozen parameters take the bytes of their format. All ranks share them.

    Args:
        job (`Job`): The run.
    """
    if job.offload == "none":
        return 0.0
    trained = trained_parameters(job)
    if job.offload == "optimizer":
        return 12.0 * trained / job.layout.world_size / GIB
    return (16.0 * trained + FROZEN_BYTES[job.method] * job.shape.total_parameters) / job.layout.world_size / GIB


def node_host_gib(job: Job) -> float:
    """Computes the CPU memory that the ranks of the fullest node need, in GiB, without that of their processes.

    It is what offload keeps there, and in addition the larger of the weights while they are loaded and the copy of the
    states that a background save keeps. Loading: every rank reads all weights without sharding or with ZeRO-1 and 2,
    rank 0 alone with FSDP2, each rank its part with offload (DeepSpeed) and in `ParallelTrainer`. Saving: rank 0
    copies weights and optimizer states that are not sharded, otherwise each rank its part. What is offloaded is copied
    too.

    Args:
        job (`Job`): The run.
    """
    local = min(job.gpus_per_node, job.layout.world_size)
    share = local / job.layout.world_size
    parameters = float(job.shape.total_parameters)
    trained = trained_parameters(job)
    weights = 4.0 * parameters if job.method == "full" else FROZEN_BYTES[job.method] * parameters + 4.0 * trained
    saved = (4.0 + OPTIMIZERS[job.optimizer]["state_bytes"]) * trained
    is_split = job.layout.tp * job.layout.pp > 1
    readers = 1 if job.zero == 3 else local
    loading = weights * (share if job.offload != "none" or is_split else readers)
    saving = saved if job.zero == 0 and not is_split else saved * share
    return host_gib(job) * local + float(max(loading, saving)) / GIB
