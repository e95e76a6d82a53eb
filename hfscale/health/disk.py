"""Is there room for two checkpoints, and is a save done before a preempted machine is gone?"""

import os
import shutil
import tempfile
import time
from pathlib import Path

from hfscale.errors import StorageError
from hfscale.utils.findings import Finding

PROBE_BYTES = 64 * 2**20
"""Written and flushed to measure the disk: enough to leave the caches of most, short enough for every start."""
BYTES_PER_TRAINED_PARAMETER = 8
"""AdamW keeps two fp32 moments per trained parameter (Kingma & Ba, 2015; torch.optim.AdamW's state)."""
DEFAULT_NOTICE_S = 30.0
"""GCP and Azure give 30 s before they take a spot machine, AWS 120 s (their spot documentation)."""


def write_speed(folder: Path, probe_bytes: int = PROBE_BYTES) -> float:
    """Bytes per second of one file written and flushed in `folder`, which is made if it is not there.

    Raises:
        StorageError: nothing can be written there.
    """
    block = os.urandom(2**20)  # so that no compressing file system makes it look fast
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as file:  # without a name: a process that is killed leaves nothing
            for _ in range(probe_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return probe_bytes / (time.perf_counter() - begun)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}: make room, or name another") from None


def largest_checkpoint_bytes(output_dir: Path) -> int | None:
    """Size of the largest `checkpoint-N` in a run's folder, None where there is none."""
    sizes = [
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
        for folder in output_dir.glob("checkpoint-*")
        if folder.is_dir()
    ]
    return max(sizes, default=None)


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or would be made."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def judge(
    folder: Path, *, checkpoint_bytes: int | None, bytes_per_s: float | None, notice_s: float, host: str | None = None
) -> list[Finding]:
    """Room for two checkpoints (the new one is whole before the old one goes), and the time of a save."""
    free, found = free_bytes(folder), []
    if checkpoint_bytes is None:
        text = f"{free / 2**30:.1f} GiB are free in {folder}; the size of a checkpoint is not known (--checkpoint-gib)"
        return [Finding(level="note", check="disk", problem=text, host=host)]
    if free < 2 * checkpoint_bytes:
        needed_gib = 2 * checkpoint_bytes / 2**30
        text = (
            f"{free / 2**30:.1f} GiB are free in {folder} and two checkpoints need {needed_gib:.1f}: "
            "the old one goes only when the new one is whole; make room or name another folder"
        )
        found.append(Finding(level="error", check="disk", problem=text, host=host))
    if bytes_per_s is not None:
        save_s = checkpoint_bytes / bytes_per_s
        if save_s > notice_s:
            text = (
                f"a save takes {save_s:.0f} s, the notice is {notice_s:.0f} s ({checkpoint_bytes / 2**30:.1f} GiB at "
                f"{bytes_per_s / 1e6:.0f} MB/s in {folder}): a preempted machine loses what came after the last save; "
                "save more often, or to faster storage"
            )
            found.append(Finding(level="warning", check="disk", problem=text, host=host))
    return found
