"""Writes checkpoints, in the background or in the calling thread, and commits each with one rename.

A checkpoint is written in `.unfinished/checkpoint-N` of the output directory, where neither Trainer nor any other
program looks for checkpoints. When every rank has written and flushed its files, one rank writes the manifest and
renames the folder to `checkpoint-N`. So a `checkpoint-N` is complete, or it does not exist.

The on-disk protocol
--------------------

Files in the output directory:

    checkpoint-N/                      a committed checkpoint, with its hfscale_manifest.json
    checkpoint-N.superseded/           a committed checkpoint that a run which restarted before step N has archived
    .unfinished/checkpoint-N/          a checkpoint that is being written; with a manifest: complete, not yet renamed
    .unfinished/replaced-checkpoint-N/ the earlier save of step N while a second save of that step replaces it
    checkpoint-N -> .unfinished/checkpoint-N   a link, while a subclass's own saving methods run (`open_to_subclass`)
    .unfinished/checkpoint-N.deleted/  a checkpoint that rotation is deleting
    .unfinished/{upload,download}/     remote copies in transfer (hfscale.checkpoint.remote)
    .hfscale_lock                      held by the run (hfscale.checkpoint.lock)
    .NAME.PID-THREAD.tmp               temporary files of `write_atomically`

A Trainer subclass with a `_save_checkpoint` of its own may write into `checkpoint-N` itself, before or after it calls
Trainer's method, and on any rank. So while its methods run, `checkpoint-N` is a link to `.unfinished/checkpoint-N`; an
earlier save of step N is `.unfinished/replaced-checkpoint-N` from then on. A folder `checkpoint-N` that appears in
another way before the commit, for example because a callback has created it, is treated like an earlier save. Nothing
in it is of an earlier attempt: those have been archived when training started (`store.archive`).

All ranks write one checkpoint in this order (`_write_and_commit`):

1. Each rank creates `.unfinished/checkpoint-N` and writes its own files into it (`CheckpointJob.write`).
2. The ranks exchange their errors, as they do before step 1 for errors from before the job was handed over. If there
   is one, the committing rank deletes the folder and every rank raises: a `StorageError` if a file could not be
   written, else the error itself. The same happens in steps 4 and 6.
3. The ranks write the files that need exchanges (`CheckpointJob.write_collectively`). Rank 0 lists the folder and
   sends each rank the names of its own files, which the rank hashes, and on each of which it calls fsync.
4. The ranks exchange their errors, and rank 0 gets the lengths and hashes of their files.
5. The committing rank
   a. copies what an existing `checkpoint-N` or `replaced-checkpoint-N` has and the new save has not, as if the new
      save had been written over it; then it calls fsync on each folder of the checkpoint;
   b. writes the manifest: to a temporary file, fsync, rename to `hfscale_manifest.json`, fsync of the folder;
   c. renames an existing `checkpoint-N` to `.unfinished/replaced-checkpoint-N`;
   d. renames `.unfinished/checkpoint-N` to `checkpoint-N`: **this rename is the commit**;
   e. calls fsync on the output directory and on `.unfinished`;
   f. deletes `.unfinished/replaced-checkpoint-N`, and calls `CheckpointJob.on_commit` (which rotates).
6. The ranks exchange their errors again.

What a crash leaves behind, and how the next start repairs it (`finish_renames`, which any rank may call before it
looks for the newest checkpoint; then `clear_unfinished`, which the main process calls when training starts):

| crash | left in `.unfinished` | repair |
|---|---|---|
| in steps 1 to 5a | `checkpoint-N` without a manifest | deleted |
| in step 5b | `checkpoint-N`, with or without a manifest, and perhaps a temporary file | as above or below |
| after 5b | `checkpoint-N` with its manifest | renamed to `checkpoint-N` |
| between 5c and 5d | both saves of step N, each with its manifest | the new one is renamed, the old one deleted |
| a crash loses the rename of 5d before 5e | as after 5b or 5c | as there |
| in step 5f | `replaced-checkpoint-N` | deleted |
| during rotation | `checkpoint-N.deleted` | deleted |
| while `checkpoint-N` is a link | as in step 1, or `replaced-checkpoint-N` | the link is removed; then as above |

An error that is not a crash follows the same rules. For example, if the rename of 5d fails after that of 5c, the
committing rank deletes the new save, and the next start renames `replaced-checkpoint-N` back to `checkpoint-N`.

If the machine loses power, files that were not flushed may lose their content. No committed file is among them, since
each is flushed before its manifest is written. `store.verify` compares every file with the manifest before a
checkpoint is used.
"""

