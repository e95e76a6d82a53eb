"""Shared by all tests: CPU, no hub, tiny models built on the spot, and real launches on loopback."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", WANDB_MODE="offline", WANDB_SILENT="true")
os.environ["HFSCALE_CLOUD"] = "none"  # no test asks a metadata address, on whatever machine it runs

REPOSITORY = Path(__file__).parent.parent
RECIPE = REPOSITORY / "recipes" / "ddp" / "train.py"
LAUNCH_TIMEOUT_S = 240


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
    """`accelerate launch` with that config and number of processes."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return run_process([*command, "--num_processes", str(processes), *map(str, argv)], cwd, env)


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Finished]:
    """`python("script.py", "--flag")`: one process, in an empty folder."""

    def run(*argv: str | Path, env: dict[str, str] | None = None) -> Finished:
        return run_process([sys.executable, *map(str, argv)], tmp_path, env)

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
