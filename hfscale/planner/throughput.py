"""Duration of an optimizer step, by part: computation, exposed communication, pipeline bubble, optimizer.

A step runs m micro-batches through p pipeline stages. With t the time of a micro-batch on the slowest stage and v
stages per rank,

    step = m t + (sum of the other stages' times) / v + exposed gradient communication + optimizer

For equal stages the bubble is then (p-1)/(v m) of the ideal time (Narayanan et al., arXiv 2104.04473, section 2.2).
Communication is exposed where no computation runs at the same time. All durations are in seconds.
"""

import math
from dataclasses import dataclass

from hfscale.facts.schedules import idle_relative_to_1f1b
from hfscale.planner.activations import weight_bytes
from hfscale.planner.experts import (
    copied_share,
    expert_costs,
    expert_exchange_s,
    gathered_share,
    kept_share,
    layer_parameters,
    owners,
)
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.frozen import dense_bytes, mean_bytes
from hfscale.planner.gradient_sums import gradient_sums_s
from hfscale.planner.host_activations import exposed_copies_s
from hfscale.planner.images import image_parameters, images_s
from hfscale.planner.job import OPTIMIZERS, Job, strategy_of
from hfscale.planner.kernels import BACKWARD_ATTENTION, LayerTime, Rates, head_s, layer_forward
from hfscale.planner.memory import reduced_gradient_bytes, trained_parameters
from hfscale.planner.network import Group, Network, exposed_s
from hfscale.planner.tasks import generation_s, reference_s
from hfscale.planner.teacher import teacher_s

CPU_BYTES_S = 40e9
"""Memory bandwidth, bytes/s, of a rank's share of the CPUs, for an optimizer on the CPU (eight ranks on two
sockets)."""
ADAPTER_LAUNCHES = 2.0
"""Kernels that a layer with adapters on all matrices launches, relative to one without: 115 against 55 in the forward
pass of a Llama, 165 against 101 in its backward pass (counted with transformers 5.23 and PEFT 0.21.2)."""
AVERAGING_BYTES = 12.0
"""Bytes of memory traffic per parameter of an update of a moving average."""
LAUNCHED_KERNELS = 55
"""Kernels of a Llama's forward pass per layer, whose launch `Framework.launch_s` is."""
MUON_ITERATIONS = 5
"""Newton-Schulz iterations of an update, the default of `hfscale.Muon` and of `torch.optim.Muon`."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Holds the duration of a step by part, in seconds."""

    compute: float
    """Forward and backward passes and recomputation of all micro-batches on the slowest stage."""
    communication: float
    """Exposed communication."""
    bubble: float
    """Idle time of a stage while the pipeline fills and drains."""
    optimizer: float
    """The optimizer update, and other costs that occur once per step."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class DpoTime(StepTime):
    """Holds the duration of a step with a reference model by part, in seconds."""

    reference: float
    """The reference's forward passes."""


@dataclass(frozen=True, kw_only=True)
class DistillationTime(StepTime):
    """Holds the duration of a step of a distillation by part, in seconds."""

    teacher: float
    """The teacher's forward passes, and its part of the loss."""
    generation: float
    """Generation of the completions, at their full length."""


@dataclass(frozen=True, kw_only=True)
class GrpoTime(DpoTime):
    """Holds the duration of a step with generation by part, in seconds."""

    generation: float
    """Generation of the completions, at their full length."""