import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.lock import is_locked_by_another_process
from hfscale.checkpoint.manifest import FileRecord, Identity, Manifest, checkpoint_files
from hfscale.checkpoint.store import CHECKPOINT_NAME, is_link_to_unfinished
from hfscale.core import distributed
from hfscale.core.activity import activity
from hfscale.core.alarms import DISK, raise_alarm
from hfscale.core.collectives import SAVING, TRAINING
from hfscale.core.disk_errors import how_to_fix_write, is_failed_torch_write
from hfscale.core.durable_files import (
    flush,
    flush_folders,
    make_inside,
    remove_temporaries,
    write_atomically,
)
from hfscale.core.exchanges import is_of_another_rank
from hfscale.core.logging import get_logger
from hfscale.core.run_files import MANIFEST_NAME, UNFINISHED
from hfscale.errors import StorageError

logger = get_logger(__name__)

_REPLACED = "replaced-"
# Files whose name has the number of the rank that writes them: Trainer's RNG states, torch's distributed checkpoints,
# DeepSpeed's partitions, the outer state of islands, and what each rank keeps as JSON (`announced.json`). All others
# are written by rank 0.
_RANK_OF_FILE = re.compile(
    r"rng_state_(\d+)\.pth$|__(\d+)_\d+\.distcp$|zero_pp_rank_(\d+)_|_outer_(\d+)\.safetensors$"
    r"|(?:data_order|hfscale_[a-z_]+)_(\d+)\.json$"
)
_last_writers: dict[Path, "CheckpointWriter"] = {}
"""The writer of this process that was last started, by output directory."""
_open_to_subclass: set[Path] = set()
"""Output directories in which a subclass of Trainer is saving now, through a link."""


@dataclass(frozen=True, kw_only=True)
class CheckpointJob:
    """One checkpoint to write. Every rank makes one for the same step."""

    run_dir: Path
    """Output directory of the run; the checkpoint becomes its `checkpoint-N`."""
    step: int
    """Optimizer steps taken."""
    strategy: str
    """Strategy of the run, for the manifest."""
    global_batch_size: int
    """Sequences per optimizer step, for the manifest."""
    layout: dict[str, int] | None = None
    """Sizes with which transformers distributed the model, for the manifest; None under the other strategies."""
    identity: Identity | None = None
    """What is trained, for the manifest."""
    commits: bool
    """Whether this rank writes the manifest."""
    is_shared: bool = True
    """Whether all ranks see one folder. If not, a committing rank is responsible for all files in its own folder."""
    write: Callable[[Path], None] | None = None
    """Writes this rank's own files into the folder that it is given; None if they are already there."""
    write_collectively: Callable[[Path], None] | None = None
    """Writes what needs exchanges between the ranks, on the channel `SAVING`. It is called only if no `write` has
    failed."""
    error: Exception | None = None
    """An error on this rank that occurred before the job was handed over."""
    on_commit: Callable[[Manifest], None] | None = None
    """Called on the committing rank when the checkpoint has been renamed to its final path."""
    is_optional: bool = False
    """Whether training continues if the checkpoint cannot be written: its error is in `optional_failure`."""
    make_folder: Callable[[Path], None] | None = None
    """Makes the folder in which the checkpoint is written; None: it is made with those above it."""
    started_at: float = field(default_factory=time.monotonic)
    """Start of the save, on the clock of `time.monotonic`."""

    @property
    def folder(self) -> Path:
        """Folder in which the checkpoint is written."""
        return unfinished_folder(self.run_dir, self.step)

    def make(self) -> None:
        """Make the folder in which the checkpoint is written.

        Raises:
            OSError: it cannot be made.
        """
        if self.make_folder is not None:
            self.make_folder(self.folder)
            return
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def target(self) -> Path:
        """Final path of the checkpoint."""
        return self.run_dir / f"checkpoint-{self.step}"


