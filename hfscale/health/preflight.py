"""All ranks check each other before the first step, within a deadline, whatever any of them does.

The checks run on a thread, phase by phase. Each rank writes on the `RankStore` which phase it enters and what it
found, so that a phase that hangs does not keep anybody from reading, at the deadline, who is not where the others are.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hfscale.health import collectives, compute, machine
from hfscale.health.rank_store import RankStore
from hfscale.health.verdict import accuse
from hfscale.utils.findings import Finding

POLL_S = 0.02
CPU_SIZES = (4096, 2**20, 2**24)
GPU_SIZES = (4096, 2**20, 2**26, 2**28)
SHORT_SIZES = (4096, 2**20)
CLOCK_ROUNDS = 5
MARGIN_S = 1.0
"""Of the deadline, to read what the others have posted and to say it."""


@dataclass(kw_only=True)
class Plan:
    """What a pre-flight does."""

    device: torch.device
    """Where it computes."""
    deadline_s: float
    """Seconds from the start to the verdict."""
    connect: Callable[[], None] | None = None
    """Makes the process group; None where it is there."""
    sizes: tuple[int, ...] = SHORT_SIZES
    """Bytes of the buffers of each collective."""
    rounds: int = collectives.ROUNDS
    """Timed calls of each."""
    compute_s: float = 0.1
    """Seconds of matrix products."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More about this rank for the report."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The outcome, the same on every rank that lives."""

    findings: tuple[Finding, ...]
    """What is wrong; empty: nothing."""
    ranks: dict[int, dict[str, Any]]
    """What each rank said about itself."""
    links: list[dict[str, Any]]
    """The collectives, with the slowest rank's times."""
    seconds: float
    """From start to verdict."""
    stuck: bool
    """Whether a thread of this process still hangs in a collective: leave by `os._exit`, nothing else returns."""


class _Checks(threading.Thread):
    """The phases of this rank, one after the other."""

    def __init__(self, rank_store: RankStore, plan: Plan) -> None:
        super().__init__(name="hfscale-preflight", daemon=True)
        self.rank_store, self.plan = rank_store, plan
        self.phase = "arrive"
        self.results: dict[str, Any] = {"links": []}
        self.error: str | None = None

    def run(self) -> None:
        try:
            self._all_phases()
            self.phase = "done"
            self.rank_store.post("results", self.results)
        except Exception as error:  # whatever it is, the others must hear of it
            self.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.rank_store.raise_flag("failed", str(self.rank_store.rank))

    def _all_phases(self) -> None:
        plan = self.plan
        if plan.device.type == "cuda":
            torch.cuda.set_device(plan.device)  # the current device belongs to the thread
        self.phase = "matmul"
        self.results["matmul"] = compute.check_device(plan.device, seconds=plan.compute_s)
        self.phase = "connect"
        if plan.connect is not None:
            plan.connect()
        groups = self._groups()
        for kind in collectives.KINDS:
            self.phase = kind
            for where, group in groups.items():
                rows = collectives.measure(kind, plan.sizes, plan.device, group, plan.rounds)
                self.results["links"] += [{**row, "where": where} for row in rows]
        self.phase = "matmul again"
        again = compute.check_device(plan.device, seconds=plan.compute_s)
        self.results["matmul"] = compute.better(self.results["matmul"], again)
        self.phase = "clock"
        self.results["clock"] = self._clock()

    def _groups(self) -> dict[str, dist.ProcessGroup | None]:
        """The world, and on several nodes with the same number of ranks in a row this node's ranks too."""
        hosts = [note["host"] for _, note in sorted(self.rank_store.read("hello").items())]
        nodes = list(dict.fromkeys(hosts))
        per_node = len(hosts) // len(nodes)
        in_rows = all(hosts[i] == nodes[i // per_node] for i in range(len(hosts))) if per_node else False
        if len(nodes) == 1:
            return {"node": None}
        if per_node == 1 or not in_rows or self.plan.connect is None:
            return {"network": None}
        return {"network": None, "node": dist.new_subgroups(group_size=per_node)[0]}

    def _clock(self) -> float:
        """This rank's time just after a barrier, the quickest of some: all ranks leave it together."""
        best = (float("inf"), 0.0)
        token = torch.zeros(1, device=self.plan.device)
        for _ in range(CLOCK_ROUNDS):
            begun = time.perf_counter()
            dist.all_reduce(token)
            token.item()
            best = min(best, (time.perf_counter() - begun, time.time()))
        return best[1]


def run(
    rank_store: RankStore, plan: Plan, *, begun: float | None = None, is_ending: Callable[[], bool] = bool
) -> Preflight:
    """Check this rank with all others; every rank must call it.

    Args:
        board (`RankStore`): unused until now.
        plan (`Plan`): the same on all ranks, but for the device's index.
        begun (`float`, *optional*): `time.monotonic()` from which the deadline counts. By default now.
        is_ending (`Callable[[], bool]`, *optional*): whether the launcher is ending this process.
    """
    begun = time.monotonic() if begun is None else begun
    grace_s = min(3.0, plan.deadline_s / 4)
    until = begun + plan.deadline_s - grace_s - MARGIN_S
    rank_store.post("hello", {**machine.describe_self(device=plan.device), **plan.facts})

    def go_on() -> bool:
        return time.monotonic() < until and not is_ending() and rank_store.flag("failed") is None

    while not rank_store.is_complete("hello") and go_on():
        time.sleep(POLL_S)
    checks = _Checks(rank_store, plan)
    if rank_store.is_complete("hello"):
        checks.start()
        while not rank_store.is_complete("results") and go_on():
            time.sleep(POLL_S)
    complete = rank_store.is_complete("results")
    if not complete:
        rank_store.raise_flag("failed", str(rank_store.rank))
        rank_store.post("present", {"phase": checks.phase, "error": checks.error})
        late = time.monotonic() + grace_s
        while not rank_store.is_complete("present") and time.monotonic() < late:
            time.sleep(POLL_S)
    hello, results = rank_store.read("hello"), rank_store.read("results")
    hosts = {rank: note["host"] for rank, note in hello.items()}
    findings = machine.compare(hello) if hello else []
    if not complete:
        findings = accuse(rank_store.world_size, hello, rank_store.read("present")) + findings
    findings += compare_results(results, hosts)
    return Preflight(
        findings=tuple(findings),
        ranks=hello,
        links=slowest(results),
        seconds=time.monotonic() - begun,
        stuck=checks.is_alive(),
    )


def compare_results(results: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[Finding]:
    """What the results of the ranks that came to the end say against each other."""
    if not results:
        return []
    found = compute.compare({rank: result["matmul"] for rank, result in results.items()}, hosts)
    whole = "network" if len(set(hosts.values())) > 1 else "node"
    links = {rank: [row for row in r["links"] if row["where"] == whole] for rank, r in results.items()}
    found += collectives.compare_values(links, hosts) + collectives.compare_neighbours(links, hosts)
    return found + machine.clock_skew({rank: result["clock"] for rank, result in results.items()}, hosts)


def slowest(results: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per collective, place and size: the slowest rank's time."""
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for result in results.values():
        for row in result["links"]:
            key = (row["kind"], row["where"], row["bytes"])
            if key not in best or row["seconds"] > best[key]["seconds"]:
                best[key] = {name: row[name] for name in ("kind", "where", "bytes", "seconds", "gb_s")}
    return list(best.values())
