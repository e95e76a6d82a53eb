"""A benchmark of several processes: a module of this folder, launched as users launch a training."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
_PREFIX = "result: "


def launched(module: str, *, processes: int, config: str = "ddp") -> Any:
    """Launch `python -m module` on so many processes under one of `accelerate_configs`; what its main process told.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    options = ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", str(processes)]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options, "-m", module],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_PREFIX)]
    return json.loads(line.removeprefix(_PREFIX))


def tell(result: Any) -> None:
    """To be called by the main process, once."""
    sys.stdout.write(f"{_PREFIX}{json.dumps(result)}\n")
