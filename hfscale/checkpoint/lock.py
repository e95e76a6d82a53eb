"""Locks an output directory: two runs that save into one would delete and overwrite each other's checkpoints."""

import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from hfscale.errors import UsageError
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

LOCK_NAME = ".hfscale_lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_LOCKED_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, int] = {}
"""Lock files that this process holds, with their open descriptors."""


def lock_output_dir(output_dir: str | os.PathLike[str]) -> None:
    """Keep other runs out of `output_dir` until this process ends or calls `unlock_output_dir`.

    Call it on one process of the run; calling it again in that process has no effect. The lock is a POSIX record lock:
    the system releases it however the process ends, forked children do not inherit it, and on NFS it also holds for
    other machines. On a file system without locks it only logs a warning.

    Raises:
        UsageError: another process holds the lock; the message names its host, process id and start time.
    """
    path = Path(output_dir).resolve() / LOCK_NAME
    if path in _held:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 1024, 0)
        os.close(descriptor)
        if error.errno in _NOT_SUPPORTED:
            logger.warning("%s cannot be locked on this file system: do not start a second run in it", output_dir)
            return
        if error.errno not in _LOCKED_BY_ANOTHER:
            raise
        raise UsageError(
            f"{output_dir} is in use by {_describe(holder)}: wait until it ends, stop it, or use another output_dir"
        ) from None
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)
    _held[path] = descriptor


def is_locked_by_another_process(output_dir: str | os.PathLike[str]) -> bool:
    """Return whether another process holds the lock of `output_dir` now."""
    path = Path(output_dir).resolve() / LOCK_NAME
    if path in _held or not path.exists():
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _LOCKED_BY_ANOTHER
    finally:
        os.close(descriptor)  # this also releases the lock
    return False


def lock_for_all_ranks(output_dir: str | os.PathLike[str], *, is_holder: bool) -> None:
    """Create the output directory if it does not exist, and lock it. Call it on every rank.

    Args:
        output_dir (`str`): output directory of the run.
        is_holder (`bool`): whether this rank locks it: the main process, or one process on each node if each node has
            a disk of its own.

    Raises:
        UsageError: another run holds the lock; raised on every rank.
    """
    error: UsageError | None = None
    if is_holder:
        try:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            lock_output_dir(output_dir)
        except UsageError as refused:
            error = refused
    if distributed.all_max([float(error is not None)])[0]:
        raise error or UsageError(f"{output_dir} is in use by another run: use another output_dir")


def unlock_output_dir(output_dir: str | os.PathLike[str]) -> None:
    """Release the lock of `output_dir` if this process holds it."""
    descriptor = _held.pop(Path(output_dir).resolve() / LOCK_NAME, None)
    if descriptor is not None:
        os.close(descriptor)


def _describe(holder: bytes) -> str:
    try:
        fields = json.loads(holder)
        return f"process {int(fields['pid'])} on {fields['host']} since {fields['since']}"
    except (ValueError, KeyError, TypeError):
        return "another run"
