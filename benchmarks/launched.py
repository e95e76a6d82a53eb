"""Runs a benchmark of several processes: a module of this folder, launched as users launch a training."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
_PREFIX = "result: "


def launch_benchmark(
    module: str, *arguments: str, processes: int, config: str = "ddp", supervised: bool = False
) -> Any:
    """Launch `python -m module` on several processes.

    Args:
        module (`str`): The module; its main process calls `send_result` once.
        arguments (`str`): Arguments of the module.
        processes (`int`): Number of processes.
        config (`str`): Name of a file in `accelerate_configs`, without its suffix.
        supervised (`bool`): Whether to launch it under `hfscale run`.

    Returns:
        `Any`: The result that the main process has sent.

    Raises:
        RuntimeError: The module failed; the message has the end of its standard error.
    """
    config_file = f"accelerate_configs/{config}.yaml"
    options = ["--config_file", config_file, "--num_processes", str(processes), "--mixed_precision", "no"]
    supervisor = [sys.executable, "-m", "hfscale", "run", "--max-restarts", "0", "--"] if supervised else []
    done = subprocess.run(
        [*supervisor, sys.executable, "-m", "accelerate.commands.launch", *options, "-m", module, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_PREFIX)]
    return json.loads(line.removeprefix(_PREFIX))


def send_result(result: Any) -> None:
    """Send the result of a benchmark to the process that launched it. Call it once, in the main process."""
    sys.stdout.write(f"{_PREFIX}{json.dumps(result)}\n")