def step_time(job: Job, framework: Framework, shared: SharedConstants) -> StepTime:
    """Estimate the duration of one optimizer step by part, in seconds.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        shared (`SharedConstants`): constants of hardware and networks.

    Raises:
        UsageError: no peak of the device is known for the precision, or the bandwidth between nodes is not above 0.
    """
    network = Network.of(
        job.gpu, node_size=job.gpus_per_node, network_gb_s=job.network_gb_s, shared=shared
    )
    rates = Rates(job, framework, shared)
    layer = layer_forward(job, framework, shared, rates)
    forward, backward = _layer_compute(layer, job, framework)
    sent = _layer_traffic(job, framework, network, layer) + expert_exchange_s(
        job, network, forward + backward
    )
    head = head_s(job, framework, rates)
    copies = _Copies.of(job, rates)
    gathered = _sharded_traffic(job, framework, network, copies, forward, backward, head)

    first, last = job.layer_split
    offloaded = exposed_copies_s(job, framework, _host_bytes_s(job), forward, backward)
    exposed = sent + gathered.per_layer + offloaded
    compute = max(first * (forward + backward), last * (forward + backward) + head)
    logits = _gathered_logits_s(job, network)
    on_last = last * (forward + backward + exposed) + head + logits + gathered.root
    slowest = max(first * (forward + backward + exposed), on_last)
    pipeline = _pipeline_sends(job, network)
    weights = layer.matmul if job.method == "full" else 0.0
    bubble = _bubble(
        job, slowest + pipeline, job.shape.layers * (forward + backward + exposed) + head + logits
    )
    bubble *= idle_relative_to_1f1b(
        job.schedule_name,
        stages_per_rank=job.virtual_stages,
        forward=forward,
        input_gradients=max(0.0, backward - weights),
        weight_gradients=weights,
    )

    m = job.micro_batches
    once = (
        _once_per_step(job, framework, network, forward * first, backward * first)
        + gathered.per_step
    )
    optimizer = _optimizer_s(job, rates) + framework.step_s
    of_images, waited = images_s(job, framework, shared, network, rates)
    drift = 1 + shared.node_drift * math.log2(max(1.0, job.layout.world_size / job.gpus_per_node))
    parts = {
        "compute": m * (compute + of_images) + gradient_sums_s(job, rates),
        "communication": m * (slowest + pipeline - compute + waited)
        + once
        + (drift - 1) * (m * slowest + bubble),
        "bubble": bubble,
        "optimizer": optimizer,
    }
    if job.task == "distillation":
        teacher = m * teacher_s(job, framework, shared, network, rates)
        generated = generation_s(job, framework, shared, network, rates)
        return DistillationTime(**parts, teacher=teacher, generation=generated)
    if job.task not in ("dpo", "grpo"):
        return StepTime(**parts)
    reference = m * reference_s(job, framework, shared, network, rates)
    if job.task == "dpo":
        return DpoTime(**parts, reference=reference)
    generation = generation_s(job, framework, shared, network, rates)
    return GrpoTime(**parts, reference=reference, generation=generation)


def _layer_compute(layer: LayerTime, job: Job, framework: Framework) -> tuple[float, float]:
    """Forward and backward pass of a layer, recomputation included, and at least the time to launch its kernels."""
    # Frozen weights need no gradient, and a flash kernel computes the scores again.
    products = 2.0 if job.method == "full" else 1.0
    attention = 2.0 if job.writes_scores else BACKWARD_ATTENTION
    recomputed = {
        "none": 0.0,
        "full": layer.total,
        "selective": _selective_s(job, layer, framework),
    }
    again = recomputed[job.activation_checkpointing]
    backward = (
        products * layer.matmul
        + attention * layer.attention
        + layer.elementwise_backward
        + 2 * layer.routing
        + layer.merging
        + layer.merged_matmul
        + again
    )
    launch = framework.launch_s
    if job.compile:
        launch *= 0.5
    elif job.method != "full":
        launch *= ADAPTER_LAUNCHES
    experts = expert_costs(job, weight_bytes(job))
    each = framework.launch_s / LAUNCHED_KERNELS
    launch_of_forward = launch + each * experts.forward_launches
    forward = max(layer.total, launch_of_forward)
    launch_of_backward = 1.5 * launch + each * experts.backward_launches
    if again:
        launch_of_backward += launch_of_forward
    backward = max(backward, launch_of_backward)
    # A recomputed layer runs forward twice, and backward, which counts as two passes.
    fixed = 0.0
    if again and job.is_megatron_deepspeed:
        fixed = framework.pass_s
    return forward + fixed, backward + 3 * fixed


