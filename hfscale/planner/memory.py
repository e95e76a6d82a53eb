"""Memory of the fullest rank at its peak, by part.

peak = states + activations of the micro-batches in flight + the larger of the loss's peak and one layer's backward
pass + gathered parameters and buckets + context, times the allocator's fragmentation.
"""

from dataclasses import dataclass

from hfscale.planner.activations import in_flight, kept_and_working, loss_bytes
from hfscale.planner.job import Job
from hfscale.planner.model_view import ModelView
from hfscale.planner.stacks import Stack
from hfscale.planner.states import state_bytes

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """GiB on the fullest rank."""

    parameters: float
    """Parameters, sharded as the layout says."""
    gradients: float
    """Gradients."""
    optimizer: float
    """Moments and master copies."""
    activations: float
    """What the backward pass needs, of all micro-batches in flight."""
    loss: float
    """Logits and their gradient at the loss."""
    buffers: float
    """Gathered parameters, gradient buckets, fragmentation."""
    context: float
    """CUDA context, libraries, NCCL."""

    @property
    def total(self) -> float:
        """All parts."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.loss
            + self.buffers
            + self.context
        )


def memory_of(view: ModelView, job: Job, stack: Stack) -> Memory:
    """Peak memory of the fullest rank."""
    states = state_bytes(view, job, stack)
    buffers = _buffer_bytes(view, job, stack)
    activations, loss, gradients = _peak(view, job, stack, states.gradients)
    used = states.parameters + gradients + states.optimizer + activations + loss + buffers
    return Memory(
        parameters=states.parameters / GIB,
        gradients=gradients / GIB,
        optimizer=states.optimizer / GIB,
        activations=activations / GIB,
        loss=loss / GIB,
        buffers=(buffers + (stack.fragmentation - 1) * used) / GIB,
        context=stack.context_gib,
    )


def _peak(view: ModelView, job: Job, stack: Stack, gradients: float) -> tuple[float, float, float]:
    """Activations, loss and gradients at the moment when they are most together.

    Without a pipeline that is the loss of the last micro-batch, or the end of the backward pass. Gradients of a single
    micro-batch do not exist yet at its loss, unless the stack keeps a buffer for them (Megatron). In a pipeline it is
    the first rank with its many micro-batches, or the last one with fewer and the loss.
    """
    kept, working = kept_and_working(view, job, stack)
    loss = loss_bytes(view, job, stack)
    first, last = job.layer_split
    if job.layout.pp > 1:
        opening = in_flight(job) * first * kept + working
        closing = in_flight(job, last=True) * last * kept
        if opening >= closing + max(loss, working):
            return opening, 0.0, gradients
        return closing + max(0.0, working - loss), loss, gradients
    is_allocated_late = job.micro_batches == 1 and stack.name != "megatron"
    at_loss = first * kept + loss + (0.0 if is_allocated_late else gradients)
    at_end = kept + working + gradients
    in_between = first * kept + working + (0.0 if is_allocated_late else gradients)
    if at_loss >= max(at_end, in_between):
        return first * kept, loss, 0.0 if is_allocated_late else gradients
    if in_between >= at_end:
        return first * kept + working, 0.0, 0.0 if is_allocated_late else gradients
    return kept + working, 0.0, gradients


def _buffer_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Parameters gathered for the layers at work, gradients on their way, buckets, gathered activations."""
    layout = job.layout
    per_layer = view.layer_parameters / layout.tp
    ends = (view.embedding_parameters + view.head_parameters) / layout.tp
    gathered = 0.0
    if layout.tp > 1 and job.sequence_parallel:
        gathered = GATHERED_ACTIVATIONS * 2.0 * job.tokens * view.hidden
    if job.zero == 3 and layout.dp_shard * layout.cp > 1:
        trained = 1.0 if job.method == "full" else 0.0
        if layout.pp > 1:
            # With a pipeline, the layers stay gathered and their gradients whole until the last micro-batch.
            return gathered + (2.0 + trained * stack.gradient_bytes) * job.layer_split[0] * per_layer + 2.0 * ends
        # FSDP2 holds the root group (embedding and head) gathered, the layer at work and the one prefetched, and one
        # layer's gradients.
        layers = 2 if job.reshard else job.layer_split[0]
        return gathered + 2.0 * (ends + layers * per_layer) + trained * (2.0 + stack.gradient_bytes) * per_layer
    if job.zero in (1, 2) and job.precision == "fp16":
        return gathered + DEEPSPEED_BUCKET_BYTES
    if (
        stack.name != "megatron"
        and job.zero == 0
        and not job.pure
        and job.precision != "fp32"
        and job.method == "full"
    ):
        # Autocast's bf16 copies of the weights: it keeps them all until the forward ends, autograd until the backward.
        return gathered + 2.0 * (job.layer_split[0] * per_layer + view.head_parameters / layout.tp)
    return gathered


GATHERED_ACTIVATIONS = 2
"""Activations of the whole sequence that a layer at work holds under sequence parallelism: its input and a
gradient."""
DEEPSPEED_BUCKET_BYTES = 3e9
"""DeepSpeed's default buckets of 5e8 elements of 2 bytes: two to reduce (`overlap_comm`) and one to gather."""
