"""The whole of `hfscale check`: this node alone, or under a launcher every rank with every other.

hfscale check                            # variables, limits, disk of this node
accelerate launch -m hfscale check       # and on every rank: matrix products, collectives, clocks, versions
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hfscale.errors import UsageError
from hfscale.facts.hardware import match_device_name
from hfscale.health import collectives, disk, env, preflight
from hfscale.health.rank_store import RankStore, launcher_has_store
from hfscale.utils.findings import Finding, has_errors

T = TypeVar("T")
_SAID_S = 3.0
"""Seconds that ranks wait for each other's last words: the launcher ends all when the first has gone."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked."""

    deadline_s: float
    """Seconds until every rank knows the verdict."""
    output_dir: Path | None = None
    """Where checkpoints will go."""
    checkpoint_bytes: int | None = None
    """Size of one; None: of the largest in `output_dir`."""
    notice_s: float = disk.DEFAULT_NOTICE_S
    """Seconds between a preemption's notice and the end of the machine."""
    backend: str | None = None
    """`nccl` or `gloo`; None: by the device."""
    short: bool = False
    """Small buffers only."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found."""

    findings: tuple[Finding, ...]
    """Of the nodes and the ranks."""
    world_size: int
    """Ranks that should be there."""
    rank: int
    """This one."""
    ranks: Mapping[int, Mapping[str, Any]]
    """What each rank said about itself."""
    links: list[dict[str, Any]]
    """Collectives by size."""
    seconds: float
    """From start to verdict."""
    speaks: bool
    """Whether this process prints the report: the lowest rank that lives."""
    rank_store: RankStore | None = None
    """To wait for the others' last words."""
    stuck: bool = False
    """Whether a thread hangs in a collective."""

    @property
    def ok(self) -> bool:
        """Whether nothing forbids training."""
        return not has_errors(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.ok,
            "world_size": self.world_size,
            "ranks": [{"rank": rank, **note} for rank, note in sorted(self.ranks.items())],
            "findings": [finding.to_dict() for finding in self.findings],
            "collectives": self.links,
            "seconds": round(self.seconds, 3),
        }

    def text(self) -> str:
        """For people."""
        lines = [f"{finding.level}: {finding}" for finding in self.findings]
        for row in self.links:
            size = f"{row['bytes'] / 2**20:.3g} MiB"
            where = "" if row["where"] == "node" else " between nodes"
            lines.append(
                f"{row['kind']} of {size}{where}: {row['seconds'] * 1e3:.2f} ms, {row['gb_s']:.2f} GB/s past each rank"
            )
        hosts = len({note["host"] for note in self.ranks.values()})
        of = (
            f"{self.world_size} ranks on {hosts} node{'s' if hosts != 1 else ''}"
            if self.world_size > 1
            else "this node"
        )
        errors = sum(finding.level == "error" for finding in self.findings)
        verdict = "fit to train" if self.ok else f"not fit to train: {errors} error{'s' if errors > 1 else ''}"
        if self.world_size == 1:
            lines.append("ranks and links are not checked by one process: accelerate launch -m hfscale check")
        return "\n".join([*lines, f"{of}: {verdict} ({self.seconds:.1f} s)"])


