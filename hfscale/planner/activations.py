"""Bytes per rank that a forward pass leaves for the backward pass, and the peak at the loss."""

from dataclasses import replace

from hfscale.facts.schedules import in_flight
from hfscale.planner.frameworks import Stack
from hfscale.planner.job import Job
from hfscale.planner.model_view import ModelView

SCORE_BYTES_KEPT = 5.0
"""Bytes kept per attention score without flash attention: the scores and their softmax in 2 bytes, the dropout mask in
1 (Korthikanti et al., arXiv 2205.05198, section 4.1)."""
FUSED_LOSS_CHUNKS = 8
"""Parts in which a fused loss works through the logits (Liger's default grows with the vocabulary; torchtune has
8)."""


def layer_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Activations of one layer and micro-batch without recomputation, attention scores apart.

    Widths times the stack's bytes: hidden (norms and residuals), queries with the attention's output, keys and values,
    the MLP, and the copies of a token that its experts get (Korthikanti et al., arXiv 2205.05198, section 4.1, for
    Megatron; for Hugging Face's layers 26 to 28 h + 8 f, and 4 h more for each expert, measured with torch's
    MemTracker). Sequence parallelism splits the hidden part too. With frozen weights the input of the MLP's last
    matrix is not kept.
    """
    tp = job.layout.tp
    mlp = stack.kept_f if view.gated else stack.kept_f_plain
    if job.method != "full":
        mlp -= 2.0
    split = tp if job.sequence_parallel else 1
    widths = (
        stack.kept_h * view.hidden / split
        + (stack.kept_q * view.query_width + stack.kept_kv * view.kv_width + mlp * view.mlp_width) / tp
    )
    widths += stack.kept_e * view.moe_share * view.top_k * view.hidden / split
    return job.tokens * (stack.compiled_kept if job.compile else 1.0) * widths


def selective_bytes(view: ModelView, job: Job) -> float:
    """What selective recomputation keeps of a layer and micro-batch: its input, the attention's output, and every
    second matrix product (queries, values, the MLP's first, and the last of a gated one), 2 bytes each, as
    torchtitan's policy and hfscale/recipe/arguments.py do. A compiled backward pass reads no output of the last one.
    """
    tp = job.layout.tp
    boundary = view.hidden / (tp if job.sequence_parallel else 1)
    last = view.hidden if view.gated and not job.compile else 0.0
    return 2.0 * job.tokens * (boundary + (2 * view.query_width + view.kv_width / 2 + view.mlp_width) / tp + last)


def megatron_dropped(view: ModelView, job: Job, stack: Stack) -> float:
    """What Megatron's selective recomputation drops of a layer and micro-batch besides the scores: nothing of a dense
    model; of experts the outputs of norms and activations, and latent attention's queries, keys and values, which are
    expanded again (`--recompute-modules layernorm moe_act mla_up_proj`; arXiv 2412.19437, section 3.2.3)."""
    if view.experts == 1:
        return 0.0
    tp = job.layout.tp
    norms = 2 * 2.0 * view.hidden / (tp if job.sequence_parallel else 1)
    inner = 2.0 * view.moe_share * view.mlp_width / tp
    latent = 0.0
    if view.latent_width:
        latent = (2.0 * view.query_width + stack.kept_kv * view.kv_width - 2.0 * view.latent_width) / tp
    return job.tokens * (norms + inner + latent)


def kept_and_working(view: ModelView, job: Job, stack: Stack) -> tuple[float, float]:
    """Bytes of a layer and micro-batch that are kept until the backward pass, and those of the layer at work on
    top."""
    whole = layer_bytes(view, job, stack) + _gathered_inputs(view, job, stack)
    tp = job.layout.tp
    scores = 0.0 if job.flash_attention else SCORE_BYTES_KEPT * job.tokens * view.heads / tp * job.seq_len
    boundary = 2.0 * job.tokens * view.hidden / (tp if job.sequence_parallel else 1)
    if job.recompute == "none":
        return whole + scores, 0.0
    if job.recompute == "full":
        return boundary, whole + scores
    if stack.name == "megatron":
        return whole - megatron_dropped(view, job, stack), scores
    kept = min(whole, selective_bytes(view, job))
    return kept, whole + scores - kept


def _gathered_inputs(view: ModelView, job: Job, stack: Stack) -> float:
    """What `ParallelTrainer` keeps beyond Megatron of a layer and micro-batch: with sequence parallelism the inputs of
    attention and MLP, gathered once and kept whole, where Megatron gathers them again for the backward pass; with
    context parallelism the other ranks' keys and values."""
    if stack.name != "hf":
        return 0.0
    tp, cp = job.layout.tp, job.layout.cp
    inputs = 2 * 2.0 * view.hidden * (1 - 1 / tp) if job.sequence_parallel else 0.0
    others = 2.0 * view.kv_width / tp * (cp - 1) if job.layout.pp > 1 else 0.0
    return job.tokens * (inputs + others)


def micro_batches_in_flight(job: Job, *, last: bool = False) -> float:
    """Micro-batches whose activations a pipeline rank holds at once: the first rank, or with `last` the one with the
    head.

    The formulas are those of `hfscale.facts.schedules.in_flight`, except that the last rank of an interleaved schedule
    holds (p (v-1) + 1)/v (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    pp, m, v = job.layout.pp, job.micro_batches, job.virtual_stages
    if job.overlapped_experts:
        # The forward pass of one more chunk runs beside each backward pass.
        return min(micro_batches_in_flight(replace(job, overlapped_experts=False), last=last) + 1 / v, float(m))
    if last and pp > 1 and job.schedule == "1f1b":
        return min((pp * (v - 1) + 1) / v, float(m))
    return in_flight(job.schedule_name, pp=pp, stages_per_rank=v, micro_batches=m, rank=0)


def layers_in_flight(job: Job) -> float:
    """Layers times micro-batches that the pipeline rank with most of them holds."""
    if job.rank_layers is None:
        return micro_batches_in_flight(job) * job.layer_split[0]
    pp, m, v = job.layout.pp, job.micro_batches, job.virtual_stages
    return max(
        in_flight(job.schedule_name, pp=pp, stages_per_rank=v, micro_batches=m, rank=rank) * layers
        for rank, layers in enumerate(job.rank_layers)
    )


def loss_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Logits, their log-probabilities and gradient at the peak of the cross-entropy."""
    logits = job.tokens * view.shape.vocab / (job.layout.tp if job.loss_parallel else 1)
    if job.fused_loss:
        return stack.loss_kept * logits / FUSED_LOSS_CHUNKS + 2.0 * job.tokens * view.hidden
    if job.loss_parallel and job.layout.tp > 1:
        return stack.split_loss_kept * logits
    return (stack.compiled_loss_kept if job.compile and job.compiled_loss else stack.loss_kept) * logits