def _selective_s(job: Job, layer: LayerTime, framework: Framework) -> float:
    """Time of what selective recomputation computes again of a layer, in seconds.

    `activations.kept_and_working` describes what it keeps.
    """
    if framework.name == "megatron" and job.shape.moe is not None:
        return job.shape.expanding_share * layer.matmul + layer.elementwise
    return (
        framework.selective_matmul * layer.matmul
        + framework.selective_attention * layer.attention
        + layer.elementwise
    )


def _layer_traffic(job: Job, framework: Framework, network: Network, layer: LayerTime) -> float:
    """Exposed tensor- and context-parallel communication of one layer and micro-batch, forward and backward."""
    shape = job.shape
    tp = job.layout.tp
    cp = job.layout.cp
    # A recomputed forward pass communicates again
    passes = 3 if job.activation_checkpointing == "full" else 2
    seconds = 0.0
    if tp > 1:
        # Attention and MLP each gather and scatter the activation, forward and backward (Korthikanti et al., fig. 5).
        buffer = 2.0 * job.tokens * shape.hidden
        exchanges = 4 * passes
        overlap = 0.0
        if job.sequence_parallel:
            # Only these gathers and scatters can overlap, piece by piece, with the matrix products.
            overlap = framework.overlap_tp
            if framework.name != "hf":  # `ParallelTrainer` keeps what it has gathered
                exchanges += 2
        seconds += exchanges * network.gather_s(buffer, Group(size=tp)) * (1 - overlap)
    if cp > 1:
        ring = network.gather_s(
            2.0 * job.tokens * cp * shape.attention.kv_width / tp, Group(size=cp, stride=tp)
        )
        if job.runs_parallel_trainer:
            # `ParallelTrainer` gathers keys and values before attention (Llama Team, arXiv 2407.21783, section 3.3.2),
            # gathers them again where a layer is recomputed, and reduces their gradients.
            rings = 2 if job.activation_checkpointing == "none" else 3
            return seconds + rings * ring
        # Keys and values are sent around the ring during attention (Liu et al., arXiv 2310.01889), and their gradients
        # are sent back.
        exposed = max(0.0, ring - layer.attention)
        exposed_backward = max(0.0, 2 * ring - BACKWARD_ATTENTION * layer.attention)
        seconds += exposed + exposed_backward
    return seconds


def _gathered_logits_s(job: Job, network: Network) -> float:
    """Time to gather a micro-batch's logits on every tensor-parallel rank, where the loss needs all of them."""
    if job.loss_parallel or job.layout.tp == 1:
        return 0.0
    return network.gather_s(2.0 * job.tokens * job.shape.vocab, Group(size=job.layout.tp))


@dataclass(frozen=True)
class _ShardedTraffic:
    """Exposed communication of sharded parameters."""

    per_layer: float = 0.0
    """Per layer and micro-batch."""
    root: float = 0.0
    """Of embedding and head, per micro-batch."""
    per_step: float = 0.0
    """Once per step."""


@dataclass(frozen=True)
class _Copies:
    """Seconds per byte of the copies that come with the communication of sharded parameters."""

    gathered: float = 0.0
    """Per byte of a gathered buffer. FSDP2 copies it to the parameters, on the stream of the computation: it is read
    and written."""
    scattered: float = 0.0
    """Per byte of gradients that are copied into the buffer of the reduce-scatter or out of the gradients, there."""
    own: float = 0.0
    """Per byte of the rank's shard that is copied to the device from the CPU, where parameters are offloaded, on the
    stream of the communication."""

    @classmethod
    def of(cls, job: Job, rates: Rates) -> "_Copies":
        """Return those of a run: FSDP2 copies (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py,
        `foreach_all_gather_copy_out` and `foreach_reduce_scatter_copy_in`), Megatron gathers in place. ZeRO-3's
        copies are on the streams of its communication (DeepSpeed 0.19.8, runtime/zero/partition_parameters.py,
        `AllGatherCoalescedHandle`) and are not counted; so are those of offloaded shards
        (runtime/zero/partitioned_param_coordinator.py), which are."""
        own = 0.0
        if job.offload == "full":
            own = 1 / _host_bytes_s(job)
        is_fsdp2 = job.stack != "megatron" and not strategy_of(job).startswith("zero")
        if not is_fsdp2:
            return cls(own=own)
        return cls(gathered=2 / rates.memory, scattered=1 / rates.memory, own=own)


