"""Simulates what the control plane costs at thousands of ranks.

`python -m benchmarks control_plane --ranks 1024,4096,16384`

It runs the code of the package; only what ranks would measure or write (times of steps, positions in collectives, the
content of files) is given. The exchange of a log runs over real gloo groups: those of rank 0, which has the most to
do. Each of their ranks is a process, and the times are each process's own CPU time.

The protocols over the launcher's store (pre-flight, hang alarm) run on all ranks in simulated time
(`benchmarks.simulated_ranks`): real requests, answers and CPU times, as if every rank had a core of its own. Not
simulated are the collectives that a pre-flight times, and reading the recorder of torch and the stacks for a snapshot.
"""

import gc
import json
import os
import random
import statistics
import tempfile
import time
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.simulated_ranks import SimulatedRanks, StoreProcess
from hfscale.checkpoint import writer
from hfscale.checkpoint.manifest import FileRecord, Manifest
from hfscale.core.rank_store import RankStore
from hfscale.core.tree import Level, Tree, groups_of_levels
from hfscale.health import hang, preflight
from hfscale.health.callback import PREFLIGHT_DEADLINE_S
from hfscale.health.diagnosis import Position, Snapshot, diagnose
from hfscale.health.monitor import OWN_S, Monitor

RANKS = (1024, 4096, 16384)
PER_NODE = 8
HANGS = 100
"""Number of diagnoses, and of hangs."""
KINDS_OF_HANG = ("late", "other", "dead")
LOGS = 5
CHECKPOINT_BYTES = 2 * 10**12
READ_BYTES_PER_S = 1e9
_STACKS = (
    "thread MainThread\n" + '  File "/opt/train/model.py", line 128, in forward\n    return self.layers(x)\n' * 250
)


def measure(ranks: tuple[int, ...] = RANKS) -> dict[str, Any]:
    """Simulate each number of ranks; the summary has the figures of the largest.

    Args:
        ranks (`tuple[int, ...]`): the numbers of ranks.
    """
    results = {}
    for number in ranks:
        gc.collect()
        results[number] = {
            **_over_store(number),
            "diagnosis": _diagnoses(number),
            **_groups(number),
            "save": _save(number),
            "verification": _verification(number),
        }
    largest = results[max(ranks)]
    summary = {f"{part}_{key}": value for part, figures in largest.items() for key, value in figures.items()}
    return {"summary": {"ranks": max(ranks), **summary}, "ranks": results}


# Protocols over the store


def _over_store(ranks: int) -> dict[str, dict[str, float]]:
    """Run the protocols in a process of their own, whose modules have the simulated clock; return their figures."""
    fork = get_context("fork")
    results = fork.SimpleQueue()
    process = fork.Process(target=_run_protocols, args=(ranks, results))
    process.start()
    figures = results.get()
    process.join(60)
    return figures


def _run_protocols(ranks: int, results: Any) -> None:
    simulated = SimulatedRanks(ranks)
    figures: dict[str, dict[str, float]] = {}
    for name, body in {"preflight": _preflight_rank, "stuck_rank": _stuck_rank}.items():
        ended = simulated.run(name, body)
        figures[name] = {
            "seconds": round(max(at for _, at in ended), 1),
            "right_ranks": sum(well for well, _ in ended),
        }
    figures["hang"] = _hangs(simulated)
    results.put(figures)
    simulated.close()


def _hangs(simulated: SimulatedRanks) -> dict[str, float]:
    """Let ranks hang, each time because of another one: it is late, in another collective, or dead."""
    draw = random.Random(0)  # noqa: S311
    right, seconds = 0, []
    for number in range(HANGS):
        guilty, kind = draw.randrange(simulated.number), KINDS_OF_HANG[number % len(KINDS_OF_HANG)]
        ended = simulated.run(f"hang {number}", partial(_hanging_rank, guilty=guilty, kind=kind, draw=draw))
        right += all(well for well, _ in ended)
        seconds.append(max(at for _, at in ended))
    return {
        "hangs": HANGS,
        "right_on_all_ranks": right,
        "median_s": round(statistics.median(seconds), 1),
        "longest_s": round(max(seconds), 1),
    }


_rank: ContextVar[int] = ContextVar("rank")
"""The rank that runs: each greenlet has a context of its own."""
_DESCRIBED = preflight.describe_rank({})


def _describe_rank(**_: Any) -> dict[str, Any]:
    """Replaces `preflight.describe_rank` in the processes of the simulated ranks."""
    rank = _rank.get()
    return _DESCRIBED | {"host": f"node-{rank // PER_NODE}", "local_rank": rank % PER_NODE}