class CheckpointWriter:
    """Writes one checkpoint at a time, in a background thread or in the calling one.

    Every rank must create one at the same point: the groups of the channel `SAVING` are created with the first.
    """

    def __init__(self) -> None:
        SAVING.open()
        self._thread: threading.Thread | None = None
        self._is_optional = False  # what the thread writes
        self._failure: Exception | None = None
        self.optional_failure: Exception | None = None
        """The error of the last optional checkpoint that could not be written; it is the same kind on every rank."""
        self.last_optional_s = 0.0
        """Seconds from the start of the last optional checkpoint to its commit."""
        self._started_at = 0.0
        self._last_s = 0.0

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint is being written on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def remaining_s(self) -> float:
        """Seconds until the save in flight is committed if it takes as long as the last one; 0 if there is none."""
        return (
            max(self._started_at + self._last_s - time.monotonic(), 0.0) if self.in_flight else 0.0
        )

    @property
    def has_failed(self) -> bool:
        """Whether the last checkpoint could not be written and `wait` has not yet raised its error."""
        return self._failure is not None

    def start(self, job: CheckpointJob) -> None:
        """Write `job` in a background thread, after waiting for a checkpoint that is still being written.

        A snapshot in host memory takes no long time, so that a rank which waits for others there may hang.

        Raises:
            Exception: as `wait`; an error that occurred before the job was handed over is raised here, on all ranks.
        """
        with _may_take_long(job.is_optional):
            if not self._begin(job):
                return
        self._is_optional = job.is_optional
        self._started_at = job.started_at
        _last_writers[job.run_dir.resolve()] = self
        # A daemon thread: the callers that know how long they may wait do so before the process ends.
        self._thread = threading.Thread(
            target=self._run_in_thread,
            args=(job, current_gpu()),
            name="hfscale-checkpoint",
            daemon=True,
        )
        self._thread.start()

    @activity("saving")
    def run(self, job: CheckpointJob) -> None:
        """Write `job` in the calling thread.

        Raises:
            Exception: as `wait`.
        """
        if not self._begin(job):
            return
        self._run(job)
        self.wait()

    def _begin(self, job: CheckpointJob) -> bool:
        """Return whether all ranks can write; False for an optional checkpoint whose folder cannot be made."""
        self.wait()
        for other in _last_writers.values():
            # Of a training that an exception ended: it exchanges on the same channel
            if other.in_flight:
                other.wait_without_raising()
        try:
            _exchange("save: state is copied", job, job.error)
        except StorageError as error:  # on every rank
            if not job.is_optional:
                raise
            self.optional_failure = error
            return False
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, or for `timeout_s` seconds.

        Args:
            timeout_s (`float`, *optional*): longest time to wait, in seconds; None waits without a limit. If a
                checkpoint is still being written after that, the method returns and raises nothing.

        Raises:
            StorageError: a file of the last checkpoint could not be written. Raised once, on every rank.
            Exception: what else ended the save, such as an error in a callback whose state is saved. It is raised on
                its rank, and a `RuntimeError` that contains its traceback on the others.
        """
        if self._thread is not None:
            with _may_take_long(self._is_optional):
                self._thread.join(timeout_s)
            if self._thread.is_alive():
                return
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    @activity("saving")
    def wait_without_raising(self) -> None:
        """Wait until nothing is being written; log a failure as a warning and leave it for the owner's `wait`."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            is_known = isinstance(self._failure, StorageError)
            logger.warning("%s", self._failure, exc_info=None if is_known else self._failure)

    @activity("saving")
    def _run_in_thread(self, job: CheckpointJob, gpu: int | None) -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        self._run(job)

    def _run(self, job: CheckpointJob) -> None:
        try:
            _write_and_commit(job)
            if job.is_optional:
                self.last_optional_s = time.monotonic() - job.started_at
            else:
                self._last_s = time.monotonic() - job.started_at
        except Exception as error:  # raised again by `wait`, unless the job is optional
            if job.is_optional:
                self.optional_failure = error
            else:
                self._failure = error


def report_removal(run_dir: Path, step: int) -> None:
    """Log that the output directory no longer exists, before a save makes it again.

    Args:
        run_dir (`Path`): output directory of the run, which was made when the training began.
        step (`int`): optimizer steps taken.
    """
    if not run_dir.is_dir():
        lost = "it is made again; the checkpoints and measurements in it are lost"
        text = f"the output directory {run_dir} was removed during the run: {lost}"
        logger.error(text)
        raise_alarm(DISK, text, step=step, level="error")


def _may_take_long(is_optional: bool) -> AbstractContextManager[None]:
    return nullcontext() if is_optional else activity("saving")


