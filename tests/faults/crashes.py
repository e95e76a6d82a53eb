"""Runs trainings that lose their machine or their disk at a chosen I/O operation (`crash_shim.cpp`)."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY
from disk import Disk, Operation, Tree, restore, tree_of
from fork_client import ForkServer

from hfscale.core.records import read_records

WORKER = REPOSITORY / "tests" / "workers" / "saving.py"
LIMIT_S = 120


@dataclass(frozen=True)
class Outcome:
    """How a training ended, and the operations on its files."""

    codes: list[int]
    err: str
    operations: list[Operation]
    """Of all ranks, in order."""
    pids: list[int]
    """Process of each rank."""
    cwd: Path
    start: Tree
    """The files that existed before."""
    trash: Path
    """Folder with the files that were deleted."""

    def operations_of(self, rank: int) -> list[Operation]:
        """Return the operations that one rank counted."""
        return [entry for entry in self.operations if entry.pid == self.pids[rank] and entry.name != "flushed"]

    def disk(self) -> Disk:
        """Return the disk after the last operation. The contents of its files are also those of `states`."""
        disk = Disk(self.cwd, self.start)
        for operation in self._performed():
            disk.apply(operation)
        return disk

    def states(self) -> Iterator[tuple[int, Disk]]:
        """Yield, for each operation, the newest step that is committed by then, and the disk."""
        disk, performed, seen = Disk(self.cwd, self.start), self._performed(), committed_step(())
        for number, operation in enumerate(performed):
            disk.apply(operation)
            if operation.name != "write":
                seen = max(seen, committed_step(performed[: number + 1]))
            yield seen, disk

    def _performed(self) -> list[Operation]:
        """Return the operations without the last one of each process if it did not happen."""
        last = {operation.pid: operation for operation in self.operations}
        return [
            operation for operation in self.operations if last[operation.pid] is not operation or _happened(operation)
        ]


def _happened(operation: Operation) -> bool:
    if operation.name == "rename":
        return not os.path.lexists(operation.other)
    if operation.name in ("unlink", "rmdir"):
        return not os.path.lexists(operation.path)
    return True


def committed_step(operations: Sequence[Operation], *, needs_flush: bool = True) -> int:
    """Return the newest step of which the run has promised a checkpoint, 0 if there is none.

    The rename to `checkpoint-N` is the commit. The promise is made when the thread has also flushed the folders: when
    its next operation is another one than fsync, for example a deletion of the previous checkpoint.

    Args:
        operations: in order.
        needs_flush (`bool`): if False, the rename is a promise; so it is as long as the machine is not lost.
    """
    renamed: dict[int, int] = {}
    promised = 0
    for operation in operations:
        if operation.thread in renamed and (operation.name not in ("fsync", "flushed") or not needs_flush):
            promised = max(promised, renamed.pop(operation.thread))
        prefix, _, step = operation.path.name.partition("-")
        if operation.name == "rename" and prefix == "checkpoint" and step.isdigit():
            renamed[operation.thread] = int(step)
    return promised


class CrashRunner:
    """Runs the worker `saving.py` in subfolders of `folder`, with or without a crash.

    `kind` is the class of Trainer: "Trainer", or "WritesMore" of test_checkpoint_writer.py.
    """

    def __init__(self, server: ForkServer, folder: Path, kind: str = "Trainer") -> None:
        self.server = server
        self.folder = folder
        self.kind = kind

    def copy(self, name: str) -> Path:
        """Return a new copy of the folder `start`."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / "start", target)
        return target

    def train(
        self,
        cwd: Path,
        steps: int,
        *,
        ranks: int = 1,
        at: int = 0,
        after_s: float | None = None,
        errno: int = 0,
        failing: str = "",
        rank: int = 0,
        env: dict[str, str] | None = None,
        worker: Path = WORKER,
    ) -> Outcome:
        """Train until step `steps`, with `env` in addition to this process's own environment.

        All ranks are killed at the operation number `at` of `rank`, or `after_s` seconds after the first operation.
        With `errno` they are not killed; the disk of `rank` fails from that operation on, in all operations or in
        those that `failing` names, with commas between them.
        """
        cwd.mkdir(exist_ok=True)
        start, trash = tree_of(cwd), cwd.with_name(f"{cwd.name}.deleted")
        shutil.rmtree(trash, ignore_errors=True)
        trash.mkdir()
        with tempfile.TemporaryDirectory() as folder:
            out, err, log = (Path(folder) / name for name in ("out", "err", "log"))
            crash = {"CRASH_FOLDER": str(cwd), "CRASH_LOG": str(log), "CRASH_AT": str(at), "CRASH_RANK": str(rank)}
            crash |= {"CRASH_TRASH": str(trash), "CRASH_FAILING": failing}
            settings = os.environ | (env or {}) | crash | ({"CRASH_ERRNO": str(errno)} if errno else {})
            argv = [str(worker), str(steps), self.kind]
            job = self.server.start("script", argv, cwd=cwd, env=settings, out=out, err=err, ranks=ranks)
            if after_s is not None:
                self.server.wait_until(job, log.exists, LIMIT_S)
                time.sleep(after_s)
                job.signal(signal.SIGKILL)
            elif at and not errno and ranks > 1:
                self.server.wait_for_any(job, LIMIT_S)
                job.signal(signal.SIGKILL)
            codes = self.server.wait(job, LIMIT_S)
            lines = log.read_text().splitlines() if log.exists() else []
            operations = [Operation.of(line) for line in lines]
            return Outcome(codes, err.read_text(), operations, job.pids, cwd, start, trash)

    @staticmethod
    def lose_machine(outcome: Outcome, survivors: Sequence[str]) -> None:
        """Leave of the run's folder what is on the disk if the machine was lost when the run ended.

        Args:
            outcome (`Outcome`): of the run.
            survivors: the operations whose changes of names reach the disk without fsync (`disk.SURVIVORS`).
        """
        disk, left = outcome.disk(), outcome.cwd.with_name(f"{outcome.cwd.name}.left")
        restore(disk.after_loss(survivors), disk.contents(outcome.trash), left)
        shutil.rmtree(outcome.cwd)
        left.rename(outcome.cwd)

    @staticmethod
    def records(cwd: Path) -> list[tuple[int, float, float]]:
        """Return step, loss and gradient norm of every logged step; an incomplete line is ignored."""
        return [(r["step"], r["loss"], r["grad_norm"]) for r in read_records(cwd / "out" / "scaling.jsonl")]


@pytest.fixture(scope="session")
def crash_server(tmp_path_factory):
    """Start a fork server whose processes preload the shim."""
    shim = tmp_path_factory.mktemp("shim") / "crash_shim.so"
    source = Path(__file__).parent / "crash_shim.cpp"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True, timeout=120)
    server = ForkServer(shim)
    yield server
    server.close()
