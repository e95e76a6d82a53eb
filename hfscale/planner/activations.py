"""Bytes of the activations of one rank: what the layers keep for their backward pass, and what the loss needs.

All byte counts are per rank unless a docstring states otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from hfscale.facts.activations import (
    KeptBytes,
    Regime,
    has_scores,
    kept_bytes,
    layer_widths,
    of_fullest_layer,
    routed_bytes,
)
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.schedules import SPLIT_BACKWARD, held_at_peak, in_flight
from hfscale.planner.adapters import formed_bytes
from hfscale.planner.experts import expert_costs, imbalance_of, unit_parameters
from hfscale.planner.frameworks import Framework, shared_constants
from hfscale.planner.job import Job

SCORE_BYTES_KEPT = {"megatron": 5.0, "titan": 6.0, "hf": 6.0}
"""Bytes kept per attention score without flash attention. Megatron: 2 each for the scores and their softmax, 1 for the
dropout mask (Korthikanti et al., arXiv 2205.05198, section 4.1). Hugging Face: the softmax in fp32, and in bf16 for
the product with the values (`activations.csv`, factor `scores`)."""
LOSS_TILE = (4096, 32768)
"""Tokens and vocabulary entries of a tile of TRL's loss (TRL 1.16, kernels/chunked_logprob.py, trainer/utils.py)."""
RECIPE_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time in a loss of the recipes (`CHUNK_TOKENS` of hfscale/recipe/fused_loss.py)."""
LOSS_KERNEL_BYTES = 4.0
"""Bytes per logit of flash-attn's cross-entropy: bf16 logits and their gradient (flash_attn 1.0,
losses/cross_entropy.py without `inplace_backward`; llm-foundry, models/mpt/modeling_mpt.py, `loss_fn:
fused_crossentropy`)."""
FP8_SAVED = {"hidden": 2.0, "query": -1.0, "mlp": 1.0, "plain_mlp": 1.0, "routed": 1.0}
"""Bytes per unit of a width that Transformer Engine keeps less with fp8 than with bf16: a matrix product keeps its
input in one byte. The attention's output is kept in bf16 too, for attention itself."""
LIGER_SAVED: Mapping[Regime, float] = {
    "autocast": 14.0,
    "mixed": 8.0,
    "bf16": 8.0,
    "lora": 4.0,
    "lora_bf16": 4.0,
}
"""Bytes per hidden element of a layer that Liger Kernel's two RMS norms keep less than transformers': each keeps its
input, and transformers also the input in fp32 and the normed values before they are multiplied by the weight
(liger-kernel 0.8.5, ops/rms_norm.py; transformers 5.23, `LlamaRMSNorm`)."""
LIGER_MLP_SAVED = 2.0
"""Bytes per inner width that its gated activation keeps less: it computes the activation again (ops/swiglu.py)."""
NORM_KERNEL_BYTES = 8.0
"""Bytes per hidden element of a layer whose two norms are computed by one kernel each: input and output, 2 bytes each
(torchtitan at 395a526, models/norms.py)."""


def regime_of(job: Job) -> Regime:
    """Return the formats in which Hugging Face's layers compute.

    DDP keeps fp32 weights under autocast. FSDP2 and `ParallelTrainer` gather bf16 weights, also under Accelerate's
    autocast. DeepSpeed's weights are in bf16, without autocast. Adapters are in fp32 only under DDP.

    Args:
        job (`Job`): the run.
    """
    is_plain = job.layout.tp == 1 and job.layout.pp == 1 and not job.runs_parallel_trainer
    # Accelerate casts to bf16 where torch holds the fp32 weights; who shards them casts them too.
    if job.method != "full" and job.zero == 0 and not job.pure_bf16:
        return "lora"
    if job.method != "full":
        return "lora_bf16"
    if job.precision == "fp32":
        return "fp32"
    if job.pure_bf16 or job.zero in (1, 2) or job.offload != "none":
        return "bf16"
    if job.zero == 0 and is_plain:
        return "autocast"
    return "mixed"


