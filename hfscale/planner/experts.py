"""The exchange of a mixture of experts: tokens on their way to the ranks of their experts, and back.

Two ways. Plainly, every token is sent to each of its experts, and the layer waits. Or as DeepSeek-V3 was trained
(arXiv 2412.19437, section 3.2; Megatron-Core's `--overlap-moe-expert-parallel-comm` with its `flex` dispatcher): once
to each node that holds some of them, in 8 bits where the products are, while the other direction of another
micro-batch is computed.
"""

from hfscale.planner.job import Job
from hfscale.planner.model_view import ModelView
from hfscale.planner.network import Group, Network, exposed_s

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
