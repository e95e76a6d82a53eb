"""The folder in host memory that belongs to one supervised run on one node.

It lies in a file system in memory (`/dev/shm`), so it outlives the processes that train, but not the machine:

    hfscale-run-XXXXXXXX/        mode 0700, made by the supervisor
        owner                    locked (flock) by the supervisor as long as it lives
        ranks                    the socket of the supervisor (`hfscale.core.rank_link`)
        progress-R               the steps of rank R, 32 bytes (`Progress`)
        samples-R                the dataset indices of the step that rank R has begun, if they are known
        failure.json             the failure before this launch, written by the supervisor
        imports.json             what a rank has imported, for the next launcher (`hfscale.recovery.standby`)
        outlives-PID             a process that is not ended with the launch that has started it
        HASH/                    snapshots of one output directory, in its layout; made when its training begins
            trusted              the last step whose snapshot may be used, after silent data corruption

The supervisor deletes it when the run ends. If the supervisor was killed, the next one on this machine does.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hfscale.core.durable_files import make_inside
from hfscale.core.records import unix_time
from hfscale.core.text_files import open_regular, read_json, read_text

FOLDER_VARIABLE = "HFSCALE_RUN_MEMORY"
"""Environment variable with the path of the folder, set by the supervisor for the ranks."""
RESTARTS_VARIABLE = "HFSCALE_RUN_RESTARTS"
"""Environment variable with the number of restarts before this launch."""
LAUNCHED_VARIABLE = "HFSCALE_RUN_LAUNCHED_AT"
"""Environment variable with the moment at which the launcher was started, in seconds of `time.monotonic`."""
INTERVAL_VARIABLE = "HFSCALE_MEMORY_INTERVAL_STEPS"
"""Environment variable with the steps between two snapshots; without it the interval follows from their cost."""
NODES_VARIABLE = "HFSCALE_RUN_NODES"
"""Environment variable with the number of nodes of this launch."""
NODE_RANK_VARIABLE = "HFSCALE_RUN_NODE_RANK"
"""Environment variable with the number of this node among them."""
AGREED_VARIABLES = {INTERVAL_VARIABLE: "--memory-interval-steps", NODES_VARIABLE: "--nodes"}
"""Variables on which exchanges between ranks depend, with their options of `hfscale run`: they must be equal on all
ranks, which is checked when a training begins (`hfscale.checkpoint.memory_snapshots`)."""
OWN_VARIABLES = (FOLDER_VARIABLE, LAUNCHED_VARIABLE, NODE_RANK_VARIABLE, RESTARTS_VARIABLE)
"""Variables that a node has of its own: no exchange between ranks may depend on them."""
PARTS = "parts"
"""Folder of this node's parts of the snapshots of a training, in a run on several nodes."""
TRUSTED = "trusted"
"""File with the last step whose snapshot may be used, from a fault in the training until the next launch."""
REPLICATED = "replicated"
"""File with the last step of which every part has a copy on another node."""
DEFAULT_ROOT = Path("/dev/shm")  # noqa: S108 - the folder below it has a random name and mode 0700
_PACKAGE = str(Path(__file__).parent.parent)
FOLDER_PREFIX = "hfscale-run-"
_RANDOM = 8
"""Letters that `tempfile.mkdtemp` adds."""
_MOST_OF_SOCKET = 107
"""Bytes of the path of a Unix socket: `sun_path` of Linux's unix(7), without the zero at its end."""
OWNER_NAME = "owner"
_FAILURE_NAME = "failure.json"
_IMPORTS_NAME = "imports.json"
_OUTLIVES = "outlives-"
# Between two readings of the time at which a process was created (`hfscale.core.processes`)
_CLOCK_S = 2.0
_MOST_BYTES = 4096  # of a file with one number
_READ_BY_IMPORTS = ("OMP_NUM_THREADS",)  # set by launchers, and read when torch is imported


