"""The moment of a step at which a rank uses most memory.

All byte counts are per rank unless a docstring states otherwise.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hfscale.facts.activations import attention_bytes, layer_kinds
from hfscale.facts.schedules import SPLIT_BACKWARD
from hfscale.planner.activations import (
    dispatched_bytes,
    end_activations,
    exchange_bytes,
    held_bytes,
    kept_and_waiting,
    kept_and_working,
    layers_in_flight,
    loss_bytes,
    micro_batches_in_flight,
    new_gradient_bytes,
    regime_of,
    transient_bytes,
)
from hfscale.planner.experts import (
    copied_share,
    gathered_share,
    kept_share,
    layer_parameters,
    owners,
    unit_parameters,
)
from hfscale.planner.frameworks import Framework
from hfscale.planner.frozen import dense_bytes, expanded_bytes
from hfscale.planner.host_activations import stashed_bytes
from hfscale.planner.images import (
    image_bytes,
    image_parameters,
    image_root_parameters,
    image_unit_parameters,
)
from hfscale.planner.job import Job
from hfscale.planner.tasks import (
    LOGIT_COPIES_BYTES,
    forward_bytes,
    generated_at_once,
    generation_weight_bytes,
    kv_cache_bytes,
    prompt_job,
    reference_buffer_bytes,
)
from hfscale.planner.teacher import divergence_bytes, teacher_forward_bytes

GATHERED_ACTIVATIONS = 2
"""Unsplit activations that the current layer holds under sequence parallelism: its input and a gradient."""
DEEPSPEED_BUCKET_BYTES = 3e9
"""DeepSpeed's default buckets of 5e8 elements of 2 bytes: two to reduce (`overlap_comm`) and one to gather into."""


@dataclass(frozen=True)
class Moment:
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


def highest_moment(job: Job, framework: Framework, gradients: float, update: float = 0.0) -> Moment:
    """The moment of a step at which most memory is in use.

    Without a pipeline this moment is the loss of the last micro-batch, the backward pass of the last layer, or that of
    the first layer. At the loss the gradients of a single micro-batch do not exist yet, unless the framework keeps a
    buffer for them (Megatron; DDP, whose buckets stay allocated between steps; ZeRO-1, which accumulates in one) or
    they are sharded: the memory that
    the previous step's shards left free is too small to be reused for activations (torchtitan's peaks fall by 16 bytes
    per parameter and shard from 8 to 128 ranks, gradients included). The recipes store gradients in the
    buckets (`gradient_as_bucket_view`). With a pipeline the rank with most micro-batches in
    flight or the one with the loss is the fullest. Where the optimizer needs memory for its update, that is a moment
    too.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        gradients (`float`): bytes of all gradients, as they are at the end of the backward pass.
        update (`float`): bytes that the optimizer's update needs in addition to the states.
    """
    highest = _highest_in_passes(job, framework, gradients)
    if update + gradients > highest.total:
        return Moment(0.0, 0.0, gradients, update, at="optimizer update")
    return highest


def _highest_in_passes(job: Job, framework: Framework, gradients: float) -> Moment:
    """The moment of the forward and backward passes at which most memory is in use."""
    if job.runs_parallel_trainer and job.layout.pp > 1:
        return max(_pipeline_moments(job, framework), key=lambda moment: moment.total)
    if job.spreads_experts:
        moments = _moments_of_spread_experts(job, framework, gradients)
        return max(moments, key=lambda moment: moment.total)
    if job.layout.pp > 1:
        return _pipeline_moment(job, framework, gradients)
    return max(_moments(job, framework, gradients), key=lambda moment: moment.total)


def _moments_of_spread_experts(
    job: Job, framework: Framework, gradients: float
) -> Iterator[Moment]:
    """The moments of a step with spread experts, for each kind of layers that the model has."""
    if job.runs_parallel_trainer and job.micro_batches > 1:
        gradients = _unreduced_bytes(job, framework)
    for kind in layer_kinds(job.shape):
        yield from _native_moments(job, framework, gradients, replace(job, shape=kind))


