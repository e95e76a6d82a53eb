"""Keeps the counts of a long campaign of faults in a result file like those of `benchmarks/results/`.

The environment variable HFSCALE_RESULTS is the path of the file; without it nothing is written. The file is written
again after each trial, so it has the counts of a campaign that was ended early. An example:

    HFSCALE_RESULTS=benchmarks/results/sigterm_trials.json HFSCALE_TRIALS=1000 HFSCALE_RESUME_EVERY=1 \\
        python -m pytest -m faults tests/faults/test_preemption_trials.py -k "any_moment and zero3"
"""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def keep_result(strategy: str, summary: dict[str, Any]) -> None:
    """Write the counts of one strategy so far; those of other strategies stay in the file."""
    if name := os.environ.get("HFSCALE_RESULTS"):
        path = Path(name)
        summaries = json.loads(path.read_text())["summary"] if path.is_file() else {}
        text = json.dumps({"machine": machine(), "summary": summaries | {strategy: summary}}, indent=1) + "\n"
        path.write_text(text)


def machine() -> dict[str, str]:
    """Return on what a campaign ran, and when."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"cpu, {os.cpu_count()} cores, other work beside it",
    }