def _host_bytes_s(job: Job) -> float:
    """Bandwidth to the CPU's memory, bytes/s."""
    return (job.gpu.host_gb_s or 16.0) * 1e9


def _sharded_traffic(
    job: Job,
    framework: Framework,
    network: Network,
    copies: _Copies,
    forward: float,
    backward: float,
    head: float,
) -> _ShardedTraffic:
    """Exposed communication of sharded parameters (ZeRO-3, FSDP), with the copies that belong to it.

    Parameters are gathered before each pass, and gradients are reduce-scattered after the backward pass. With a
    pipeline both happen once per step, not per micro-batch.
    """
    shape = job.shape
    layout = job.layout
    if job.zero < 3 or layout.dp_shard * layout.cp == 1:
        return _ShardedTraffic()
    # Parameters are sharded over context-parallel ranks too (torchtitan's dp_shard_cp axis).
    shard = Group(size=layout.dp_shard * layout.cp, stride=layout.tp)
    replicas = Group(size=layout.dp_replicate, stride=layout.tp * layout.cp * layout.dp_shard)
    gradient = (
        reduced_gradient_bytes(job, framework) * trained_parameters(job) / shape.total_parameters
    )
    dense, experts = layer_parameters(job)
    expert_weight = job.value_bytes
    gather = _layer_gather_s(job, network, shard, dense_bytes(job), expert_weight)
    scatter = _layer_gather_s(job, network, shard, gradient, gradient)
    copied_experts = experts * copied_share(job)
    weights = dense_bytes(job) * dense + expert_weight * copied_experts
    gather += weights * copies.own / shard.size
    # What the computation waits for: the copies after each gather, and those before the reduction
    copied_out = weights * copies.gathered
    trained = trained_parameters(job) / shape.total_parameters
    read_and_written = job.value_bytes * trained + gradient
    copied_in = copies.scattered * read_and_written * (dense + copied_experts)
    share = dense / shard.size + experts * kept_share(job, shard.size)
    across = network.reduce_s(gradient * share, replicas)
    if job.spreads_experts and job.expert_parallel > layout.dp_shard * layout.cp * layout.tp:
        # Ranks that share experts are those of several replicas, which then have fewer copies of them.
        across = network.reduce_s(gradient * dense / shard.size, replicas)
        across += network.reduce_s(gradient * experts, _expert_replicas(job))
    again = 0.0
    copied = copied_out + copied_in
    if job.reshard:
        again = gather
        copied += copied_out
    ends = (shape.embedding_parameters + shape.head_parameters) / layout.tp
    of_ends = network.gather_s(job.value_bytes * ends, shard) + network.gather_s(
        gradient * ends, shard
    )
    of_ends += network.reduce_s(gradient * ends / shard.size, replicas)
    root = exposed_s(of_ends, head, framework.overlap_dp)
    ahead = exposed_s(gather, forward, framework.overlap_dp)
    # Gradients are reduced over replicas with the last micro-batch only (`emit.SYNC_EACH_BATCH`)
    if job.is_native:
        once = exposed_s(across, backward, framework.overlap_dp) * job.layer_split[0]
        behind = exposed_s(again + scatter, backward, framework.overlap_dp)
        return _ShardedTraffic(per_layer=ahead + behind + copied, root=root, per_step=once)
    behind = exposed_s(again + scatter + across, backward, framework.overlap_dp)
    if layout.pp > 1:
        return _ShardedTraffic(per_step=job.layer_split[0] * (ahead + behind + copied) + root)
    if job.runs_parallel_trainer:  # it reduces gradients with the last micro-batch only
        once = exposed_s(scatter + across, backward, framework.overlap_dp) + copied_in
        return _ShardedTraffic(
            per_layer=ahead + exposed_s(again, backward, framework.overlap_dp) + copied - copied_in,
            root=root,
            per_step=once * job.layer_split[0],
        )
    return _ShardedTraffic(per_layer=ahead + behind + copied, root=root)


