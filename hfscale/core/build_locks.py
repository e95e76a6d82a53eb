"""Removes abandoned locks of torch's C++ extensions, which would block every later launch that needs them.

torch puts a lock file into the folder of an extension while it builds or loads it. A process that is killed meanwhile
leaves the file behind, and `torch.utils.cpp_extension` (2.13) silently waits for it to disappear in every later
launch: a DeepSpeed run that lost its machine at a bad moment would never start again.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from hfscale.core.findings import Finding
from hfscale.core.logging import get_logger

logger = get_logger(__name__)

UNSEEN_HOLDER_AGE_S = 600.0
"""Age from which a lock counts as abandoned if its holder may be a process that is not visible from here, on another
machine or of another user; our own choice: the longest build that we have seen, DeepSpeed's CPU Adam on busy cores,
takes half of it."""
RELEASE_S = 1.0
"""Seconds after which a lock that no process holds is checked again: a process that releases its lock closes the file
and then removes it."""
_SHARED_FILE_SYSTEMS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "fuse",
    "glusterfs",
    "9p",
    "virtiofs",
)


def abandoned_locks(environ: Mapping[str, str]) -> list[Path]:
    """Return the locks that no process holds any more.

    The holder keeps the file open, which is visible for files of this user on a disk of this machine; for other files
    `UNSEEN_HOLDER_AGE_S` decides. Holders in other containers that share the folder are not visible either.

    Args:
        environ (`Mapping[str, str]`): the environment variables, which say where extensions are built.

    Returns:
        `list[Path]`: the lock files, in the order of their paths.
    """
    return [path for path in _locks(environ) if _is_abandoned(path)]


def remove_locks_before_deepspeed(environ: Mapping[str, str] = os.environ) -> None:
    """Remove abandoned locks if the run uses DeepSpeed, on the first process of each machine.

    It must be called before DeepSpeed loads an extension. On a CPU that is as soon as the process group exists, so the
    entry point of the recipes calls it first of all. Where there is no recipe, it is called when the first callback
    meets its Trainer, which is before the optimizer of DeepSpeed is made.

    Args:
        environ (`Mapping[str, str]`): the environment variables, in which the launcher or Accelerate has left that
            DeepSpeed is used.
    """
    if environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and environ.get("LOCAL_RANK", "0") == "0":
        remove_abandoned_locks(environ)


def remove_abandoned_locks(environ: Mapping[str, str]) -> None:
    """Delete abandoned locks.

    Args:
        environ (`Mapping[str, str]`): the environment variables, which say where extensions are built.
    """
    for path in _locks(environ):
        identity = _identity(path)
        if not _is_abandoned(path):
            continue
        time.sleep(RELEASE_S)
        # Another run may have removed the file meanwhile and have taken the lock itself.
        if _is_abandoned(path) and _identity(path) == identity:
            path.unlink(missing_ok=True)
            logger.warning(
                "removed %s: the process that held it while it loaded an extension has ended", path
            )


def lock_finding(path: str, host: str) -> Finding:
    """Return the finding about an abandoned lock, a warning.

    Args:
        path (`str`): the lock file.
        host (`str`): the name of its machine.
    """
    problem = f"{path} is left from a build that was killed: DeepSpeed waits for it forever if it needs that extension"
    return Finding(level="warning", check="build lock", problem=problem, fix="delete it", host=host)


def _locks(environ: Mapping[str, str]) -> list[Path]:
    cache = environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions"))
    # TORCH_EXTENSIONS_DIR has a folder per extension; the default has one per Python and CUDA version above these.
    return sorted((*root.glob("*/lock"), *root.glob("*/*/lock")))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_abandoned(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:  # a build has just ended
        return False
    if status.st_uid != os.getuid() or _is_shared(path):
        return time.time() - status.st_mtime > UNSEEN_HOLDER_AGE_S
    return not _is_open(path)


def _is_shared(path: Path) -> bool:
    """Return whether another machine may write to the file system."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    nearest = next((folder for folder in path.resolve().parents if folder in mounts), None)
    return nearest is None or mounts[nearest].startswith(_SHARED_FILE_SYSTEMS)


def _is_open(path: Path) -> bool:
    name = str(path.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == name for file in process.open_files()):
                return True
        except (
            psutil.NoSuchProcess,
            psutil.AccessDenied,
        ):  # it has ended, or belongs to another user
            continue
    return False
