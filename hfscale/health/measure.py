"""Checks the values of matrix products and collectives, and times them.

The pre-flight (`hfscale.health.preflight`) checks values and times, the calibration (`hfscale.check.calibrate`) times
the same operations.

**Matrix products.** The matrices are periodic with period 3 and hold -1, 0 and 1, so the product is known without
computing it: with n = 3m + 1 rows and columns, entry (i, j) depends on i mod 3 and j mod 3 only. All partial sums are
integers below n, which fp32 holds exactly (n < 2^24), whatever the order in which a device adds.

**Collectives.** Rank r contributes (r + 1) x p, where p is 0, 1 … 96, 0, 1 … along the buffer: integers in fp64, so
that sums over any number of ranks are exact in any order (fp32 holds integers only up to 2^24, which sums of 591 ranks
exceed), and a contribution can be attributed to its rank. A ring of n ranks moves (n-1)/n of the full buffer
past each rank in an all-gather, a reduce-scatter or an all-to-all, and twice that in an all-reduce (Thakur et al.,
2005). The reported bandwidth, `gb_s`, is that volume over the time.

A matrix product of n x n takes 2 n^3 FLOPs.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hfscale.core.findings import Finding, rank_error

SLOW_RATIO = 1.4
"""Time of the same product over the median of all ranks, from which a GPU is called slow."""
CPU_SLOW_RATIO = 3.0
"""The same ratio for CPUs. We measured that work on the other hardware thread of its core slows a rank by 1.4 to
2.0, which is no fault."""
KINDS = ("neighbours", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives in the order in which they run: point to point first, since there one broken link does not make every
rank hang."""
ROUNDS = 5
"""Timed calls of each collective and size; the result is their median."""
RING_PASSES = {
    "neighbours": 1,
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
}
"""How many times the buffer goes around the ring."""
LARGE_BYTES = 15 * 2**20
"""Size from which the time of an exchange is set by bandwidth and not by latency."""
SLOW_LINK_RATIO = 3.0
"""Time over the median from which a link is called slow: it has lost lanes or uses another path; less is ordinary
spread."""
_MATRIX_PERIOD = 3
_BUFFER_PERIOD = 97
_ELEMENT_BYTES = 8
# torch 2.13 has new names for these two functions and warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def time_call(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one call of `run`, including the kernels that it starts on `device`.

    Args:
        run (`Callable[[], object]`): what is timed.
        device (`torch.device`): the device that is synchronized after the call, if it is a GPU.
        clock (`Callable[[], float]`): a clock in seconds.
    """
    begun = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begun


# Matrix products


def known_product(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and their product, which is computed without multiplying them.

    Args:
        n (`int`): the number of rows and columns, below 2^24.
        device (`torch.device`): where the matrices are.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: the left matrix, the right matrix and their product, each
        (n, n) fp32.
    """
    i = torch.arange(n, device=device)
    left = ((i[:, None] + i[None, :]) % _MATRIX_PERIOD - 1).float()
    right = ((2 * i[:, None] + i[None, :]) % _MATRIX_PERIOD - 1).float()
    # How often each residue k occurs among the n terms of a sum, times the two factors at that residue.
    table = torch.zeros(_MATRIX_PERIOD, _MATRIX_PERIOD)
    for row in range(_MATRIX_PERIOD):
        for column in range(_MATRIX_PERIOD):
            table[row, column] = sum(
                ((row + k) % _MATRIX_PERIOD - 1)
                * ((2 * k + column) % _MATRIX_PERIOD - 1)
                * len(range(k, n, _MATRIX_PERIOD))
                for k in range(_MATRIX_PERIOD)
            )
    return left, right, table.to(device)[i % _MATRIX_PERIOD][:, i % _MATRIX_PERIOD]


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix product (n, n) that is checked.

    Args:
        left (`torch.Tensor`): the left matrix, (n, n).
        right (`torch.Tensor`): the right matrix, (n, n).
    """
    return left @ right


def check_matmul(device: torch.device, *, seconds: float) -> dict[str, float]:
    """Multiply matrices for about the given time and check each product.

    Args:
        device (`torch.device`): the device that multiplies.
        seconds (`float`): seconds of multiplying; at least eight products are computed.

    Returns:
        `dict[str, float]`: `wrong`: the number of wrong entries. `seconds`: time of one product; on a GPU the lower
        quartile, on a CPU, whose cores the ranks of a node share, the least time on a core. `slow_ratio`: time over
        the median of all ranks from which this device is slow. `shares_cores`: 1 on a CPU, else 0.
    """
    is_cpu = device.type == "cpu"
    clock = time.thread_time if is_cpu else time.perf_counter
    n = 4096 if device.type == "cuda" else 256
    left, right, expected = known_product(n + 1 - n % _MATRIX_PERIOD, device)
    products: list[torch.Tensor] = []

    def run() -> None:
        products[:] = [multiply(left, right)]

    times: list[float] = []
    wrong = 0
    begun = time.perf_counter()
    run()  # warm-up
    while len(times) < 8 or time.perf_counter() - begun < seconds:
        times.append(time_call(run, device, clock))
        wrong += int((products[0] != expected).sum())
    return {
        "wrong": float(wrong),
        "seconds": sorted(times)[0 if is_cpu else len(times) // 4],
        "slow_ratio": CPU_SLOW_RATIO if is_cpu else SLOW_RATIO,
        "shares_cores": float(is_cpu),
    }


def best_matmul(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Combine two results of `check_matmul`: a device that was slow only once had other work at that moment.

    Args:
        first (`Mapping[str, float]`): the first result.
        second (`Mapping[str, float]`): the second result of the same device.

    Returns:
        `dict[str, float]`: a result with the sum of the wrong entries and the lower time.
    """
    seconds = min(first["seconds"], second["seconds"])
    return {**first, "wrong": first["wrong"] + second["wrong"], "seconds": seconds}


