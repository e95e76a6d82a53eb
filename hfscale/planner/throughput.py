"""Seconds of an optimizer step, by part: computation, exposed communication, pipeline bubble, optimizer.

A step is m micro-batches through p pipeline stages. With t the time of a micro-batch on the slowest stage,
step = m t + (sum of the other stages' times) / v + exposed gradient traffic + optimizer
(Narayanan et al., arXiv 2104.04473, section 2.2, for equal stages: (p-1)/(v m) of the ideal time is lost).
"""

import math
from dataclasses import dataclass

from hfscale.facts.schedules import idle_relative_to_1f1b
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.job import Job
from hfscale.planner.kernels import BACKWARD_ATTENTION, LayerTime, Rates, head_s, layer_forward
from hfscale.planner.memory import trained_parameters
from hfscale.planner.model_view import ModelView
from hfscale.planner.network import Group, Network, exposed_s

OPTIMIZER_TRAFFIC = {
    "adamw": 34.0,
    "adamw_bf16": 18.0,
    "adamw_8bit": 22.0,
    "sgd": 18.0,
    "sgd_momentum": 26.0,
    "adafactor": 26.0,
    "muon": 30.0,
}
"""Bytes moved per parameter of an update: parameter, gradient and states read, parameter and states written, the bf16
copy written, the gradient read once more to clip its norm. AdamW in fp32: 4 x 4 + 3 x 4 + 2 + 4."""
CPU_BYTES_S = 40e9
"""Memory bandwidth a rank's share of the host gives an optimizer on the CPU (eight ranks on two sockets)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by part."""

    compute: float
    """Forward, backward and recomputation of all micro-batches on the slowest stage."""
    communication: float
    """Traffic that no computation hides."""
    bubble: float
    """A stage's wait for the others while the pipeline fills and drains."""
    optimizer: float
    """The update, and what a step costs once."""

    @property
    def total(self) -> float:
        """All parts."""
        return self.compute + self.communication + self.bubble + self.optimizer


def step_time(view: ModelView, job: Job, framework: Framework, shared: SharedConstants) -> StepTime:
    """Time of one optimizer step."""
    network = Network.of(job.gpu, node_size=job.gpus_per_node, network_gb_s=job.network_gb_s, shared=shared)
    rates = Rates(job, framework, shared)
    layer = layer_forward(view, job, framework, shared, rates)
    forward, backward = _layer_compute(view, layer, job, framework)
    sent = _layer_traffic(view, job, framework, network, layer) + exchanged_s(view, job, network, forward + backward)
    head = head_s(view, job, framework, rates)
    gathered = _sharded_traffic(view, job, framework, network, forward, backward, head)

    first, last = job.layer_split
    exposed = sent + gathered.per_layer
    compute = max(first * (forward + backward), last * (forward + backward) + head)
    logits = _gathered_logits_s(view, job, network)
    on_last = last * (forward + backward + exposed) + head + logits + gathered.root
    slowest = max(first * (forward + backward + exposed), on_last)
    pipeline = _pipeline_sends(view, job, network)
    weights = layer.matmul if job.method == "full" else 0.0
    bubble = _bubble(job, slowest + pipeline, view.layers * (forward + backward + exposed) + head + logits)
    bubble *= idle_relative_to_1f1b(
        job.schedule_name,
        stages_per_rank=job.virtual_stages,
        forward=forward,
        input_gradients=max(0.0, backward - weights),
        weight_gradients=weights,
    )

    m = job.micro_batches
    once = _once_per_step(view, job, framework, network, forward * first, backward * first) + gathered.per_step
    optimizer = _optimizer_s(view, job, rates) + framework.step_s
    drift = 1 + shared.node_drift * math.log2(max(1.0, job.layout.world_size / job.gpus_per_node))
    return StepTime(
        compute=m * compute,
        communication=m * (slowest + pipeline - compute) + once + (drift - 1) * (m * slowest + bubble),
        bubble=bubble,
        optimizer=optimizer,
    )


def _layer_compute(view: ModelView, layer: LayerTime, job: Job, framework: Framework) -> tuple[float, float]:
    """Forward and backward pass of a layer, recomputation included; never faster than the host can launch it."""
    products = 2.0 if job.method == "full" else 1.0  # frozen weights need no gradient of their own
    attention = BACKWARD_ATTENTION if job.flash_attention else 2.0
    again = {"none": 0.0, "full": layer.total, "selective": _selective_s(view, layer, framework)}[job.recompute]
    backward = products * layer.matmul + attention * layer.attention + 2 * (layer.elementwise + layer.routing) + again
    launch = framework.launch_s * (0.5 if job.compile else 1.0)
    forward, backward = max(layer.total, launch), max(backward, 1.5 * launch + (launch if again else 0.0))
    # A recomputed layer runs forward twice and backward, which counts as two passes.
    fixed = framework.pass_s if again and job.is_megatron_deepspeed else 0.0
    return forward + fixed, backward + 3 * fixed


