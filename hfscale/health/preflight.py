"""Checks all ranks before the first step; every rank gets the verdict within a deadline.

The protocol uses the launcher's key-value store (`RankStore`), which works when a collective hangs:

1. *Hello.* Each rank writes its host, device, library versions and communication variables, and waits for all others.
   The time limit restarts whenever a rank arrives, so that ranks may come up one after the other, however slowly.
2. *Checks.* A thread runs the phases of `PHASES` in order: matrix products, the process group, each collective,
   clocks. It writes its results when it is done, or raises the flag `failed` when one of them raises an exception.
3. *Wait.* The main thread polls the store until all results are there, the flag `failed` is up, the time since all
   ranks arrived is over, or the launcher ends this process.
4. *Failure.* If results are missing, the rank raises the flag, so that the others stop waiting too, and writes the
   phase it is in and its exception. For a grace period it waits for the others to do the same. Ranks that do not
   answer, or that are behind most others, are to blame (`blame_ranks`).
5. *Verdict.* One rank, rank 0 if it is alive, reads all notes, compares them and publishes the findings. So the work
   grows with the number of ranks and not with its square.

A phase that hangs blocks only the thread: the main thread still reads which rank is missing where.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hfscale.core.findings import Finding, limit_findings, name_ranks, rank_error
from hfscale.core.logging import get_logger
from hfscale.core.rank_store import RankStore
from hfscale.health import measure
from hfscale.health.diagnosis import POINT_TO_POINT, positions
from hfscale.health.rank_notes import compare_ranks, compare_results, describe_rank, slowest_links

logger = get_logger(__name__)

CPU_SIZES = (4096, 2**20, 2**24)
GPU_SIZES = (4096, 2**20, 2**26, 2**28)
SHORT_SIZES = (4096, 2**20)
CLOCK_ROUNDS = 5
MARGIN_S = 1.0
"""Part of the deadline that is kept for reading the store and for reporting."""
PHASES = ("arrive", "matmul", "connect", "gloo", *measure.KINDS, "matmul again", "clock", "done")
"""The phases of a rank's pre-flight, in order. `gloo` is an all-reduce over gloo, which hfscale's exchanges use."""
_FIXES = {
    "gloo": "set GLOO_SOCKET_IFNAME to the interface that connects the nodes (ip -br address lists them)"
}
"""How to fix a failure of a phase, where that is known."""
LOCAL_PHASES = ("arrive", "matmul", "matmul again")
"""Phases in which a rank waits for no other rank."""


@dataclass(kw_only=True)
class PreflightPlan:
    """Describes what a pre-flight checks."""

    device: torch.device
    """The device of this rank."""
    deadline_s: float
    """Seconds from the arrival of the last rank to the verdict; the same where others do not arrive at all, unless
    `arrival_s` is longer."""
    arrival_s: float = 0.0
    """Seconds to wait for the next rank to arrive, where that is longer than the deadline. The late ranks are
    logged at the deadline."""
    connect: Callable[[], None] | None = None
    """Makes the default process group; None where it exists already."""
    sizes: tuple[int, ...] = SHORT_SIZES
    """Sizes of each collective's buffers, bytes."""
    rounds: int = measure.ROUNDS
    """Timed calls of each collective and size."""
    compute_s: float = 0.1
    """Seconds of matrix products."""
    all_to_all: bool = True
    """Whether the collectives include an all-to-all over all ranks, for which each rank connects to every other one.
    NCCL keeps the buffers of these connections for as long as the group exists."""
    gloo: bool = False
    """Whether all ranks connect over gloo too, in a group of their own. A training does it itself when it begins."""
    node_findings: Sequence[Finding] = ()
    """What this rank has found about its node, for the report."""