def weight_bytes(job: Job) -> float:
    """Compute the bytes of a weight as the layers have it: DDP's are in fp32 also under autocast.

    Args:
        job (`Job`): the run, in Hugging Face's stack.
    """
    return 4.0 if regime_of(job) in ("autocast", "fp32") else 2.0


def layer_bytes(job: Job, framework: Framework) -> float:
    """Compute the bytes of the activations of one layer and micro-batch without recomputation.

    For Hugging Face's layers autograd's bytes are counted per family (`hfscale.facts.activations`), including
    attention scores where the family has no other attention. For Megatron and torchtitan they are the layer's widths
    times the framework's bytes, without attention scores: hidden (norms and residuals), queries and the attention's
    output, keys and values, the MLP, and the copies of a token that its experts get, as in Korthikanti et al., arXiv
    2205.05198, section 4.1. Sequence parallelism splits the hidden part too. With frozen weights the input of the
    MLP's last matrix is not kept.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
    """
    # What frameworks keep differs by kernels, which the constants of each were measured or read for.
    compiled = framework.compiled_kept if job.compile else 1.0
    if framework.kept is None:
        return compiled * _hugging_face_bytes(job, "none") - _liger_saved(job)
    shape = job.shape
    attention = shape.attention
    kept = framework.kept
    if framework.name == "megatron" and job.precision == "fp8":
        kept = {width: size - FP8_SAVED.get(width, 0.0) for width, size in kept.items()}
    if job.norm_kernel:
        kept = {**kept, "hidden": NORM_KERNEL_BYTES}
    mlp = kept["mlp" if shape.gated else "plain_mlp"]
    if job.method != "full":
        mlp -= 2.0
    inside = (
        kept["query"] * attention.query_width
        + kept["kv"] * attention.kv_width
        + mlp * shape.mlp_width
    )
    split = job.sequence_split
    widths = kept["hidden"] * shape.hidden / split + inside / job.layout.tp
    widths += kept["routed"] * shape.moe_share * shape.top_k * shape.hidden / split
    return job.tokens * compiled * widths


def _liger_saved(job: Job) -> float:
    """Bytes that Liger Kernel's norms and activations keep less of an uncompiled layer than transformers'."""
    shape = job.shape
    has_kernels = job.liger and not job.chunked_loss and not job.compile
    if not has_kernels or shape.norm_parameters != shape.hidden:
        return 0.0
    norms = LIGER_SAVED.get(regime_of(job), 0.0) * shape.norms_per_layer / 2
    inner = 0.0
    if shape.gated and shape.moe is None:
        inner = LIGER_MLP_SAVED * shape.mlp_width
    hidden = norms * shape.hidden
    return job.tokens * (hidden / job.sequence_split + inner / job.layout.tp)


def _hugging_face_bytes(job: Job, recompute: str) -> float:
    """Bytes of one layer and micro-batch in Hugging Face's models."""
    kept = _per_token(job, recompute)
    tp = job.layout.tp
    split = job.sequence_split
    if not job.spreads_experts:
        return job.tokens * (kept.unsplit / split + kept.split / tp)
    more = (imbalance_of(job, shared_constants()) - 1) * kept.dispatched
    return job.tokens * (
        (kept.unsplit - kept.routed) / split + (kept.split + kept.routed + more) / tp
    )


def _per_token(job: Job, recompute: str) -> KeptBytes:
    return kept_bytes(job.shape, regime_of(job), recompute, job.seq_len, job.adapter_rank)


def dispatched_bytes(job: Job) -> float:
    """Compute the bytes that the backward pass of transformers' experts frees of one layer and micro-batch.

    Args:
        job (`Job`): the run.
    """
    if not job.shape.moe_share:
        return 0.0
    kept = _per_token(job, "none").dispatched * imbalance_of(job, shared_constants())
    return job.tokens * (kept + routed_bytes(job.shape, regime_of(job)))