def compare_matmul(
    results: Mapping[int, Mapping[str, float]], hosts: Mapping[int, str]
) -> list[Finding]:
    """Find ranks whose products are wrong or much slower than the median.

    Args:
        results (`Mapping[int, Mapping[str, float]]`): the result of `check_matmul` of each rank.
        hosts (`Mapping[int, str]`): the host of each rank.

    Returns:
        `list[Finding]`: an error for each wrong or slow rank.
    """
    found = []
    ordered = sorted(result["seconds"] for result in results.values())
    median = ordered[(len(ordered) - 1) // 2]
    slow = {
        rank
        for rank, result in results.items()
        if result["seconds"] >= result["slow_ratio"] * median
    }
    if (
        len(results) > 2
        and 2 * len(slow) >= len(results)
        and all(results[rank]["shares_cores"] for rank in slow)
    ):
        slow = (
            set()
        )  # half of the ranks share their cores with other work: no single rank is at fault
    for rank, result in sorted(results.items()):
        if result["wrong"]:
            problem = f"computes wrong matrix products ({result['wrong']:.0f} wrong entries)"
            found.append(
                rank_error("matmul", rank, hosts, problem, "take this device out of the run")
            )
        if rank in slow:
            problem = (
                f"multiplies matrices {result['seconds'] / median:.1f}x slower than the median rank "
                f"({result['seconds'] * 1e3:.2f} ms, median {median * 1e3:.2f} ms)"
            )
            fix = (
                "look for throttling or another process on this device, or leave it out of the run"
            )
            found.append(rank_error("speed", rank, hosts, problem, fix))
    return found


# Collectives


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Holds one collective over the ranks of a group, with its buffers."""

    kind: str
    """One of `KINDS`."""
    source: torch.Tensor
    """What this rank contributes."""
    output: torch.Tensor
    """What this rank receives."""
    expected: torch.Tensor
    """What it must receive."""
    prepare: Callable[[], object]
    """Makes `output` ready for a call; not timed."""
    run: Callable[[], object]
    """Fills `output`; may be called again after `prepare`."""
    full_bytes: int
    """Size of the full buffer, as in the formulas of this module."""

    def ring_bytes(self, ranks: int) -> float:
        """Return the bytes that move past each rank in one call.

        Args:
            ranks (`int`): the number of ranks in the group.
        """
        if self.kind == "neighbours":
            return float(self.full_bytes)
        return RING_PASSES[self.kind] * self.full_bytes * (ranks - 1) / ranks


def _buffer_pattern(length: int, device: torch.device) -> torch.Tensor:
    """Return the pattern p of this module's collectives, (length,) fp64; sums over any number of ranks are exact."""
    return (torch.arange(length, device=device) % _BUFFER_PERIOD).double()


def make_collective(
    kind: str, size_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> Collective:
    """Make the buffers of a collective. Every rank of the group calls it with the same kind and size.

    Args:
        kind (`str`): one of `KINDS`.
        size_bytes (`int`): size of the full buffer; rounded down so that every rank has an equal part, of at least one
            element.
        device (`torch.device`): where the buffers are.
        group (`ProcessGroup`, *optional*): the ranks that take part; None: all.

    Returns:
        `Collective`: the collective with its buffers and the expected values; it has not run yet.
    """
    ranks = dist.get_world_size(group)
    me = dist.get_rank(group)
    part = max(1, size_bytes // _ELEMENT_BYTES // ranks)
    mine = slice(me * part, (me + 1) * part)
    pattern = _buffer_pattern(part * ranks, device)
    source = (me + 1) * (pattern[mine] if kind == "all_gather" else pattern)
    output = torch.empty_like(pattern[mine] if kind == "reduce_scatter" else pattern)
    sum_of_factors = ranks * (ranks + 1) // 2
    factors = torch.arange(1, ranks + 1, device=device).double().repeat_interleave(part)
    left = (me - 1) % ranks
    right = (me + 1) % ranks

    def neighbours() -> None:
        operations = [
            dist.P2POp(dist.isend, source, group=group, group_peer=right),
            dist.P2POp(dist.irecv, output, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    programs: dict[str, tuple[Callable[[], object], Callable[[], torch.Tensor]]] = {
        "neighbours": (neighbours, lambda: (left + 1) * pattern),
        "all_reduce": (
            lambda: dist.all_reduce(output, group=group),
            lambda: sum_of_factors * pattern,
        ),
        "all_gather": (lambda: _all_gather(output, source, group=group), lambda: factors * pattern),
        "reduce_scatter": (
            lambda: _reduce_scatter(output, source, group=group),
            lambda: sum_of_factors * pattern[mine],
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(output, source, group=group),
            lambda: factors * pattern[mine].repeat(ranks),
        ),
    }
    run, expected = programs[kind]
    return Collective(
        kind=kind,
        source=source,
        output=output,
        expected=expected(),
        prepare=(lambda: output.copy_(source)) if kind == "all_reduce" else (lambda: None),
        run=run,
        full_bytes=pattern.nbytes,
    )


def time_collective(collective: Collective, device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median seconds of the calls of a collective on this rank, after one call that warms up.

    Args:
        collective (`Collective`): the collective.
        device (`torch.device`): the device of its buffers.
        rounds (`int`): the number of timed calls, the same on every rank.
    """
    times = []
    for _ in range(rounds + 1):
        time_call(collective.prepare, device)
        times.append(time_call(collective.run, device))
    return statistics.median(times[1:])


def kinds_on(device: torch.device) -> tuple[str, ...]:
    """Return the collectives that the default process group has for tensors on a device.

    gloo, which ranks that share a GPU use since NCCL refuses them, sends nothing from rank to rank on GPUs: the table
    of backends in the documentation of `torch.distributed` names `all_reduce` alone among these.

    Args:
        device (`torch.device`): where the buffers are.

    Returns:
        `tuple[str, ...]`: some of `KINDS`, in their order.
    """
    backends = dict(each.split(":") for each in dist.get_backend_config().split(","))
    if device.type != "cpu" and backends.get(device.type) == "gloo":
        return ("all_reduce",)
    return KINDS


def check_collective(
    kind: str,
    sizes: tuple[int, ...],
    device: torch.device,
    group: dist.ProcessGroup | None,
    rounds: int = ROUNDS,
) -> list[dict[str, Any]]:
    """Run a collective at each size, time it and check what this rank receives. Every rank of the group must call it.

    Args:
        kind (`str`): one of `KINDS`.
        sizes (`tuple[int, ...]`): sizes of the full buffers, bytes.
        device (`torch.device`): where the buffers are.
        group (`ProcessGroup`, *optional*): the ranks that take part; None: all.
        rounds (`int`): the number of timed calls at each size, the same on every rank.

    Returns:
        `list[dict[str, Any]]`: a row per size: `kind`, `bytes`, `seconds`, `gb_s`; `wrong`, the number of wrong
        elements; and `blame`, the rank of the group whose contribution would explain all of them, None if there is
        none.
    """
    rows = []
    ranks = dist.get_world_size(group)
    for size in sizes:
        collective = make_collective(kind, size, device, group)
        seconds = time_collective(collective, device, rounds)
        wrong = int((collective.output != collective.expected).sum())
        rows.append(
            {
                "kind": kind,
                "bytes": collective.full_bytes,
                "seconds": seconds,
                "gb_s": collective.ring_bytes(ranks) / seconds / 1e9,
                "wrong": wrong,
                "blame": _guilty_contributor(collective, ranks) if wrong else None,
            }
        )
    return rows


def _guilty_contributor(collective: Collective, ranks: int) -> int | None:
    """Return the rank whose missing or changed contribution explains all wrong elements; None if there is none."""
    output = collective.output
    expected = collective.expected
    if collective.kind in ("all_gather", "all_to_all"):
        parts = (output != expected).view(ranks, -1).any(dim=1).nonzero().flatten().tolist()
        return parts[0] if len(parts) == 1 else None
    if collective.kind in ("all_reduce", "reduce_scatter"):
        pattern = expected / (ranks * (ranks + 1) // 2)
        factors = ((output - expected)[pattern > 0] / pattern[pattern > 0]).unique()
        missing = round(abs(float(factors[0]))) if len(factors) == 1 else 0
        return missing - 1 if 1 <= missing <= ranks else None
    return None


def compare_values(
    results: Mapping[int, list[dict[str, Any]]], hosts: Mapping[int, str]
) -> list[Finding]:
    """Find ranks that received or sent wrong values.

    Where most ranks received wrong values and these point to one sender, the sender is named; otherwise each receiver.

    Args:
        results (`Mapping[int, list[dict[str, Any]]]`): the rows of `check_collective` over all ranks (not of a
            subgroup), by rank.
        hosts (`Mapping[int, str]`): the host of each rank.

    Returns:
        `list[Finding]`: an error for each sender or receiver; an error about neighbours names both.
    """
    found = []
    fix = "take this device or its link out of the run"
    for kind in KINDS:
        by_rank = {
            rank: [row for row in rows if row["kind"] == kind] for rank, rows in results.items()
        }
        receivers = sorted(
            rank for rank, rows in by_rank.items() if any(row["wrong"] for row in rows)
        )
        blamed = {row["blame"] for rows in by_rank.values() for row in rows if row["wrong"]}
        if (
            len(receivers) > 1
            and 2 * len(receivers) > len(results)
            and len(blamed) == 1
            and None not in blamed
        ):
            sender = blamed.pop()
            problem = f"sends wrong values in {kind}, which {len(receivers)} ranks received"
            found.append(rank_error(kind, sender, hosts, problem, fix))
        elif kind == "neighbours":
            found += [_wrong_from_neighbour(rank, len(results), hosts) for rank in receivers]
        else:
            problem = f"receives wrong values from {kind}"
            found += [rank_error(kind, rank, hosts, problem, fix) for rank in receivers]
    return found


def _wrong_from_neighbour(rank: int, world_size: int, hosts: Mapping[int, str]) -> Finding:
    sender = (rank - 1) % world_size
    return Finding(
        level="error",
        check="neighbours",
        problem=f"what rank {sender} sends arrives wrong at rank {rank}",
        fix="take out one of the two devices, or repair the link between them",
        ranks=(rank, sender),
        host=hosts.get(rank) if hosts.get(rank) == hosts.get(sender) else None,
    )


def compare_neighbours(
    results: Mapping[int, list[dict[str, Any]]], hosts: Mapping[int, str]
) -> list[Finding]:
    """Find ranks whose exchange with their neighbours is far slower than that of others: a slow but working link.

    A slow link shows at both of its ends. Small buffers say nothing about bandwidth and are left out.

    Args:
        results (`Mapping[int, list[dict[str, Any]]]`): the rows of `check_collective` over all ranks, by rank.
        hosts (`Mapping[int, str]`): the host of each rank.

    Returns:
        `list[Finding]`: one warning that names all slow ranks; empty if no rank is slow.
    """
    times = {
        rank: max(
            (
                row["seconds"]
                for row in rows
                if row["kind"] == "neighbours" and row["bytes"] >= LARGE_BYTES
            ),
            default=0.0,
        )
        for rank, rows in results.items()
    }
    median = statistics.median_low(times.values())
    slow = tuple(
        rank
        for rank, seconds in sorted(times.items())
        if median > 0 and seconds >= SLOW_LINK_RATIO * median
    )
    if not slow:
        return []
    hosts_of_slow = {hosts.get(rank) for rank in slow}
    worst = max(times.values())
    return [
        Finding(
            level="warning",
            check="neighbours",
            problem=f"the exchange with the neighbours is {worst / median:.1f}x slower than on the median rank "
            f"({worst * 1e3:.1f} ms, median {median * 1e3:.1f} ms)",
            fix="check the cables and ports between these ranks",
            ranks=slow,
            host=hosts_of_slow.pop() if len(hosts_of_slow) == 1 else None,
        )
    ]