def _pipeline_moment(job: Job, framework: Framework, gradients: float) -> Moment:
    """The highest moment of another framework's pipeline."""
    kept, working = kept_and_working(job, framework)
    ends = end_activations(job, framework)
    loss = loss_bytes(job, framework)
    _, last = job.layer_split
    _, buffers = _buffer_bytes(job, framework)
    opening = layers_in_flight(job) * kept + working
    closing = micro_batches_in_flight(job, last=True) * (last * kept + ends)
    if opening >= closing + max(loss, working):
        return Moment(
            opening, 0.0, gradients, buffers, at="backward pass", rank="first pipeline rank"
        )
    rank_of_head = "first pipeline rank" if job.is_v_shaped else "last pipeline rank"
    return Moment(closing + max(0.0, working - loss), loss, gradients, buffers, rank=rank_of_head)


def _moments(job: Job, framework: Framework, gradients: float) -> list[Moment]:
    """The moments of a step without a pipeline and without spread experts."""
    kept, working = kept_and_working(job, framework)
    images = image_bytes(job)
    ends = end_activations(job, framework) + images.kept
    loss = divergence_bytes(job) if job.task == "distillation" else loss_bytes(job, framework)
    layers, _ = job.layer_split
    at_loss, at_layer = _buffer_bytes(job, framework)
    buckets = gradients if _has_buckets(job, framework) else 0.0
    is_shared = job.zero == 3 and job.layout.dp_shard * job.layout.cp > 1
    is_allocated_late = job.micro_batches == 1 and framework.name != "megatron" and not is_shared
    before = buckets if is_allocated_late else gradients
    of_layers = layers * kept
    of_all = of_layers + ends
    if job.activation_offload:
        of_layers = min(of_layers, stashed_bytes(job, framework))
        of_all = min(of_all, max(of_layers, kept))
    moments = [
        Moment(of_all, loss, before, at_loss),
        Moment(of_all + working, 0.0, before, at_layer, at="last layer's backward pass"),
        Moment(
            kept + working + images.kept,
            0.0,
            gradients,
            at_layer,
            at="first layer's backward pass",
        ),
    ]
    if job.tower is not None:
        moments += _of_the_tower(job, before, gradients)
    if job.task == "distillation":
        moments += _of_generation(job, buckets)
        moments.append(_of_the_teacher(job, of_all, before, at_loss))
    if job.task == "dpo" and job.has_reference_pass:
        moments.append(_of_the_reference(job, of_layers, before, at_loss))
    if job.task == "grpo":
        # Generation comes before the step's gradients, unless those of an earlier round are still there.
        earlier = gradients if job.generation_rounds > 1 else buckets
        moments += _of_generation(job, earlier)
        if job.has_reference_pass:
            moments.append(_of_the_reference(job, 0.0, earlier, 0.0))
    return moments


def _has_buckets(job: Job, framework: Framework) -> bool:
    """Whether gradients have memory of their own between steps: DDP's buckets, and what ZeRO-1 accumulates in."""
    if framework.name != "hf":
        return False
    is_ddp = job.zero == 0 and job.layout.world_size > 1 and job.layout.tp == 1
    return is_ddp or job.zero == 1


def _unreduced_bytes(job: Job, framework: Framework) -> float:
    """Gradients of all micro-batches but the last one, which `ParallelTrainer` sums before it reduces them."""
    dense, experts = layer_parameters(job)
    ends = job.shape.embedding_parameters + job.shape.head_parameters
    layers = job.layer_split[0] * (dense + experts * gathered_share(job))
    return _reduced_bytes(job, framework) * (layers + ends / job.layout.tp)


def _reduced_bytes(job: Job, framework: Framework) -> float:
    """Bytes of the gradient of a parameter of the model as it is reduced; adapters train none of these."""
    return framework.gradient_bytes if job.method == "full" else 0.0