def _run_checks(checks: Any) -> None:
    """Replaces the thread that checks a rank: all are well, apart from the clock of one rank."""
    link = {"bytes": 4096, "seconds": 1e-3, "gb_s": 1.0, "wrong": 0, "blame": None, "where": "network"}
    store = checks.rank_store
    checks._groups()
    checks.results |= {
        "matmul": {"wrong": 0.0, "seconds": 1e-3, "slow_ratio": 2.0, "shares_cores": 1.0},
        "links": [{"kind": kind, **link} for kind in preflight.measure.KINDS for _ in range(2)],
        "clock": 100.0 + 10.0 * (store.rank == _guilty(store)),
    }
    store.write("results", checks.results)


def _guilty(store: RankStore) -> int:
    return store.world_size // 3


def _preflight_rank(store: RankStore) -> bool:
    """A pre-flight in which one rank's clock is wrong; return whether this rank learns of it."""
    preflight.describe_rank, preflight._Checks.start = _describe_rank, _run_checks
    _rank.set(store.rank)
    result = preflight.run(store, preflight.PreflightPlan(device=torch.device("cpu"), deadline_s=PREFLIGHT_DEADLINE_S))
    return [(finding.check, finding.ranks) for finding in result.findings] == [("clock", (_guilty(store),))]


def _stuck_rank(store: RankStore) -> bool:
    """A pre-flight in which one rank hangs in its matrix products; return whether this rank learns of it."""
    preflight.describe_rank, preflight._Checks.start = _describe_rank, _get_stuck
    _rank.set(store.rank)
    result = preflight.run(store, preflight.PreflightPlan(device=torch.device("cpu"), deadline_s=PREFLIGHT_DEADLINE_S))
    return [(finding.check, finding.ranks) for finding in result.findings] == [("matmul", (_guilty(store),))]


def _get_stuck(checks: Any) -> None:
    """Replaces the thread that checks a rank: one hangs, and the others wait for it."""
    checks.phase = "matmul" if checks.rank_store.rank == _guilty(checks.rank_store) else "connect"


def _hanging_rank(store: RankStore, guilty: int, kind: str, draw: random.Random) -> bool:
    """A hang, from when silence counts as one to the verdict; return whether this rank learns who is to blame."""
    if kind == "dead" and store.rank == guilty:
        return True
    snapshot = _snapshot(store.rank, store.world_size, guilty, kind)

    class Watchdog(hang.HangWatchdog):
        def _snapshot(self, _: Any) -> Snapshot:
            return replace(snapshot, stacks=store.keep(_STACKS))

        def _report(self) -> None:
            """Write nothing: the folder with the stacks follows the verdict."""

    watchdog = Watchdog(store, Path())
    hang.time.sleep(draw.random() * watchdog._poll_s)  # when it looks the next time
    if store.flag("hang/0") is None:
        store.raise_flag("hang/0", str(store.rank))
    watchdog._examine([])
    return [finding.ranks for finding in watchdog.findings] == [(guilty,)]


def _snapshot(rank: int, ranks: int, guilty: int, kind: str) -> Snapshot:
    """All ranks wait in an all-reduce; the guilty one has not reached it (`late`), or is in another (`other`)."""
    late = rank == guilty and kind == "late"
    operation = "all_gather" if rank == guilty and kind == "other" else "all_reduce"
    first = rank - rank % PER_NODE
    inner = Position(group=f"tp{first}", ranks=tuple(range(first, first + PER_NODE)), entered=96)
    whole = Position(
        group="0",
        ranks=_first(ranks),
        entered=8 if late else 9,
        waiting=None if late else 9,
        operation=None if late else operation,
        sizes="[[4096, 4096]]",
    )
    return Snapshot(
        host=f"node-{rank // PER_NODE}",
        step=1000,
        phase="compute",
        idle_s=70.0,
        occupation=None,
        place="model.py:128 forward",
        positions=(inner, whole),
    )