@dataclass(frozen=True, kw_only=True)
class PreflightResult:
    """Holds the outcome of a pre-flight; its findings are the same on every rank that is alive."""

    findings: tuple[Finding, ...]
    """What is wrong; empty if nothing is."""
    node_findings: tuple[Finding, ...]
    """What the ranks have found about their nodes (`PreflightPlan.node_findings`)."""
    is_reader: bool
    """Whether this rank has read the notes of all ranks."""
    ranks: dict[int, dict[str, Any]]
    """What each rank wrote about itself (`describe_rank`), on the rank that has read it; empty on the others."""
    links: list[dict[str, Any]]
    """A row for each collective, group and size, with the time of the slowest rank (`slowest_links`)."""
    seconds: float
    """Seconds from the start to the verdict."""
    stuck: bool
    """Whether a thread of this process still hangs in a collective: then only `os._exit` ends the process."""


def run(
    rank_store: RankStore,
    plan: PreflightPlan,
    *,
    begun: float | None = None,
    is_ending: Callable[[], bool] = bool,
) -> PreflightResult:
    """Check this rank together with all others; every rank must call it.

    Args:
        rank_store (`RankStore`): a store that has not been used yet.
        plan (`PreflightPlan`): the same on all ranks, apart from the device's index.
        begun (`float`, *optional*): `time.monotonic()` from which `PreflightResult.seconds` counts. By default now.
        is_ending (`Callable[[], bool]`, *optional*): whether the launcher is ending this process.

    Returns:
        `PreflightResult`: the findings about all ranks, and what they measured.
    """
    begun = time.monotonic() if begun is None else begun
    grace_s = min(3.0 + rank_store.world_size / 4096, plan.deadline_s / 4)
    limit_s = plan.deadline_s - grace_s - MARGIN_S

    def may_wait() -> bool:
        return not is_ending() and rank_store.flag("failed") is None

    checks = _Checks(rank_store, plan)
    of_node = [finding.to_dict() for finding in plan.node_findings]
    rank_store.write("hello", {**describe_rank(device=plan.device), "node": of_node})
    arrived_at = time.monotonic()
    if _wait_for_arrivals(rank_store, may_wait, limit_s, plan.arrival_s):
        checks.results["waited_s"] = time.monotonic() - arrived_at
        checks.start()
        _wait_for_all(rank_store, "results", may_wait, limit_s)
    is_complete = rank_store.is_complete("results")
    if not is_complete:
        _report_presence(rank_store, checks, grace_s, time.monotonic() - arrived_at)
    hello: dict[int, dict[str, Any]] = {}

    def judge() -> dict[str, Any]:
        hello.update(rank_store.read("hello"))
        return _judge(rank_store, hello, is_complete=is_complete)

    verdict, is_reader = rank_store.decide(
        "verdict", judge, after_s=grace_s, limit_s=4 * grace_s, is_ready=lambda: True
    )
    if verdict is None:
        problem = f"no rank has published a verdict within {4 * grace_s:.0f} s: the one that read the notes has ended"
        lost = Finding(
            level="error",
            check="verdict",
            problem=problem,
            fix="see the logs, then start all again",
        )
        verdict = {"findings": [lost.to_dict()], "node": [], "links": []}
    return PreflightResult(
        findings=tuple(map(Finding.from_dict, verdict["findings"])),
        node_findings=tuple(map(Finding.from_dict, verdict["node"])),
        is_reader=is_reader,
        ranks=hello,
        links=verdict["links"],
        seconds=time.monotonic() - begun,
        stuck=checks.is_alive(),
    )


def _judge(
    rank_store: RankStore, hello: dict[int, dict[str, Any]], *, is_complete: bool
) -> dict[str, Any]:
    """Read what all ranks wrote, and return the verdict that they all get."""
    results = rank_store.read("results")
    hosts = {rank: note["host"] for rank, note in hello.items()}
    of_nodes = [
        Finding.from_dict(fields)
        for _, note in sorted(hello.items())
        for fields in note.pop("node")
    ]
    found = (
        [] if is_complete else blame_ranks(rank_store.world_size, hello, rank_store.read("present"))
    )
    found += [*compare_ranks(hello), *compare_results(results, hosts)]
    return {
        "findings": [finding.to_dict() for finding in limit_findings(found)],
        "node": [finding.to_dict() for finding in limit_findings(of_nodes)],
        "links": slowest_links(results),
    }