def _pipeline_moments(job: Job, framework: Framework) -> Iterator[Moment]:
    """The moments of a step of `ParallelTrainer`'s pipelines.

    Layers stay gathered, and gradients are summed in the format of their reduction, until the last micro-batch of a
    stage. Those of a micro-batch are added when all of a unit are there. Then FSDP2 reduces the sums unit by unit,
    from a copy (torch 2.13, distributed/pipelining/stage.py, `backward_maybe_with_nosync`).
    """
    assert job.rank_layers is not None
    _, working = kept_and_working(job, framework)
    working += exchange_bytes(job) + transient_bytes(job)
    copied = _reduced_bytes(job, framework) * unit_parameters(job)
    last = 0 if job.is_v_shaped else job.layout.pp - 1
    ends = micro_batches_in_flight(job, last=True) * end_activations(job, framework)
    of_a_layer = kept_and_waiting(job, framework)
    counts = rank_parameters(job)
    for rank in _fullest_ranks(job):
        layers, parameters = job.rank_layers[rank], counts[rank]
        name = {0: "first pipeline rank", last: "last pipeline rank"}.get(
            rank, "pipeline rank in the middle"
        )
        buffers = _pipeline_buffers(job, framework, parameters)
        of_ends = ends if rank == last else 0.0
        held = held_bytes(job, rank, layers, of_a_layer) + of_ends
        new = new_gradient_bytes(job, parameters)
        yield Moment(held + working, 0.0, 0.0, buffers + new, at="backward pass", rank=name)
        yield Moment(0.0, 0.0, 0.0, buffers + copied, at="reduction of gradients", rank=name)
        if rank == last:
            held = held_bytes(job, rank, layers, of_a_layer, at_loss=True) + of_ends
            new = new_gradient_bytes(job, parameters, at_loss=True)
            yield Moment(held, loss_bytes(job, framework), 0.0, buffers + new, rank=name)


def _fullest_ranks(job: Job) -> Iterable[int]:
    """The pipeline ranks but those that hold no more than an earlier one: of ranks between the ends of the pipeline
    with equally many layers the first one holds most micro-batches, unless the backward pass is split."""
    assert job.rank_layers is not None
    if job.schedule_name in SPLIT_BACKWARD:
        return range(job.layout.pp)
    last = job.layout.pp - 1
    first_with = {layers: rank for rank, layers in reversed([*enumerate(job.rank_layers)][1:last])}
    return sorted({0, last, *first_with.values()})


def rank_parameters(job: Job) -> list[float]:
    """Count the parameters of each pipeline rank of `ParallelTrainer`, as FSDP2 gathers them.

    Args:
        job (`Job`): the run, which has a pipeline.
    """
    assert job.rank_layers is not None
    shape = job.shape
    dense, experts = layer_parameters(job)
    of_a_layer = dense + experts * copied_share(job)
    counts = [layers * of_a_layer for layers in job.rank_layers]
    counts[0] += shape.embedding_parameters / job.layout.tp
    counts[0 if job.is_v_shaped else -1] += shape.vocab * shape.embedding_width / job.layout.tp
    return counts


def _pipeline_buffers(job: Job, framework: Framework, parameters: float) -> float:
    """Bytes of the gathered parameters, where they are a copy, of the sums of gradients, and of gathered activations,
    which a pipeline rank of `ParallelTrainer` holds from its first to its last micro-batch."""
    layout = job.layout
    gathered_inputs = 0.0
    if layout.tp > 1 and job.sequence_parallel:
        gathered_inputs = GATHERED_ACTIVATIONS * 2.0 * job.tokens * job.shape.hidden
    is_copied = job.precision != "fp32" or layout.dp_replicate * layout.dp_shard * layout.cp > 1
    copied = job.value_bytes if is_copied else 0.0
    return gathered_inputs + (copied + _reduced_bytes(job, framework)) * parameters