def exchange_bytes(job: Job) -> float:
    """Compute the bytes that transformers' exchange of tokens needs at its peak, in addition to what a layer keeps.

    When the outputs of the experts return, the rank still holds the tokens that it received and their outputs, and of
    its own tokens the received outputs twice (the collective's tensor and its wrapper) and the weighted outputs. A
    repeated forward pass stops before it weighs them, unless a shared expert follows (transformers 5.23,
    distributed/expert_parallel.py, `AllToAllEP`; torch.utils.checkpoint).

    Args:
        job (`Job`): the run; 0 without transformers' expert parallelism.
    """
    if not job.spreads_experts or not job.shape.moe_share:
        return 0.0
    received = 2 * imbalance_of(job, shared_constants())
    moe = job.shape.moe
    has_shared_expert = moe is not None and moe.shared_ffn > 0
    sent = 2
    if job.activation_checkpointing == "none" or has_shared_expert:
        sent += 1  # the weighted outputs
    return job.tokens * routed_bytes(job.shape, regime_of(job)) * (received + sent) / job.layout.tp


def transient_bytes(job: Job) -> float:
    """Compute the bytes that a rank of `ParallelTrainer`'s pipelines needs in a backward pass beside activations.

    These are the gradients of a unit of FSDP2, a layer or the experts of one, before they are added to the sums of the
    micro-batches, and the hidden states of a micro-batch and their gradient while they are received. A pass of the
    inputs alone frees no activations, so that the gradients inside an MLP come in addition: three of its width, and
    those of what experts return (counted with torch 2.13 for three families, tests/planner/test_planner_pipeline.py).

    Args:
        job (`Job`): the run, which has a pipeline.
    """
    shape = job.shape
    received = 2 * job.tokens * shape.hidden / job.sequence_split
    new = 0.0
    if job.method == "full":
        new = unit_parameters(job)
    inside = 0.0
    if job.schedule_name in SPLIT_BACKWARD:
        routed = shape.moe_share * shape.top_k * shape.hidden
        inside = job.tokens * (3 * shape.mlp_width + routed) / job.layout.tp
    return job.value_bytes * (received + inside + new)


def new_gradient_bytes(job: Job, parameters: float, *, at_loss: bool = False) -> float:
    """Compute the bytes of gradients that FSDP2 has not added to the sums of the micro-batches yet.

    It adds those of a stage in its next pass of the inputs, if the pass of the weights comes after that of the inputs.
    Until then those of the rank's other stages exist, and at the loss those of all.

    Args:
        job (`Job`): the run, which has a pipeline.
        parameters (`float`): parameters of all stages of the rank, as they are gathered.
        at_loss (`bool`): whether at the loss, instead of in a backward pass.
    """
    if job.schedule_name not in SPLIT_BACKWARD or job.method != "full":
        return 0.0
    stages = job.value_bytes * parameters
    if at_loss:
        return stages
    return stages * (1 - 1 / job.virtual_stages)


def waiting_bytes(job: Job) -> float:
    """Compute the bytes that one layer and micro-batch keeps while gradients of its weights are still to be computed.

    These are the gradients of the outputs of its matrix products and norms; its activations stay, too (torch 2.13,
    distributed/pipelining/_backward.py, `stage_backward_input`). The gradients of what attention and MLP return are
    complete on each rank of tensor parallelism.

    Args:
        job (`Job`): the run, which has a pipeline.
    """
    shape = job.shape
    returned = 2 * shape.hidden
    norms = 0
    if job.method == "full":
        norms = shape.norms_per_layer * shape.hidden
    normed = layer_widths(shape, job.seq_len)["normed"]
    more = 0.0
    if job.spreads_experts and shape.moe is not None:
        routed = sum(
            linear.used * linear.outputs for linear in shape.moe.linears if linear.copies > 1
        )
        more = (imbalance_of(job, shared_constants()) - 1) * shape.moe_share * routed
    inside = (shape.output_width - returned + normed + more) / job.layout.tp
    widths = returned + norms / job.sequence_split + inside
    return job.value_bytes * job.tokens * widths


