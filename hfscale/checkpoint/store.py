"""The files of a run's output directory: its checkpoints and its status. This module imports no torch.

It commits, verifies, lists, inspects, archives and rotates checkpoints, and reads and writes `hfscale_status.json`.
How a checkpoint gets here while training runs is described in `hfscale.checkpoint.writer`; which one a run resumes
from, `hfscale.checkpoint.resume` decides.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hfscale.checkpoint.best import STATE_NAME, best_step_of
from hfscale.checkpoint.manifest import (
    FileRecord,
    Identity,
    Manifest,
    checkpoint_files,
    read_manifest,
    record_files,
)
from hfscale.checkpoint.untrusted import check_links, check_no_link
from hfscale.core.best_effort import best_effort
from hfscale.core.durable_files import flush, flush_folders, write_atomically
from hfscale.core.logging import get_logger
from hfscale.core.records import read_status as read_status
from hfscale.core.redaction import redact
from hfscale.core.run_files import MANIFEST_NAME, UNFINISHED
from hfscale.core.run_files import STATUS_NAME as STATUS_NAME
from hfscale.core.run_memory import RunMemory
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError, UsageError

logger = get_logger(__name__)

VISIBILITY_TIMEOUT_S = 75.0
"""How long a new file may be invisible to another machine: NFS caches the attributes of a folder for up to 60 s
(nfs(5), acdirmax); the rest allows for slow servers and clocks that differ."""
STATUSES = ("running", "completed", "preempted", "failed")
LAST_CHECKPOINT = "last-checkpoint"
"""The folder that `hub_strategy="checkpoint"` uploads."""
GOOD = "good"
INCOMPLETE = "incomplete"
CORRUPT = "corrupt"
ARCHIVED = "superseded"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
"""Name of a checkpoint's folder; the group is its step."""
DELETING = "deleting old checkpoints"
"""Name of this work in warnings and in the report."""
SUPERSEDED = ".superseded"
"""Suffix of the folder of an archived checkpoint."""
_ARCHIVE_NAME = re.compile(r"checkpoint-(\d+)\.superseded")


# ---- Committing and verifying


def commit(
    checkpoint: Path,
    *,
    step: int,
    strategy: str,
    world_size: int,
    global_batch_size: int,
    identity: Identity | None = None,
) -> Manifest:
    """Make the content of `checkpoint` durable and valid: flush its files to the disk, then write the manifest.

    Call it on one process, after every process has written its files. The folder that contains it is not flushed.

    Args:
        checkpoint (`Path`): the folder with the files.
        step (`int`): optimizer steps taken.
        strategy (`str`): strategy under which the files were written.
        world_size (`int`): processes that wrote the files.
        global_batch_size (`int`): sequences per optimizer step.
        identity (`Identity`, *optional*): what is trained.

    Returns:
        `Manifest`: the manifest that was written.

    Raises:
        OSError: the disk is full or read-only; the checkpoint then stays uncommitted.
    """
    manifest = Manifest(
        step=step,
        strategy=strategy,
        world_size=world_size,
        global_batch_size=global_batch_size,
        identity=identity,
        files=record_files(checkpoint),
    )
    for name in manifest.files:
        flush(checkpoint / name)
    flush_folders(checkpoint)
    write_atomically(checkpoint / MANIFEST_NAME, manifest.to_json())
    return manifest


def update_manifest(checkpoint: Path) -> None:
    """Record the files that were added, changed or removed since the commit, for example by a callback in `on_save`.

    Args:
        checkpoint (`Path`): a committed checkpoint, to which nobody writes.
    """
    manifest = read_manifest(checkpoint)
    written_at = (checkpoint / MANIFEST_NAME).stat().st_mtime_ns
    files = {}
    for name in checkpoint_files(checkpoint):
        stat = (checkpoint / name).stat()
        record = manifest.files.get(name)
        if record is None or record.bytes != stat.st_size or stat.st_mtime_ns >= written_at:
            flush(checkpoint / name)
            record = FileRecord.of(checkpoint / name)
        files[name] = record
    if files != manifest.files:
        flush_folders(checkpoint)
        write_atomically(checkpoint / MANIFEST_NAME, replace(manifest, files=files).to_json())