def _wait_for_arrivals(
    rank_store: RankStore, may_wait: Callable[[], bool], limit_s: float, longer_s: float
) -> bool:
    """Wait until all ranks have arrived; log which are late after `limit_s` seconds without another arrival."""
    if _wait_for_all(rank_store, "hello", may_wait, limit_s, each_restarts_it=True):
        return True
    if longer_s <= limit_s or not may_wait():
        return False
    if rank_store.claim("late ranks"):
        late = set(range(rank_store.world_size)) - set(rank_store.read("hello"))
        # An error, since rank 0, which alone logs warnings, may be late.
        logger.error(
            "not yet arrived after %.0f s: %s; waiting up to %.0f s",
            limit_s,
            name_ranks(late),
            longer_s,
        )
    return _wait_for_all(rank_store, "hello", may_wait, longer_s, each_restarts_it=True)


def _wait_for_all(
    rank_store: RankStore,
    topic: str,
    may_wait: Callable[[], bool],
    limit_s: float,
    *,
    each_restarts_it: bool = False,
) -> bool:
    """Wait until all ranks have written `topic`, `may_wait` is False, or `limit_s` seconds are over.

    Args:
        rank_store (`RankStore`): the notes of the ranks.
        topic (`str`): what they write.
        may_wait (`Callable[[], bool]`): called again and again, after an answer of the store.
        limit_s (`float`): longest time to wait, seconds.
        each_restarts_it (`bool`): whether `limit_s` counts from the last time that a rank wrote.

    Returns:
        `bool`: whether all ranks have written.
    """
    most = 0
    since = time.monotonic()
    while (count := rank_store.count(topic)) < rank_store.world_size and may_wait():
        if each_restarts_it and count > most:
            most = count
            since = time.monotonic()
        if time.monotonic() - since > limit_s:
            break
        time.sleep(rank_store.poll_s)
    return rank_store.is_complete(topic)


def _report_presence(
    rank_store: RankStore, checks: "_Checks", grace_s: float, waited_s: float
) -> None:
    """End the wait on all ranks, write the phase that this rank is in, and wait for the others to do so."""
    rank_store.raise_flag("failed", str(rank_store.rank))
    note = {"phase": checks.phase, "error": checks.error, "waited_s": waited_s}
    done = sorted({row["kind"] for row in list(checks.results["links"])})
    rank_store.write("present", note | {"done": done, "entered": _entered()})
    _wait_for_all(rank_store, "present", lambda: True, grace_s)


def _entered() -> dict[str, int | None] | None:
    """Return what this rank has entered in the default group; None where that is not recorded.

    `collectives` and `p2p` count the collectives, and the sends and receives; `waits_in` is the number of the
    collective that it waits in.
    """
    found = {position.group: position for position in positions()} if dist.is_initialized() else {}
    if not found:
        return None
    world = dist.group.WORLD
    assert world is not None  # the process group has positions
    name = world.group_name
    collectives = found.get(name)
    p2p = found.get(name + POINT_TO_POINT)
    return {
        "collectives": collectives.entered if collectives else 0,
        "p2p": p2p.entered if p2p else 0,
        "waits_in": collectives.waiting if collectives else None,
    }


