"""Locks an output directory: two runs that save into one would delete and overwrite each other's checkpoints."""

import errno
import fcntl
import json
import os
import socket
import struct
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from hfscale.core.collectives import START
from hfscale.core.durable_files import flush_parents
from hfscale.core.logging import get_logger
from hfscale.core.run_files import LOCK_NAME
from hfscale.core.text_files import parse_json
from hfscale.errors import OutputDirInUseError, StorageError, UsageError

logger = get_logger(__name__)

LOCK_WAIT_S = 300.0
"""How long a lock of another machine is waited for: after the loss of a machine an NFS server keeps its locks until
their lease ends, 90 s by default, and then for a grace period of the same length."""
_POLL_S = 1.0
_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_LOCKED_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
# `struct flock` of fcntl(2): type, whence, start, length, process
_FLOCK = struct.Struct("@hhqqi4x")
_held: dict[Path, int] = {}
"""Lock files that this process holds, with their open descriptors."""
_not_lockable: set[Path] = set()
"""Lock files on file systems without locks, which were reported."""


def lock_output_dir(output_dir: str | os.PathLike[str]) -> None:
    """Keep other runs out of `output_dir` until this process ends or calls `unlock_output_dir`.

    Call it on one process of the run; calling it again in that process has no effect, unless the folder was removed
    and made again: then the new one is locked. The lock is one of fcntl(2): the system releases it however the
    process ends, forked children do not keep it, and on NFS it also holds for other machines. If another machine holds
    it, which may be lost, the lock is waited for. On a file system without locks it only logs a warning.

    Raises:
        UsageError: a process of this machine holds the lock, or the file is a link; the message names the process and
            its start time.
        OutputDirInUseError: another machine has held the lock for `LOCK_WAIT_S` seconds.
    """
    path = Path(output_dir).resolve() / LOCK_NAME
    if _holds(path):
        return
    _release(path)  # it was of a folder that is removed
    began = time.monotonic()
    descriptor = _open(path)
    while True:
        try:
            _lock(descriptor)
            if _is_at(descriptor, path):
                break
            os.close(descriptor)  # the folder was removed meanwhile, and made again
            descriptor = _open(path)
            continue
        except OSError as error:
            holder = os.pread(descriptor, 1024, 0)
            os.close(descriptor)
            if error.errno in _NOT_SUPPORTED:
                if path not in _not_lockable:
                    logger.warning(
                        "%s cannot be locked on this file system: do not start a second run in it",
                        output_dir,
                    )
                _not_lockable.add(path)
                return
            if error.errno not in _LOCKED_BY_ANOTHER:
                raise
            waited_s = time.monotonic() - began
            _check_may_wait(output_dir, holder, waited_s)
            if waited_s < _POLL_S:
                logger.warning(
                    "%s is in use by %s: waiting up to %.0f s for it to end",
                    output_dir,
                    _describe(holder),
                    LOCK_WAIT_S,
                )
            time.sleep(_POLL_S)
            descriptor = _open(path)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(
        descriptor,
        json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(),
        0,
    )
    _held[path] = descriptor


def _lock(descriptor: int) -> None:
    """Lock an open file, or raise an OSError.

    The lock belongs to the open file (Linux), so that it stays when another part of the process, such as a backup,
    opens and closes it. It excludes the lock of the process that other systems have, and earlier versions of hfscale.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):
        try:
            fcntl.fcntl(
                descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            )
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system does not know such locks
                raise
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_child() -> None:
    """Close the files in a forked child, such as a worker of a DataLoader, which would keep the locks."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"{path} is a symbolic link: remove it") from None
        raise


def _check_may_wait(output_dir: str | os.PathLike[str], holder: bytes, waited_s: float) -> None:
    """Raise if the holder of the lock is alive on this machine, or if it has been waited for long enough.

    Raises:
        UsageError: the holder is a process of this machine.
        OutputDirInUseError: the lock has been waited for.
    """
    in_use = f"{output_dir} is in use by {_describe(holder)}"
    if _is_alive_here(holder):
        raise UsageError(f"{in_use}: wait until it ends, stop it, or use another output_dir")
    if waited_s >= LOCK_WAIT_S:
        raise OutputDirInUseError(
            f"{in_use}, also after {LOCK_WAIT_S:.0f} s: start the same command again later, or use another output_dir"
        )


def is_locked_by_another_process(output_dir: str | os.PathLike[str]) -> bool:
    """Return whether another process holds the lock of `output_dir` now."""
    path = Path(output_dir).resolve() / LOCK_NAME
    if _holds(path) or not path.exists():
        return False
    descriptor = _open(path)
    try:
        _lock(descriptor)
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
        OutputDirInUseError: another machine has held the lock for some minutes; raised on every rank.
        StorageError: the lock file cannot be written; raised on every rank.
    """
    with START.agreed("lock of the output directory"):
        if is_holder:
            make_and_lock(output_dir)


def make_and_lock(output_dir: str | os.PathLike[str]) -> None:
    """Create the output directory if it does not exist, and lock it, unless this process has locked it.

    Args:
        output_dir (`str`): output directory of the run.

    Raises:
        UsageError: another run holds the lock.
        OutputDirInUseError: another machine has held the lock for some minutes.
        StorageError: the lock file cannot be written.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        flush_parents(Path(output_dir))
        lock_output_dir(output_dir)
    except OSError as failure:
        raise StorageError(
            f"{output_dir} cannot be locked: {failure.strerror}; make it writable"
        ) from failure


def unlock_output_dir(output_dir: str | os.PathLike[str]) -> None:
    """Release the lock of `output_dir` if this process holds it."""
    _release(Path(output_dir).resolve() / LOCK_NAME)


def _release(path: Path) -> None:
    descriptor = _held.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def _holds(path: Path) -> bool:
    """Return whether this process holds the lock of the file that has this name now."""
    descriptor = _held.get(path)
    return descriptor is not None and _is_at(descriptor, path)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has its name: its folder may be another one by now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _is_alive_here(holder: bytes) -> bool:
    """Return whether the holder is a process of this machine.

    A pod that replaces a lost one can have its host name, and process ids repeat: the process must have started before
    the lock was taken.
    """
    try:
        fields = parse_json(holder)
        since = datetime.fromisoformat(fields["since"]).timestamp()
        is_older = psutil.Process(fields["pid"]).create_time() <= since + 1
        return is_older and str(fields["host"]) == socket.gethostname()
    except (ValueError, KeyError, TypeError, OverflowError, psutil.Error):
        return False


def _describe(holder: bytes) -> str:
    try:
        fields = parse_json(holder)
        return f"process {int(fields['pid'])} on {fields['host']} since {fields['since']}"
    except (ValueError, KeyError, TypeError, OverflowError):
        return "another run"
