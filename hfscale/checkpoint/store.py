"""The checkpoints of a run's output directory: commit, verify, find the newest good one, rotate."""

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hfscale.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest, record_files
from hfscale.errors import CheckpointError
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

UNFINISHED = ".unfinished"
"""Folder in the output directory, on the same file system: what is being written, fetched or deleted. Nobody looks for
checkpoints there, and the next launch clears it."""
VISIBLE_WITHIN_S = 75.0
"""How long another machine may not see a new file: NFS keeps what it knows of a folder for up to 60 s (nfs(5),
acdirmax), and clocks and servers take their time."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = re.compile(r"\.\w+\.jsonl?\.\d+-\d+\.tmp")


def commit(checkpoint: Path, *, step: int, strategy: str, world_size: int, global_batch_size: int) -> Manifest:
    """Make `checkpoint` durable and valid: flush its files to the disk, then write the manifest.

    Call it on one process, after every process has written its files.

    Raises:
        OSError: the disk is full or read-only; the checkpoint then stays uncommitted.
    """
    manifest = Manifest(
        step=step,
        strategy=strategy,
        world_size=world_size,
        global_batch_size=global_batch_size,
        files=record_files(checkpoint),
    )
    for name in manifest.files:
        flush(checkpoint / name)
    flush(checkpoint)
    write_atomically(checkpoint / MANIFEST_NAME, manifest.to_json())
    flush(checkpoint.parent)
    return manifest


def verify(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Read every file of `checkpoint` and compare it with the manifest, which is returned when all is well.

    Raises:
        CheckpointError: naming the first file that is missing, of another length or of other content; or the folder is
            named for another step.
    """
    checkpoint = Path(checkpoint)
    manifest = read_manifest(checkpoint)
    named = _CHECKPOINT.fullmatch(checkpoint.name)
    if named is not None and int(named[1]) != manifest.step:
        raise CheckpointError(f"{checkpoint} is corrupt: its manifest is that of step {manifest.step}")
    for name, expected in manifest.files.items():
        path = checkpoint / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{checkpoint} is corrupt: {name} is missing")
        length = path.stat().st_size
        if length != expected.bytes:
            raise CheckpointError(f"{checkpoint} is corrupt: {name} has {length} bytes, not {expected.bytes}")
        if FileRecord.of(path) != expected:
            raise CheckpointError(f"{checkpoint} is corrupt: the content of {name} has changed")
    return manifest


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of `output_dir` whose every file matches its manifest, or None.

    Reads the whole of each candidate, newest first; why one was passed over is logged.
    """
    for checkpoint in reversed(list_checkpoints(output_dir)):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
            continue
        return str(checkpoint)
    return None


def is_visible(path: Path, within_s: float = VISIBLE_WITHIN_S) -> bool:
    """Whether a file that another machine has just made is there, asked again and again for so many seconds."""
    deadline = time.monotonic() + within_s
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        if path.parent.is_dir():
            list(path.parent.iterdir())  # has a network file system look again
        time.sleep(0.2)
    return True


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Every folder `checkpoint-N` of `output_dir`, whatever its condition, by rising N; [] where it does not exist."""
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """The N of `checkpoint-N`."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is not named checkpoint-N")
    return int(match[1])


def archive(output_dir: str | os.PathLike[str], *, after_step: int) -> list[Path]:
    """Rename checkpoints of later steps than `after_step` to `checkpoint-N.superseded`; returns the new paths.

    A run that begins at `after_step` will write those steps anew. Left in place, they would pass for its own at the
    next relaunch, or be overwritten half.
    """
    moved = []
    for checkpoint in list_checkpoints(output_dir):
        if checkpoint_step(checkpoint) <= after_step:
            continue
        target = checkpoint.with_name(f"{checkpoint.name}.superseded")
        number = 2
        while target.exists():
            target = checkpoint.with_name(f"{checkpoint.name}.superseded-{number}")
            number += 1
        moved.append(checkpoint.rename(target))
    return moved


def rotate(output_dir: str | os.PathLike[str], *, limit: int, keep: Path | None = None) -> list[Path]:
    """Delete the oldest committed checkpoints beyond `limit`; returns those deleted.

    Only committed checkpoints count, so an unfinished one never costs a good one its place; and each leaves its place
    in one piece before it is deleted, so that a deletion cut short leaves no part of it there. `keep` (the best one,
    say) stays beside the newest `limit`.
    """
    committed = [path for path in list_checkpoints(output_dir) if (path / MANIFEST_NAME).is_file()]
    to_delete = list(_beyond(committed, limit, keep))
    for checkpoint in to_delete:
        condemned = checkpoint.parent / UNFINISHED / f"{checkpoint.name}.deleted"
        condemned.parent.mkdir(exist_ok=True)
        shutil.rmtree(condemned, ignore_errors=True)
        checkpoint.rename(condemned)
        shutil.rmtree(condemned)
    return to_delete


def _beyond(committed: list[Path], limit: int, keep: Path | None) -> Iterator[Path]:
    for checkpoint in committed[: max(len(committed) - max(limit, 1), 0)]:
        if keep is None or checkpoint.resolve() != keep.resolve():
            yield checkpoint


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a crash, finds the old content or the new, never a part."""
    # The thread, too: a save beside the training writes the status as the training does.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def remove_temporaries(folder: Path) -> None:
    """Delete what `write_atomically` leaves in `folder` when its process is killed."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """fsync a file or a folder: what it holds reaches the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
