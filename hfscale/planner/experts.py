"""The experts of a mixture on one rank: what it keeps and gathers of them, and the exchange of tokens between ranks.

Under expert parallelism each of `Job.expert_parallel` neighbouring data-parallel ranks has other experts, and tokens
are sent to the ranks of their experts and back. The ranks that have the same experts, one in each such group, shard
them between each other (transformers 5.23, distributed/configuration_utils.py, `efsdp_size`; Megatron-Core's expert
data parallelism).
"""

import math
from dataclasses import dataclass

from hfscale.facts.model_shape import ModelShape
from hfscale.facts.schedules import paired_share
from hfscale.planner.frameworks import SharedConstants
from hfscale.planner.job import Job
from hfscale.planner.network import Group, Network, exposed_s

# -- tokens -----------------------------------------------------------------------------------------------------------


def imbalance_of(job: Job, shared: SharedConstants) -> float:
    """Return the tokens of the fullest of the ranks that share experts, relative to the average.

    Args:
        job (`Job`): the run. Without expert parallelism its ranks have the same number of tokens, and what is given
            for it does not apply.
        shared (`SharedConstants`): constants, of which `imbalance` holds where the run states nothing else.
    """
    if job.expert_parallel == 1 or job.expert_imbalance is None:
        return shared.imbalance
    return job.expert_imbalance


# -- parameters -------------------------------------------------------------------------------------------------------


def layer_parameters(job: Job) -> tuple[float, float]:
    """Count the parameters of an average layer with which a rank computes, after tensor and expert parallelism.

    Args:
        job (`Job`): the run.

    Returns:
        `tuple[float, float]`: those of all but the routed experts, and those of the rank's routed experts.
    """
    experts = job.shape.mean_expert_parameters
    tp = job.layout.tp
    dense = (job.shape.mean_layer_parameters - experts) / tp
    own = experts / job.expert_parallel
    if not job.spreads_experts:
        own /= tp
    return dense, own


def owners(job: Job, ranks: float) -> float:
    """Compute the number of ranks that have the same experts and shard them.

    Args:
        job (`Job`): the run.
        ranks (`float`): data- and context-parallel ranks that shard the states. In Hugging Face's stack the
            tensor-parallel ranks of each of them have other experts.
    """
    if job.spreads_experts:
        ranks *= job.layout.tp
    return max(1.0, ranks / job.expert_parallel)


def kept_share(job: Job, ranks: float) -> float:
    """Compute the part of its experts that the fullest rank keeps if their states are sharded over `ranks` ranks.

    FSDP2 shards the first dimension of a parameter, which transformers 5 gives the experts of a layer: each rank keeps
    complete experts, and with more ranks than experts some ranks keep none (torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param.py, `_chunk_with_empty`). DeepSpeed, Megatron and torchtitan divide
    experts too, and so does `ParallelTrainer` where it spreads them (hfscale/parallel/experts.py).

    Args:
        job (`Job`): the run.
        ranks (`float`): ranks that shard the states, of which those with the same experts share them.
    """
    shards = owners(job, ranks)
    if (
        job.stack != "hf"
        or job.zero != 3
        or job.shape.moe is None
        or (job.spreads_experts and not job.is_native)
    ):
        return 1 / shards
    experts = job.shape.moe.experts // job.expert_parallel
    return math.ceil(experts / shards) / experts


def gathered_share(job: Job) -> float:
    """Compute the size of the buffer into which a rank's experts are gathered, relative to the experts themselves.

    FSDP2 pads every rank's part to that of the fullest rank.

    Args:
        job (`Job`): the run, whose states are sharded (ZeRO stage 3).
    """
    ranks = job.layout.dp_shard * job.layout.cp
    return kept_share(job, ranks) * owners(job, ranks)


def copied_share(job: Job) -> float:
    """Compute the part of its experts of which a rank holds a copy while they compute.

    It is `gathered_share`, but 0 where experts are no unit of FSDP2.

    Args:
        job (`Job`): the run, whose states are sharded (ZeRO stage 3).
    """
    is_alone = job.layout.dp_shard * job.layout.cp == job.expert_parallel
    return 0.0 if job.bare_experts and is_alone else gathered_share(job)


def unit_parameters(job: Job) -> float:
    """Count the parameters that a rank of `ParallelTrainer` computes with in the largest unit of FSDP2 among its
    layers: spread experts are a unit, and the rest of their layer another one.

    Args:
        job (`Job`): the run, whose states are sharded (ZeRO stage 3).
    """
    dense, experts = layer_parameters(job)
    copied = experts * copied_share(job)
    return max(dense, copied) if job.spreads_experts else dense + copied


# -- how transformers computes them -----------------------------------------------------------------------------------

LOOP_LAUNCHES = (26.0, 22.0)
"""Kernels that a loop over experts launches for each of them, forward and backward. Four times in the forward pass the
CPU waits for a value, the expert's number or its tokens, which counts as three kernels each (transformers 5.23,
models/qwen3_moe/modeling_qwen3_moe.py, `Qwen3MoeExperts.forward`)."""
LOOP_PASSES = 4.0
"""Reads and writes of all experts of a layer, per expert in the backward pass of a loop: the gradient of one expert's
matrices is written into zeros of the size of all, which are added to the gradients so far (torch 2.13,
`select_backward`)."""
BATCHED_PASSES = (3.0, 4.0)
"""Reads and writes of the matrices of each token's experts, forward and backward: they are copied and multiplied; in
the backward pass they are multiplied again, and their gradients are written and added up (transformers 5.23,
integrations/moe.py, `batched_mm_experts_forward`)."""


@dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """Holds what other products of experts than grouped ones cost an average layer in addition, per micro-batch."""

    forward_bytes: float = 0.0
    """Memory traffic of the forward pass."""
    backward_bytes: float = 0.0
    """Memory traffic of the backward pass."""
    forward_launches: float = 0.0
    """Kernels of the forward pass that the CPU launches one by one."""
    backward_launches: float = 0.0
    """The same of the backward pass."""
    kept_bytes: float = 0.0
    """Bytes kept until the backward pass, unless the layer is recomputed."""
    working_bytes: float = 0.0
    """Bytes in addition while the layer's backward pass runs."""


def expert_costs(job: Job, width: float) -> ExpertCosts:
    """Compute what the run's products of experts cost in addition to grouped ones.

    Args:
        job (`Job`): the run, which names the implementation.
        width (`float`): bytes of a weight as the layers have it.
    """
    moe = job.shape.moe
    if moe is None or job.experts_implementation == "grouped_mm":
        return ExpertCosts()
    _, experts = layer_parameters(job)
    weights = width * experts
    matrices = [one.parameters for one in moe.linears if one.copies > 1]
    share = max(matrices) / sum(matrices)
    largest = weights * share
    used = job.shape.top_k / moe.experts
    if job.experts_implementation == "eager":
        missed = (1 - used) ** job.tokens
        hit = moe.experts * (1 - missed)
        in_layers = hit * job.shape.moe_share
        of_forward, of_backward = LOOP_LAUNCHES
        return ExpertCosts(
            backward_bytes=LOOP_PASSES * hit * weights,
            forward_launches=of_forward * in_layers,
            backward_launches=of_backward * in_layers,
            working_bytes=largest,
        )
    copies = job.tokens * used
    copied = copies * weights
    of_forward, of_backward = BATCHED_PASSES
    return ExpertCosts(
        forward_bytes=of_forward * copied,
        backward_bytes=of_backward * copied,
        kept_bytes=copied,
        working_bytes=copies * largest,
    )


# -- the exchange -----------------------------------------------------------------------------------------------------


EXPERT_OVERLAP = 1 - 20 / 132
"""Relative speed of a computation during the exchange, which takes 20 of the 132 multiprocessors (arXiv 2412.19437,
section 3.2.2)."""
FP8_SCALE_BYTES = 4 / 128
"""Bytes per element that is sent in 8 bits, in addition to the element: an fp32 scale per 128 elements (arXiv
2412.19437, section 3.3)."""


def expert_exchange_s(job: Job, network: Network, compute: float) -> float:
    """Compute the exposed seconds of sending tokens to the ranks of their experts and back, forward and backward.

    The result is that of an average layer and one micro-batch. Without overlap every token is sent to each of its
    experts, and the layer waits. With overlap, as DeepSeek-V3 was trained (arXiv 2412.19437, section 3.2;
    Megatron-Core's `--overlap-moe-expert-parallel-comm` with its `flex` dispatcher), a token is sent once to each node
    that holds some of its experts, in 8 bits where the matrix products are, while another micro-batch is computed.
    `ParallelTrainer` overlaps the exchanges of the passes that its schedule pairs (hfscale/parallel/overlap.py).
    The rank that gets most tokens sets the pace.

    Args:
        job (`Job`): the run.
        network (`Network`): the links between ranks.
        compute (`float`): seconds of the layer's own forward and backward pass, which is also the duration of the
            other micro-batch's computation that hides an overlapped exchange.
    """
    shape = job.shape
    size = job.expert_parallel
    if size == 1:
        return 0.0
    tp = job.layout.tp
    # transformers' groups are neighbours, tensor- and context-parallel ranks included.
    stride = 1 if job.spreads_experts else tp * job.layout.cp
    group = Group(size=size, stride=stride)
    element = job.value_bytes * job.tokens * imbalance_of(job, network.shared) * shape.hidden / tp
    if not job.overlapped_experts:
        is_repeated = job.activation_checkpointing == "full"
        if job.spreads_experts and job.layout.pp == 1:
            is_repeated = job.activation_checkpointing != "none"
        # A recomputed forward pass communicates again
        passes = 3 if is_repeated else 2
        all_nodes = size / network.per_node(group)
        sent = network.exchange_s(element * shape.top_k, group)
        if job.fused_exchange:
            nodes = nodes_of_a_token(shape, all_nodes)
            sent = network.routed_s(element, group, copies=shape.top_k, nodes=nodes)
        exchange = shape.moe_share * 2 * passes
        exchange *= sent
        pairs = 0.0
        if job.stack == "hf":
            pairs = paired_share(
                job.schedule_name, pp=job.layout.pp, micro_batches=job.micro_batches
            )
        return (1 - pairs) * exchange + pairs * exposed_s(exchange, compute, EXPERT_OVERLAP)
    nodes = nodes_of_a_token(shape, size / network.per_node(group))
    packed = (1 + FP8_SCALE_BYTES) / 2 if job.precision == "fp8" else 1.0
    there = network.routed_s(element * packed, group, copies=shape.top_k, nodes=nodes)
    back = network.routed_s(element, group, copies=shape.top_k, nodes=nodes)
    return exposed_s(shape.moe_share * 2 * (there + back), compute, EXPERT_OVERLAP)


def nodes_of_a_token(shape: ModelShape, nodes: float) -> float:
    """Compute the largest number of nodes that hold experts of one token.

    If the router selects experts from some groups only, these are the nodes that hold so many groups; otherwise all.

    Args:
        shape (`ModelShape`): the model.
        nodes (`float`): nodes that hold experts of the layer.
    """
    moe = shape.moe
    if moe is None or moe.groups == 1:
        return nodes
    return min(nodes, moe.top_groups * max(1.0, nodes / moe.groups))
