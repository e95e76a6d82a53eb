"""Bytes per rank that a forward pass leaves for the backward pass, and the peak at the loss."""

from hfscale.planner.job import Job
from hfscale.planner.model_view import ModelView
from hfscale.planner.stacks import Stack


def layer_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Activations of one layer and micro-batch without recomputation.

    Widths times the stack's bytes: hidden (norms and residuals), queries with the attention's output, keys and values,
    and the MLP (Korthikanti et al., arXiv 2205.05198, section 4.1, for Megatron; measured with torch's MemTracker for
    Hugging Face's layers). Sequence parallelism splits the hidden part too. Without flash attention the scores are kept:
    5 bytes each, that is scores, softmax and the dropout mask.
    """
    tp = job.layout.tp
    mlp = stack.kept_f if view.gated else stack.kept_f_plain
    split = tp if job.sequence_parallel else 1
    widths = (
        stack.kept_h * view.hidden / split
        + (stack.kept_q * view.query_width + stack.kept_kv * view.kv_width + mlp * view.mlp_width) / tp
    )
    scores = 0.0 if job.flash_attention else 5.0 * view.heads / tp * job.seq_len
    return job.tokens * ((stack.compiled_kept if job.compile else 1.0) * widths + scores)


def in_flight(job: Job) -> float:
    """Micro-batches whose activations the first pipeline rank holds at once.

    1F1B: as many as stages, or all where there are fewer; interleaved: p (1 + (p-1)/(p v)) (Narayanan et al., arXiv
    2104.04473, section 2.2); GPipe: all.
    """
    pp, m, v = job.layout.pp, job.micro_batches, job.virtual_stages
    if pp == 1:
        return 1.0
    if job.schedule == "gpipe":
        return float(m)
    if v == 1 or job.schedule == "zero_bubble":
        return float(min(pp, m))
    return min(pp * (1 + (pp - 1) / (pp * v)), float(m))


def activation_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Activations of the fullest rank at its peak."""
    whole = layer_bytes(view, job, stack)
    split = job.layout.tp if job.sequence_parallel else 1
    boundary = 2.0 * job.tokens * view.hidden / split
    if job.recompute == "none":
        kept, working = whole, 0.0
    elif job.recompute == "full":
        # The layer's input is kept; the layer at work is whole, with the gradients of its widest part.
        kept, working = boundary, whole
    else:
        kept, working = max(boundary, stack.selective_kept * whole), whole * (1 - stack.selective_kept)
    if job.recompute == "selective" and not job.flash_attention:
        scores = job.tokens * 5.0 * view.heads / job.layout.tp * job.seq_len
        kept, working = whole - scores, scores
    return in_flight(job) * job.layer_split[0] * kept + working


def loss_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Logits and their gradient at the peak of the cross-entropy; on the last pipeline stage only, where little else is
    in flight, so they count where there is no pipeline."""
    logits = job.tokens * view.shape.vocab / job.layout.tp
    if job.fused_loss:
        return 2.0 * job.tokens * view.hidden * 2
    if job.layout.pp > 1:
        return 0.0
    return stack.loss_kept * logits