class _Checks(threading.Thread):
    """Runs the phases of this rank in order.

    Args:
        rank_store (`RankStore`): where the results are written.
        plan (`PreflightPlan`): what is checked.
    """

    def __init__(self, rank_store: RankStore, plan: PreflightPlan) -> None:
        super().__init__(name="hfscale-preflight", daemon=True)
        self.rank_store = rank_store
        self.plan = plan
        self.phase = "arrive"
        self.results: dict[str, Any] = {"links": []}
        self.error: str | None = None

    def run(self) -> None:
        try:
            self._run_phases()
            self.phase = "done"
            self.rank_store.write("results", self.results)
        except Exception as error:  # whatever it is, the other ranks must learn of it
            self.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.rank_store.raise_flag("failed", str(self.rank_store.rank))

    def _run_phases(self) -> None:
        plan = self.plan
        if plan.device.type == "cuda":
            torch.cuda.set_device(plan.device)  # the current device is a property of the thread
        self.phase = "matmul"
        self.results["matmul"] = measure.check_matmul(plan.device, seconds=plan.compute_s)
        self.phase = "connect"
        if plan.connect is not None:
            plan.connect()
        if plan.gloo:
            self.phase = "gloo"
            reduce_over_gloo(plan.deadline_s)
        groups = self._groups()
        for kind in measure.kinds_on(plan.device):
            if kind == "all_to_all" and not plan.all_to_all:
                continue
            self.phase = kind
            for where, group in groups.items():
                rows = measure.check_collective(kind, plan.sizes, plan.device, group, plan.rounds)
                self.results["links"] += [{**row, "where": where} for row in rows]
        self.phase = "matmul again"
        again = measure.check_matmul(plan.device, seconds=plan.compute_s)
        self.results["matmul"] = measure.best_matmul(self.results["matmul"], again)
        self.phase = "clock"
        self.results["clock"] = self._time_after_barrier()

    def _groups(self) -> dict[str, dist.ProcessGroup | None]:
        """Return the group of all ranks, and this node's if several nodes have equally many, consecutive ranks."""
        if self.rank_store.rank == 0:
            hello = self.rank_store.read("hello")
            self.rank_store.publish(
                "nodes", ranks_per_node([note["host"] for _, note in sorted(hello.items())])
            )
        while (nodes := self.rank_store.published("nodes")) is None:
            time.sleep(self.rank_store.poll_s)
        number, per_node = nodes
        if number == 1:
            return {"node": None}
        if per_node < 2 or self.plan.connect is None:
            return {"network": None}
        return {"network": None, "node": dist.new_subgroups(group_size=per_node)[0]}

    def _time_after_barrier(self) -> float:
        """Return this rank's clock just after the quickest of a few all-reduces, which all ranks leave together."""
        best = (float("inf"), 0.0)
        token = torch.zeros(1, device=self.plan.device)
        for _ in range(CLOCK_ROUNDS):
            begun = time.perf_counter()
            dist.all_reduce(token)
            token.item()
            best = min(best, (time.perf_counter() - begun, time.time()))
        return best[1]