def _native_moments(job: Job, framework: Framework, gradients: float, layer: Job) -> list[Moment]:
    """The moments of a step with spread experts under FSDP2 without a pipeline.

    The embedding, each layer without its experts, the experts of each layer, and the last norm with the head are
    units: each is gathered while it runs, and the head from the forward pass to its backward pass. Gradients of a unit
    are reduced when its backward pass is over, from a copy in the format of the reduction into another one of their
    shard, where a third divides them if only one rank has these experts; the copy of a unit exists until that of the
    next (transformers 5.23, distributed/fsdp.py; torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    Where attention writes its scores to memory, one layer's attention may need more than all of the layer keeps; the
    experts' gradients have been copied for their reduction before, and the buffer into which a recomputed forward pass
    has gathered the experts of several ranks is kept until that of the next layer (_fsdp_param_group.py,
    `wait_for_unshard`, there). Where layers have different mixers, one kind
    computes at a time, and the peak is that of the kind that needs most.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        gradients (`float`): bytes of the gradients of all layers.
        layer (`Job`): the run with a model of one layer, of the kind that computes; `job` if there is one kind.
    """
    kept, _ = kept_and_working(job, framework)
    _, working = kept_and_working(layer, framework)
    kept_of_all = job.layer_split[0] * kept
    ends = end_activations(job, framework)
    dense, experts = layer_parameters(layer)
    experts /= layer.shape.moe_share or 1.0  # of a layer that has any
    head = job.shape.vocab * job.shape.embedding_width / job.layout.tp
    width = job.value_bytes
    reduced = _reduced_bytes(job, framework)
    recomputes = job.activation_checkpointing != "none"
    gathered = width * (dense + experts * gathered_share(job))
    in_layer = working + exchange_bytes(layer)
    shards = job.layout.dp_shard * job.layout.cp
    is_alone = owners(job, shards) == 1
    copies = gathered_share(job) + kept_share(job, shards) + is_alone
    moments = [
        Moment(kept_of_all + ends, loss_bytes(job, framework), gradients, width * head),
        Moment(
            kept_of_all + in_layer,
            0.0,
            gradients,
            gathered + reduced * head,
            at="last layer's backward pass",
        ),
        Moment(
            kept_of_all + working - dispatched_bytes(layer),
            0.0,
            gradients,
            width * dense + reduced * experts * copies,
            at="reduction of the last experts' gradients",
        ),
        Moment(
            kept + in_layer,
            0.0,
            gradients,
            gathered + reduced * dense,
            at="first layer's backward pass",
        ),
    ]
    attention = job.tokens * attention_bytes(job.shape, regime_of(job), job.seq_len) / job.layout.tp
    if attention > 0:
        others = kept_of_all
        if not recomputes:
            others -= kept
        held = width * dense + reduced * experts * gathered_share(job)
        if recomputes and not is_alone:
            held += width * experts * gathered_share(job)
        moments.append(
            Moment(others + ends + attention, 0.0, gradients, held, at="last layer's attention")
        )
    if not recomputes:
        moments.append(
            Moment(
                kept_of_all + ends + in_layer,
                0.0,
                gradients,
                gathered,
                at="last layer's forward pass",
            )
        )
    return moments


def _of_the_reference(job: Job, kept: float, gradients: float, buffers: float) -> Moment:
    """The reference's forward pass. In DPO the policy's activations are kept meanwhile; in GRPO it runs after
    generation."""
    gathered = buffers + reference_buffer_bytes(job)
    return Moment(
        kept + forward_bytes(job), 0.0, gradients, gathered, at="reference's forward pass"
    )


