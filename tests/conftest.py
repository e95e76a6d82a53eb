"""Shared by all tests: CPU, no hub, tiny models built on the spot, and real launches on loopback."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from forking import fork_server

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", WANDB_MODE="offline", WANDB_SILENT="true")
os.environ["HFSCALE_CLOUD"] = "none"  # no test asks a metadata address, on whatever machine it runs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts in the background deaf to it
EXTENSIONS = Path(sys.prefix, "torch_extensions")  # DeepSpeed's operators, of build_extensions.py
os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)

REPOSITORY = Path(__file__).parent.parent
RECIPE = REPOSITORY / "recipes" / "ddp" / "train.py"
LAUNCH_TIMEOUT_S = 240
LOAD_TIMEOUT_S = 60
"""No load of an extension that is built takes so long."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    out: str
    err: str

    def lines(self, start: str) -> list[str]:
        """The lines of standard error that begin with `start`."""
        return [line for line in self.err.replace("\r", "\n").splitlines() if line.startswith(start)]


def run_process(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> Finished:
    """Run `argv` to its end, within the time limit."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(
        argv, cwd=cwd, env=clean | (env or {}), capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def accelerate_launch(cwd: Path, config: Path, processes: int, *argv: str | Path, **env: str) -> Finished:
    """`accelerate launch` with that config and number of processes, its ranks forked from one that has the libraries.

    With HFSCALE_TEST_LAUNCH=agent in the environment it is the command itself with torch's elastic agent, as users run
    it: `make test-faults` does so, and it takes some ten seconds more for each launch.
    """
    if os.environ.get("HFSCALE_TEST_LAUNCH") == "agent":
        return agent_launch(cwd, config, processes, *argv, **env)
    command = ["--config_file", str(config), "--num_processes", str(processes), *map(str, argv)]
    return run_forked("launch", command, cwd, env)


def agent_launch(cwd: Path, config: Path, processes: int, *argv: str | Path, **env: str) -> Finished:
    """The command itself, with torch's elastic agent."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return run_process([*command, "--num_processes", str(processes), *map(str, argv)], cwd, env)


def run_forked(kind: str, argv: list[str], cwd: Path, env: dict[str, str], ranks: int = 1) -> Finished:
    """As `run_process`, by the fork server. A launch's code is the launcher's, else that of the first failed rank."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = fork_server().start(kind, argv, cwd=cwd, env=clean | env, out=out, err=err, ranks=ranks)
        codes = fork_server().wait(job, LAUNCH_TIMEOUT_S)
        return Finished(next((code for code in codes if code), 0), out.read_text(), err.read_text())


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Finished]:
    """`python("script.py", "--flag")`: one process, in an empty folder."""

    def run(*argv: str | Path, env: dict[str, str] | None = None) -> Finished:
        return run_forked("script", list(map(str, argv)), tmp_path, env or {})

    return run


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Finished]:
    """`launch(2, "script.py", "--flag")`: that many processes under `accelerate launch`, in an empty folder."""

    def run(
        processes: int, *argv: str | Path, config: Path | None = None, env: dict[str, str] | None = None
    ) -> Finished:
        config = config or REPOSITORY / "accelerate_configs" / "ddp.yaml"
        return accelerate_launch(tmp_path, config, processes, *argv, **(env or {}))

    return run


def pytest_configure(config: pytest.Config) -> None:
    """A suite that was ended midway may have left torch's lock behind, for which every later load would wait."""
    if not hasattr(config, "workerinput"):
        for lock in EXTENSIONS.glob("*/lock"):
            if time.time() - lock.stat().st_mtime > LOAD_TIMEOUT_S:
                lock.unlink()


LONG_FILES = (
    "test_strategies.py",
    "test_reshape.py",
    "test_recipe_ddp.py",
    "test_recipe_sharded.py",
    "test_crash_points.py",
    "test_checkpoint_writer.py",
    "test_parallel.py",
    "test_planner_emit.py",
    "test_lr_scaling_callback.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes come first, so that two workers end together and not one long after the other."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
