"""What each rank says about itself when it arrives, and what must not differ between ranks."""

import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from hfscale.utils.findings import Finding

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "hfscale")
CLOCK_SKEW_S = 1.0
"""Clocks further apart than this order log lines and notices wrongly; NTP keeps them within milliseconds."""
_SHARED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "FI_", "UCX_")
_MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE")


def describe_self(environ: Mapping[str, str] = os.environ, device: torch.device | None = None) -> dict[str, Any]:
    """This rank's facts, for the others to compare: host, versions, device, the variables of the communication
    libraries. No other variable leaves the process."""
    versions = {name: version for name in LIBRARIES if (version := _version(name)) is not None}
    versions["python"] = platform.python_version()
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        versions |= {"cuda": torch.version.cuda or torch.version.hip or "", "nccl": _nccl_version()}
    shared = {k: v for k, v in environ.items() if k.startswith(_SHARED_PREFIXES) and k not in _MAY_DIFFER}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "local_rank": int(environ.get("LOCAL_RANK", "0")),
        "local_world_size": int(environ.get("LOCAL_WORLD_SIZE", "0")),
        "device": torch.cuda.get_device_name(device) if on_gpu else (platform.machine() or "cpu"),
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1) if on_gpu else None,
        "versions": versions,
        "variables": shared,
    }


def compare(notes: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """What differs between ranks and must not: library versions, devices, variables of NCCL and gloo."""
    found: list[Finding] = []
    for name in sorted({name for note in notes.values() for name in note["versions"]}):
        values = {rank: note["versions"].get(name, "none") for rank, note in notes.items()}
        level = "warning" if name in ("python", "peft") else "error"
        found += _odd_ones(
            notes, values, level, "versions", f"has {name} {{mine}}, the others {{others}}: install one version"
        )
    devices = {rank: note["device"] for rank, note in notes.items()}
    found += _odd_ones(
        notes,
        devices,
        "warning",
        "devices",
        "is a {mine}, the others are {others}: every step waits for the slowest type; give each type a run of its own",
    )
    for name in sorted({name for note in notes.values() for name in note["variables"]}):
        values = {rank: note["variables"].get(name, "unset") for rank, note in notes.items()}
        found += _odd_ones(
            notes,
            values,
            "warning",
            "environment",
            f"has {name}={{mine}}, the others {{others}}: set it for all ranks, or for none",
        )
    return found


def clock_skew(offsets_s: Mapping[int, float], hosts: Mapping[int, str]) -> list[Finding]:
    """Hosts whose clock is away from the median, from the times that ranks read just after the same barrier."""
    ordered = sorted(offsets_s.values())
    middle = ordered[len(ordered) // 2]
    off = {rank: offset - middle for rank, offset in offsets_s.items() if abs(offset - middle) > CLOCK_SKEW_S}
    found = []
    for host in sorted({hosts[rank] for rank in off}):
        ranks = tuple(rank for rank in off if hosts[rank] == host)
        text = f"its clock is {off[ranks[0]]:+.1f} s from the others': start chrony or ntpd there"
        found.append(Finding(level="warning", check="clock", problem=text, ranks=ranks, host=host))
    return found


def _odd_ones(
    notes: Mapping[int, Mapping[str, Any]], values: Mapping[int, str], level: Any, check: str, text: str
) -> list[Finding]:
    """The ranks whose value is not the commonest, one finding per host and value."""
    commonest, _ = Counter(values.values()).most_common(1)[0]
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, value in sorted(values.items()):
        if value != commonest:
            groups.setdefault((notes[rank]["host"], value), []).append(rank)
    return [
        Finding(
            level=level, check=check, problem=text.format(mine=value, others=commonest), ranks=tuple(ranks), host=host
        )
        for (host, value), ranks in groups.items()
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
