"""Bytes per rank that a forward pass leaves for the backward pass, and the peak at the loss."""

from hfscale.planner.job import Job
from hfscale.planner.model_view import ModelView
from hfscale.planner.stacks import Stack

SCORE_BYTES_KEPT = 5.0
"""Bytes kept per attention score without flash attention: the scores and their softmax in 2 bytes, the dropout mask in
1 (Korthikanti et al., arXiv 2205.05198, section 4.1)."""
FUSED_LOSS_CHUNKS = 8
"""Parts in which a fused loss works through the logits (Liger's default grows with the vocabulary; torchtune has
8)."""


def layer_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Activations of one layer and micro-batch without recomputation, attention scores apart.

    Widths times the stack's bytes: hidden (norms and residuals), queries with the attention's output, keys and values,
    and the MLP (Korthikanti et al., arXiv 2205.05198, section 4.1, for Megatron; for Hugging Face's layers 26 to 28 h
    + 8 f, measured with torch's MemTracker). Sequence parallelism splits the hidden part too. With frozen weights the
    input of the MLP's last matrix is not kept.
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
    return job.tokens * (stack.compiled_kept if job.compile else 1.0) * widths


def kept_and_working(view: ModelView, job: Job, stack: Stack) -> tuple[float, float]:
    """Bytes of a layer and micro-batch that are kept until the backward pass, and those of the layer at work on
    top."""
    whole = layer_bytes(view, job, stack)
    tp = job.layout.tp
    scores = 0.0 if job.flash_attention else SCORE_BYTES_KEPT * job.tokens * view.heads / tp * job.seq_len
    boundary = 2.0 * job.tokens * view.hidden / (tp if job.sequence_parallel else 1)
    if job.recompute == "none":
        return whole + scores, 0.0
    if job.recompute == "full":
        return boundary, whole + scores
    if not job.flash_attention:
        return whole, scores  # Megatron's selective recomputation drops the scores and nothing else
    kept = max(boundary, stack.selective_kept * whole)
    return kept, whole - kept


def in_flight(job: Job, *, last: bool = False) -> float:
    """Micro-batches whose activations the first or the last pipeline rank holds at once.

    1F1B: as many as stages from there on; interleaved: p + (p-1)/v on the first rank, (p (v-1) + 1)/v on the last
    (Narayanan et al., arXiv 2104.04473, section 2.2); GPipe: all.
    """
    pp, m, v = job.layout.pp, job.micro_batches, job.virtual_stages
    if pp == 1:
        return 1.0
    if job.schedule == "gpipe":
        return float(m)
    if job.schedule == "zero_bubble":
        return float(min(pp, m))
    held = (pp * (v - 1) + 1) / v if last else pp + (pp - 1) / v if v > 1 else pp
    return min(held, float(m))


def loss_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Logits, their log-probabilities and gradient at the peak of the cross-entropy."""
    logits = job.tokens * view.shape.vocab / job.layout.tp
    if job.fused_loss:
        return stack.loss_kept * logits / FUSED_LOSS_CHUNKS + 2.0 * job.tokens * view.hidden
    return (stack.compiled_loss_kept if job.compile else stack.loss_kept) * logits
