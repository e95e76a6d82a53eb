"""Raw records of local files, cached under a hash of their content.

`datasets` names its cache of a file by path and modification time: a file that is replaced by another one of the same
age is read from the stale cache, and one that was only touched or moved is tokenised again. Here the name is a hash of
the content. What is derived from these records with `Dataset.map` is cached next to them, under names that `datasets`
makes of the record's fingerprint, the function and all that it refers to: tokenizer, chat template and flags.
"""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import datasets
import xxhash
from datasets import Dataset, DatasetDict

from hfscale.checkpoint.manifest import FileRecord
from hfscale.core.durable_files import write_atomically
from hfscale.errors import DataError

_TEMPORARY = "loading-"
_LOCK = "lock"
# From the creation of a temporary folder until its process surely holds the lock
_LOCKED_AFTER_S = 60.0
# A file that changed less than this before it was read could change again without a trace
_SETTLED_NS = 2 * 10**9


def load_by_content(
    files: Sequence[Path], load: Callable[[str], DatasetDict], *, options: object, source: str
) -> DatasetDict:
    """Load records, or find them in the cache if files of the same content were loaded before.

    Several processes may do so at once, and one may be killed: the records appear in the cache when they are complete.

    Args:
        files (`Sequence[Path]`): the files of the records.
        load (`Callable`): loads the records with the folder that it gets as the cache of `datasets`.
        options (`object`): all else on which the records depend; its `repr` must be the same in each run.
        source (`str`): the flag and the value that name the records, for the error.

    Returns:
        `DatasetDict`: the records of each split. Their fingerprints depend on the content and the options only.

    Raises:
        DataError: a file has changed while it was read.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE, "hfscale")
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache)
    before = [_state(file) for file in files]
    contents = [_content(file, cache) for file in files]
    key = xxhash.xxh3_128_hexdigest(repr((datasets.__version__, options, contents)).encode())
    folder = cache / key
    if not folder.is_dir():
        with (
            tempfile.TemporaryDirectory(
                prefix=_TEMPORARY, dir=cache, ignore_cleanup_errors=True
            ) as temporary,
            Path(temporary, _LOCK).open("w") as lock,
        ):
            # A file system without locks: if this process is killed, the folder is left
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, also if it is killed
            loaded = load(temporary)
            if [_state(file) for file in files] != before:
                raise DataError(
                    f"{source} has changed while it was read: start again when it is complete"
                )
            was_disabled = datasets.are_progress_bars_disabled()
            datasets.disable_progress_bars()
            try:
                loaded.save_to_disk(f"{temporary}/complete")
            finally:
                if not was_disabled:
                    datasets.enable_progress_bars()
            try:
                Path(temporary, "complete").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster
                    raise
    found = DatasetDict.load_from_disk(str(folder))
    return DatasetDict(
        {
            split: Dataset(
                records.data,
                info=records.info,
                split=records.split,
                fingerprint=f"{key}-{split}"[:64],
            )
            for split, records in found.items()
        }
    )


def _remove_abandoned(cache: Path) -> None:
    """Delete the temporary folders of processes that were killed: those whose lock nobody holds."""
    for folder in cache.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # another process is deleting it, or holds its lock
            if time.time() - folder.stat().st_mtime > _LOCKED_AFTER_S:
                with Path(folder, _LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)


def _content(file: Path, cache: Path) -> str:
    """Return a hash of a file's content; one that has not changed since the last time is not read again."""
    state = _state(file)
    known = cache / f"{xxhash.xxh3_128_hexdigest(repr((str(file.resolve()), state)).encode())}.hash"
    if known.is_file():
        return known.read_text(encoding="utf-8")
    content = FileRecord.of(file).xxh3_128
    if max(state[-2:]) < time.time_ns() - _SETTLED_NS:
        write_atomically(known, content)
    return content


def _state(file: Path) -> tuple[int, ...]:
    """Return what changes with a file's content; no program can set the last number, the time of the change, back."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
