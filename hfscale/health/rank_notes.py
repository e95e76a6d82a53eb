"""What the ranks of a pre-flight write about themselves, and the findings where they differ."""

import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from hfscale.core.findings import Finding, Level
from hfscale.core.launch_variables import launch_number
from hfscale.core.versions import installed
from hfscale.health import measure

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "hfscale")
LATE_S = 10.0
"""Seconds after the median rank from which a rank's arrival is reported: importing torch and transformers takes about
this long from a cold disk."""
CLOCK_SKEW_S = 1.0
"""Difference between clocks from which log lines and notices are put in a wrong order; NTP keeps clocks within
milliseconds."""
_SHARED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "FI_", "UCX_")
_MAY_DIFFER = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_DEBUG_FILE",
    "NCCL_TOPO_FILE",
)


def describe_rank(
    environ: Mapping[str, str] = os.environ, device: torch.device | None = None
) -> dict[str, Any]:
    """Describe this rank: its host, device, library versions and communication variables, for the others to compare.

    No other environment variable leaves the process, apart from the local rank and the number of ranks on the node.

    Args:
        environ (`Mapping[str, str]`): the environment variables.
        device (`torch.device`, *optional*): the device of this rank; None: its CPU.

    Returns:
        `dict[str, Any]`: `host`, `pid`, `local_rank`, `local_world_size`, `device` (its name), `memory_gib` (None on a
        CPU), `versions` and `variables`.
    """
    versions = {name: version for name in LIBRARIES if (version := installed(name)) is not None}
    versions["python"] = platform.python_version()
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        versions |= {"cuda": torch.version.cuda or torch.version.hip or "", "nccl": _nccl_version()}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "local_rank": launch_number("LOCAL_RANK", 0, environ),
        "local_world_size": launch_number("LOCAL_WORLD_SIZE", 0, environ),
        "device": torch.cuda.get_device_name(device) if on_gpu else (platform.machine() or "cpu"),
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
        if on_gpu
        else None,
        "versions": versions,
        "variables": {
            k: v
            for k, v in environ.items()
            if k.startswith(_SHARED_PREFIXES) and k not in _MAY_DIFFER
        },
    }


