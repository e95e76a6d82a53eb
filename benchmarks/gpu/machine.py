"""What a result says of the machine: `python -m benchmarks.gpu.machine` prints it as JSON.

It runs in a process of its own, because the question opens a CUDA context, which takes memory of the card.
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
from typing import Any

from benchmarks.gpu.settings import REPOSITORY, TIMES_SLOWER, TINY
from hfscale.facts.hardware import match_device_name

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "datasets",
    "liger-kernel",
    "torchao",
    "bitsandbytes",
    "deepspeed",
    "triton",
    "nvidia-ml-py",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a measurement depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, str]:
    """Return the commit that runs; nothing where the tree is a copy without git."""
    found = _output("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=8")
    if not found:
        return {}
    return {"commit": found}


def cards() -> dict[str, Any]:
    """Return the GPUs of this machine; none with tiny shapes."""
    import torch

    if TINY or not torch.cuda.is_available():
        return {"gpus": 0}
    name = torch.cuda.get_device_name()
    found = {"gpu": name, "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    driver = _output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0")
    if driver:
        found["driver"], _, found["power_limit"] = driver.partition(", ")
    accelerator = match_device_name(name)
    if accelerator is not None:
        found["accelerator"] = accelerator.name
    return found


def _output(*command: str) -> str:
    """Return what a command prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def ask() -> dict[str, Any]:
    """Ask a process of its own for `machine`, `versions` and `commit` of a result.

    Raises:
        RuntimeError: The process failed, for example because torch is not installed.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120 * TIMES_SLOWER, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{sys.executable} cannot run the measurements: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps({"machine": cards(), "versions": versions(), **commit()}))