@cache
def _first(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


def _diagnoses(ranks: int) -> dict[str, float]:
    """Diagnose hangs from the snapshots of all ranks, as the rank that reads them does."""
    well = {rank: _snapshot(rank, ranks, -1, "late") for rank in range(ranks)}
    draw = random.Random(1)  # noqa: S311
    right, seconds = 0, []
    for number in range(HANGS):
        guilty, kind = draw.randrange(ranks), KINDS_OF_HANG[number % len(KINDS_OF_HANG)]
        given = well | {guilty: _snapshot(guilty, ranks, guilty, kind)}
        if kind == "dead":
            del given[guilty]
        begun = time.process_time()
        found = diagnose(ranks, {}, given)
        seconds.append(time.process_time() - begun)
        right += [finding.ranks for finding in found] == [(guilty,)]
    return {"diagnoses": HANGS, "right": right, "cpu_s": round(statistics.median(seconds), 2)}


# The groups of a channel, and the exchange of a log


def _groups(ranks: int) -> dict[str, dict[str, float]]:
    """Create the groups of rank 0, one of each level, and exchange logs in them.

    `start` has what a channel costs before training: the CPU time of the launcher's store, which connects all groups
    of the channel one request after the other, the CPU time of rank 0, and its number of connections. `log` has the
    CPU time of the exchange and judgement of a log on rank 0, and on the others.
    """
    layers = groups_of_levels(ranks)
    of_rank_0 = [groups[0] for groups in layers]
    members = sorted({rank for group in of_rank_0 for rank in group})
    store = StoreProcess()
    fork = get_context("fork")
    results, step = fork.SimpleQueue(), fork.Barrier(len(members) + 1)
    running = [
        fork.Process(target=_log_rank, args=(rank, members, of_rank_0, ranks, store.port, step, results))
        for rank in members
    ]
    for process in running:
        process.start()
    step.wait()
    store_s = 0.0
    for groups in layers:
        before_s = store.cpu_s()
        step.wait()  # they create the first group of the level
        step.wait()
        store_s += (store.cpu_s() - before_s) * len(groups)
    rows = dict(results.get() for _ in running)
    for process in running:
        process.join(60)
    store.close()
    return {
        "start": {
            "store_cpu_s": round(store_s, 2),
            "cpu_s_rank_0": round(rows[0][0], 2),
            "connections_rank_0": sum(len(group) - 1 for group in of_rank_0),
        },
        "log": {
            "cpu_ms_rank_0": round(rows[0][1] * 1e3, 1),
            "cpu_ms_other": round(statistics.median(log_s for rank, (_, log_s) in rows.items() if rank) * 1e3, 1),
        },
    }


def _log_rank(
    rank: int, members: list[int], groups: list[tuple[int, ...]], ranks: int, port: int, step: Any, results: Any
) -> None:
    """One of the `members` of the `groups` of rank 0. The ranks below the others are not simulated."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    # Otherwise the default group would connect all processes.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    number = members.index(rank)
    dist.init_process_group("gloo", store=store, rank=number, world_size=len(members), timeout=timedelta(minutes=5))
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    dist.barrier()
    step.wait()
    levels, rows, connect_s = [], 1, 0.0
    for group in groups:
        step.wait()
        before_s = time.process_time()
        created = dist.new_group([members.index(member) for member in group])
        connect_s += time.process_time() - before_s
        if rank in group:
            levels.append(Level(group=created, ranks=group, rows=rows))
        rows *= len(group)
        step.wait()
    tree = Tree(levels, depth=len(groups), world_size=ranks)
    monitor = Monitor(hosts=[""] * ranks)
    names = [*monitor.numbers(100, None, None, {}), *OWN_S]
    row = torch.rand(len(names), dtype=torch.float64) * 0.01 + 1.0
    times = []
    for _ in range(LOGS):
        dist.barrier()
        before_s = time.process_time()
        table = tree.gather_rows(row) if rank == 0 else levels[0].gather_rows(row.repeat(levels[0].rows, 1))
        verdict = None
        if rank == 0 and table is not None:
            columns = dict(zip(names, table.T.contiguous().numpy(), strict=True))
            verdict = json.dumps(monitor.judge(100, columns)).encode()
        tree.broadcast_bytes(verdict)
        times.append(time.process_time() - before_s)
    results.put((rank, (connect_s, statistics.median(times[1:]))))
    dist.barrier()
    os._exit(0)


# Checkpoints


def _save(ranks: int) -> dict[str, float]:
    """Commit a checkpoint with two small files of each rank; return rank 0's seconds and those of another rank."""
    with tempfile.TemporaryDirectory() as name:
        job = writer.CheckpointJob(run_dir=Path(name), step=1, strategy="fsdp2", global_batch_size=ranks, commits=True)
        (job.folder / "optimizer_0").mkdir(parents=True)
        files = [file for rank in range(ranks) for file in (f"rng_state_{rank}.pth", f"optimizer_0/__{rank}_0.distcp")]
        for file in files:
            (job.folder / file).write_bytes(b"x")
        record = FileRecord.of(job.folder / files[0])
        begun = time.process_time()
        writer._commit(job, dict.fromkeys(files, record))
        return {"files": len(files), "commit_cpu_s": round(time.process_time() - begun, 2)}


def _verification(ranks: int) -> dict[str, float]:
    """Share 2 TB in two files of each rank; return the seconds that the rank with most to read needs at 1 GB/s."""
    size = CHECKPOINT_BYTES // (2 * ranks)
    draw = random.Random(0)  # noqa: S311
    files = {f"{n}": FileRecord(bytes=int(size * draw.uniform(0.5, 1.5)), xxh3_128="") for n in range(2 * ranks)}
    manifest = Manifest(step=1, strategy="fsdp2", world_size=ranks, global_batch_size=1, files=files)
    begun = time.process_time()
    manifest.share(0, ranks)
    share_s = time.process_time() - begun
    loads = [sum(files[name].bytes for name in manifest.share(rank, ranks)) for rank in range(0, ranks, ranks // 8)]
    return {"share_cpu_s": round(share_s, 2), "read_s": round(max(loads) / READ_BYTES_PER_S, 1)}
