"""Does this device multiply right, and as fast as its peers?

The matrices are periodic with period 3 and hold -1, 0 and 1, so the product is known without computing it: with
n = 3m + 1 rows and columns, entry (i, j) depends on i mod 3 and j mod 3 only. All partial sums are integers below n,
which fp32 holds exactly (n < 2^24), whatever the order in which a device adds.
"""

import time
from collections.abc import Mapping

import torch

from hfscale.utils.findings import Finding

SLOW_RATIO = 1.4
"""Time of the same product over the peers' median above which a GPU is called slow."""
CPU_SLOW_RATIO = 2.0
"""The same for CPUs: what runs on the other thread of its core slows a rank by 1.4 to 2.0, as measured."""
_PERIOD = 3


def operands(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices (n, n) and their known product (n, n), fp32."""
    i = torch.arange(n, device=device)
    left = ((i[:, None] + i[None, :]) % _PERIOD - 1).float()
    right = ((2 * i[:, None] + i[None, :]) % _PERIOD - 1).float()
    # Counts of each residue among the n terms of a sum, times the products of the residues.
    table = torch.zeros(_PERIOD, _PERIOD)
    for row in range(_PERIOD):
        for column in range(_PERIOD):
            table[row, column] = sum(
                ((row + k) % _PERIOD - 1) * ((2 * k + column) % _PERIOD - 1) * len(range(k, n, _PERIOD))
                for k in range(_PERIOD)
            )
    return left, right, table.to(device)[i % _PERIOD][:, i % _PERIOD]


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product (n, n) that is checked."""
    return left @ right


def check_device(device: torch.device, *, seconds: float) -> dict[str, float]:
    """Multiply for about `seconds`, checking each product.

    Returns `wrong`: entries that are not what they must be, and `seconds` of one product: on a GPU the lower quartile,
    on a CPU, which the ranks of a node share with each other, the least time of a core; `slow_ratio`, from which on
    that is slow beside the peers; and `shares_cores`, 1 on a CPU.
    """
    now = time.thread_time if device.type == "cpu" else time.perf_counter
    n = 4096 if device.type == "cuda" else 256
    left, right, known = operands(n + 1 - n % _PERIOD, device)
    times: list[float] = []
    wrong, begun = 0, time.perf_counter()
    multiply(left, right)
    while len(times) < 8 or time.perf_counter() - begun < seconds:
        started = now()
        product = multiply(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(now() - started)
        wrong += int((product != known).sum())
    is_cpu = device.type == "cpu"
    return {
        "wrong": float(wrong),
        "seconds": sorted(times)[0 if is_cpu else len(times) // 4],
        "slow_ratio": CPU_SLOW_RATIO if is_cpu else SLOW_RATIO,
        "shares_cores": float(is_cpu),
    }


def better(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Two results of `check_device` as one: who was only once slow had other work at that moment."""
    seconds = min(first["seconds"], second["seconds"])
    return {**first, "wrong": first["wrong"] + second["wrong"], "seconds": seconds}


def compare(results: Mapping[int, Mapping[str, float]], hosts: Mapping[int, str]) -> list[Finding]:
    """Ranks whose products are wrong, or slow beside their peers; where cores are shared, if those are the most."""
    found = []
    ordered = sorted(result["seconds"] for result in results.values())
    median = ordered[(len(ordered) - 1) // 2]
    slow = {rank for rank, result in results.items() if result["seconds"] >= result["slow_ratio"] * median}
    if len(results) > 2 and 2 * len(slow) >= len(results) and all(results[rank]["shares_cores"] for rank in slow):
        slow = set()  # half of the ranks: others' work on their cores, and no rank's fault
    for rank, result in sorted(results.items()):
        where = {"ranks": (rank,), "host": hosts.get(rank)}
        if result["wrong"]:
            text = f"multiplies wrongly ({result['wrong']:.0f} entries): take this device out of the run"
            found.append(Finding(level="error", check="matmul", problem=text, **where))
        if rank in slow:
            text = (
                f"multiplies {result['seconds'] / median:.1f}x slower than its peers ({result['seconds'] * 1e3:.2f} "
                f"ms, median {median * 1e3:.2f} ms): look for throttling or another process on it, or leave it out"
            )
            found.append(Finding(level="error", check="speed", problem=text, **where))
    return found