def reduce_over_gloo(limit_s: float) -> None:
    """Make a gloo group of all ranks, as hfscale's exchanges do under NCCL, and add up a number over it.

    Args:
        limit_s (`float`): time limit of each step in seconds.

    Raises:
        RuntimeError: gloo does not connect the ranks, or adds wrongly.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
    ranks = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(ranks, group=group)
    dist.destroy_process_group(group)
    if ranks.item() != dist.get_world_size():
        raise RuntimeError(f"gloo counts {ranks.item()} of {dist.get_world_size()} ranks")


def ranks_per_node(hosts: Sequence[str]) -> tuple[int, int]:
    """Return the number of nodes, and how many consecutive ranks each has; 0 if it is not the same for all.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
    """
    nodes = list(dict.fromkeys(hosts))
    per_node = len(hosts) // len(nodes)
    is_regular = per_node * len(nodes) == len(hosts) and all(
        host == nodes[rank // per_node] for rank, host in enumerate(hosts)
    )
    return len(nodes), per_node if is_regular else 0


# Who is missing


def blame_ranks(
    world_size: int,
    hello: Mapping[int, Mapping[str, Any]],
    present: Mapping[int, Mapping[str, Any]],
) -> list[Finding]:
    """Explain why a pre-flight did not end.

    Args:
        world_size (`int`): the number of ranks that there should be.
        hello (`Mapping[int, Mapping[str, Any]]`): what each rank wrote when it arrived; ranks that never arrived are
            missing.
        present (`Mapping[int, Mapping[str, Any]]`): what each rank that is alive wrote at the end: its `phase`, the
            `error` that ended it, the collectives that it has `done`, what it has `entered` (if known), and how long
            it `waited_s` since it arrived.

    Returns:
        `list[Finding]`: an error for each rank to blame, or one about all if no single rank is.
    """
    hosts = known_hosts(world_size, hello)
    absent = [rank for rank in range(world_size) if rank not in present]
    if absent:
        return [_blame_absent(rank, hosts, has_arrived=rank in hello) for rank in absent]
    phases = {rank: str(note["phase"]) for rank, note in present.items()}
    first = min(phases.values(), key=PHASES.index)
    behind = sorted(rank for rank, phase in phases.items() if phase == first)
    if len(behind) < world_size:
        return _blame_phases(first, behind, phases, present, hosts)
    if first == "arrive":
        return [_blame_late(present, hosts)]
    errors = _errors_of(present)
    if 0 < len(errors) < world_size:
        return _blame_failed(errors, phases, hosts)
    reason = next(iter(errors.values()), "all wait")
    between = ", ".join(sorted(set(hosts.values())))
    problem = f"{first} ended on no rank ({reason}): the links between {between} do not carry it"
    fix = _FIXES.get(first, "check interfaces, firewalls, NCCL_DEBUG=INFO")
    return [Finding(level="error", check=first, problem=problem, fix=fix)]


def _blame_absent(rank: int, hosts: Mapping[int, str], *, has_arrived: bool) -> Finding:
    if has_arrived:
        problem = "does not answer: its process is dead, stopped or cut off from the launcher"
        fix = "see its log and the kernel log of its host, then start all again"
        return rank_error("presence", rank, hosts, problem, fix)
    problem = (
        "never arrived: its process did not start, or its node does not reach the launcher's node"
    )
    return rank_error(
        "presence", rank, hosts, problem, "start it, or open the launcher's port between the nodes"
    )


def _blame_late(present: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> Finding:
    """Blame the ranks that came when the others had already stopped waiting for them; all are there now."""
    waited = {rank: float(note.get("waited_s", 0.0)) for rank, note in present.items()}
    late = tuple(
        sorted(rank for rank, seconds in waited.items() if seconds <= max(waited.values()) / 2)
    )
    problem = f"arrived after the others had waited for {max(waited.values()):.0f} s"
    fix = "give a longer --deadline, or see what slows the start of its node down"
    where = {hosts[rank] for rank in late if rank in hosts}
    host = where.pop() if len(where) == 1 else None
    return Finding(level="error", check="arrival", problem=problem, fix=fix, ranks=late, host=host)


def _errors_of(present: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return the exception of each rank that one has ended, in the order of the ranks."""
    return {rank: str(note["error"]) for rank, note in sorted(present.items()) if note.get("error")}


def _blame_failed(
    errors: Mapping[int, str], phases: Mapping[int, str], hosts: Mapping[int, str]
) -> list[Finding]:
    """Blame the ranks that an exception has ended, while the others were only waiting or on their way."""
    found = []
    for rank, error in errors.items():
        phase = phases[rank]
        fix = _FIXES.get(
            phase, "the exception says what this rank lacks; the other ranks did not fail"
        )
        found.append(rank_error(phase, rank, hosts, f"{phase} failed: {error}", fix))
    return found