def _selective_s(view: ModelView, layer: LayerTime, framework: Framework) -> float:
    """What selective recomputation computes again of a layer (`activations.kept_and_working` says what it keeps)."""
    if framework.name == "megatron" and view.experts > 1:
        return view.expanding_share * layer.matmul + layer.elementwise
    return (
        framework.selective_matmul * layer.matmul + framework.selective_attention * layer.attention + layer.elementwise
    )


def _layer_traffic(view: ModelView, job: Job, framework: Framework, network: Network, layer: LayerTime) -> float:
    """Exposed tensor- and context-parallel traffic of one layer and micro-batch, forward and backward."""
    tp, cp = job.layout.tp, job.layout.cp
    passes = 3 if job.recompute == "full" else 2  # a recomputed forward pass communicates again
    seconds = 0.0
    if tp > 1:
        # Attention and MLP each gather and scatter the activation, forward and backward (Korthikanti et al., fig. 5).
        buffer = 2.0 * job.tokens * view.hidden
        # Only the gathers and scatters of sequence parallelism can run piece by piece beside the matrices.
        regather, overlap = (2, framework.overlap_tp) if job.sequence_parallel else (0, 0.0)
        regather = 0 if framework.name == "hf" else regather  # it keeps what it has gathered
        seconds += (4 * passes + regather) * network.gather_s(buffer, Group(size=tp)) * (1 - overlap)
    if cp > 1:
        ring = network.gather_s(2.0 * job.tokens * cp * view.kv_width / tp, Group(size=cp, stride=tp))
        if framework.name == "hf" and job.layout.pp > 1:
            # `ParallelTrainer` gathers them before attention (Llama Team, arXiv 2407.21783, section 3.3.2), again
            # where a layer is recomputed, and sums their gradients.
            return seconds + (2 if job.recompute == "none" else 3) * ring
        # Keys and values go round the ring under attention (Liu et al., arXiv 2310.01889); gradients go back.
        seconds += max(0.0, ring - layer.attention) + max(0.0, 2 * ring - BACKWARD_ATTENTION * layer.attention)
    return seconds


def _gathered_logits_s(view: ModelView, job: Job, network: Network) -> float:
    """Seconds to gather a micro-batch's logits on every tensor-parallel rank, where the loss wants them whole."""
    if job.loss_parallel or job.layout.tp == 1:
        return 0.0
    return network.gather_s(2.0 * job.tokens * view.shape.vocab, Group(size=job.layout.tp))


@dataclass(frozen=True)
class _Gathered:
    per_layer: float = 0.0
    root: float = 0.0
    per_step: float = 0.0


def _sharded_traffic(
    view: ModelView, job: Job, framework: Framework, network: Network, forward: float, backward: float, head: float
) -> _Gathered:
    """Exposed traffic of sharded parameters (ZeRO-3, FSDP): gathered before each pass, gradients scattered after.

    With a pipeline they are gathered and scattered once per step, not per micro-batch.
    """
    layout = job.layout
    if job.zero < 3 or layout.dp_shard * layout.cp == 1:
        return _Gathered()
    # Context-parallel ranks hold the same parameters, so they share in the sharding (torchtitan's dp_shard_cp axis).
    shard = Group(size=layout.dp_shard * layout.cp, stride=layout.tp)
    replicas = Group(size=layout.dp_replicate, stride=layout.tp * layout.cp * layout.dp_shard)
    local = (view.layer_parameters - view.expert_parameters * (1 - 1 / job.expert_parallel)) / layout.tp
    weight, gradient = _weight_bytes(job), _gradient_bytes(job, framework)
    trained = trained_parameters(view, job) / view.total_parameters
    gather = network.gather_s(weight * local, shard)
    scatter = network.gather_s(gradient * local * trained, shard) if trained else 0.0
    across = network.reduce_s(gradient * local * trained / shard.size, replicas)
    again = gather if job.reshard else 0.0
    ends = (view.embedding_parameters + view.head_parameters) / layout.tp / local
    root = exposed_s(ends * (gather + scatter + across), head, framework.overlap_dp)
    ahead = exposed_s(gather, forward, framework.overlap_dp)
    behind = exposed_s(again + scatter + across, backward, framework.overlap_dp)
    if layout.pp > 1:
        return _Gathered(per_step=job.layer_split[0] * (ahead + behind) + root)
    return _Gathered(per_layer=ahead + behind, root=root)


def _weight_bytes(job: Job) -> float:
    """Bytes per parameter that are gathered."""
    if job.method == "qlora":
        return 0.56
    return 4.0 if job.precision == "fp32" else 2.0


def _gradient_bytes(job: Job, framework: Framework) -> float:
    return 2.0 if job.pure else framework.gradient_bytes


