"""Writes checkpoints beside the training, one at a time, and commits each when every rank has written its part.

A checkpoint grows in `.unfinished/checkpoint-N` of the run's folder, which neither Trainer nor anyone else looks into.
Each rank flushes and hashes what it wrote, and all learn how the others fared. Then one rank writes the manifest,
flushes the folders and renames the checkpoint to `checkpoint-N`: it is there whole, or not at all.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hfscale.checkpoint.lock import is_held_by_another
from hfscale.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, checkpoint_files
from hfscale.checkpoint.store import UNFINISHED, flush, remove_temporaries, write_atomically
from hfscale.errors import StorageError
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_REPLACED = ".replaced"
# Files that carry the number of the rank that writes them: Trainer's RNG states, torch's distributed checkpoints and
# DeepSpeed's partitions. All others are written by rank 0.
_RANK_OF_FILE = re.compile(r"rng_state_(\d+)\.pth$|__(\d+)_\d+\.distcp$|zero_pp_rank_(\d+)_")
_TORCH_WRITE_FAILED = re.compile(r"PytorchStreamWriter failed|inline_container\.cc")  # its C++ drops the errno
_last_writers: dict[Path, "CheckpointWriter"] = {}  # of this process, by the folder of the run


@dataclass(frozen=True, kw_only=True)
class CheckpointJob:
    """One checkpoint to be written. Every rank makes one for the same step."""

    run_dir: Path
    """Folder of the run; the checkpoint becomes `checkpoint-N` of it."""
    step: int
    strategy: str
    global_batch_size: int
    commits: bool
    """Whether this rank writes the manifest."""
    is_shared: bool = True
    """Whether all ranks see one folder. If not, a committing rank answers for what it sees in its own."""
    write: Callable[[Path], None] | None = None
    """Writes this rank's own files into the folder it is given; None where they stand there already."""
    write_together: Callable[[Path, dist.ProcessGroup | None], None] | None = None
    """Writes what needs exchanges between the ranks, on the group it is given. Called when no `write` has failed."""
    failed: Exception | None = None
    """What went wrong on this rank before the job was handed over."""
    committed: Callable[[Manifest], None] | None = None
    """Called on the committing rank once the checkpoint stands at its place."""
    begun: float = field(default_factory=time.monotonic)
    """When the save began, on the clock of `time.monotonic`."""

    @property
    def folder(self) -> Path:
        """Where the checkpoint grows."""
        return unfinished_folder(self.run_dir, self.step)

    @property
    def target(self) -> Path:
        """Where it stands when it is committed."""
        return self.run_dir / f"checkpoint-{self.step}"


class CheckpointWriter:
    """Writes one checkpoint at a time, on a thread of its own or in the calling one.

    Every rank makes one at the same point: its exchanges run on a group that nothing else uses.
    """

    def __init__(self) -> None:
        self._group = distributed.own_group()
        self._thread: threading.Thread | None = None
        self._failure: StorageError | None = None
        self._begun = self._last_s = 0.0

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint is being written on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def remaining_s(self) -> float:
        """Seconds until the save in flight is committed if it takes as long as the last; 0 where there is none."""
        return max(self._begun + self._last_s - time.monotonic(), 0.0) if self.in_flight else 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last checkpoint could not be written, and `wait` has not said so yet."""
        return self._failure is not None

    def start(self, job: CheckpointJob) -> None:
        """Write `job` beside the caller. One that is being written is waited for first.

        Raises:
            StorageError: that earlier one could not be written.
        """
        self.wait()
        self._begun = job.begun
        _last_writers[job.run_dir.resolve()] = self
        # A daemon: what must not be lost at the end of a process is waited for by whoever knows how long it may take.
        self._thread = threading.Thread(target=self._run, args=(job,), name="hfscale-checkpoint", daemon=True)
        self._thread.start()

    def run(self, job: CheckpointJob) -> None:
        """Write `job` in the calling thread.

        Raises:
            StorageError: it, or an earlier one, could not be written. Raised on every rank.
        """
        self.wait()
        self._run(job)
        self.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, or for `timeout_s` seconds.

        Raises:
            StorageError: the last checkpoint could not be written. Raised once, on every rank.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait_as_another(self) -> None:
        """Wait as one who did not begin the save: its failure is a warning here, an error in its owner's `wait`."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            logger.warning("%s", self._failure)

    def _run(self, job: CheckpointJob) -> None:
        try:
            _write_and_commit(job, self._group)
            self._last_s = time.monotonic() - job.begun
        except StorageError as error:
            self._failure = error
        except Exception as error:  # a rank that is gone, say: the exchange with it fails
            self._failure = StorageError(_explain(job.step, str(distributed.rank()), error))
            self._failure.__cause__ = error