def verify(checkpoint: str | os.PathLike[str], *, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Read every file of `checkpoint` and compare it with the manifest.

    Args:
        checkpoint (`str` or `Path`): the folder of the checkpoint.
        share (`tuple[int, int]`): the number of this reader and how many readers there are, of which each reads a
            part of the files (`Manifest.share`); by default there is one.

    Returns:
        `Manifest`: the manifest, if all files match it.

    Raises:
        CheckpointError: the manifest is missing or invalid, a file is missing or has another length or content (the
            message names the first one), a file or folder is a symbolic link, also one that the manifest does not
            list, or the folder's name has another step than the manifest.
    """
    checkpoint = Path(checkpoint)
    manifest = _read_matching_manifest(checkpoint)
    if share[0] == 0:
        check_links(checkpoint)
    for name in manifest.share(*share):
        expected = manifest.files[name]
        _check_length(checkpoint, name, expected)
        if FileRecord.of(checkpoint / name) != expected:
            raise CheckpointError(f"{checkpoint} is corrupt: the content of {name} has changed")
    return manifest


def check_files(checkpoint: Path) -> Manifest:
    """Check, as `verify` does, what can be checked without reading the files: which there are, and their lengths.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.

    Returns:
        `Manifest`: the manifest.

    Raises:
        CheckpointError: as `verify`.
    """
    manifest = _read_matching_manifest(checkpoint)
    check_links(checkpoint)
    for name, expected in manifest.files.items():
        _check_length(checkpoint, name, expected)
    return manifest


def _read_matching_manifest(checkpoint: Path) -> Manifest:
    manifest = read_manifest(checkpoint)
    named = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if named is not None and int(named[1]) != manifest.step:
        raise CheckpointError(f"{checkpoint} is corrupt: its manifest is for step {manifest.step}")
    return manifest


def _check_length(checkpoint: Path, name: str, expected: FileRecord) -> None:
    path = checkpoint / name
    check_no_link(checkpoint, name)
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} is corrupt: {name} is missing")
    length = path.stat().st_size
    if length != expected.bytes:
        raise CheckpointError(
            f"{checkpoint} is corrupt: {name} has {length} bytes, not {expected.bytes}"
        )


# ---- Finding


def wait_until_visible(path: Path, timeout_s: float = VISIBILITY_TIMEOUT_S) -> bool:
    """Wait for a file that another machine has just created on a shared file system.

    Args:
        path (`Path`): the file.
        timeout_s (`float`): longest time to wait, in seconds.

    Returns:
        `bool`: whether the file appeared in time.
    """
    deadline = time.monotonic() + timeout_s
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        if path.parent.is_dir():
            list(path.parent.iterdir())  # makes a network file system refresh its cache
        time.sleep(0.2)
    return True


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """List every folder `checkpoint-N` of `output_dir` in any state, in ascending order of N; [] if there is none.

    One that is still being written is left out.
    """
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    found = [
        path for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()
    ]
    return sorted((path for path in found if not is_link_to_unfinished(path)), key=checkpoint_step)


def list_with_snapshots(output_dir: str | os.PathLike[str]) -> list[Path]:
    """List what a run can resume from, in ascending order of the step: its checkpoints, and under `hfscale run` its
    snapshots in host memory too, after a checkpoint of the same step.

    Args:
        output_dir (`str`): output directory of the run.
    """
    memory = RunMemory.of_environment()
    snapshots = list_checkpoints(memory.snapshots(output_dir)) if memory is not None else []
    return sorted([*list_checkpoints(output_dir), *snapshots], key=checkpoint_step)


def name_last_checkpoint(output_dir: Path) -> None:
    """Give the folder `last-checkpoint` the name by which a checkpoint is found, `checkpoint-N`.

    `hub_strategy="checkpoint"` uploads the newest checkpoint under that name, so it is there after a download of the
    repository; and Trainer moves the local folder to it during an upload, which a killed process does not undo. It
    stays where a checkpoint of its step is there already.

    Args:
        output_dir (`Path`): output directory of the run.

    Raises:
        OSError: it cannot be renamed.
    """
    last = output_dir / LAST_CHECKPOINT
    try:
        step = int(read_json(last / STATE_NAME)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        logger.warning("%s is no complete checkpoint, and is left alone", last)
        return
    named = output_dir / f"checkpoint-{step}"
    if named.exists():
        return
    last.rename(named)
    logger.info("%s is renamed to %s, so that the run finds it", last, named.name)


def is_link_to_unfinished(path: Path) -> bool:
    """Return whether `path` is the link to a checkpoint that is being written, also if that one no longer exists."""
    return path.is_symlink() and path.readlink().parent == Path(UNFINISHED)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the N of `checkpoint-N`.

    Raises:
        CheckpointError: the folder has another name.
    """
    match = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is not named checkpoint-N")
    return int(match[1])


# ---- Archiving and deleting


def archive(
    output_dir: str | os.PathLike[str], *, after_step: int, limit: int | None = None
) -> list[Path]:
    """Rename the checkpoints of later steps than `after_step` to `checkpoint-N.superseded`.

    A run that starts at `after_step` will write those steps again. If the old checkpoints stayed, the next relaunch
    would take them for this run's own, or a crash could leave one half overwritten. One archive is kept of each step,
    the last one.

    Args:
        output_dir (`str`): output directory of the run.
        after_step (`int`): optimizer step at which the run starts; its checkpoint and earlier ones are not renamed.
        limit (`int`, *optional*): number of archives to keep, those of the latest steps, and in any case those that
            this call makes; None: all.

    Returns:
        `list[Path]`: the new paths, in ascending order of N.
    """
    moved: list[Path] = []
    # A crash must not leave the newest, which would be used
    for checkpoint in reversed(list_checkpoints(output_dir)):
        if checkpoint_step(checkpoint) > after_step:
            target = checkpoint.with_name(f"{checkpoint.name}{SUPERSEDED}")
            if target.exists():
                _delete(target)
            moved.append(checkpoint.rename(target))
    moved.reverse()
    if moved:
        flush(Path(output_dir))
    archives = list_archives(output_dir)
    for path in archives[: -limit if limit is not None else 0]:
        if path not in moved:
            _try_to_delete(path)
    return moved


def list_archives(output_dir: str | os.PathLike[str]) -> list[Path]:
    """List every folder `checkpoint-N.superseded` of `output_dir`, in ascending order of N."""
    found = [
        path
        for path in Path(output_dir).glob(f"checkpoint-*{SUPERSEDED}")
        if _ARCHIVE_NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: checkpoint_step(path.with_suffix("")))


def rotate(
    output_dir: str | os.PathLike[str],
    *,
    limit: int | None,
    keep: Path | None = None,
    temporary: Collection[int] = (),
) -> list[Path]:
    """Delete the oldest checkpoints beyond `limit`, as Trainer does (see `excess_steps`).

    A checkpoint is moved to `.unfinished` in one rename before its files are deleted, so an interrupted deletion
    leaves no partial checkpoint. One that cannot be deleted is left, and a warning says so.

    Args:
        output_dir (`str`): output directory of the run.
        limit (`int`, *optional*): checkpoints to keep, at least 1; None: all that are not temporary.
        keep (`Path`, *optional*): the best checkpoint.
        temporary (`Collection[int]`): the steps of the temporary checkpoints.

    Returns:
        `list[Path]`: the former paths of the deleted checkpoints.
    """
    checkpoints = {checkpoint_step(path): path for path in list_checkpoints(output_dir)}
    best = next(
        (step for step, path in checkpoints.items() if keep and path.resolve() == keep.resolve()),
        None,
    )
    incomplete = [
        step for step, path in checkpoints.items() if not (path / MANIFEST_NAME).is_file()
    ]
    steps = excess_steps(
        list(checkpoints), limit=limit, best=best, temporary=temporary, incomplete=incomplete
    )
    for step in steps:
        _try_to_delete(checkpoints[step])
    return [checkpoints[step] for step in steps if not checkpoints[step].exists()]


def excess_steps(
    steps: list[int],
    *,
    limit: int | None,
    best: int | None = None,
    temporary: Collection[int] = (),
    incomplete: Collection[int] = (),
) -> list[int]:
    """Return the steps of the checkpoints that rotation deletes.

    The newest complete checkpoint and the best one are never deleted, and they count, as in transformers'
    `rotate_checkpoints`. Incomplete ones are deleted first, but not those that are newer than every complete one. A
    temporary checkpoint does not count, and it is deleted when there is a newer one, unless it is the best.

    Args:
        steps (`list[int]`): the steps of all checkpoints, in ascending order.
        limit (`int`, *optional*): checkpoints to keep, at least 1; None: all that are not temporary.
        best (`int`, *optional*): the step of the best checkpoint.
        temporary (`Collection[int]`): the steps of the temporary ones.
        incomplete (`Collection[int]`): the steps of those without a manifest.
    """
    complete = [step for step in steps if step not in incomplete]
    if not complete:
        return []
    newest = complete[-1]
    obsolete = [step for step in steps if step in temporary and step < newest and step != best]
    if limit is None:
        return obsolete
    counted = [step for step in steps if step <= newest and (step not in temporary or step == best)]
    kept = {step for step in counted if step == best} | set(
        [step for step in counted if step in complete][-1:]
    )
    deletable = sorted(set(counted) - kept, key=lambda step: (step in complete, step))
    return sorted(obsolete + deletable[: max(len(counted) - limit, 0)])


def keep_only(output_dir: str | os.PathLike[str], checkpoint: Path) -> None:
    """Delete every other checkpoint, as Trainer does at the end if `save_total_limit` is 1 and there is a best one.

    Args:
        output_dir (`str`): output directory of the run.
        checkpoint (`Path`): the best checkpoint; if it does not exist, nothing is deleted.
    """
    if checkpoint.is_dir():
        for other in list_checkpoints(output_dir):
            if not other.samefile(checkpoint):
                _try_to_delete(other)


def delete_newest(
    output_dir: str | os.PathLike[str], *, temporary: Collection[int], best: Path | None
) -> None:
    """Delete the newest checkpoint at the end of a run if it is temporary, not the best and not the only one.

    Args:
        output_dir (`str`): output directory of the run.
        temporary (`Collection[int]`): the steps of the temporary checkpoints.
        best (`Path`, *optional*): the best checkpoint.
    """
    checkpoints = list_checkpoints(output_dir)
    if len(checkpoints) < 2 or checkpoint_step(checkpoints[-1]) not in temporary:
        return
    if best is None or checkpoints[-1].resolve() != best.resolve():
        _try_to_delete(checkpoints[-1])


def _try_to_delete(checkpoint: Path) -> None:
    with best_effort(DELETING, checkpoint.parent):
        _delete(checkpoint)


def _delete(checkpoint: Path) -> None:
    moved = checkpoint.parent / UNFINISHED / f"{checkpoint.name}.deleted"
    moved.parent.mkdir(exist_ok=True)
    shutil.rmtree(moved, ignore_errors=True)
    checkpoint.rename(moved)
    shutil.rmtree(moved)


# ---- Inspecting


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Description of one checkpoint; an unknown value is None."""

    name: str
    """Name of its folder."""
    path: str
    """Path of its folder."""
    state: str
    """`good` (every file matches the manifest), `incomplete` (no manifest, or the model alone), `corrupt`, or
    `superseded`: a launch that
    started at an earlier step has archived it, and none resumes from it."""
    reason: str | None
    """Why it is not good; None if it is good."""
    step: int | None
    """Optimizer steps taken, from the manifest or else from the folder's name."""
    strategy: str | None
    """Strategy under which it was written."""
    world_size: int | None
    """Number of processes that wrote it."""
    global_batch_size: int | None
    """Sequences per optimizer step of the run."""
    bytes: int
    """Total length of its files."""
    age_s: float
    """Seconds since the newest file was written."""
    best: bool
    """Whether the run's newest `trainer_state.json` names it as the best checkpoint."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary for JSON."""
        return asdict(self)


def inspect(path: Path, *, read_files: bool = True, archives: bool = False) -> list[CheckpointInfo]:
    """Describe the checkpoint at `path`, or all checkpoints of the run at `path`, in ascending order of step.

    Args:
        path (`Path`): a checkpoint or the output directory of a run.
        read_files (`bool`): compare the content of every file with its hash; if False, compare only its length.
        archives (`bool`): describe also the archived checkpoints of the run, after the others; they are not read.

    Returns:
        `list[CheckpointInfo]`: one description per checkpoint; empty if the run has none.

    Raises:
        UsageError: `path` is not a folder.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: name a run's output directory or one checkpoint")
    found = [path] if is_checkpoint(path) else list_checkpoints(path)
    best = _best_name(found)
    found += list_archives(path) if archives else []
    return [_inspect(checkpoint, best, read_files) for checkpoint in found]


def is_checkpoint(path: Path) -> bool:
    """Return whether the folder is one checkpoint, and not an output directory with several."""
    return (path / MANIFEST_NAME).is_file() or (
        (path / "trainer_state.json").is_file() and not list_checkpoints(path)
    )


def _best_name(checkpoints: list[Path]) -> str | None:
    newest = next((each for each in reversed(checkpoints) if (each / STATE_NAME).is_file()), None)
    step = best_step_of(newest) if newest is not None else None
    return f"checkpoint-{step}" if step is not None else None


def _inspect(checkpoint: Path, best: str | None, read_files: bool) -> CheckpointInfo:
    manifest, state, reason = _state_of(checkpoint, read_files)
    stats = [(checkpoint / name).stat() for name in checkpoint_files(checkpoint)]
    newest = max(stat.st_mtime for stat in stats or [checkpoint.stat()])
    named = checkpoint.name.removesuffix(SUPERSEDED).rpartition("-")[2]
    step = int(named) if named.isdecimal() else None
    return CheckpointInfo(
        name=checkpoint.name,
        path=str(checkpoint),
        state=state,
        reason=reason,
        step=manifest.step if manifest else step,
        strategy=manifest.strategy if manifest else None,
        world_size=manifest.world_size if manifest else None,
        global_batch_size=manifest.global_batch_size if manifest else None,
        bytes=sum(stat.st_size for stat in stats),
        age_s=round(max(0.0, time.time() - newest), 1),
        best=checkpoint.name == best,
    )


def _state_of(checkpoint: Path, read_files: bool) -> tuple[Manifest | None, str, str | None]:
    if _ARCHIVE_NAME.fullmatch(checkpoint.name):
        reason = (
            "archived by a launch that started at an earlier step; "
            f"to use it again, remove {SUPERSEDED} from its name"
        )
        return _manifest_or_none(checkpoint), ARCHIVED, reason
    if not (checkpoint / MANIFEST_NAME).is_file():
        return None, INCOMPLETE, f"it has no {MANIFEST_NAME}"
    manifest = None
    try:
        manifest = read_manifest(checkpoint)
        if read_files:
            verify(checkpoint)
        else:
            _compare_lengths(checkpoint, manifest)
    except CheckpointError as error:
        return manifest, CORRUPT, str(error).removeprefix(f"{checkpoint} is corrupt: ")
    model_only = manifest.why_model_only()
    if model_only is not None:
        return manifest, INCOMPLETE, model_only
    return manifest, GOOD, None


def _manifest_or_none(checkpoint: Path) -> Manifest | None:
    try:
        return read_manifest(checkpoint)
    except CheckpointError:
        return None


def _compare_lengths(checkpoint: Path, manifest: Manifest) -> None:
    check_links(checkpoint)
    for name, record in manifest.files.items():
        path = checkpoint / name
        length = path.stat().st_size if path.is_file() else None
        if length != record.bytes:
            raise CheckpointError(
                f"{name} " + ("is missing" if length is None else f"has {length} bytes")
            )


# ---- The status of the run


def write_status(
    output_dir: Path, status: str, *, step: int, checkpoint: str | None, reason: str | None
) -> None:
    """Write `hfscale_status.json`, from which schedulers and people see the state of a run.

    Call it on one process per run.

    Args:
        output_dir (`Path`): output directory of the run.
        status (`str`): one of `STATUSES`.
        step (`int`): optimizer steps taken.
        checkpoint (`str`, *optional*): name of the newest committed checkpoint, `checkpoint-N`.
        reason (`str`, *optional*): why the run ended; secrets in it are redacted.
    """
    reason = redact(reason) if reason is not None else None
    fields = {"status": status, "step": step, "checkpoint": checkpoint, "reason": reason}
    write_atomically(output_dir / STATUS_NAME, json.dumps(fields) + "\n")
