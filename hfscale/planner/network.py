"""Time of a collective over a group of ranks, by size and topology: bandwidth plus latency.

A ring over n ranks moves (n-1)/n of the bytes past each of them for an all-gather or a reduce-scatter, twice that for
an
all-reduce (Thakur et al., 2005). Inside a node each rank has its link; a ring between nodes uses the network cards of
all ranks that a node has in the group, so a group with one rank per node runs at one card's speed and a group of whole
nodes at eight (NCCL's rings, one per card).
"""

import math
from dataclasses import dataclass, replace

from hfscale.errors import UsageError
from hfscale.facts.hardware import Accelerator
from hfscale.planner.frameworks import SharedConstants


def exposed_s(traffic: float, compute: float, overlap: float) -> float:
    """Traffic that stays visible beside `compute`: all that is longer, and a part of the rest for contention."""
    return max(traffic - overlap * compute, (1 - overlap) * traffic)


DEFAULT_NETWORK_GB_S = 12.5
"""Per GPU where the vendor has no reference node: 100 Gbit/s each, or 800 for eight (AWS p4d is 400 Gbit/s for
eight)."""
PEER_TO_PEER_PCIE = 0.5
"""Part of the PCIe bandwidth between two devices without NVLink: through the host bridge, both directions at once."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that communicate: `size` of them, each `stride` ranks after the one before."""

    size: int
    """Number of ranks."""
    stride: int = 1
    """Distance between neighbours, in ranks; below a node's size, several members share a node."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between the devices of a job."""

    link_bytes_s: float
    """Of one device inside its node, one direction."""
    card_bytes_s: float
    """Of one device's share of the network, one direction."""
    node_size: int
    """Devices per node."""
    shared: SharedConstants
    """Rates and latencies."""

    @classmethod
    def of(cls, gpu: Accelerator, *, node_size: int, network_gb_s: float | None, shared: SharedConstants) -> "Network":
        """The network of nodes of `gpu`.

        Raises:
            `UsageError`: The bandwidth given is not above 0.
        """
        if network_gb_s is not None and not 0 < network_gb_s < math.inf:
            raise UsageError(
                f"network bandwidth {network_gb_s} GB/s is not above 0 and finite: give one direction, per GPU"
            )
        link = gpu.link_gb_s or (gpu.host_gb_s or 16.0) * PEER_TO_PEER_PCIE
        card = network_gb_s or gpu.network_gb_s or DEFAULT_NETWORK_GB_S
        # What was measured (`hfscale plan --calibrate`) is the rate itself, not a datasheet's to take a part of.
        if gpu.achieved_link_gb_s:
            link, shared = gpu.achieved_link_gb_s, replace(shared, link_rate=1.0)
        if gpu.achieved_network_gb_s and network_gb_s is None:
            card, shared = gpu.achieved_network_gb_s, replace(shared, network_rate=1.0)
        if gpu.hop_us:
            shared = replace(shared, hop_s=gpu.hop_us / 1e6)
        if gpu.network_hop_us:
            shared = replace(shared, network_hop_s=gpu.network_hop_us / 1e6)
        return cls(link_bytes_s=link * 1e9, card_bytes_s=card * 1e9, node_size=node_size, shared=shared)

    def per_node(self, group: Group) -> int:
        """Members of a group that share a node."""
        return max(1, min(group.size, self.node_size // group.stride))

    def bandwidth(self, group: Group) -> float:
        """Bytes per second that a ring over the group moves past each rank."""
        inside = self.link_bytes_s * self.shared.link_rate
        local = self.per_node(group)
        if local >= group.size:
            return inside
        return min(inside, local * self.card_bytes_s * self.shared.network_rate)

    def gather_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of an all-gather or reduce-scatter whose whole buffer has `total_bytes`."""
        if group.size <= 1 or total_bytes <= 0:
            return 0.0
        moved = total_bytes * (group.size - 1) / group.size
        return moved / self.bandwidth(group) + self.latency(group)

    def reduce_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of an all-reduce of `total_bytes`."""
        return 2 * self.gather_s(total_bytes, group)

    def exchange_s(self, total_bytes: float, group: Group) -> float:
        """Seconds of an all-to-all in which each rank holds `total_bytes`; what stays on the rank or in the node is
        not sent over the network."""
        if group.size <= 1 or total_bytes <= 0:
            return 0.0
        local = self.per_node(group)
        inside = total_bytes * (local - 1) / group.size / (self.link_bytes_s * self.shared.link_rate)
        outside = total_bytes * (group.size - local) / group.size / (self.card_bytes_s * self.shared.network_rate)
        return max(inside, outside) + self.latency(group)

    def routed_s(self, copy_bytes: float, group: Group, *, copies: int, nodes: float) -> float:
        """Seconds to send every token of a rank to the ranks of its `copies` experts, or their outputs back.

        A token crosses the network once for each node that holds some of its experts, and goes on over the node's own
        links from there, both at once (DeepSeek-V3, arXiv 2412.19437, section 3.2.2; DeepEP).

        Args:
            copy_bytes (`float`): Of a rank's tokens, each once.
            group (`Group`): The ranks that share the experts.
            copies (`int`): Experts that a token passes.
            nodes (`float`): Nodes that hold a token's experts at most.
        """
        if group.size <= 1 or copy_bytes <= 0:
            return 0.0
        local = self.per_node(group)
        everywhere = group.size / local
        least = min(nodes, everywhere)
        reached = least * (1 - (1 - 1 / least) ** copies) if least > 1 else 1.0
        outside = copy_bytes * reached * (1 - 1 / everywhere) / (self.card_bytes_s * self.shared.network_rate)
        inside = copy_bytes * copies * (1 - 1 / local) / (self.link_bytes_s * self.shared.link_rate)
        return max(inside, outside) + self.latency(group)

    def send_s(self, total_bytes: float, stride: int) -> float:
        """Seconds to send `total_bytes` to the rank `stride` further."""
        if stride < self.node_size:
            return total_bytes / (self.link_bytes_s * self.shared.link_rate) + self.shared.hop_s
        return total_bytes / (self.card_bytes_s * self.shared.network_rate) + self.shared.network_hop_s

    def latency(self, group: Group) -> float:
        """Seconds of a ring's steps: inside nodes, and once per node between them."""
        nodes = group.size / self.per_node(group)
        return (group.size - 1) * self.shared.hop_s + (nodes - 1) * self.shared.network_hop_s
