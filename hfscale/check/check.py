"""Runs `hfscale check`: it checks this node alone, or under a launcher every rank together with all others.

    hfscale check                            # variables, limits, disk of this node
    accelerate launch -m hfscale check       # and on every rank: matrix products, collectives, clocks, versions

Under a launcher every rank connects to the launcher's key-value store (`RankStore`), runs the pre-flight
(`hfscale.health.preflight`) and gets the same findings. If one of them is an error, each rank prints it and writes
that it has: the launcher ends all ranks as soon as the first one leaves, so none leaves before all have printed. The
rank that has read the notes of all ranks (rank 0, if it is alive) prints the report.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfscale.check.links import compare_links
from hfscale.core import distributed
from hfscale.core.counts import counted
from hfscale.core.findings import Finding, has_errors
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import print_line
from hfscale.core.nvidia_driver import check_gpus_of_driver
from hfscale.core.rank_store import RankStore, launcher_has_store
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.hardware import match_device_name
from hfscale.health import node, preflight
from hfscale.health.rank_notes import describe_rank

_REPORT_WAIT_S = 3.0
"""Seconds that ranks wait for each other to print their errors."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """Holds the options of a check."""

    deadline_s: float
    """Seconds within which every rank must have the verdict, from the arrival of the last rank."""
    output_dir: Path | None = None
    """Where checkpoints will be written; None: the disk is not checked."""
    checkpoint_bytes: int | None = None
    """Size of a checkpoint; None: that of the largest in `output_dir`."""
    notice_s: float = node.DEFAULT_NOTICE_S
    """Seconds between a preemption notice and the end of the machine."""
    backend: str | None = None
    """`nccl` or `gloo`; None: chosen by the device."""
    short: bool = False
    """Whether to use small buffers only."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Holds the outcome of a check."""

    findings: tuple[Finding, ...]
    """Findings about the nodes and the ranks."""
    world_size: int
    """The number of ranks that there should be."""
    rank: int
    """The rank of this process."""
    ranks: Mapping[int, Mapping[str, Any]]
    """What each rank wrote about itself, on the rank that reports; empty on the others."""
    links: list[dict[str, Any]]
    """A row for each collective, group and size, with the time of the slowest rank (`rank_notes.slowest_links`)."""
    seconds: float
    """Seconds from the start to the verdict."""
    is_reporter: bool
    """Whether this process prints the report: the one that has read the notes of all ranks."""
    rank_store: RankStore | None = None
    """The store of all ranks; None for a single process."""
    stuck: bool = False
    """Whether a thread hangs in a collective."""

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not has_errors(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the object that `--json` prints."""
        return {
            "ok": self.ok,
            "world_size": self.world_size,
            "ranks": [{"rank": rank, **note} for rank, note in sorted(self.ranks.items())],
            "findings": [finding.to_dict() for finding in self.findings],
            "collectives": self.links,
            "seconds": round(self.seconds, 3),
        }

    def text(self) -> str:
        """Return the report as text for the terminal; its last line is the verdict."""
        lines = [f"{finding.level}: {finding}" for finding in self.findings]
        for row in self.links:
            size = f"{row['bytes'] / 2**20:.3g} MiB"
            where = "" if row["where"] == "node" else " between nodes"
            lines.append(
                f"{row['kind']} of {size}{where}: {row['seconds'] * 1e3:.2f} ms, {row['gb_s']:.2f} GB/s past each rank"
            )
        subject = "this node"
        if self.world_size > 1:
            hosts = len({note["host"] for note in self.ranks.values()})
            if self.ok:
                lines.append("gloo connects all ranks")
            subject = f"{self.world_size} ranks on {counted(hosts, 'node')}"
        else:
            lines.append(
                "ranks and links are not checked by one process: accelerate launch -m hfscale check"
            )
        errors = sum(finding.level == "error" for finding in self.findings)
        verdict = "fit to train"
        if not self.ok:
            verdict = f"not fit to train: {counted(errors, 'error')}"
        return "\n".join([*lines, f"{subject}: {verdict} ({self.seconds:.1f} s)"])


def check_all(
    request: CheckRequest, *, begun: float, environ: Mapping[str, str] = os.environ
) -> CheckReport:
    """Check this node, and where a launcher started several processes all ranks together.

    Under a launcher the process itself ends with exit code 1 if the launcher's store does not answer for as long as
    the deadline.

    Args:
        request (`CheckRequest`): the options.
        begun (`float`): `time.monotonic()` from which the reported seconds count.
        environ (`Mapping[str, str]`): the environment variables.

    Returns:
        `CheckReport`: the findings about nodes and ranks, with what was measured.

    Raises:
        UsageError: NCCL is asked for without a GPU, or a launcher's variable is not a number.
        HealthError: the launcher's store does not answer.
        StorageError: the output folder cannot be written.
    """
    world_size = launch_number("WORLD_SIZE", 1, environ)
    local_rank = launch_number("LOCAL_RANK", 0, environ)
    device = _device(request, local_rank)
    node_findings = _check_node(request, environ) if local_rank == 0 else []
    if world_size > 1:
        return _check_ranks(request, begun, environ, device, node_findings)
    return CheckReport(
        findings=tuple(node_findings),
        world_size=1,
        rank=0,
        ranks={0: describe_rank(environ, device)},
        links=[],
        seconds=time.monotonic() - begun,
        is_reporter=True,
    )


def _check_ranks(
    request: CheckRequest,
    begun: float,
    environ: Mapping[str, str],
    device: torch.device,
    node_findings: list[Finding],
) -> CheckReport:
    """Run the pre-flight with all ranks of the launcher."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    with _ending_without_answers(request.deadline_s, environ) as has_answered:
        rank_store = RankStore.connect(
            "check", environ, timeout_s=request.deadline_s - 1, opens=True
        )
        plan = preflight.PreflightPlan(
            device=device,
            deadline_s=request.deadline_s,
            connect=lambda: _make_process_group(rank_store, request, device, environ),
            gloo=True,
            node_findings=node_findings,
            sizes=_buffer_sizes(request, device),
        )

        def is_ending() -> bool:
            has_answered()
            return bool(ending)

        result = preflight.run(rank_store, plan, begun=begun, is_ending=is_ending)
    slow_links: list[Finding] = []
    if not request.short:
        gpu = (
            match_device_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        )
        slow_links = compare_links(result.links, gpu, launch_number("LOCAL_WORLD_SIZE", 1, environ))
    report = CheckReport(
        findings=(*result.findings, *slow_links, *result.node_findings),
        world_size=rank_store.world_size,
        rank=rank_store.rank,
        ranks=result.ranks,
        links=result.links,
        seconds=result.seconds,
        is_reporter=result.is_reader,
        rank_store=rank_store,
        stuck=result.stuck,
    )
    if report.ok and not report.stuck and device.type == "cuda":
        # Of this thread, for the barrier of `leave`: the default is GPU 0
        torch.cuda.set_device(device)
    return report if report.ok else _print_errors(report, rank_store)


@contextmanager
def _ending_without_answers(
    limit_s: float, environ: Mapping[str, str]
) -> Iterator[Callable[[], None]]:
    """End this process if the store does not answer for `limit_s` seconds within the `with` block.

    It gives a function, to be called after each answer of the store.
    """
    answered_at = time.monotonic()
    is_done = threading.Event()

    def has_answered() -> None:
        nonlocal answered_at
        answered_at = time.monotonic()

    def watch() -> None:
        while not is_done.wait(0.2):
            if time.monotonic() - answered_at > limit_s:
                holder = (
                    "the launcher of the first node" if launcher_has_store(environ) else "rank 0"
                )
                print_line(
                    f"hfscale: error on rank {environ['RANK']}: {holder} at {environ['MASTER_ADDR']} holds the store "
                    "of all ranks and does not answer: it is stopped, dead or cut off"
                )
                os._exit(1)

    threading.Thread(target=watch, name="hfscale-check-store", daemon=True).start()
    try:
        yield has_answered
    finally:
        is_done.set()


def _print_errors(report: CheckReport, rank_store: RankStore) -> CheckReport:
    """Print the errors on this rank, and wait until all ranks that are alive have."""
    for finding in report.findings:
        if finding.level == "error":
            print_line(f"hfscale: error on rank {report.rank}: {finding}")
    absent = {
        rank for finding in report.findings if finding.check == "presence" for rank in finding.ranks
    }
    until = time.monotonic() + _REPORT_WAIT_S
    try:
        rank_store.write("printed", {})
        while (
            rank_store.count("printed") < report.world_size - len(absent)
            and time.monotonic() < until
        ):
            time.sleep(rank_store.poll_s)
    except dist.DistError:  # the rank that keeps the store has seen that all have printed, and left
        pass
    return report


def leave(report: CheckReport) -> int:
    """Leave the process group.

    A process that hangs in a collective, or found errors, ends here with its exit code, since nothing else would end
    it.

    Args:
        report (`CheckReport`): the outcome of the check.

    Returns:
        `int`: the exit code, 0 without errors and 1 otherwise, if the process did not end here.
    """
    code = 0 if report.ok else 1
    if report.rank_store is None:
        return code
    if report.stuck or code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    distributed.last_barrier()
    dist.destroy_process_group()
    return code


def _device(request: CheckRequest, local_rank: int) -> torch.device:
    if torch.cuda.is_available() and request.backend != "gloo":
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if request.backend == "nccl":
        backend = spelled("backend", request.backend)
        raise UsageError(
            f"{backend} needs a GPU, and torch finds none here: leave it out, or check nvidia-smi"
        )
    return torch.device("cpu")


def _buffer_sizes(request: CheckRequest, device: torch.device) -> tuple[int, ...]:
    if request.short:
        return preflight.SHORT_SIZES
    return preflight.GPU_SIZES if device.type == "cuda" else preflight.CPU_SIZES


def _make_process_group(
    rank_store: RankStore, request: CheckRequest, device: torch.device, environ: Mapping[str, str]
) -> None:
    """Make the default process group with a connection of its own to the store.

    A group that waits for a rank blocks its connection, and so would block the notes of this rank.
    """
    store = RankStore.connect("check group", environ, timeout_s=request.deadline_s).store
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank_store.rank,
        world_size=rank_store.world_size,
        timeout=timedelta(seconds=request.deadline_s),
    )


def _check_node(request: CheckRequest, environ: Mapping[str, str]) -> list[Finding]:
    found = node.check_node(environ, node.Node.here(node.gpu_names()))
    if request.backend != "gloo":
        found += check_gpus_of_driver(environ)
    if request.output_dir is None:
        return found
    size = request.checkpoint_bytes or largest_checkpoint_bytes(request.output_dir)
    speed = node.write_speed(request.output_dir)
    return found + node.check_disk(
        request.output_dir,
        checkpoint_bytes=size,
        bytes_per_s=speed,
        notice_s=request.notice_s,
        host=os.uname().nodename,
    )


def largest_checkpoint_bytes(output_dir: Path) -> int | None:
    """Return the size of the largest checkpoint of a run in bytes, or None if there is none.

    Args:
        output_dir (`Path`): the folder that holds the run's `checkpoint-N` folders.
    """
    sizes = [
        sum(
            file.stat().st_size
            for file in folder.rglob("*")
            if file.is_file() and not file.is_symlink()
        )
        for folder in output_dir.glob("checkpoint-*")
        if folder.is_dir()
    ]
    return max(sizes, default=None)
