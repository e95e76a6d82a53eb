"""Duration of a collective over a group of ranks: bytes over bandwidth, plus latency.

A ring over n ranks moves (n-1)/n of the bytes past each rank for an all-gather or a reduce-scatter, and twice that for
an all-reduce (Thakur et al., 2005). Inside a node each rank has its own link. A ring between nodes uses the network
cards of all ranks of the group that share a node: a group with one rank per node runs at the speed of one card, and a
group of full nodes at the speed of all eight (NCCL builds one ring per card).
"""

import math
from dataclasses import dataclass, replace

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.hardware import Accelerator
from hfscale.planner.frameworks import SharedConstants


def exposed_s(traffic: float, compute: float, overlap: float) -> float:
    """Compute the part of a communication, in seconds, that a computation at the same time does not hide.

    It is what exceeds the computation, and because of contention at least a fraction of the communication.

    Args:
        traffic (`float`): seconds of the communication alone.
        compute (`float`): seconds of the computation.
        overlap (`float`): fraction of the communication that can be hidden.
    """
    return max(traffic - overlap * compute, (1 - overlap) * traffic)


DEFAULT_NODE_GB_S = 12.5
"""Network bandwidth of a node, GB/s, where the vendor has no reference node: 100 Gbit/s for all GPUs, as AWS's nodes
of eight A10G have (Amazon EC2 user guide, accelerated computing instances, G5: "up to 100 Gbps")."""


def datasheet_network_gb_s(gpu: Accelerator, node_size: int) -> float:
    """Return the bandwidth between nodes per device and direction, GB/s, that is assumed where none is given.

    It is that of the vendor's reference node, or else a device's share of `DEFAULT_NODE_GB_S`.

    Args:
        gpu (`Accelerator`): the device.
        node_size (`int`): devices per node.
    """
    return gpu.network_gb_s or DEFAULT_NODE_GB_S / node_size


def with_link(gpu: Accelerator, link_gb_s: float | None) -> Accelerator:
    """Return a device whose link to those of its node has a bandwidth that was measured.

    Args:
        gpu (`Accelerator`): the device.
        link_gb_s (`float`, *optional*): GB/s per device and direction; None leaves the device as it is.
    """
    return gpu if link_gb_s is None else replace(gpu, achieved_link_gb_s=link_gb_s)


