"""How long the nodes of a job take to load a model, each for itself and with `load_once`, simulated to 1,024 nodes.

    python -m benchmarks load_once

Simulated is what `hfscale.checkpoint.transfer` does: the order of the chunks of each node is that of its code, and a
rank reads ahead, receives, writes and sends with its number of buffers. Given are

- the weights of a model in bf16, and the planner's network of a node (`hfscale.planner.network`), of which gloo's TCP
  reaches a share;
- the rate of the shared file system, for all nodes together, which serves one chunk after the other;
- the time of a message without its bytes.

All rings are busy at the same time, so one is simulated, with its equal part of each rate. Local disks are not
simulated: the copy is in memory.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hfscale.checkpoint.transfer import CHUNK_BYTES, Chunk, Nodes, Transfer
from hfscale.facts.hardware import accelerator
from hfscale.planner.network import datasheet_network_gb_s

NODES = (1, 8, 32, 128, 256, 1024)
RANKS_PER_NODE = 8
WEIGHTS_BYTES = 2 * 235_093_634_560
"""Qwen3-235B-A22B in bf16."""
GPU = "H100-80GB"
STORAGE_GB_S = (10.0, 100.0)
TCP_SHARES = (1.0, 0.1)
"""Parts of the planner's network that TCP reaches."""
MESSAGE_S = 1e-4
FREE_BUFFERS = 3
"""Of a rank's buffers those in which it does not read ahead."""

Times = npt.NDArray[np.float64]


def measure() -> dict[str, Any]:
    """Simulate each number of nodes."""
    rows = []
    of_node = datasheet_network_gb_s(accelerator(GPU), RANKS_PER_NODE) * RANKS_PER_NODE
    for storage_gb_s in STORAGE_GB_S:
        for share in TCP_SHARES:
            for nodes in NODES:
                rates = {"storage_gb_s": storage_gb_s, "node_gb_s": of_node * share}
                rows.append({"nodes": nodes, **rates, **loading_times(nodes, **rates)})
    largest = max(NODES)
    summary = {
        f"{row['storage_gb_s']:g} GB/s, {row['node_gb_s']:g} GB/s": [row["each_node_s"], row["load_once_s"]]
        for row in rows
        if row["nodes"] == largest
    }
    return {"summary": {f"{largest} nodes: each node, load once (s)": summary}, "rows": rows}


def loading_times(nodes: int, *, storage_gb_s: float, node_gb_s: float) -> dict[str, float]:
    """Return how long the weights take in seconds: `each_node_s` where each node reads,
    `load_once_s`, and `bound_s`, below which neither reading nor sending all bytes once can be.

    Args:
        nodes (`int`): number of nodes.
        storage_gb_s (`float`): rate of the file system, GB/s.
        node_gb_s (`float`): rate of a node's network in each direction, GB/s.
    """
    storage_s = WEIGHTS_BYTES / (storage_gb_s * 1e9)
    network_s = WEIGHTS_BYTES / (node_gb_s * 1e9)
    chunks = -(-WEIGHTS_BYTES // CHUNK_BYTES // RANKS_PER_NODE)
    found = ring_time(
        nodes,
        chunks,
        read_s=CHUNK_BYTES * RANKS_PER_NODE / (storage_gb_s * 1e9),
        send_s=CHUNK_BYTES * RANKS_PER_NODE / (node_gb_s * 1e9),
    )
    times = {
        "each_node_s": nodes * storage_s,
        "load_once_s": found,
        "bound_s": max(storage_s, network_s * (nodes - 1) / nodes),
    }
    return {name: round(seconds, 1) for name, seconds in times.items()}


def rounds_of_ring(nodes: int, chunks: int) -> list[npt.NDArray[np.bool_]]:
    """Return for each round which nodes read, (nodes,), by the code of the package.

    Args:
        nodes (`int`): number of nodes.
        chunks (`int`): chunks of the ring.
    """
    members = tuple((number,) for number in range(nodes))
    first = Transfer.__new__(Transfer)  # without its buffers
    first._nodes = Nodes(ranks=members, number=0, local_rank=0)
    first._readers = range(nodes)
    order = [reader for _, reader in first._of_rail([Chunk(name="", start=0, length=1)] * chunks)]
    rounds = []
    for start in range(0, chunks, nodes):
        reads = np.zeros(nodes, dtype=bool)
        reads[order[start : start + nodes]] = True
        rounds.append(reads)
    return rounds


def ring_time(nodes: int, chunks: int, *, read_s: float, send_s: float) -> float:
    """Return after how many seconds all nodes of a ring have all chunks.

    Args:
        nodes (`int`): number of nodes.
        chunks (`int`): chunks of the ring.
        read_s (`float`): time of the file system for a chunk of this ring.
        send_s (`float`): time of the network for one.
    """
    storage = _Storage(read_s)
    read = np.zeros(nodes)
    link = np.zeros(nodes)
    """When the link that leads to a node is free again."""
    # By item, the last ones: when each node has received it, and has sent it
    had: Times = np.zeros(nodes)
    sent = [np.zeros(nodes) for _ in range(FREE_BUFFERS)]
    asked = np.zeros(nodes)
    for reads in rounds_of_ring(nodes, chunks):
        read = storage.serve(asked, reads)
        # A node takes its own chunk when it is read and the last one of the round before has come
        own = np.where(reads, np.maximum(read, had), had)
        asked = own
        had = own
        present = reads
        for _ in range(nodes - 1):
            before, present = np.roll(had, 1), np.roll(present, 1)
            begun = np.maximum(np.maximum(before, link), sent[0])
            arrived = np.where(present, begun + send_s + MESSAGE_S, had)
            link = np.where(present, begun + send_s, link)
            # What a node has received now, the node before has sent
            sent = [*sent[1:], np.where(np.roll(present, -1), np.roll(arrived, -1), sent[-1])]
            had = np.maximum(arrived, had)
    return float(had.max())


class _Storage:
    """The file system, which serves one request of this ring after the other.

    Args:
        read_s (`float`): time of a chunk.
    """

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s
        self._free = 0.0

    def serve(self, asked: Times, reads: npt.NDArray[np.bool_]) -> Times:
        """Return when the chunks of a round are read, (nodes,).

        Args:
            asked (`np.ndarray`): when each node asks for its chunk, (nodes,).
            reads (`np.ndarray`): which nodes have one, (nodes,).
        """
        done = np.zeros_like(asked)
        for node in np.argsort(asked, kind="stable"):
            if reads[node]:
                self._free = max(self._free, asked[node]) + self._read_s
                done[node] = self._free
        return done
