"""Runs trainings that lose their machine or their disk at a chosen I/O operation (`crash_shim.cpp`)."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY
from fork_client import ForkServer

from hfscale.metrics.records import read_records

WORKER = REPOSITORY / "tests" / "workers" / "saving.py"
LIMIT_S = 120


@dataclass(frozen=True)
class Operation:
    """One line of the shim's log."""

    number: int
    name: str
    size: int
    """Length in bytes of a file that is flushed, else -1."""
    path: Path


@dataclass(frozen=True)
class Outcome:
    """How a training ended, and the operations on its files."""

    codes: list[int]
    err: str
    operations: list[Operation]
    sizes: dict[Path, int]
    """Lengths of the files that existed before."""

    def committed_step(self, crashed_at: int) -> int:
        """Return the newest step whose checkpoint was committed before the operation `crashed_at`."""
        steps = [
            step
            for operation in self.operations
            if operation.number < crashed_at and (step := _committed_step(operation)) is not None
        ]
        return max(steps, default=0)

    def unflushed(self) -> dict[Path, int]:
        """Return the files with unflushed writes, and how many bytes of each are safe if the machine is lost.

        That is the length that the file had when it was last flushed. The last operation may not have happened.
        """
        dirty: set[Path] = set()
        flushed = dict(self.sizes)
        for operation in self.operations[:-1]:
            if operation.name in ("write", "truncate"):
                dirty.add(operation.path)
            elif operation.name == "fsync":
                dirty.discard(operation.path)
                flushed[operation.path] = operation.size
        if self.operations and self.operations[-1].name in ("write", "truncate"):
            dirty.add(self.operations[-1].path)
        return {path: flushed.get(path, 0) for path in dirty}


def _committed_step(operation: Operation) -> int | None:
    """Return the step of the checkpoint that the operation commits: it renames a folder to checkpoint-N."""
    if operation.name != "rename":
        return None
    prefix, _, step = operation.path.name.partition("-")
    return int(step) if prefix == "checkpoint" and step.isdigit() else None


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
        rank: int = 0,
        env: dict[str, str] | None = None,
    ) -> Outcome:
        """Train until step `steps`, with `env` in addition to this process's own environment.

        All ranks are killed at the operation number `at` of `rank`, or `after_s` seconds after the first operation.
        With `errno` they are not killed; the disk of `rank` fails from that operation on.
        """
        cwd.mkdir(exist_ok=True)
        sizes = {path: path.stat().st_size for path in cwd.rglob("*") if path.is_file()}
        with tempfile.TemporaryDirectory() as folder:
            out, err, log = (Path(folder) / name for name in ("out", "err", "log"))
            crash = {"CRASH_FOLDER": f"{cwd}/", "CRASH_LOG": str(log), "CRASH_AT": str(at), "CRASH_RANK": str(rank)}
            settings = os.environ | (env or {}) | crash | ({"CRASH_ERRNO": str(errno)} if errno else {})
            argv = [str(WORKER), str(steps), self.kind]
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
            parts = (line.split(" ", 3) for line in lines)
            operations = [Operation(int(number), name, int(size), Path(path)) for number, name, size, path in parts]
            return Outcome(codes, err.read_text(), operations, sizes)

    @staticmethod
    def lose_unflushed(outcome: Outcome) -> None:
        """Truncate each file with unflushed writes to the length that it had when it was last flushed."""
        for path, size in outcome.unflushed().items():
            if path.is_file():
                os.truncate(path, min(path.stat().st_size, size))

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