def _pipeline_sends(view: ModelView, job: Job, network: Network) -> float:
    """Activations and their gradients of one micro-batch to the neighbouring stages, of each virtual stage."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.cp * layout.dp_shard * layout.dp_replicate
    split = layout.tp if job.sequence_parallel else 1
    return 2 * job.virtual_stages * network.send_s(2.0 * job.tokens * view.hidden / split, stride)


def _bubble(job: Job, slowest: float, all_layers: float) -> float:
    """Idle time of the slowest rank under 1F1B: one micro-batch through all the others."""
    if job.layout.pp == 1:
        return 0.0
    return max(all_layers - slowest, (job.layout.pp - 1) * slowest * 0.5)


def _once_per_step(
    view: ModelView, job: Job, framework: Framework, network: Network, forward: float, backward: float
) -> float:
    """Exposed gradient reduction (and gathering of updated parameters) of replicated parameters."""
    layout = job.layout
    if job.zero >= 3:
        return 0.0
    group = Group(size=job.data_parallel * layout.cp, stride=layout.tp)
    if group.size == 1:
        return 0.0
    trained = trained_parameters(view, job) / (layout.tp * layout.pp)
    experts = view.expert_parameters * view.layers / view.total_parameters
    trained *= 1 - experts * (1 - 1 / job.expert_parallel)
    gradient = _gradient_bytes(job, framework)
    if framework.name == "megatron" and not job.flash_attention:
        # Of that time: gradients were reduced whole after the last micro-batch, also where the optimizer's states were
        # shared (DeepSpeed's pipelines), and nothing ran beside them (`--overlap-grad-reduce` is of 2023).
        gathered = network.gather_s(2.0 * trained, group) if job.zero else 0.0
        return network.reduce_s(gradient * trained, group) + gathered
    if job.zero == 0:
        return exposed_s(network.reduce_s(gradient * trained, group), backward, framework.overlap_dp)
    scattered = exposed_s(network.gather_s(gradient * trained, group), backward, framework.overlap_dp)
    return scattered + exposed_s(network.gather_s(2.0 * trained, group), forward, framework.overlap_dp)


def _optimizer_s(view: ModelView, job: Job, rates: Rates) -> float:
    layout = job.layout
    trained = trained_parameters(view, job) / (layout.tp * layout.pp)
    if job.zero:
        trained /= (layout.dp_shard * layout.cp) if job.zero == 3 else job.data_parallel * layout.cp
    traffic = OPTIMIZER_TRAFFIC[job.optimizer] * (0.5 if job.pure and job.optimizer == "adamw" else 1.0)
    if job.offload == "none":
        return trained * traffic / rates.memory
    host = (job.gpu.host_gb_s or 16.0) * 1e9
    # Gradients down, parameters up over PCIe, and the update in the CPU's memory; fully offloaded parameters travel
    # up for each pass of each micro-batch.
    crossings = 2 * 2.0 * job.micro_batches if job.offload == "full" else 0.0
    whole = view.total_parameters / (layout.tp * layout.pp) / max(1, layout.dp_shard)
    return trained * ((4 + 2) / host + traffic / CPU_BYTES_S) + crossings * whole / host


# -- the exchange of a mixture of experts -----------------------------------------------------------------------------


OVERLAP = 1 - 20 / 132
"""What a computation runs at beside the exchange, which takes 20 of the 132 multiprocessors (arXiv 2412.19437, section
3.2.2)."""
FP8_SCALE_BYTES = 4 / 128
"""Per element that is sent in 8 bits: an fp32 scale per 128 (arXiv 2412.19437, section 3.3)."""


def exchanged_s(view: ModelView, job: Job, network: Network, compute: float) -> float:
    """Exposed seconds of the exchange of an average layer and micro-batch, forward and backward.

    Args:
        compute (`float`): Seconds of the layer's own forward and backward pass: as long is that of the other
            micro-batch, under which an overlapped exchange is hidden.
    """
    size = job.expert_parallel
    if size == 1:
        return 0.0
    tp = job.layout.tp
    group = Group(size=size, stride=tp * job.layout.cp)
    element = 2.0 * job.tokens * view.hidden / tp
    if not job.overlapped_experts:
        passes = 3 if job.recompute == "full" else 2  # a recomputed forward pass communicates again
        return view.moe_share * 2 * passes * network.exchange_s(element * view.top_k, group)
    nodes = nodes_of_a_token(view, size / network.per_node(group))
    packed = (1 + FP8_SCALE_BYTES) / 2 if job.precision == "fp8" else 1.0
    there = network.routed_s(element * packed, group, copies=view.top_k, nodes=nodes)
    back = network.routed_s(element, group, copies=view.top_k, nodes=nodes)
    return exposed_s(view.moe_share * 2 * (there + back), compute, OVERLAP)


def nodes_of_a_token(view: ModelView, nodes: float) -> float:
    """Nodes on which a token's experts lie at most, of those that hold experts: where the router takes them from some
    groups only, and groups lie together, the nodes of as many groups."""
    if view.expert_groups == 1:
        return nodes
    return min(nodes, view.top_groups * max(1.0, nodes / view.expert_groups))