def check_all(request: Request, *, begun: float, environ: Mapping[str, str] = os.environ) -> Report:
    """Check this node, and where a launcher started several processes all ranks together.

    Raises:
        UsageError: NCCL is asked for without a GPU, or a launcher's variable is no number.
        HealthError: the launcher's store does not answer.
        StorageError: the output folder cannot be written.
    """
    world_size, rank = env.whole(environ, "WORLD_SIZE", 1), env.whole(environ, "RANK", 0)
    local_rank = env.whole(environ, "LOCAL_RANK", 0)
    device = _device(request, local_rank)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    here = env.lint(environ, env.Node.here(gpus)) + _disk(request, local_rank) if local_rank == 0 else []
    if world_size == 1:
        return Report(
            findings=tuple(here),
            world_size=1,
            rank=0,
            links=[],
            seconds=time.monotonic() - begun,
            speaks=True,
            ranks={0: preflight.machine.describe_self(environ, device)},
        )
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    left_s = begun + request.deadline_s - time.monotonic()
    rank_store = _in_time(
        left_s, environ, lambda: RankStore.connect("check", environ, timeout_s=left_s - 1, opens=True)
    )
    plan = preflight.Plan(
        device=device,
        deadline_s=request.deadline_s,
        connect=lambda: _connect(rank_store, request, device),
        facts={"node": [finding.to_dict() for finding in here]},
        sizes=preflight.SHORT_SIZES if request.short else _sizes(device),
    )
    found = _in_time(
        begun + request.deadline_s - time.monotonic(),
        environ,
        lambda: preflight.run(rank_store, plan, begun=begun, is_ending=lambda: bool(ending)),
    )
    nodes = [Finding.from_dict(fields) for note in found.ranks.values() for fields in note.pop("node")]
    gpu = match_device_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    links = (
        [] if request.short else collectives.compare_links(found.links, gpu, env.whole(environ, "LOCAL_WORLD_SIZE", 1))
    )
    report = Report(
        findings=(*found.findings, *links, *nodes),
        world_size=world_size,
        rank=rank,
        ranks=found.ranks,
        links=found.links,
        seconds=found.seconds,
        speaks=rank == 0,
        rank_store=rank_store,
        stuck=found.stuck,
    )
    return report if report.ok else _tell(report)


def _in_time(seconds: float, environ: Mapping[str, str], run: Callable[[], T]) -> T:
    """`run()`; past its time this process ends, for then the store itself hangs, and with it whoever holds it."""

    def end() -> None:
        holder = "the launcher of the first node" if launcher_has_store(environ) else "rank 0"
        text = (
            f"{holder} at {environ['MASTER_ADDR']} holds the store of all ranks and does not answer: it is stopped, "
        )
        print(f"hfscale: error on rank {environ['RANK']}: {text}dead or cut off", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    try:
        return run()
    finally:
        timer.cancel()


def leave(report: Report) -> int:
    """The exit code; a process that hangs in a collective ends here, for nothing else would end it."""
    code = 0 if report.ok else 1
    if report.rank_store is None:
        return code
    if report.stuck or code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    dist.barrier()  # without it a rank that ends early can abort the others' last collective
    dist.destroy_process_group()
    return code


def _tell(report: Report) -> Report:
    """Each rank that lives says what is wrong; the lowest of them prints the report. None leaves before all have."""
    rank_store = report.rank_store
    assert rank_store is not None
    for finding in report.findings:
        if finding.level == "error":
            print(f"hfscale: error on rank {report.rank}: {finding}", file=sys.stderr, flush=True)
    named = {rank for finding in report.findings if finding.check == "presence" for rank in finding.ranks}
    until = time.monotonic() + _SAID_S
    try:
        rank_store.post("said", {})
        while rank_store.count("said") < report.world_size - len(named) and time.monotonic() < until:
            time.sleep(preflight.POLL_S)
        return replace(report, speaks=report.rank == min(rank_store.read("said")))
    except dist.DistError:  # the rank that keeps the store has seen that all have said it, and left
        return replace(report, speaks=False)


def _device(request: Request, local_rank: int) -> torch.device:
    if torch.cuda.is_available() and request.backend != "gloo":
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if request.backend == "nccl":
        raise UsageError("--backend nccl needs a GPU, and torch sees none here: leave it out, or look at nvidia-smi")
    return torch.device("cpu")


def _sizes(device: torch.device) -> tuple[int, ...]:
    return preflight.GPU_SIZES if device.type == "cuda" else preflight.CPU_SIZES


def _connect(rank_store: RankStore, request: Request, device: torch.device) -> None:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", rank_store.store),
        rank=rank_store.rank,
        world_size=rank_store.world_size,
        timeout=timedelta(seconds=request.deadline_s),
    )


def _disk(request: Request, local_rank: int) -> list[Finding]:
    if request.output_dir is None or local_rank > 0:
        return []
    size = request.checkpoint_bytes or disk.largest_checkpoint_bytes(request.output_dir)
    speed = disk.write_speed(request.output_dir)
    return disk.judge(
        request.output_dir,
        checkpoint_bytes=size,
        bytes_per_s=speed,
        notice_s=request.notice_s,
        host=os.uname().nodename,
    )