def compare_ranks(notes: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Find ranks whose library versions, device or NCCL and gloo variables differ from those of most ranks.

    Args:
        notes (`Mapping[int, Mapping[str, Any]]`): what `describe_rank` returned on each rank.

    Returns:
        `list[Finding]`: errors and warnings, one per difference, host and value.
    """
    found: list[Finding] = []
    for name in sorted({name for note in notes.values() for name in note["versions"]}):
        values = {rank: note["versions"].get(name, "none") for rank, note in notes.items()}
        level: Level = "warning" if name in ("python", "peft") else "error"
        problem = f"has {name} {{mine}}, the others {{others}}"
        found += _differing(
            notes, values, level, "versions", problem, "install the same version on all nodes"
        )
    devices = {rank: note["device"] for rank, note in notes.items()}
    problem = "has the device {mine}, the others {others}: every step waits for the slowest type"
    found += _differing(
        notes, devices, "warning", "devices", problem, "run each type of device in a run of its own"
    )
    for name in sorted({name for note in notes.values() for name in note["variables"]}):
        values = {rank: note["variables"].get(name, "unset") for rank, note in notes.items()}
        problem = f"has {name}={{mine}}, the others {{others}}"
        found += _differing(
            notes, values, "warning", "environment", problem, "set it on all ranks or on none"
        )
    return found


def _differing(
    notes: Mapping[int, Mapping[str, Any]],
    values: Mapping[int, str],
    level: Level,
    check: str,
    problem: str,
    fix: str,
) -> list[Finding]:
    """Return one finding per host and value that is not the most common one."""
    if not values:
        return []
    most_common, _ = Counter(values.values()).most_common(1)[0]
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, value in sorted(values.items()):
        if value != most_common:
            groups.setdefault((notes[rank]["host"], value), []).append(rank)
    return [
        Finding(
            level=level,
            check=check,
            problem=problem.format(mine=value, others=most_common),
            fix=fix,
            ranks=tuple(ranks),
            host=host,
        )
        for (host, value), ranks in groups.items()
    ]


def compare_results(
    results: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]
) -> list[Finding]:
    """Compare the results of the ranks that finished their checks.

    Args:
        results (`Mapping[int, Mapping[str, Any]]`): what each rank measured: `matmul`, `links`, `waited_s`, `clock`.
        hosts (`Mapping[int, str]`): the host of each rank.

    Returns:
        `list[Finding]`: a finding for each rank or host that differs from the others.
    """
    if not results:
        return []
    found = measure.compare_matmul(
        {rank: result["matmul"] for rank, result in results.items()}, hosts
    )
    everyone = "network" if len(set(hosts.values())) > 1 else "node"
    links = {
        rank: [row for row in r["links"] if row["where"] == everyone] for rank, r in results.items()
    }
    found += measure.compare_values(links, hosts) + measure.compare_neighbours(links, hosts)
    found += compare_arrivals({rank: result["waited_s"] for rank, result in results.items()}, hosts)
    return found + compare_clocks(
        {rank: result["clock"] for rank, result in results.items()}, hosts
    )


def compare_arrivals(waited_s: Mapping[int, float], hosts: Mapping[int, str]) -> list[Finding]:
    """Find hosts whose ranks arrived much later than the median rank.

    Args:
        waited_s (`Mapping[int, float]`): how long each rank waited until all ranks had arrived, seconds.
        hosts (`Mapping[int, str]`): the host of each rank.

    Returns:
        `list[Finding]`: a warning for each host with ranks that arrived more than `LATE_S` after the median.
    """
    ordered = sorted(waited_s.values())
    median = ordered[len(ordered) // 2]
    late = {
        rank: median - seconds for rank, seconds in waited_s.items() if median - seconds > LATE_S
    }
    found = []
    for host in sorted({hosts[rank] for rank in late}):
        ranks = tuple(rank for rank in sorted(late) if hosts[rank] == host)
        problem = f"arrived {max(late[rank] for rank in ranks):.0f} s after the median rank"
        fix = "see what slows its start down: its disk, a cold cache of the image or of Python's modules, other work"
        found.append(Finding(check="arrival", problem=problem, fix=fix, ranks=ranks, host=host))
    return found


def compare_clocks(clocks_s: Mapping[int, float], hosts: Mapping[int, str]) -> list[Finding]:
    """Find hosts whose clock is far from the median.

    Args:
        clocks_s (`Mapping[int, float]`): the Unix time that each rank read just after the same barrier, seconds.
        hosts (`Mapping[int, str]`): the host of each rank.

    Returns:
        `list[Finding]`: a warning for each host whose clock differs by more than `CLOCK_SKEW_S`.
    """
    ordered = sorted(clocks_s.values())
    median = ordered[len(ordered) // 2]
    off = {
        rank: clock - median
        for rank, clock in clocks_s.items()
        if abs(clock - median) > CLOCK_SKEW_S
    }
    found = []
    for host in sorted({hosts[rank] for rank in off}):
        ranks = tuple(rank for rank in off if hosts[rank] == host)
        problem = f"the clock differs by {off[ranks[0]]:+.1f} s from that of the others"
        found.append(
            Finding(
                check="clock",
                problem=problem,
                fix="start chrony or ntpd there",
                ranks=ranks,
                host=host,
            )
        )
    return found


def slowest_links(results: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the row of the slowest rank for each collective, group and size.

    Args:
        results (`Mapping[int, Mapping[str, Any]]`): the results by rank; `links` has the rows of `check_collective`,
            each with `where` (`node` or `network`).

    Returns:
        `list[dict[str, Any]]`: rows with `kind`, `where`, `bytes`, `seconds` and `gb_s`.
    """
    slowest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for result in results.values():
        for row in result["links"]:
            key = (row["kind"], row["where"], row["bytes"])
            if key not in slowest or row["seconds"] > slowest[key]["seconds"]:
                slowest[key] = {
                    name: row[name] for name in ("kind", "where", "bytes", "seconds", "gb_s")
                }
    return list(slowest.values())


def _nccl_version() -> str:
    return (
        ".".join(map(str, torch.cuda.nccl.version()))
        if torch.distributed.is_nccl_available()
        else "none"
    )