def current_gpu() -> int | None:
    """Return the index of this thread's CUDA device; None if the process has not used CUDA.

    A new thread starts on device 0. Without this index each rank of a node would create a CUDA context (hundreds of
    MiB) on GPU 0, as soon as torch's distributed checkpointing asks for the current stream (`_OverlappingCpuLoader`).
    """
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def unfinished_folder(run_dir: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of `step` is written until it is committed.

    Args:
        run_dir (`Path`): output directory of the run.
        step (`int`): optimizer steps taken.
    """
    return run_dir / UNFINISHED / f"checkpoint-{step}"


@contextmanager
def open_to_subclass(run_dir: Path, step: int, *, is_holder: bool) -> Iterator[None]:
    """Make `checkpoint-N` a link to the folder in which the checkpoint is written, within the `with` block.

    Every rank must enter and leave it.

    Args:
        run_dir (`Path`): output directory of the run.
        step (`int`): optimizer steps taken.
        is_holder (`bool`): whether this rank makes and removes the link: the rank that commits.

    Raises:
        OSError: on every rank, if the link cannot be made.
    """
    folder, target = unfinished_folder(run_dir, step), run_dir / f"checkpoint-{step}"
    with TRAINING.agreed("save: link"):
        if is_holder:
            folder.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(_replaced(folder), ignore_errors=True)
                target.rename(_replaced(folder))
            target.symlink_to(folder.relative_to(run_dir), target_is_directory=True)
    failed: Exception | None = None
    _open_to_subclass.add(run_dir.resolve())
    try:
        yield
    except Exception as error:
        failed = error
        raise
    finally:
        # Another rank may still be writing through the link.
        TRAINING.combine_outcomes(
            "save: link is not used any more", None, lambda _: None, error=failed
        )
        _open_to_subclass.discard(run_dir.resolve())
        if is_holder:
            target.unlink()


def _replaced(folder: Path) -> Path:
    """Return where the earlier save of a step is until the one in the unfinished `folder` has replaced it."""
    # Trainer's own rotation takes `checkpoint-*`
    return folder.with_name(f"{_REPLACED}{folder.name}")


def finish_renames(run_dir: Path) -> list[Path]:
    """Commit the checkpoints that an ended process left complete but not yet renamed.

    Any rank may call it at any time. It does nothing while another process holds the lock of the folder, since that
    process will finish its own renames, nor while a subclass of Trainer saves there in this process. If this process
    is still writing a checkpoint there, for a training that an exception ended, it waits until that checkpoint is
    written.

    Returns:
        `list[Path]`: the checkpoints that were renamed.
    """
    renamed: list[Path] = []
    last_writer = _last_writers.get(run_dir.resolve())
    if last_writer is not None:
        last_writer.wait_without_raising()
    left = sorted((run_dir / UNFINISHED).glob("*checkpoint-*"))
    links = [path for path in run_dir.glob("checkpoint-*") if is_link_to_unfinished(path)]
    is_in_use = run_dir.resolve() in _open_to_subclass or is_locked_by_another_process(run_dir)
    if is_in_use or not (left or links):
        return renamed
    for link in links:
        link.unlink(missing_ok=True)
    for folder in left:
        name = folder.name.removeprefix(_REPLACED)
        target = run_dir / name
        if (
            CHECKPOINT_NAME.fullmatch(name)
            and (folder / MANIFEST_NAME).is_file()
            and not target.exists()
        ):
            with suppress(FileNotFoundError):  # another rank has renamed it already
                folder.rename(target)
                renamed.append(target)
    if renamed:
        flush(run_dir)
    return renamed


def clear_unfinished(run_dir: Path) -> None:
    """Delete what an ended process left incomplete. Call it when no other process writes to the folder."""
    finish_renames(run_dir)
    shutil.rmtree(run_dir / UNFINISHED, ignore_errors=True)
    remove_temporaries(run_dir)


def _write_and_commit(job: CheckpointJob) -> None:
    """Write and commit the checkpoint, on all ranks at once; the exchange after each part stops all if one fails."""
    problem: Exception | None = None
    try:
        job.make()
        if job.write is not None:
            job.write(job.folder)
    except Exception as error:
        problem = error
    _exchange("save: own files", job, problem)
    records: dict[str, FileRecord] = {}
    try:
        if job.write_collectively is not None:
            job.write_collectively(job.folder)
    except Exception as error:
        problem = error
    try:
        names = _own_files(job, problem)
        records = _record(job.folder, names) if problem is None else {}
    except Exception as error:
        if error is problem:  # the other ranks have not come
            raise
        problem = error
    of_all_ranks = _exchange("save: all files", job, problem, records)
    if job.commits:
        try:
            _commit(job, of_all_ranks if job.is_shared else records)
        except Exception as error:
            problem = error
    _exchange("save: commit", job, problem)


def _exchange(
    name: str,
    job: CheckpointJob,
    problem: Exception | None,
    files: Mapping[str, FileRecord] | None = None,
) -> dict[str, FileRecord]:
    """Stop all ranks if one has a problem; return the file records of all ranks on rank 0, and no others elsewhere.

    Raises:
        StorageError: on every rank, if one of them could not write a file.
        Exception: `problem`, if it has another reason.
        RuntimeError: another rank has a problem with another reason; its traceback is a part of the message.
    """
    fix = how_to_fix_write(problem) if problem is not None else None
    is_defect = problem is not None and fix is None
    own = {
        "problem": None if problem is None else _summary(problem),
        "fix": fix,
        "is_of_another_rank": problem is not None and is_of_another_rank(problem),
        "traceback": "".join(traceback.format_exception(problem)) if is_defect else None,
    }
    records: dict[str, FileRecord] = {}

    def first_failure(rows: list[Any]) -> Any:
        for _, of_rank in rows:
            records.update({name: FileRecord(**record) for name, record in of_rank.items()})
        failed = [
            number for number, (outcome, _) in enumerate(rows) if outcome["problem"] is not None
        ]
        failed.sort(key=lambda number: rows[number][0]["is_of_another_rank"])
        defects = [number for number in failed if rows[number][0]["fix"] is None]
        return next(([number, rows[number][0]] for number in [*defects, *failed]), None)

    sent = {name: asdict(record) for name, record in (files or {}).items()}
    first = SAVING.combine_outcomes(name, [own, sent], first_failure, error=problem)
    if first is None:
        return records
    if job.commits:
        shutil.rmtree(job.folder, ignore_errors=True)  # frees its space if the disk is full
    if problem is not None and is_defect:
        raise problem
    blamed, outcome = first
    where = f" on rank {blamed}" if distributed.is_distributed() else ""
    failure = f"checkpoint-{job.step} could not be written{where}: {outcome['problem']}"
    if outcome["fix"] is None:
        raise RuntimeError(f"{failure}\n\n{outcome['traceback']}") from problem
    raise StorageError(
        f"{failure}; the checkpoints committed before are complete: {outcome['fix']} and relaunch the same command"
    ) from problem


def _summary(error: Exception) -> str:
    """Return the error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if is_failed_torch_write(text):
        return "a file could not be written completely; is the disk full?"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def _own_files(job: CheckpointJob, problem: Exception | None) -> list[str]:
    """Return the files that this rank hashes: those that it wrote. Rank 0 lists the folder if all ranks share it.

    Every rank must call it, when it has written its files or has a problem.
    """

    def of_each_rank(arrived: list[None]) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in arrived]
        for name in checkpoint_files(job.folder) if job.is_shared else ():
            names[rank_of_file(name, len(arrived))].append(name)
        return names

    shared: list[str] = SAVING.distribute("save: names of files", None, of_each_rank, error=problem)
    return checkpoint_files(job.folder) if job.commits and not job.is_shared else shared