PEER_TO_PEER_PCIE = 0.31
"""Fraction of the PCIe bandwidth that two devices without NVLink reach, in both directions at once: 10 of 32 GB/s on
A40 through the CPU's memory (NVIDIA/nccl-tests#74, P2P disabled), which GeForce cards and most virtual machines
need."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Describes a group of `size` ranks that communicate, each `stride` ranks after the previous one."""

    size: int
    """Number of ranks."""
    stride: int = 1
    """Distance between neighbours, in ranks. If it is less than a node's size, several members share a node."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Describes the links between the devices of a job, and computes the duration of collectives over them."""

    link_bytes_s: float
    """Bandwidth of one device inside its node, one direction, bytes/s."""
    card_bytes_s: float
    """Network bandwidth per device, one direction, bytes/s."""
    node_size: int
    """Devices per node."""
    shared: SharedConstants
    """Constants of links and networks."""

    @classmethod
    def of(
        cls,
        gpu: Accelerator,
        *,
        node_size: int,
        network_gb_s: float | None,
        shared: SharedConstants,
    ) -> "Network":
        """Create the network that connects nodes of `gpu`.

        Bandwidths and latencies that were measured on the device are used instead of datasheet numbers and shared
        constants, except that `network_gb_s` takes precedence over a measured bandwidth.

        Args:
            gpu (`Accelerator`): the device.
            node_size (`int`): devices per node.
            network_gb_s (`float`, *optional*): bandwidth between nodes per device and direction, GB/s; by default the
                device's (`datasheet_network_gb_s`).
            shared (`SharedConstants`): constants of links and networks.

        Raises:
            UsageError: the given bandwidth is not above 0 and finite.
        """
        if network_gb_s is not None and not 0 < network_gb_s < math.inf:
            raise UsageError(
                f"{spelled('network_gb_s')} is {network_gb_s}: give the bandwidth per GPU and direction, above 0 and "
                "finite"
            )
        link = gpu.link_gb_s or (gpu.host_gb_s or 16.0) * PEER_TO_PEER_PCIE
        card = network_gb_s or datasheet_network_gb_s(gpu, node_size)
        # A measured bandwidth (`hfscale plan --calibrate`) is reached in full, a datasheet's only in part.
        if gpu.achieved_link_gb_s:
            link = gpu.achieved_link_gb_s
            shared = replace(shared, link_rate=1.0)
        if gpu.achieved_network_gb_s and network_gb_s is None:
            card = gpu.achieved_network_gb_s
            shared = replace(shared, network_rate=1.0)
        if gpu.hop_us:
            shared = replace(shared, hop_s=gpu.hop_us / 1e6)
        if gpu.network_hop_us:
            shared = replace(shared, network_hop_s=gpu.network_hop_us / 1e6)
        return cls(
            link_bytes_s=link * 1e9, card_bytes_s=card * 1e9, node_size=node_size, shared=shared
        )

    def per_node(self, group: Group) -> int:
        """Count the members of a group that share a node."""
        return max(1, min(group.size, self.node_size // group.stride))

    def bandwidth(self, group: Group) -> float:
        """Compute the bytes per second that a ring over the group moves past each rank."""
        inside = self.link_bytes_s * self.shared.link_rate
        local = self.per_node(group)
        if local >= group.size:
            return inside
        return min(inside, local * self.card_bytes_s * self.shared.network_rate)

    def gather_s(self, total_bytes: float, group: Group) -> float:
        """Compute the seconds of an all-gather or a reduce-scatter.

        Args:
            total_bytes (`float`): bytes of the gathered buffer.
            group (`Group`): the ranks that communicate.
        """
        if group.size <= 1 or total_bytes <= 0:
            return 0.0
        moved = total_bytes * (group.size - 1) / group.size
        return moved / self.bandwidth(group) + self.latency(group)

    def reduce_s(self, total_bytes: float, group: Group) -> float:
        """Compute the seconds of an all-reduce.

        Args:
            total_bytes (`float`): bytes of the buffer that every rank holds.
            group (`Group`): the ranks that communicate.
        """
        return 2 * self.gather_s(total_bytes, group)

    def exchange_s(self, total_bytes: float, group: Group) -> float:
        """Compute the seconds of an all-to-all. Only what leaves the node is sent over the network.

        Args:
            total_bytes (`float`): bytes that each rank holds.
            group (`Group`): the ranks that communicate.
        """
        if group.size <= 1 or total_bytes <= 0:
            return 0.0
        local = self.per_node(group)
        inside = (
            total_bytes * (local - 1) / group.size / (self.link_bytes_s * self.shared.link_rate)
        )
        outside = (
            total_bytes
            * (group.size - local)
            / group.size
            / (self.card_bytes_s * self.shared.network_rate)
        )
        return max(inside, outside) + self.latency(group)

    def routed_s(self, copy_bytes: float, group: Group, *, copies: int, nodes: float) -> float:
        """Compute the seconds to send every token of a rank to the ranks of its experts, or their outputs back.

        A token crosses the network once for each node that holds some of its experts, and is forwarded once to each
        of that node's other ranks that have any, over the node's own links; both happen at the same time (DeepSeek-V3,
        arXiv 2412.19437, section 3.2.2; DeepEP, `get_dispatch_layout`).

        Args:
            copy_bytes (`float`): bytes of one copy of each of the rank's tokens.
            group (`Group`): the ranks that share the experts.
            copies (`int`): experts that a token passes.
            nodes (`float`): most nodes that hold experts of one token.
        """
        if group.size <= 1 or copy_bytes <= 0:
            return 0.0
        local = self.per_node(group)
        all_nodes = group.size / local
        reached = _reached(min(nodes, all_nodes), copies)
        ranks = _reached(local, copies / reached)
        outside = (
            copy_bytes
            * reached
            * (1 - 1 / all_nodes)
            / (self.card_bytes_s * self.shared.network_rate)
        )
        forwarded = copy_bytes * reached * ranks * (1 - 1 / local)
        inside = forwarded / (self.link_bytes_s * self.shared.link_rate)
        return max(inside, outside) + self.latency(group)

    def send_s(self, total_bytes: float, stride: int) -> float:
        """Compute the seconds to send data to one other rank.

        Args:
            total_bytes (`float`): bytes to send.
            stride (`int`): distance to the other rank, in ranks. If it is less than a node's size, the data stays in
                the node.
        """
        if stride < self.node_size:
            return total_bytes / (self.link_bytes_s * self.shared.link_rate) + self.shared.hop_s
        return (
            total_bytes / (self.card_bytes_s * self.shared.network_rate) + self.shared.network_hop_s
        )

    def latency(self, group: Group) -> float:
        """Compute the seconds that the steps of a ring take without any bytes.

        There is one step per rank inside nodes, and one per node between them.
        """
        nodes = group.size / self.per_node(group)
        return (group.size - 1) * self.shared.hop_s + (nodes - 1) * self.shared.network_hop_s


def _reached(places: float, copies: float) -> float:
    """Expected number of different places of copies of a token, each of which is at a random one."""
    return places * (1 - (1 - 1 / places) ** copies) if places > 1 else 1.0