def _blame_phases(
    first: str,
    behind: list[int],
    phases: Mapping[int, str],
    present: Mapping[int, Mapping[str, Any]],
    hosts: Mapping[int, str],
) -> list[Finding]:
    """Blame ranks that are in another phase than others, where it is known that the fault is theirs.

    A rank that is ahead has ended what the others are still in, which is no fault, unless what it has done and entered
    shows that it skipped that or a part of it.

    Args:
        first (`str`): the earliest phase that a rank is in.
        behind (`list[int]`): the ranks that are in it.
        phases (`Mapping[int, str]`): the phase of each rank.
        present (`Mapping[int, Mapping[str, Any]]`): as for `blame_ranks`.
        hosts (`Mapping[int, str]`): the host of each rank, as far as it is known.
    """
    ahead = sorted(set(phases) - set(behind))
    # Most ranks that are behind have written the same.
    different = {
        (str(present[rank].get("entered")), str(present[rank].get("done"))): rank for rank in behind
    }.values()
    skipping = [
        r
        for r in ahead
        if any(_has_skipped(first, present[r], present[other]) for other in different)
    ]
    if skipping:
        return [_blame_skipping(rank, hosts, phases[rank], first) for rank in skipping]
    errors = _errors_of(present)
    if errors and not errors.keys() & set(behind):
        # It is no consequence of the ranks behind: a time-out would come after the end of the pre-flight, and a dead
        # rank would not be present. The exception has stopped the others where they were.
        return _blame_failed(errors, phases, hosts)
    if first in LOCAL_PHASES or 2 * len(behind) < len(phases):
        others, _ = Counter(phases[rank] for rank in ahead).most_common(1)[0]
        return [
            _blame_behind(rank, hosts, first, others, present[rank].get("error")) for rank in behind
        ]
    problem = f"{first} ended on {name_ranks(ahead)} and not on {name_ranks(behind)}"
    fix = _FIXES.get(
        first, "check the links between their nodes, and that all ranks run the same code"
    )
    return [Finding(level="error", check=first, problem=problem, fix=fix)]


def _has_skipped(phase: str, ahead: Mapping[str, Any], behind: Mapping[str, Any]) -> bool:
    """Return whether a rank has not done `phase`, which another is still in, or only a part of it.

    It has done a part of it if it has entered less than the other, or waits in a collective of the same number.
    """
    if phase in measure.KINDS and phase not in ahead.get("done", measure.KINDS):
        return True
    mine = ahead.get("entered")
    other = behind.get("entered")
    if phase not in measure.KINDS or mine is None or other is None:
        return False
    has_less = mine["collectives"] < other["collectives"] or mine["p2p"] < other["p2p"]
    return has_less or (mine["waits_in"] is not None and mine["waits_in"] <= other["collectives"])


def _blame_behind(
    rank: int, hosts: Mapping[int, str], phase: str, others: str, error: str | None
) -> Finding:
    problem = f"is still in {phase} while others are in {others}: " + (
        f"it failed: {error}" if error else "it hangs"
    )
    fix = _FIXES.get(phase, "check this rank's device and log, or take it out of the run")
    return rank_error(phase, rank, hosts, problem, fix)


def _blame_skipping(rank: int, hosts: Mapping[int, str], phase: str, others: str) -> Finding:
    problem = (
        f"is already in {phase} while others are in {others}: it has skipped a collective of theirs"
    )
    return rank_error(others, rank, hosts, problem, "check that all ranks run the same code")


def known_hosts(world_size: int, hello: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return the host of each rank, as far as it is known.

    The host of a rank that never arrived is that of the other ranks on its node, if one of them arrived.

    Args:
        world_size (`int`): the number of ranks that there should be.
        hello (`Mapping[int, Mapping[str, Any]]`): what each rank wrote when it arrived (`describe_rank`).

    Returns:
        `dict[int, str]`: the host by rank; ranks whose host is not known are missing.
    """
    hosts = {rank: str(note["host"]) for rank, note in hello.items()}
    for other, note in hello.items():
        first = other - int(note.get("local_rank", 0))
        for rank in range(first, min(first + int(note.get("local_world_size", 0)), world_size)):
            hosts.setdefault(rank, str(note["host"]))
    return hosts
