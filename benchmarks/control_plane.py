"""Simulates what the control plane costs at thousands of ranks.

`python -m benchmarks control_plane --ranks 1024,4096,16384`

It runs the code of the package; only what ranks would measure or write (times of steps, positions in collectives, the
content of files) is given. The exchange of a log runs over real gloo groups: the group of rank 0 and the group of the
leaders, which have the most to do; each of their ranks is a process, and the times are each process's own CPU time.

The protocols over the launcher's store (pre-flight, hang alarm) run on all ranks at once: each rank is a thread with a
connection of its own to the process of the store. The seconds are from the start to the last verdict. The CPU time of
all ranks, which thousands of machines would share, is spent on this one, so they are an upper bound.
"""

import gc
import json
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfscale.checkpoint import writer
from hfscale.checkpoint.manifest import FileRecord, Manifest
from hfscale.health import hang, preflight
from hfscale.health.diagnosis import Position, Snapshot, diagnose
from hfscale.health.local_time import KEPT_STEPS
from hfscale.health.monitor import Monitor
from hfscale.health.rank_store import RankStore
from hfscale.utils.tree import Level, Tree

RANKS = (1024, 4096, 16384)
PER_NODE = 8
DIAGNOSES = 100
LOGS = 5
LOGGED = (
    *("data_wait_s", "window_s", "has_loss", "loss", "has_grad_norm", "grad_norm", "checksum"),
    *("temperature_c", "power_w", "throttled"),
)
"""The numbers that `Monitor` exchanges, before the times of own work."""
CHECKPOINT_BYTES = 2 * 10**12
READ_BYTES_PER_S = 1e9
PER_PROCESS = 128
"""Simulated ranks of one process: among more threads, most of the time would go into waiting for the interpreter."""
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
            "preflight": _over_store(number, _preflight_rank),
            "late_rank": _over_store(number, _late_rank),
            "dead_rank": _over_store(number, _dead_rank),
            "hang": _diagnoses(number),
            "log": _log(number),
            "save": _save(number),
            "verification": _verification(number),
        }
    largest = results[max(ranks)]
    summary = {f"{part}_{key}": value for part, figures in largest.items() for key, value in figures.items()}
    return {"summary": {"ranks": max(ranks), **summary}, "ranks": results}


# Protocols over the store


def _over_store(ranks: int, body: Callable[[RankStore], bool]) -> dict[str, float]:
    """Run `body` for each rank; return the seconds until all have ended, and on how many the verdict was right."""
    fork = get_context("fork")
    ports, results, begin, end = fork.SimpleQueue(), fork.SimpleQueue(), fork.Event(), fork.Event()
    server = fork.Process(target=_serve, args=(ports, end))
    server.start()
    port = ports.get()
    shares = [range(first, min(first + PER_PROCESS, ranks)) for first in range(0, ranks, PER_PROCESS)]
    clients = [
        fork.Process(target=_client, args=(port, ranks, numbers, body, begin, end, results)) for numbers in shares
    ]
    for client in clients:
        client.start()
    for _ in clients:
        results.get()  # all ranks are connected
    begun = time.monotonic()
    begin.set()
    rows = [results.get() for _ in clients]
    seconds = time.monotonic() - begun
    end.set()
    for process in (*clients, server):
        process.join(60)
    return {
        "seconds": round(seconds, 1),
        "right_ranks": sum(row["right"] for row in rows),
        "cpu_ms_per_rank": round(sum(row["cpu_s"] for row in rows) / ranks * 1e3, 2),
    }


