"""Processes of this machine: how another rank is recognised as one of them, and whether it is still alive."""

import socket
from collections.abc import Mapping
from typing import Any

import psutil

_CLOCK_S = 2.0
"""Difference between two readings of the time at which a process was created: it follows the machine's clock, in whole
seconds on Linux."""


def describe_process() -> dict[str, Any]:
    """Return what another rank needs to recognise this process, as an object for JSON.

    Returns:
        `dict[str, Any]`: `host`, `pid`, the `parent`'s process id, and `started`, the Unix time of its creation.
    """
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": process.pid,
        "parent": process.ppid(),
        "started": process.create_time(),
    }


def find_process(description: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process that another rank has described, if it is visible and alive on this machine.

    Args:
        description (`Mapping[str, Any]`): what `describe_process` returned on that rank.

    Returns:
        `psutil.Process` or `None`: None also for a process of another container on this machine.
    """
    if description["host"] != socket.gethostname():
        return None
    try:
        process = psutil.Process(description["pid"])
        is_same = abs(process.create_time() - description["started"]) < _CLOCK_S
    except psutil.Error:
        return None
    return process if is_same and is_alive(process) else None


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs: it has not ended, and no other process has its number."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
