"""The processes that a supervisor starts: what they do when it ends, and how they are ended."""

import ctypes
import fcntl
import os
import signal
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from hfscale.core.counts import nouns

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2), as the next one
_SET_CHILD_SUBREAPER = 36
_POLL_S = 1.0
# `struct pidfd_info` of <linux/pidfd.h>: mask, control group, eleven ids, and the status as waitpid(2) returns it
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 8
_libc = ctypes.CDLL(None, use_errno=True)  # before a fork: other threads may be running then


def _call_prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def adopt_orphans() -> None:
    """Make descendants whose parent is killed children of this process."""
    _call_prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process receive SIGTERM when the supervisor ends, so that a killed supervisor leaves no training."""
    _call_prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def exit_code_of(pid: int, descriptor: int) -> int | None:
    """Return the exit code of an ended process that another one has started, negative for a signal; None if unknown.

    A launcher returns 1 for whatever its ranks have ended with, and Python does not tell a process with which code
    `sys.exit` ends it. The kernel knows it until the parent has waited for the process, and since Linux 6.15 for as
    long as somebody has it open.

    Args:
        pid (`int`): its id.
        descriptor (`int`): what `os.pidfd_open` has returned for it.
    """
    status: int | None = None
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        if fields[0] == "Z":
            status = int(fields[-1])
    if status is None:
        asked = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        with suppress(OSError):  # older kernels do not have it
            fcntl.ioctl(descriptor, _PIDFD_GET_INFO, asked)
            mask, *_, found = _PIDFD_INFO.unpack(asked)
            status = found if mask & _PIDFD_INFO_EXIT else None
    return None if status is None else os.waitstatus_to_exitcode(status)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; True where that cannot be read.

    Args:
        pid (`int`): its id.
        number (`int`): the signal.
    """
    path = Path(f"/proc/{pid}/status")
    bit = 1 << (number - 1)
    with suppress(OSError, ValueError):
        text = path.read_text(encoding="utf-8")
        fields = text.split()
        place = fields.index("SigCgt:") + 1
        caught = int(fields[place], 16)
        return bool(caught & bit)
    return True


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it still exists. A process that is stopped (SIGSTOP) goes on, to take it.

    Args:
        pid (`int`): its id.
        number (`int`): the signal.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)


def end_descendants(spared: Collection[psutil.Process], *, limit_s: float) -> list[psutil.Process]:
    """Kill what a launcher has left behind; only processes of this run are descendants of the supervisor.

    Args:
        spared (`Collection[psutil.Process]`): descendants that stay.
        limit_s (`float`): seconds to wait for their end. A process that waits for a device or a file system in the
            kernel ends only when that answers.

    Returns:
        `list[psutil.Process]`: those that have not ended in this time.
    """
    until = time.monotonic() + limit_s
    while (left := _living(spared)) and time.monotonic() < until:
        for child in left:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(left, timeout=_POLL_S)
        _reap()
    return left


def _living(spared: Collection[psutil.Process]) -> list[psutil.Process]:
    """Return the descendants that have not ended; one whose parent does not take its exit code has."""
    living = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child not in spared and child.status() != psutil.STATUS_ZOMBIE:
                living.append(child)
    return living


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def describe(processes: Collection[psutil.Process]) -> str:
    """Return the ids of processes, with what is known of them.

    Args:
        processes (`Collection[psutil.Process]`): at least one.
    """
    shown = []
    for process in processes:
        try:
            shown.append(f"{process.pid} ({process.name()}, {process.status()})")
        except psutil.Error:
            shown.append(str(process.pid))
    return f"{nouns(len(shown), 'process')} {', '.join(shown)}"