def _record(folder: Path, names: list[str]) -> dict[str, FileRecord]:
    """Hash and flush the files that this rank wrote, while they are in its page cache."""
    records = {}
    for name in names:
        records[name] = FileRecord.of(folder / name)
        flush(folder / name)
    return records


def rank_of_file(name: str, ranks: int) -> int:
    """Return the rank that writes the file `name` of a checkpoint, from the number in the name.

    Rank 0 writes the files whose name has no such number.

    Args:
        name (`str`): relative path of the file.
        ranks (`int`): number of processes that write the checkpoint.
    """
    found = _RANK_OF_FILE.search(name)
    number = int(next(group for group in found.groups() if group)) if found else 0
    return number if number < ranks else 0


def _commit(job: CheckpointJob, records: dict[str, FileRecord]) -> None:
    """Write the manifest and rename the checkpoint to its final path: step 5 of the protocol."""
    replaced = _replaced(job.folder)
    for earlier in (job.target, replaced):
        records |= _copy_missing(earlier, job.folder)
    manifest = Manifest(
        step=job.step,
        strategy=job.strategy,
        world_size=distributed.world_size(),
        global_batch_size=job.global_batch_size,
        layout=job.layout,
        identity=job.identity,
        files=dict(sorted(records.items())),
    )
    flush_folders(job.folder)
    write_atomically(job.folder / MANIFEST_NAME, manifest.to_json())
    # The same step is saved twice, for example by save_steps and at the end of an epoch
    if job.target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        job.target.rename(replaced)
    job.folder.rename(job.target)
    flush(job.run_dir)
    flush(job.folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    if job.on_commit is not None:
        job.on_commit(manifest)


def _copy_missing(source: Path, folder: Path) -> dict[str, FileRecord]:
    """Copy the files of `source` that `folder` does not have, flush them, and return their records."""
    records = {}
    for name in sorted(set(checkpoint_files(source)) - set(checkpoint_files(folder))):
        make_inside(folder, (folder / name).parent)
        shutil.copy2(source / name, folder / name)
        flush(folder / name)
        records[name] = FileRecord.of(folder / name)
    return records
