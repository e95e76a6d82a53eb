"""Memory of the fullest rank at its peak, by part.

peak = states + activations of the micro-batches in flight + the larger of the loss's peak and one layer's backward pass
+ gathered parameters and buckets + context, times the allocator's fragmentation.
"""

from dataclasses import dataclass

from hfscale.planner.activations import activation_bytes, loss_bytes
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
            self.parameters + self.gradients + self.optimizer + self.activations + self.loss + self.buffers + self.context
        )


def memory_of(view: ModelView, job: Job, stack: Stack) -> Memory:
    """Peak memory of the fullest rank."""
    states = state_bytes(view, job, stack)
    activations = activation_bytes(view, job, stack)
    loss = loss_bytes(view, job, stack)
    buffers = _buffer_bytes(view, job, stack)
    used = states.parameters + states.gradients + states.optimizer + activations + loss + buffers
    # Fragmentation comes from what is allocated and freed within a step, not from states that stay.
    return Memory(
        parameters=states.parameters / GIB,
        gradients=states.gradients / GIB,
        optimizer=states.optimizer / GIB,
        activations=activations / GIB,
        loss=loss / GIB,
        buffers=(buffers + (stack.fragmentation - 1) * used) / GIB,
        context=stack.context_gib,
    )


def _buffer_bytes(view: ModelView, job: Job, stack: Stack) -> float:
    """Parameters gathered for the layers at work, gradients on their way, buckets."""
    layout = job.layout
    per_layer = view.layer_parameters / layout.tp
    ends = (view.embedding_parameters + view.head_parameters) / layout.tp
    if job.zero == 3 and layout.dp_shard * layout.cp > 1:
        # FSDP2 holds the root group (embedding and head) gathered, the layer at work and the one prefetched, and one
        # layer's gradients.
        gathered = 2.0 * (ends + 2 * per_layer)
        trained = 1.0 if job.method == "full" else 0.0
        gradients = trained * (2.0 + stack.gradient_bytes) * per_layer
        if layout.pp > 1 or not job.reshard:
            gathered = 2.0 * (ends + job.layer_split[0] * per_layer)
        return gathered + gradients
    if stack.name != "megatron" and job.zero == 0 and not job.pure and job.precision != "fp32" and job.method == "full":
        return 2.0 * max(per_layer, ends)  # autocast's bf16 copies of the weights at work
    return 0.0