def _serve(ports: Any, end: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    end.wait()
    os._exit(0)


def _client(
    port: int, ranks: int, numbers: range, body: Callable[[RankStore], bool], begin: Any, end: Any, results: Any
) -> None:
    """Run some of the ranks, each in a thread of its own."""
    threading.stack_size(256 * 1024)

    def connect(rank: int) -> RankStore:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        return RankStore(dist.PrefixStore("simulated", store), rank, ranks)

    stores = [connect(rank) for rank in numbers]
    results.put(None)
    begin.wait()
    before_s = time.process_time()
    with ThreadPoolExecutor(len(stores)) as threads:
        right = sum(threads.map(body, stores))
    results.put({"right": right, "cpu_s": time.process_time() - before_s})
    end.wait()  # a connection that ends makes work for the store
    os._exit(0)


_thread = threading.local()
_DESCRIBED = preflight.describe_rank({})


def _describe_rank(**_: Any) -> dict[str, Any]:
    """Replaces `preflight.describe_rank` in the processes of the simulated ranks."""
    rank = _thread.rank
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
    _thread.rank = store.rank
    found = preflight.run(store, preflight.PreflightPlan(device=torch.device("cpu"), deadline_s=60.0)).findings
    return [(finding.check, finding.ranks) for finding in found] == [("clock", (_guilty(store),))]


def _late_rank(store: RankStore) -> bool:
    """A hang, from the alarm to the verdict, in which one rank has not reached a collective."""
    return _examines(store)


def _dead_rank(store: RankStore) -> bool:
    """A hang in which one rank does not answer the alarm."""
    return store.rank == _guilty(store) or _examines(store)


def _examines(store: RankStore) -> bool:
    """Return whether this rank learns which rank is to blame."""

    class Watchdog(hang.HangWatchdog):
        def _snapshot(self, _: Any) -> Snapshot:
            return replace(_snapshot(store.rank, store.world_size, _guilty(store)), stacks=store.keep(_STACKS))

        def _report(self) -> None:
            """Write nothing: the folder with the stacks follows the verdict."""

    watchdog = Watchdog(store, Path())
    time.sleep(random.random() * watchdog._poll_s)  # noqa: S311 (until it sees the alarm)
    watchdog._examine([])
    return [finding.ranks for finding in watchdog.findings] == [(_guilty(store),)]


# The diagnosis of a hang


def _snapshot(rank: int, ranks: int, guilty: int) -> Snapshot:
    """All ranks wait in an all-reduce that the guilty one has not reached."""
    late = rank == guilty
    first = rank - rank % PER_NODE
    inner = Position(group=f"tp{first}", ranks=tuple(range(first, first + PER_NODE)), entered=96)
    whole = Position(
        group="0",
        ranks=_first(ranks),
        entered=8 if late else 9,
        waiting=None if late else 9,
        operation=None if late else "all_reduce",
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
    """Diagnose hangs with one guilty rank each: it is late, dead, steps behind, or in another collective."""
    snapshots = {rank: _snapshot(rank, ranks, -1) for rank in range(ranks)}
    right, seconds = 0, []
    draw = random.Random(0)  # noqa: S311
    for number in range(DIAGNOSES):
        guilty = draw.randrange(ranks)
        given = dict(snapshots)
        well = given.pop(guilty)
        if number % 3 == 0:
            given[guilty] = _snapshot(guilty, ranks, guilty)
        elif number % 3 == 1:
            inner, whole = well.positions
            given[guilty] = replace(well, positions=(inner, replace(whole, operation="all_gather")))
        begun = time.process_time()
        found = diagnose(ranks, {}, given)
        seconds.append(time.process_time() - begun)
        right += [finding.ranks for finding in found] == [(guilty,)]
    return {"right_of_100_diagnoses": right, "diagnosis_s": round(statistics.median(seconds), 2)}


# The exchange of a log


def _log(ranks: int) -> dict[str, float]:
    """Exchange and judge logs in the groups of rank 0; return the CPU time on rank 0, a leader and a member."""
    size = next(n for n in range(1, ranks + 1) if n * n >= ranks)
    leaders = range(0, ranks, size)
    processes = size + len(leaders) - 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = get_context("fork")
    results = fork.SimpleQueue()
    running = [
        fork.Process(target=_log_rank, args=(number, processes, size, len(leaders), port, results))
        for number in range(processes)
    ]
    for process in running:
        process.start()
    rows = dict(results.get() for _ in running)
    for process in running:
        process.join(60)
    members = [rows[number] for number in range(1, size)]
    others = [rows[number] for number in range(size, processes)]
    return {
        "cpu_ms_rank_0": round(rows[0] * 1e3, 1),
        "cpu_ms_leader": round(statistics.median(others) * 1e3, 1),
        "cpu_ms_member": round(statistics.median(members) * 1e3, 1),
    }


def _log_rank(number: int, processes: int, size: int, groups: int, port: int, results: Any) -> None:
    """Process `number`: the first `size` are the group of rank 0, the others the leaders of the other groups."""
    # Without it each of hundreds of processes would connect to every other one before the groups are made.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_GLOO_LAZY_INIT": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=processes, timeout=timedelta(minutes=5))
    levels = []
    of_members, of_leaders = (dist.new_group(ranks) for ranks in ([*range(size)], [0, *range(size, processes)]))
    if number < size:
        levels.append(Level(group=of_members, ranks=(0,) * size))
    if number == 0 or number >= size:
        levels.append(Level(group=of_leaders, ranks=(0,) * groups, rows=size))
    tree = Tree(levels, depth=2, world_size=size * groups)
    monitor = Monitor(hosts=[""] * size * groups)
    row = torch.rand(len(LOGGED) + KEPT_STEPS, dtype=torch.float64) * 0.01 + 1.0
    times = []
    for _ in range(LOGS):
        dist.barrier()
        before_s = time.process_time()
        if number < size:
            table = tree.gather_rows(row)
        else:  # its members are not simulated: it has their rows
            levels[0].gather_rows(row.repeat(size, 1))
            table = None
        verdict = None
        if number == 0 and table is not None:
            verdict = json.dumps(monitor._judge(100, LOGGED, table)).encode()
        tree.broadcast_bytes(verdict)
        times.append(time.process_time() - before_s)
    results.put((number, statistics.median(times[1:])))
    dist.barrier()
    time.sleep(2.0 * (number == 0))  # it has the store, from which the others are still reading
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
