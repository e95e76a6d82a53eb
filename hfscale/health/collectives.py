"""Each collective checked for its values, and timed by size.

Rank r contributes (r + 1) x p, where p is 0, 1 … 96, 0, 1 … along the buffer: integers, so that sums are exact in fp32
and every place of every rank is different. A ring of n ranks moves (n-1)/n of the whole buffer past each rank in an
all-gather, a reduce-scatter or an all-to-all, and twice that in an all-reduce (Thakur et al., 2005).
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hfscale.facts.hardware import Accelerator
from hfscale.utils.findings import Finding

KINDS = ("neighbours", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""In the order in which they are run: point to point first, so that one dead link is not yet everybody's hang."""
ROUNDS = 5
"""Timed calls of each size; the result is their median."""
LINK_SHARE = 0.5
"""Part of a link's datasheet bandwidth below which a large all-reduce is called slow. NCCL reaches 75% to 90% of it in
its own nccl-tests; half is a wrong route (PCIe for NVLink, TCP for InfiniBand), not a matter of tuning."""
LARGE_BYTES = 15 * 2**20
"""Buffers whose time is the link's, not its latency's."""
SLOW_LINK_RATIO = 3.0
"""A link slower than others by so much has lost lanes or runs over another path; less is ordinary spread."""
_PATTERN = 97
_PASSES = {"neighbours": 1.0, "all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
# torch 2.13 has new names for them, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective over the ranks of a group, on buffers of one size."""

    kind: str
    """One of `KINDS`."""
    output: torch.Tensor
    """What this rank receives."""
    expected: torch.Tensor
    """What it must receive."""
    run: Callable[[], object]
    """Fills `output`; may be called again."""
    whole_bytes: int
    """Bytes of the whole buffer, as in the formulas above."""


def pattern(length: int, device: torch.device, start: int = 0) -> torch.Tensor:
    """Places start … start + length of p, (length,) fp32."""
    return (torch.arange(start, start + length, device=device) % _PATTERN).float()


def exchange(kind: str, size_bytes: int, device: torch.device, group: dist.ProcessGroup | None) -> Exchange:
    """Make the buffers of a collective over `group`, whole buffer of about `size_bytes`."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    part = max(1, size_bytes // 4 // ranks)
    length = part * ranks
    total = ranks * (ranks + 1) // 2
    whole, mine = pattern(length, device), slice(me * part, (me + 1) * part)
    weights = torch.arange(1, ranks + 1, device=device).float()
    if kind == "all_reduce":
        output = torch.empty_like(whole)
        source = (me + 1) * whole

        def run() -> None:
            output.copy_(source)
            dist.all_reduce(output, group=group)

        expected = total * whole
    elif kind == "all_gather":
        output, source = torch.empty_like(whole), (me + 1) * whole[mine]
        expected = weights.repeat_interleave(part) * whole

        def run() -> None:
            _all_gather(output, source, group=group)
    elif kind == "reduce_scatter":
        output, source = torch.empty(part, device=device), (me + 1) * whole
        expected = total * whole[mine]

        def run() -> None:
            _reduce_scatter(output, source, group=group)
    elif kind == "all_to_all":
        output, source = torch.empty_like(whole), (me + 1) * whole
        expected = weights.repeat_interleave(part) * whole[mine].repeat(ranks)

        def run() -> None:
            dist.all_to_all_single(output, source, group=group)
    else:
        output, source = torch.empty_like(whole), (me + 1) * whole
        left, right = (me - 1) % ranks, (me + 1) % ranks
        expected = (left + 1) * whole

        def run() -> None:
            sends = [
                dist.P2POp(dist.isend, source, group=group, group_peer=right),
                dist.P2POp(dist.irecv, output, group=group, group_peer=left),
            ]
            for work in dist.batch_isend_irecv(sends):
                work.wait()

    return Exchange(kind=kind, output=output, expected=expected, run=run, whole_bytes=4 * length)


def measure(
    kind: str, sizes: tuple[int, ...], device: torch.device, group: dist.ProcessGroup | None, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """Run a collective at each size; a row per size with `seconds`, `gb_s`, and in `wrong` the places whose value is
    not what it must be (with `blame`: the rank of the group whose contribution would explain them all)."""
    rows = []
    for size in sizes:
        made = exchange(kind, size, device, group)
        times = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            made.run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begun)
        wrong = int((made.output != made.expected).sum())
        seconds, ranks = statistics.median(times[1:]), dist.get_world_size(group)
        moved = made.whole_bytes * (1.0 if kind == "neighbours" else _PASSES[kind] * (ranks - 1) / ranks)
        row = {"kind": kind, "bytes": made.whole_bytes, "seconds": seconds, "gb_s": moved / seconds / 1e9}
        rows.append({**row, "wrong": wrong, "blame": _contributor(made, ranks) if wrong else None})
    return rows


def _contributor(made: Exchange, ranks: int) -> int | None:
    """Which rank's contribution, left out or changed, explains all wrong places; None if no one's does."""
    if made.kind in ("all_gather", "all_to_all"):
        parts = (made.output != made.expected).view(ranks, -1).any(dim=1).nonzero().flatten().tolist()
        return parts[0] if len(parts) == 1 else None
    if made.kind in ("all_reduce", "reduce_scatter"):
        shape = made.expected / (ranks * (ranks + 1) // 2)
        factors = ((made.output - made.expected)[shape > 0] / shape[shape > 0]).unique()
        missing = round(abs(float(factors[0]))) if len(factors) == 1 else 0
        return missing - 1 if 1 <= missing <= ranks else None
    return None


def compare_values(results: Mapping[int, list[dict[str, Any]]], hosts: Mapping[int, str]) -> list[Finding]:
    """Ranks that received wrong values, or sent them.

    A rank that alone received wrong values is named; where most did, the sender is, if the values tell which.

    Args:
        results: the rows of `measure` over all ranks (not of a subgroup), by rank.
    """
    found = []
    for kind in KINDS:
        by_rank = {rank: [row for row in rows if row["kind"] == kind] for rank, rows in results.items()}
        receivers = {rank for rank, rows in by_rank.items() if any(row["wrong"] for row in rows)}
        if not receivers:
            continue
        blames = {row["blame"] for rows in by_rank.values() for row in rows if row["wrong"]}
        if len(receivers) > 1 and 2 * len(receivers) > len(results) and len(blames) == 1 and None not in blames:
            sender = blames.pop()
            text = f"sends wrong values in {kind}, which {len(receivers)} ranks received: take this device or its "
            text += "link out of the run"
            found.append(Finding(level="error", check=kind, problem=text, ranks=(sender,), host=hosts.get(sender)))
            continue
        for rank in sorted(receivers):
            if kind == "neighbours":
                pair = (rank, (rank - 1) % len(results))
                text = f"what rank {pair[1]} sends arrives wrong at rank {rank}: one of the two, or the link between"
                host = hosts.get(rank) if hosts.get(rank) == hosts.get(pair[1]) else None
                found.append(Finding(level="error", check=kind, problem=text, ranks=pair, host=host))
                continue
            text = f"gets wrong values from {kind}: take this device or its link out of the run"
            found.append(Finding(level="error", check=kind, problem=text, ranks=(rank,), host=hosts.get(rank)))
    return found


def compare_neighbours(results: Mapping[int, list[dict[str, Any]]], hosts: Mapping[int, str]) -> list[Finding]:
    """Ranks whose exchange with their neighbours is far slower than others': a link that is slow and not broken.

    A slow link shows at both of its ends. Small buffers tell nothing and are left out.

    Args:
        results: the rows of `measure` over all ranks, by rank.
    """
    times = {
        rank: max(
            (row["seconds"] for row in rows if row["kind"] == "neighbours" and row["bytes"] >= LARGE_BYTES),
            default=0.0,
        )
        for rank, rows in results.items()
    }
    median = statistics.median_low(times.values())
    slow = tuple(rank for rank, seconds in sorted(times.items()) if median > 0 and seconds >= SLOW_LINK_RATIO * median)
    if not slow:
        return []
    known = {hosts.get(rank) for rank in slow}
    text = (
        f"{max(times.values()) / median:.1f}x slower than others to and from their neighbours "
        f"({max(times.values()) * 1e3:.1f} ms, median {median * 1e3:.1f} ms): look at the cables and ports between"
    )
    host = known.pop() if len(known) == 1 else None
    return [Finding(level="warning", check="neighbours", problem=text, ranks=slow, host=host)]


def compare_links(rows: list[dict[str, Any]], gpu: Accelerator | None, per_node: int) -> list[Finding]:
    """Where a large all-reduce is far below what the links should give; nothing where they are not known.

    Args:
        rows: the rows of all groups, with `where` (`node` or `network`) beside them.
        gpu: the accelerator, None where it is not in `hardware.toml` (a CPU).
        per_node: ranks on each node, which share the network's cards.
    """
    found = []
    for where in ("node", "network"):
        mine = [row for row in rows if row["kind"] == "all_reduce" and row["where"] == where]
        link = None if gpu is None else ((gpu.link_gb_s or gpu.host_gb_s) if where == "node" else gpu.network_gb_s)
        if not mine or link is None:
            continue
        due = LINK_SHARE * link * (per_node if where == "network" else 1)
        best = max(row["gb_s"] for row in mine)
        if best < due:
            place = "inside a node" if where == "node" else "between nodes"
            look = "nvidia-smi topo -m, NCCL_P2P_DISABLE" if where == "node" else "NCCL_IB_HCA, NCCL_SOCKET_IFNAME"
            text = (
                f"all-reduce {place} moves {best:.1f} GB/s past each rank, its links should give {due:.0f} or more: "
                f"look at {look} and NCCL_DEBUG=INFO"
            )
            found.append(Finding(level="warning", check="bandwidth", problem=text))
    return found
