"""Trainings that lose their machine, or their disk, at a chosen deed: `crash_shim.cpp` and the fork server."""

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
class Deed:
    """One line of the shim's log."""

    number: int
    name: str
    size: int
    """Bytes, of a file that is flushed; else -1."""
    path: Path


@dataclass(frozen=True)
class Ended:
    """How a training ended, and what it had done to its files."""

    codes: list[int]
    err: str
    deeds: list[Deed]
    sizes: dict[Path, int]
    """Of the files that were there before."""

    def committed_step(self, struck_at: int) -> int:
        """The newest step whose checkpoint stood in its place before that deed, at which all went wrong."""
        steps = [step for deed in self.deeds if deed.number < struck_at and (step := _commits(deed)) is not None]
        return max(steps, default=0)

    def unflushed(self) -> dict[Path, int]:
        """Files that were written to and not flushed since, and how much of each a lost machine finds again for sure:
        what it held when it was last flushed. The last deed may not have been done."""
        dirty: set[Path] = set()
        flushed = dict(self.sizes)
        for deed in self.deeds[:-1]:
            if deed.name in ("write", "truncate"):
                dirty.add(deed.path)
            elif deed.name == "fsync":
                dirty.discard(deed.path)
                flushed[deed.path] = deed.size
        if self.deeds and self.deeds[-1].name in ("write", "truncate"):
            dirty.add(self.deeds[-1].path)
        return {path: flushed.get(path, 0) for path in dirty}


def _commits(deed: Deed) -> int | None:
    """A whole checkpoint gets its name."""
    if deed.name != "rename":
        return None
    prefix, _, step = deed.path.name.partition("-")
    return int(step) if prefix == "checkpoint" and step.isdigit() else None


class Crashes:
    """Runs the saving worker below `folder`, with or without a crash."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def copy(self, name: str) -> Path:
        """A new folder with what the folder `start` holds."""
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
    ) -> Ended:
        """Train to `steps`, with `env` beside this process's own environment.

        All ranks are lost at the deed number `at` of `rank`, or so many seconds after its first one; with `errno` they
        live and the disk of `rank` fails from that deed on.
        """
        cwd.mkdir(exist_ok=True)
        sizes = {path: path.stat().st_size for path in cwd.rglob("*") if path.is_file()}
        with tempfile.TemporaryDirectory() as folder:
            out, err, log = (Path(folder) / name for name in ("out", "err", "log"))
            crash = {"CRASH_FOLDER": f"{cwd}/", "CRASH_LOG": str(log), "CRASH_AT": str(at), "CRASH_RANK": str(rank)}
            settings = os.environ | (env or {}) | crash | ({"CRASH_ERRNO": str(errno)} if errno else {})
            argv = [str(WORKER), str(steps)]
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
            deeds = [Deed(int(number), name, int(size), Path(path)) for number, name, size, path in parts]
            return Ended(codes, err.read_text(), deeds, sizes)

    @staticmethod
    def lose_unflushed(ended: Ended) -> None:
        """Cut each file that was not flushed back to what it held when it was."""
        for path, size in ended.unflushed().items():
            if path.is_file():
                os.truncate(path, min(path.stat().st_size, size))

    @staticmethod
    def records(cwd: Path) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of every step logged; a line that was cut short is none."""
        return [(r["step"], r["loss"], r["grad_norm"]) for r in read_records(cwd / "out" / "scaling.jsonl")]


@pytest.fixture(scope="session")
def crash_server(tmp_path_factory):
    """A fork server that runs with the shim."""
    shim = tmp_path_factory.mktemp("shim") / "crash_shim.so"
    source = Path(__file__).parent / "crash_shim.cpp"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True, timeout=120)
    server = ForkServer(shim)
    yield server
    server.close()
