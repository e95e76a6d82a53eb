"""Memory of the fullest rank at its peak, by part.

peak = states + activations of the micro-batches in flight + the larger of the loss's peak and one layer's backward
pass + gathered parameters and buckets + context, times the allocator's fragmentation.
"""

from dataclasses import dataclass

from hfscale.planner.activations import kept_and_working, layers_in_flight, loss_bytes, micro_batches_in_flight
from hfscale.planner.frameworks import Shared, Stack, shared
from hfscale.planner.job import Job
from hfscale.planner.model_view import ModelView
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


def allocated_gib(memory: Memory, common: Shared | None = None) -> float:
    """The part of a peak that `torch.cuda.max_memory_allocated` tells: without what the allocator reserves beyond it,
    and without what it does not see."""
    return (memory.total - memory.context) / (common or shared()).fragmentation


def memory_of(view: ModelView, job: Job, stack: Stack, common: Shared | None = None) -> Memory:
    """Peak memory of the fullest rank."""
    common = common or shared()
    states = state_bytes(view, job, stack)
    activations, loss, gradients, buffers = _peak(view, job, stack, states.gradients)
    used = states.parameters + gradients + states.optimizer + activations + loss + buffers
    return Memory(
        parameters=states.parameters / GIB,
        gradients=gradients / GIB,
        optimizer=states.optimizer / GIB,
        activations=activations / GIB,
        loss=loss / GIB,
        buffers=(buffers + (common.fragmentation - 1) * used) / GIB,
        context=stack.context_gib + common.group_gib * groups(job),
    )


def groups(job: Job) -> int:
    """Groups of ranks that exchange data, each with buffers of its own: all ranks; where there are several axes, one
    per axis; and the ends of a pipeline, which share the embedding."""
    layout = job.layout
    axes = sum(size > 1 for size in (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp))
    return min(1, axes) + (axes if axes > 1 else 0) + (layout.pp > 1)


def _peak(view: ModelView, job: Job, stack: Stack, gradients: float) -> tuple[float, float, float, float]:
    """Activations, loss, gradients and buffers at the moment when they are most together.

    Without a pipeline that is the loss of the last micro-batch, the backward pass of the last layer, or that of the
    first one. Gradients of a single micro-batch do not exist yet at its loss, unless the stack keeps a buffer for them
    (Megatron), or they are shards: what the last step's have left is too small for activations to be put there
    (torchtitan's peaks fall by 16 bytes per parameter and shard from 8 to 128 ranks, gradients included). In a
    pipeline it is the rank with most micro-batches in flight, or the one with the loss.
    """
    kept, working = kept_and_working(view, job, stack)
    loss = loss_bytes(view, job, stack)
    first, last = job.layer_split
    at_loss, at_layer = _buffer_bytes(view, job, stack)
    if job.layout.pp > 1:
        opening = layers_in_flight(job) * kept + working
        closing = micro_batches_in_flight(job, last=True) * last * kept
        if opening >= closing + max(loss, working):
            return opening, 0.0, gradients, at_layer
        return closing + max(0.0, working - loss), loss, gradients, at_layer
    is_shared = job.zero == 3 and job.layout.dp_shard * job.layout.cp > 1
    is_allocated_late = job.micro_batches == 1 and stack.name != "megatron" and not is_shared
    before = 0.0 if is_allocated_late else gradients
    moments = (
        (first * kept, loss, before, at_loss),
        (first * kept + working, 0.0, before, at_layer),
        (kept + working, 0.0, gradients, at_layer),
    )
    return max(moments, key=sum)


def _buffer_bytes(view: ModelView, job: Job, stack: Stack) -> tuple[float, float]:
    """Parameters gathered, gradients on their way, buckets, gathered activations: at the loss, and in a layer's
    backward pass."""
    layout = job.layout
    per_layer = view.layer_parameters / layout.tp
    ends = (view.embedding_parameters + view.head_parameters) / layout.tp
    gathered = 0.0
    if layout.tp > 1 and job.sequence_parallel:
        gathered = GATHERED_ACTIVATIONS * 2.0 * job.tokens * view.hidden
    if job.zero == 3 and layout.dp_shard * layout.cp > 1:
        trained = 1.0 if job.method == "full" else 0.0
        width = 4.0 if job.precision == "fp32" else 2.0
        scattered = trained * (width + stack.gradient_bytes) * per_layer
        if layout.pp > 1:
            # With a pipeline, the layers stay gathered and their gradients whole until the last micro-batch.
            whole = (width + trained * stack.gradient_bytes) * job.layer_split[0] * per_layer + width * ends
            return gathered + whole, gathered + whole
        # FSDP2 holds the root group (embedding and head) gathered, the layer that is prefetched and the one at work,
        # and that one's gradients.
        if not job.reshard:
            whole = gathered + width * (ends + job.layer_split[0] * per_layer)
            return whole, whole + scattered
        return gathered + width * (ends + per_layer), gathered + width * (ends + 2 * per_layer) + scattered
    if job.zero in (1, 2) and job.precision == "fp16":
        gathered += DEEPSPEED_BUCKET_BYTES
    elif (
        stack.name != "megatron"
        and job.zero == 0
        and not job.pure
        and job.precision != "fp32"
        and job.method == "full"
    ):
        # Autocast's bf16 copies of the weights: it keeps them all until the forward ends, autograd until the backward.
        gathered += 2.0 * (job.layer_split[0] * per_layer + view.head_parameters / layout.tp)
    return gathered, gathered


GATHERED_ACTIVATIONS = 2
"""Activations of the whole sequence that a layer at work holds under sequence parallelism: its input and a
gradient."""
DEEPSPEED_BUCKET_BYTES = 3e9
"""DeepSpeed's default buckets of 5e8 elements of 2 bytes: two to reduce (`overlap_comm`) and one to gather."""