def end_activations(job: Job, framework: Framework) -> float:
    """Compute the bytes that Hugging Face's embedding and last norm keep of a micro-batch; 0 for other frameworks.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
    """
    if framework.kept is not None:
        return 0.0
    kept = _per_token(job, job.activation_checkpointing)
    return job.tokens * kept.ends / job.sequence_split


def selective_bytes(job: Job, framework: Framework) -> float:
    """Compute the bytes that selective recomputation keeps of one layer and micro-batch.

    It keeps the layer's input, the attention's output, and every second matrix product (queries, values, the MLP's
    first, and the last of a gated MLP), 2 bytes each, as torchtitan's policy and hfscale/recipe/recompute.py do; for
    Hugging Face's layers they are counted per family. A compiled backward pass does not read the output of the last
    product.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
    """
    shape = job.shape
    attention = shape.attention
    if framework.kept is None:
        kept = _hugging_face_bytes(job, "selective")
        if job.compile and shape.gated:
            kept -= 2.0 * job.tokens * shape.hidden
        return kept
    boundary = shape.hidden / job.sequence_split
    last = 0.0
    if shape.gated and not job.compile:
        last = shape.hidden
    inside = 2 * attention.query_width + attention.kv_width / 2 + shape.mlp_width
    inside /= job.layout.tp
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
    width = 1.0 if job.precision == "fp8" else 2.0
    tp = job.layout.tp
    norms = 2 * width * shape.hidden / job.sequence_split
    inner = width * shape.moe_share * shape.mlp_width / tp
    latent = 0.0
    if attention.latent_width:
        kept = 2.0 * attention.query_width + framework.kept["kv"] * attention.kv_width
        latent = (kept - 2.0 * attention.latent_width) / tp
    return job.tokens * (norms + inner + latent)


def kept_and_working(job: Job, framework: Framework) -> tuple[float, float]:
    """Compute the bytes of one layer and micro-batch under the job's recomputation.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.

    Returns:
        `tuple[float, float]`: bytes kept until the backward pass, and further bytes that exist only while the layer's
            backward pass runs.
    """
    kept, working = _kept_and_working(job, framework)
    formed = formed_bytes(job, regime_of(job))
    experts = expert_costs(job, weight_bytes(job))
    kept_copies = formed.kept + experts.kept_bytes
    working += _expert_gradient_bytes(job, framework) + experts.working_bytes
    if job.activation_checkpointing == "none":
        return kept + kept_copies, working + formed.working
    if job.activation_checkpointing == "selective":
        kept += formed.kept_by_selective
    return kept, working + kept_copies + formed.working


def _kept_and_working(job: Job, framework: Framework) -> tuple[float, float]:
    """The same without what is formed from weights."""
    shape = job.shape
    all_activations = layer_bytes(job, framework) + _gathered_inputs(job, framework)
    scores = _score_bytes(job, framework)
    if job.activation_checkpointing == "none":
        return all_activations + scores, 0.0
    # What is kept sums over layers, so it is that of the mean layer; what is working is that of the fullest one.
    if framework.kept is None and shape.other_layers:
        fullest = replace(job, shape=_fullest(job))
        all_activations = layer_bytes(fullest, framework) + _gathered_inputs(fullest, framework)
        if job.activation_checkpointing == "selective":
            of_fullest = selective_bytes(fullest, framework)
            return selective_bytes(job, framework), all_activations + scores - of_fullest
    if job.activation_checkpointing == "full":
        return _boundary_bytes(job, framework), all_activations + scores
    if framework.name == "megatron":
        return all_activations - _megatron_dropped(job, framework), scores
    kept = min(all_activations, selective_bytes(job, framework))
    return kept, all_activations + scores - kept


