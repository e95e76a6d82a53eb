"""A benchmark of several processes: a module of this folder, launched as users launch a training."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
_PREFIX = "result: "


def launched(module: str, *, processes: int) -> Any:
    """Launch `python -m module` on so many processes under DDP's config, and return what its main process told.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    config = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", str(processes)]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *config, "-m", module],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_PREFIX)]
    return json.loads(line.removeprefix(_PREFIX))


def tell(result: Any) -> None:
    """To be called by the main process, once."""
    sys.stdout.write(f"{_PREFIX}{json.dumps(result)}\n")
