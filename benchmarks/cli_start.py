"""Measures the time of `hfscale --help`, of an interpreter that does nothing, and of one that imports torch."""

import statistics
import subprocess
import sys
import time
from typing import Any

ROUNDS = 9
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "hfscale --help": ["-m", "hfscale", "--help"],
    "hfscale configs list": ["-m", "hfscale", "configs", "list"],
    "python -c 'import torch'": ["-c", "import torch"],
}


def measure() -> dict[str, Any]:
    """Run the commands in turn; the summary has medians in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, argv in COMMANDS.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, *argv], check=True, capture_output=True)
            times[name].append(time.perf_counter() - begun)
    return {"summary": {name: round(statistics.median(each) * 1e3) for name, each in times.items()}}
