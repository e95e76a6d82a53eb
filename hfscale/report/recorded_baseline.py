"""Adds what a sweep has measured to the file of baselines."""

import json
from dataclasses import asdict
from pathlib import Path

from hfscale.core.durable_files import write_atomically
from hfscale.errors import StorageError
from hfscale.metrics.baseline import FORMAT, Baseline, read_baselines


def record_baseline(path: Path, baseline: Baseline) -> None:
    """Add a baseline to a file, and replace an earlier one of the same work on the same number of GPUs.

    Args:
        path (`Path`): the file; it is created if it does not exist.
        baseline (`Baseline`): the measured speed.

    Raises:
        ConfigFileError: the file exists, and is not a file that `hfscale sweep` writes.
        StorageError: the file cannot be written.
    """
    rows = read_baselines(path) if path.exists() else []
    key = (baseline.workload, baseline.world_size)
    kept = [row for row in rows if (row.workload, row.world_size) != key]
    content = {"format": FORMAT, "baselines": [asdict(row) for row in [*kept, baseline]]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise StorageError(
            f"baseline {path} cannot be written: {error.strerror}; give another file with --baseline"
        ) from None