def unfinished_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` grows until it is committed."""
    return run_dir / UNFINISHED / f"checkpoint-{step}"


def finish_renames(run_dir: Path) -> list[Path]:
    """Put in place what a process left complete but unnamed: it was ended between its manifest and its renames.

    Any rank may call it at any time. Nothing is done while another process holds the folder: it will do so itself. A
    save that this process still writes there, of a training that was broken off, is waited for.
    """
    put: list[Path] = []
    last_writer = _last_writers.get(run_dir.resolve())
    if last_writer is not None:
        last_writer.wait_as_another()
    left = sorted((run_dir / UNFINISHED).glob("checkpoint-*"))
    if not left or is_held_by_another(run_dir):
        return put
    for folder in left:
        name = folder.name.removesuffix(_REPLACED)
        target = run_dir / name
        if re.fullmatch(r"checkpoint-\d+", name) and (folder / MANIFEST_NAME).is_file() and not target.exists():
            with suppress(FileNotFoundError):  # another rank was quicker
                folder.rename(target)
                put.append(target)
    return put


def clear_unfinished(run_dir: Path) -> None:
    """Delete what an ended process left behind half-written. Call it where no other process writes to the folder."""
    finish_renames(run_dir)
    shutil.rmtree(run_dir / UNFINISHED, ignore_errors=True)
    remove_temporaries(run_dir)


def _write_and_commit(job: CheckpointJob, group: dist.ProcessGroup | None) -> None:
    """All ranks run this side by side; an exchange after each part keeps any from going on when one has failed."""
    problem = job.failed
    if problem is None:
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            if job.write is not None:
                job.write(job.folder)
        except Exception as error:
            problem = error
    _agree(job, group, problem)
    records: dict[str, FileRecord] = {}
    try:
        if job.write_together is not None:
            job.write_together(job.folder, group)
        records = _record_own_files(job)
    except Exception as error:
        problem = error
    everyones = _agree(job, group, problem, {name: asdict(record) for name, record in records.items()})
    if job.commits:
        try:
            if job.is_shared:
                records = {name: FileRecord(**record) for files in everyones for name, record in files.items()}
            _commit(job, records)
        except Exception as error:
            problem = error
    _agree(job, group, problem)


def _agree(
    job: CheckpointJob,
    group: dist.ProcessGroup | None,
    problem: Exception | None,
    files: dict[str, dict[str, Any]] | None = None,
) -> list[dict[str, dict[str, Any]]]:
    """The files of every rank; raises on every rank where one of them has a problem."""
    mine = {"problem": None if problem is None else _words(problem), "files": files or {}}
    rows = distributed.gather_json(mine, group)
    troubled = [number for number, row in enumerate(rows) if row["problem"] is not None]
    if troubled:
        if job.commits:
            shutil.rmtree(job.folder, ignore_errors=True)  # on a full disk, make room for the message's mend
        error = StorageError(_explain(job.step, str(troubled[0]), rows[troubled[0]]["problem"]))
        raise error from problem
    return [row["files"] for row in rows]


def _explain(step: int, rank: str, problem: Exception | str) -> str:
    words = problem if isinstance(problem, str) else _words(problem)
    where = f" on rank {rank}" if distributed.is_distributed() else ""
    return (
        f"checkpoint-{step} could not be written{where}: {words}; the checkpoints committed before are whole: make "
        "room and relaunch the same command"
    )


def _words(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    if _TORCH_WRITE_FAILED.search(words):
        return "a file could not be written to its end; is the disk full?"
    return words if isinstance(error, OSError) else f"{type(error).__name__}: {words}"


def _record_own_files(job: CheckpointJob) -> dict[str, FileRecord]:
    """Flush and hash the files that this rank wrote, while they lie in its page cache."""
    if job.is_shared:
        rank, ranks = distributed.rank(), distributed.world_size()
        names = [name for name in checkpoint_files(job.folder) if owner(name, ranks) == rank]
    else:
        names = checkpoint_files(job.folder) if job.commits else []
    records = {}
    for name in names:
        records[name] = FileRecord.of(job.folder / name)
        flush(job.folder / name)
    return records


def owner(name: str, ranks: int) -> int:
    """The rank that writes the file `name` of a checkpoint of `ranks` processes, by the number in its name."""
    found = _RANK_OF_FILE.search(name)
    number = int(next(group for group in found.groups() if group)) if found else 0
    return number if number < ranks else 0


def _commit(job: CheckpointJob, records: dict[str, FileRecord]) -> None:
    manifest = Manifest(
        step=job.step,
        strategy=job.strategy,
        world_size=distributed.world_size(),
        global_batch_size=job.global_batch_size,
        files=dict(sorted(records.items())),
    )
    for folder, _, _ in os.walk(job.folder):
        flush(Path(folder))
    write_atomically(job.folder / MANIFEST_NAME, manifest.to_json())
    replaced = job.folder.with_name(f"{job.folder.name}{_REPLACED}")
    if job.target.exists():  # the same step saved again, at the end of an epoch say
        job.target.rename(replaced)
    job.folder.rename(job.target)
    flush(job.run_dir)
    flush(job.folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    if job.committed is not None:
        job.committed(manifest)