def _expert_replicas(job: Job) -> Group:
    """Ranks of a stage that hold the same spread experts, in Hugging Face's stack."""
    layout = job.layout
    ranks = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp
    return Group(size=max(1, ranks // job.expert_parallel), stride=job.expert_parallel)


def _layer_gather_s(
    job: Job, network: Network, shard: Group, of_dense: float, of_experts: float
) -> float:
    """Time to gather the parameters of an average layer, or to scatter their gradients.

    `of_dense` and `of_experts` are bytes per parameter, of the routed experts and of everything else.
    """
    dense, experts = layer_parameters(job)
    experts *= gathered_share(job)
    if job.expert_parallel == 1:
        return network.gather_s(of_dense * dense + of_experts * experts, shard)
    stride = job.expert_parallel
    if not job.spreads_experts:
        stride *= shard.stride
    same = Group(size=int(owners(job, shard.size)), stride=stride)
    return network.gather_s(of_dense * dense, shard) + network.gather_s(of_experts * experts, same)


def _pipeline_sends(job: Job, network: Network) -> float:
    """Time to send one micro-batch's activations and their gradients to the neighbouring stages, for all stages of a
    rank."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.cp * layout.dp_shard * layout.dp_replicate
    sent = 2.0 * job.tokens * job.shape.hidden / job.sequence_split
    return 2 * job.virtual_stages * network.send_s(sent, stride)


def _bubble(job: Job, slowest: float, all_layers: float) -> float:
    """Idle time of the slowest rank under 1F1B with one stage per rank: a micro-batch passes through all other
    ranks."""
    if job.layout.pp == 1:
        return 0.0
    return max(all_layers - slowest, (job.layout.pp - 1) * slowest * 0.5)


def _once_per_step(
    job: Job,
    framework: Framework,
    network: Network,
    forward: float,
    backward: float,
) -> float:
    """Exposed communication of replicated parameters in a step: reduction of gradients, and with sharded optimizer
    states the gathering of updated parameters."""
    shape = job.shape
    layout = job.layout
    if job.zero >= 3:
        return 0.0
    group = Group(size=job.data_parallel * layout.cp, stride=layout.tp)
    if group.size == 1:
        return 0.0
    trained = trained_parameters(job) / (layout.tp * layout.pp)
    experts = shape.mean_expert_parameters * shape.layers / shape.total_parameters
    gradient = reduced_gradient_bytes(job, framework)
    if job.spreads_experts:
        own = trained * experts * layout.tp / job.expert_parallel
        reduced = network.reduce_s(gradient * trained * (1 - experts), group)
        reduced += network.reduce_s(gradient * own, _expert_replicas(job))
        return exposed_s(reduced, backward, framework.overlap_dp)
    trained *= 1 - experts * (1 - 1 / job.expert_parallel)
    if framework.name == "megatron" and not job.flash_attention:
        # Before flash attention, gradients were all-reduced after the last micro-batch without any overlap, even where
        # optimizer states were sharded (DeepSpeed's pipelines): `--overlap-grad-reduce` was added in 2023.
        gathered = network.gather_s(2.0 * trained, group) if job.zero else 0.0
        return network.reduce_s(gradient * trained, group) + gathered
    if job.zero == 0:
        return exposed_s(
            network.reduce_s(gradient * trained, group), backward, framework.overlap_dp
        )
    if job.zero == 1 and framework.name == "hf" and job.precision == "bf16":
        # DeepSpeed's BF16_Optimizer all-reduces the accumulated gradients after the last micro-batch, and gathers the
        # parameters after the update; nothing is computed meanwhile (DeepSpeed 0.19.8, runtime/bf16_optimizer.py).
        return network.reduce_s(gradient * trained, group) + network.gather_s(2.0 * trained, group)
    if job.zero == 2 and framework.name == "hf":
        # DeepSpeed all-reduces the gradients of every micro-batch, in the type of the weights
        # (`use_multi_rank_bucket_allreduce`, which is on). The step gathers the parameters, and nothing is computed
        # meanwhile (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py).
        weights = job.value_bytes * trained
        gathered = network.gather_s(2.0 * trained, group)
        reduced = network.reduce_s(weights, group)
        waited = exposed_s(reduced, backward, framework.overlap_dp)
        return job.micro_batches * waited + gathered
    scattered = exposed_s(
        network.gather_s(gradient * trained, group), backward, framework.overlap_dp
    )
    return scattered + exposed_s(
        network.gather_s(2.0 * trained, group), forward, framework.overlap_dp
    )


def _orthogonalization_s(job: Job, rates: Rates) -> float:
    """Time in which Muon orthogonalizes the updates of matrices, as `hfscale.optim.muon` does.

    Ranks that share the rows of matrices divide them among each other; tensor-parallel ranks and replicas all compute
    the same ones.
    """
    if job.optimizer != "muon" or job.method != "full":
        return 0.0
    shards = job.layout.dp_shard * job.layout.cp if job.zero == 3 and job.layout.tp == 1 else 1
    return (
        MUON_ITERATIONS
        * job.shape.newton_schulz_flops
        / (job.layout.pp * shards)
        / rates.bf16_matmul
    )


def _average_s(job: Job, rates: Rates) -> float:
    """Time per parameter to update a moving average in each step, which reads it and the weights, and writes it."""
    if job.ema_decay is None:
        return 0.0
    if not job.averages_on_host:
        return AVERAGING_BYTES / rates.memory
    copied = 0.0
    if job.offload == "none":
        copied = 4 / _host_bytes_s(job)
    return copied + AVERAGING_BYTES / CPU_BYTES_S


def _optimizer_s(job: Job, rates: Rates) -> float:
    """Time of the optimizer update."""
    layout = job.layout
    trained = trained_parameters(job) / (layout.tp * layout.pp) + image_parameters(job).trained
    # Whole experts, which tensor parallelism does not split
    if job.spreads_experts and job.zero != 3:
        experts = job.shape.mean_expert_parameters * job.shape.layers / job.shape.total_parameters
        trained *= 1 - experts + experts * layout.tp / job.expert_parallel
    if job.zero:
        trained /= (layout.dp_shard * layout.cp) if job.zero == 3 else job.data_parallel * layout.cp
    traffic: float = OPTIMIZERS[job.optimizer]["traffic_bytes"]
    if job.has_pure_adamw:
        traffic *= 0.5
    averaging = trained * _average_s(job, rates)
    if job.offload == "none":
        update = trained * traffic / rates.memory
        return update + _orthogonalization_s(job, rates) + averaging
    # Gradients are copied to the CPU and parameters back over PCIe, and the update runs in the CPU's memory. Fully
    # offloaded parameters are copied with each gather; without one, where ranks share none, for each pass.
    copied = 0.0
    if job.offload == "full" and layout.dp_shard * layout.cp == 1:
        copied = 2 * job.micro_batches * mean_bytes(job) * job.shape.total_parameters
        copied /= layout.tp * layout.pp
    of_update = trained * ((4 + 2) / _host_bytes_s(job) + traffic / CPU_BYTES_S)
    return of_update + copied / _host_bytes_s(job) + averaging