def _expert_gradient_bytes(job: Job, framework: Framework) -> float:
    """Bytes of the gradients inside a layer's experts in Megatron, while its backward pass runs.

    Those of the tokens that the experts get are there before and after they are sent, and those of the gated inner
    width with those of their product; a dense layer's are no more than what it no longer keeps.
    """
    shape = job.shape
    if framework.name != "megatron" or not shape.moe_share:
        return 0.0
    routed = 4.0 * shape.top_k * shape.hidden / job.sequence_split
    inner = 6.0 * shape.moe_share * shape.mlp_width / job.layout.tp
    return job.tokens * imbalance_of(job, shared_constants()) * (shape.moe_share * routed + inner)


def _boundary_bytes(job: Job, framework: Framework) -> float:
    """Bytes of the input of one layer and micro-batch, the residual stream, which autocast leaves in fp32."""
    residual = 2.0
    if framework.kept is None and regime_of(job) in ("fp32", "autocast"):
        residual = 4.0
    return residual * job.tokens * job.shape.hidden / job.sequence_split


def _fullest(job: Job) -> ModelShape:
    return of_fullest_layer(job.shape, regime_of(job), job.seq_len, job.adapter_rank)


def _score_bytes(job: Job, framework: Framework) -> float:
    """Bytes of one layer's attention scores and micro-batch that `layer_bytes` does not count."""
    is_counted = framework.kept is None and has_scores(job.shape.model_type)
    if is_counted or not job.writes_scores:
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
    inputs = 0.0
    if job.sequence_parallel:
        inputs = 2 * 2.0 * shape.hidden * (1 - 1 / tp)
    others = 0.0
    if job.runs_parallel_trainer:
        others = 2.0 * shape.attention.kv_width / tp * (job.layout.cp - 1)
    return job.tokens * (inputs + others)


def micro_batches_in_flight(job: Job, *, last: bool = False) -> float:
    """Count the micro-batches whose activations the first or the last pipeline rank holds at once.

    Args:
        job (`Job`): the run.
        last (`bool`): whether to count those of the rank with the head instead of the first rank.
    """
    pp = job.layout.pp
    m = job.micro_batches
    v = job.virtual_stages
    if job.overlapped_experts:
        # The forward pass of one more chunk runs at the same time as each backward pass.
        without = micro_batches_in_flight(replace(job, overlapped_experts=False), last=last)
        return min(without + 1 / v, float(m))
    rank = 0
    if last and not job.is_v_shaped:
        rank = pp - 1
    return in_flight(job.schedule_name, pp=pp, stages_per_rank=v, micro_batches=m, rank=rank)


def layers_in_flight(job: Job) -> float:
    """Compute layers times micro-batches in flight on the pipeline rank where this product is largest, where all ranks
    hold equally many layers.

    Args:
        job (`Job`): the run, not one of `ParallelTrainer`.
    """
    pp = job.layout.pp
    most = micro_batches_in_flight(job) * job.layer_split[0]
    if not job.embedding_is_a_layer:
        return most
    # The first rank has a layer less than the second, which holds fewer micro-batches.
    of_second = in_flight(
        job.schedule_name,
        pp=pp,
        stages_per_rank=job.virtual_stages,
        micro_batches=job.micro_batches,
        rank=1,
    )
    return max(most - micro_batches_in_flight(job), min(of_second * job.layer_split[0], most))


def kept_and_waiting(job: Job, framework: Framework) -> tuple[float, float]:
    """Compute what one layer and micro-batch keeps in a pipeline of `ParallelTrainer`.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.

    Returns:
        `tuple[float, float]`: bytes kept until the backward pass, and those kept in addition between the passes of the
            inputs and of the weights.
    """
    kept, _ = kept_and_working(job, framework)
    if job.schedule_name in SPLIT_BACKWARD:
        return kept, waiting_bytes(job)
    return kept, 0.0