def _of_the_tower(job: Job, before: float, gradients: float) -> Iterator[Moment]:
    """The forward pass of the tower, which comes first, and its backward pass, which comes last."""
    images = image_bytes(job)
    gathered = 0.0
    if job.zero == 3 and job.layout.dp_shard > 1:
        ends = job.shape.embedding_parameters + job.shape.head_parameters
        units = 2 * image_unit_parameters(job)
        gathered = job.value_bytes * (ends + image_root_parameters(job) + units)
    yield Moment(
        images.kept + images.forward, 0.0, before, gathered, at="vision tower's forward pass"
    )
    if job.train_vision_tower:
        yield Moment(
            images.kept + images.backward,
            0.0,
            gradients,
            gathered,
            at="vision tower's backward pass",
        )


def _of_the_teacher(job: Job, kept: float, gradients: float, buffers: float) -> Moment:
    """The teacher's forward pass, while the student's activations are kept."""
    working = teacher_forward_bytes(job)
    return Moment(kept, 0.0, gradients, buffers + working, at="teacher's forward pass")


def _of_generation(job: Job, gradients: float) -> tuple[Moment, Moment]:
    """The start of generation, with one layer's tensors of all prompts, and its end, with the complete cache and the
    logits of the last token."""
    weights = generation_weight_bytes(job)
    prompts = prompt_job(job)
    logits = LOGIT_COPIES_BYTES * generated_at_once(job) * job.shape.vocab
    cached = kv_cache_bytes(job, prompts.seq_len)
    start = Moment(
        forward_bytes(prompts), 0.0, gradients, weights, cached, at="start of generation"
    )
    return start, Moment(
        0.0, logits, gradients, weights, kv_cache_bytes(job, job.seq_len), at="end of generation"
    )


def _buffer_bytes(job: Job, framework: Framework) -> tuple[float, float]:
    """Bytes of gathered parameters, unreduced gradients, buckets and gathered activations.

    Returns:
        `tuple`: bytes at the loss, and bytes during a layer's backward pass.
    """
    shape = job.shape
    layout = job.layout
    dense, experts = layer_parameters(job)
    per_layer = dense + experts
    ends = (shape.embedding_parameters + shape.head_parameters) / layout.tp
    gathered = 0.0
    if layout.tp > 1 and job.sequence_parallel:
        gathered = GATHERED_ACTIVATIONS * 2.0 * job.tokens * shape.hidden
    if job.zero == 3 and layout.dp_shard * layout.cp > 1:
        per_layer = dense + experts * copied_share(job)
        trained = 1.0 if job.method == "full" else 0.0
        width = job.value_bytes
        of_layer = dense_bytes(job) * dense + width * experts * copied_share(job)
        scattered = trained * (width + framework.gradient_bytes) * per_layer
        if layout.pp > 1:
            # With a pipeline, layers stay gathered and gradients stay unreduced until the last micro-batch.
            per_parameter = width + trained * framework.gradient_bytes
            stages = per_parameter * job.layer_split[0] * per_layer + width * ends
            return gathered + stages, gathered + stages
        # FSDP2 holds the gathered root group (embedding and head), the layer that is prefetched, the current layer,
        # and the current layer's gradients.
        if not job.reshard:
            model = gathered + width * ends + job.layer_split[0] * of_layer
            return model, model + expanded_bytes(job) + scattered
        root = gathered + width * (ends + image_root_parameters(job))
        return root + of_layer, root + 2 * of_layer + expanded_bytes(job) + scattered
    if job.zero in (1, 2) and job.precision == "fp16":
        gathered += DEEPSPEED_BUCKET_BYTES
    elif (
        framework.name != "megatron"
        and job.zero == 0
        and not job.pure_bf16
        and job.precision != "fp32"
        and job.method == "full"
    ):
        # bf16 copies of the weights: autocast keeps all of them until the end of the forward pass, autograd until the
        # backward pass.
        head = (
            shape.vocab * shape.embedding_width / layout.tp
            if layout.pp == 1
            else shape.head_parameters / layout.tp
        )
        gathered += 2.0 * (job.layer_split[0] * per_layer + head + image_parameters(job).trained)
    return gathered, gathered + expanded_bytes(job)