class RunMemory:
    """The folder of one run.

    Args:
        folder (`Path`): an existing folder that `create` made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "ranks"
        """Address of the supervisor's socket."""
        self._owner: int | None = None

    @classmethod
    def create(cls, root: Path = DEFAULT_ROOT) -> "RunMemory":
        """Make a folder and lock it, for the supervisor.

        Args:
            root (`Path`): a folder of a file system in memory.

        Raises:
            OSError: the folder cannot be made, or a socket in it would have too long a path.
        """
        longest = len(os.fsencode(cls(root / f"{FOLDER_PREFIX}{'x' * _RANDOM}").socket))
        if longest > _MOST_OF_SOCKET:
            reason = f"the path of a socket in it has {longest} bytes, and at most {_MOST_OF_SOCKET} are allowed"
            raise OSError(errno.ENAMETOOLONG, reason, str(root))
        memory = cls(Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=root)))
        memory._lock()
        return memory

    def _lock(self) -> None:
        # It gets its name with the lock: `remove_abandoned` may be running
        unlocked = self.folder / f".{OWNER_NAME}"
        unlocked.unlink(missing_ok=True)
        self._owner = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.folder / OWNER_NAME)

    def is_intact(self) -> bool:
        """Return whether the folder is the one that this supervisor has made and locked."""
        if self._owner is None:
            return False
        locked = os.fstat(self._owner)
        try:
            found = (self.folder / OWNER_NAME).lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (locked.st_dev, locked.st_ino)

    def make_again(self) -> None:
        """Make and lock the folder again after something has removed it or a part of it; for the supervisor.

        Raises:
            OSError: it cannot be made, or another user has made one with its name.
        """
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        if not is_own_folder(self.folder):
            raise PermissionError(errno.EPERM, "another user has made it", str(self.folder))
        self.folder.chmod(0o700)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None
        self._lock()

    def make_folder(self, folder: Path) -> None:
        """Make a folder below the one of the run, which only the supervisor makes.

        Args:
            folder (`Path`): a path below `self.folder`; those between are made too.

        Raises:
            OSError: it cannot be made, or the folder of the run does not exist or is not private.
        """
        found = self.folder.lstat()
        if not is_own_folder(self.folder) or stat.S_IMODE(found.st_mode) & 0o077:
            text = "it is not the private folder of hfscale run"
            raise PermissionError(errno.EPERM, text, str(self.folder))
        make_inside(self.folder, folder)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> "RunMemory | None":
        """Return the folder of the supervisor that started this process; None if there is none.

        Args:
            environ (`Mapping[str, str]`): the environment variables.
        """
        folder = environ.get(FOLDER_VARIABLE)
        return cls(Path(folder)) if folder and Path(folder).is_dir() else None

    def delete(self) -> None:
        """Delete the folder and release its lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def write_failure(self, failure: Mapping[str, Any]) -> None:
        """Record a failure for the next launch, which reports it; called by the supervisor.

        Args:
            failure (`Mapping`): what JSON can represent: the fields of `hfscale.recovery.restarts.Failure`, and
                `failed_monotonic` and `ended_monotonic`, its moments in seconds of `time.monotonic`.
        """
        (self.folder / _FAILURE_NAME).write_text(json.dumps(failure), encoding="utf-8")

    def read_failure(self) -> dict[str, Any] | None:
        """Return the failure before this launch; None if it is the first launch."""
        try:
            failure: dict[str, Any] = read_json(self.folder / _FAILURE_NAME)
            return failure
        except (OSError, ValueError):
            return None

    def snapshots(self, output_dir: str | os.PathLike[str]) -> Path:
        """Return the folder of the snapshots of one training.

        It exists once a launch of this supervised run has begun that training; from then on the checkpoints of its
        output directory are its own.

        Args:
            output_dir (`str`): output directory of the training.
        """
        return (
            self.folder / hashlib.sha256(str(Path(output_dir).resolve()).encode()).hexdigest()[:16]
        )

    def write_imports(self) -> None:
        """Record which modules of installed packages this process has imported, in their order."""
        folders = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
        names = []
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if (
                spec is not None
                and spec.name == name
                and str(spec.origin).startswith((*folders, _PACKAGE))
            ):
                names.append(name)
        environ = {name: os.environ[name] for name in _READ_BY_IMPORTS if name in os.environ}
        unfinished = self.folder / f".{_IMPORTS_NAME}"
        unfinished.write_text(json.dumps({"modules": names, "environ": environ}), encoding="utf-8")
        unfinished.replace(self.folder / _IMPORTS_NAME)

    def read_imports(self) -> dict[str, Any] | None:
        """Return what `write_imports` has recorded, `{"modules": …, "environ": …}`; None if nothing is recorded."""
        try:
            found: dict[str, Any] = read_json(self.folder / _IMPORTS_NAME)
        except (OSError, ValueError):
            return None
        return found

    def let_outlive(self, process: psutil.Process) -> None:
        """Have the supervisor spare a process that a rank has started, such as the rendezvous of islands.

        Args:
            process (`psutil.Process`): the process.
        """
        (self.folder / f"{_OUTLIVES}{process.pid}").write_text(
            str(process.create_time()), encoding="utf-8"
        )

    def outliving(self) -> set[psutil.Process]:
        """Return the living processes for which `let_outlive` was called."""
        found = set()
        for path in self.folder.glob(f"{_OUTLIVES}*"):
            with suppress(OSError, ValueError, psutil.Error):
                process = psutil.Process(int(path.name.removeprefix(_OUTLIVES)))
                started_at = float(read_text(path, most_bytes=_MOST_BYTES))
                if abs(process.create_time() - started_at) < _CLOCK_S:  # its id was not used again
                    found.add(process)
        return found

    def progress(self, rank: int) -> "Progress":
        """Return the steps of a rank, to be written by it.

        Args:
            rank (`int`): its global rank.
        """
        return Progress(self._progress_path(rank))

    def has_progress(self, rank: int) -> bool:
        """Return whether the file of `progress` still exists: the folder may have been removed.

        Args:
            rank (`int`): its global rank.
        """
        return self._progress_path(rank).exists()

    def _progress_path(self, rank: int) -> Path:
        return self.folder / f"progress-{rank}"

    def write_samples(self, rank: int, step: int, indices: list[Any]) -> None:
        """Record which samples a step reads, for the message about its failure.

        Args:
            rank (`int`): the rank that reads them.
            step (`int`): the optimizer step.
            indices (`list`): their indices in the dataset.
        """
        text = json.dumps({"step": step, "samples": indices}, default=str)
        with suppress(OSError):  # the memory is full: then they are unknown
            (self.folder / f"samples-{rank}").write_text(text, encoding="utf-8")

    def samples_of(self, step: int) -> dict[str, list[Any]]:
        """Return the dataset indices of a step by rank, without the ranks that have not recorded them.

        Args:
            step (`int`): the optimizer step.
        """
        found = {}
        paths = [path for path in self.folder.glob("samples-*") if path.name[8:].isdecimal()]
        for path in sorted(paths, key=lambda path: int(path.name.removeprefix("samples-"))):
            # A rank that was killed while it wrote leaves a part of the text
            with suppress(OSError, ValueError, KeyError, TypeError):
                record = read_json(path)
                if record["step"] == step:
                    found[path.name.removeprefix("samples-")] = list(record["samples"])
        return found

    def furthest(self) -> tuple[int, int]:
        """Return the last step that a rank has begun, and the last that one has completed; 0 if there is none."""
        found = [Progress.read(path) for path in self.folder.glob("progress-*")]
        return max((begun for begun, _ in found), default=0), max(
            (done for _, done in found), default=0
        )


class Progress:
    """The steps that one rank has begun and completed, in memory that the supervisor can read after its death.

    Args:
        path (`Path`): the file; it is made if it does not exist.

    Raises:
        OSError: the memory is full.
    """

    # Last step begun, last step completed, Unix time of the last change in seconds
    _LAYOUT = struct.Struct("=qqd8x")

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Reserved, since a process that uses a page for which there is no memory is ended by SIGBUS.
            os.posix_fallocate(descriptor, 0, self._LAYOUT.size)
            self._memory = mmap.mmap(descriptor, self._LAYOUT.size)
        finally:
            os.close(descriptor)

    def write(self, begun: int, completed: int) -> None:
        """Record the progress.

        Args:
            begun (`int`): the last optimizer step that has begun.
            completed (`int`): the last optimizer step that is complete.
        """
        self._LAYOUT.pack_into(self._memory, 0, begun, completed, unix_time())

    @classmethod
    def read(cls, path: Path) -> tuple[int, int]:
        """Return the last step begun and the last step completed; 0 for a file that is not complete.

        Args:
            path (`Path`): the file that a rank has written.
        """
        try:
            with open_regular(path) as file:
                content = file.read(cls._LAYOUT.size + 1)
        except OSError:  # something has removed the folder meanwhile
            return 0, 0
        if len(content) != cls._LAYOUT.size:
            return 0, 0
        begun, completed, _ = cls._LAYOUT.unpack(content)
        return begun, completed


def replicated_step(folder: Path) -> int | None:
    """Return the last step whose snapshot survives the loss of any one node; None if there is none.

    Args:
        folder (`Path`): the folder of one training in the memory of this node.
    """
    try:
        return int(read_text(folder / REPLICATED, most_bytes=_MOST_BYTES))
    except (OSError, ValueError):
        return None


def trust_until(folder: Path, step: int) -> None:
    """Delete the snapshots of later steps than `step`, and have none used that another node still copies.

    Args:
        folder (`Path`): the folder of one training in the memory of this node; nothing happens if there is none.
        step (`int`): the last step whose state is good.
    """
    if folder.is_dir():
        (folder / TRUSTED).write_text(str(step), encoding="utf-8")
        _delete_later(folder, step)


def trusted_step(folder: Path) -> int | None:
    """Return the last step whose snapshot may be used; None if all may.

    Args:
        folder (`Path`): the folder of one training in the memory of this node.
    """
    try:
        return int(read_text(folder / TRUSTED, most_bytes=_MOST_BYTES))
    except (OSError, ValueError):
        return None


def trust_again(folder: Path) -> None:
    """Let snapshots of all steps be used that are taken from now on, and delete those that were not to be used.

    Args:
        folder (`Path`): the folder of one training in the memory of this node.
    """
    step = trusted_step(folder)
    if step is not None:
        _delete_later(folder, step)
        (folder / TRUSTED).unlink()


def _delete_later(folder: Path, step: int) -> None:
    for snapshot in folder.glob("**/checkpoint-*"):
        number = snapshot.name.removeprefix("checkpoint-")
        if number.isdecimal() and int(number) > step:
            shutil.rmtree(snapshot, ignore_errors=True)


def is_own_folder(path: Path) -> bool:
    """Return whether a path in a folder that all users share is a folder of this user, and no link.

    Args:
        path (`Path`): the path.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