def held_bytes(
    job: Job, rank: int, layers: int, of_a_layer: tuple[float, float], *, at_loss: bool = False
) -> float:
    """Compute the most bytes that the layers of a pipeline rank keep at a moment of a step of `ParallelTrainer`.

    Micro-batches that wait for the gradients of the head keep those of their logits, too.

    Args:
        job (`Job`): the run.
        rank (`int`): the pipeline rank, from 0.
        layers (`int`): layers of this rank.
        of_a_layer (`tuple[float, float]`): bytes of one layer and micro-batch, from `kept_and_waiting`.
        at_loss (`bool`): whether at the end of a forward pass, instead of the end of the backward pass after it.
    """
    stages = job.virtual_stages
    moments = held_at_peak(
        job.schedule_name,
        pp=job.layout.pp,
        stages_per_rank=stages,
        micro_batches=job.micro_batches,
        rank=rank,
    )
    if at_loss:
        moments = tuple(held._replace(waiting=max(0, held.waiting - 1)) for held in moments)
    rank_of_head = 0 if job.is_v_shaped else job.layout.pp - 1
    logits = 0.0
    if rank == rank_of_head and not job.liger:
        logits = job.value_bytes * job.tokens * job.shape.vocab / job.logits_split
    kept, waiting = (layers / stages * of_one for of_one in of_a_layer)
    return max(held.bytes(kept, waiting + logits) for held in moments)


def loss_bytes(job: Job, framework: Framework) -> float:
    """Compute the bytes of the logits, their log-probabilities and their gradient at the peak of the cross-entropy.

    TRL computes the log-probabilities in tiles, without all logits: its kernel keeps a tile, and the gradients of the
    hidden states and, unless it is frozen, of the head, each in fp32 and in the training format (TRL 1.16,
    kernels/chunked_logprob.py). All tokens are counted, though only those with a loss are projected.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
    """
    shape = job.shape
    if job.task != "text":
        head = 0
        if job.method == "full":
            head = shape.vocab * shape.embedding_width
        width = job.value_bytes
        tile = width * min(job.tokens, LOSS_TILE[0]) * min(shape.vocab, LOSS_TILE[1])
        return tile + (4.0 + width) * (job.tokens * shape.hidden + head)
    # A fused loss never has all logits; of those that have, each kernel keeps other copies of them.
    logits = job.tokens * shape.vocab / job.logits_split
    if job.liger and job.chunked_loss:
        return _chunked_loss_bytes(job)
    if job.liger:
        return _fused_loss_bytes(job)
    if job.loss_kernel:
        return LOSS_KERNEL_BYTES * logits
    if job.loss_parallel and job.layout.tp > 1:
        return framework.split_loss_kept * logits
    if job.compile and job.compiled_loss:
        return framework.compiled_loss_kept * logits
    return framework.loss_kept * logits


def _chunked_loss_bytes(job: Job) -> float:
    """Bytes of the recipes' loss in chunks (`hfscale.recipe.fused_loss`): the logits of a chunk and their
    log-probabilities in fp32, and the gradients of the hidden states and, unless it is frozen, of the head."""
    shape = job.shape
    width = job.value_bytes
    chunk = min(job.tokens, RECIPE_CHUNK_TOKENS) * shape.vocab
    head = 0.0
    if job.method == "full":
        head = shape.embedding_width * shape.vocab
    return (width + 4.0) * chunk + width * (job.tokens * shape.hidden + head)


def _fused_loss_bytes(job: Job) -> float:
    """Bytes of Liger's fused cross-entropy: the logits of one chunk of tokens, in whose place their gradient is
    written, and the gradients of the hidden states and, unless it is frozen, of the head, in the head's format.

    A chunk has as many tokens as make its logits about as large as the hidden states (Liger Kernel,
    ops/fused_linear_cross_entropy.py, `fused_linear_cross_entropy_forward`).
    """
    shape = job.shape
    vocab = shape.vocab / job.logits_split
    parts = math.ceil(shape.vocab / shape.hidden)
    chunk = min(job.tokens, 1 << (math.ceil(job.tokens / parts) - 1).bit_length())
    head = 0.0
    if job.method == "full":
        head = shape.embedding_width * vocab
    head_width = 4.0 if regime_of(job) in ("fp32", "autocast") else 2.0
    return job.value_bytes * (chunk * vocab + job.tokens * shape.hidden) + head_width * head
