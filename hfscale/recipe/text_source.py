"""The source of a text, and one line that names it when it cannot be read."""

import codecs
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets

from hfscale.errors import DataError, HfScaleError, StorageError
from hfscale.recipe.arguments import DataArguments

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""The builder of `datasets` for each ending of a file."""

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def file_of(args: DataArguments, split: str) -> str | None:
    """The file a split is read from; None where there is none."""
    return (args.validation_file if split == "validation" else None) or args.train_file


def source_of(args: DataArguments, split: str) -> str:
    """Where a split's text comes from, as the user named it."""
    if split == "validation" and args.validation_file:
        return f"--validation_file {args.validation_file}"
    if args.train_file:
        return f"--train_file {args.train_file}"
    return f"--dataset_name {args.dataset_name}" if args.dataset_name else "the embedded text"


def is_running_text(args: DataArguments, split: str) -> bool:
    """Whether a split is one text in lines, and not a record per document."""
    return Path(file_of(args, split) or "").suffix.lower() == ".txt"


@contextmanager
def reading(args: DataArguments, split: str) -> Iterator[None]:
    """Turn what `datasets` raises about a split's text into one line that names it."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs a traceback before it raises
    try:
        yield
    except HfScaleError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _explain(_root_cause(error), args, split) from error
    finally:
        datasets.logging.set_verbosity(level)


def _explain(cause: BaseException, args: DataArguments, split: str) -> HfScaleError:
    if isinstance(cause, OSError) and cause.errno in _FULL_DISK:
        return StorageError(
            f"the cache {datasets.config.HF_DATASETS_CACHE} cannot be written: {cause.strerror}: make room, or set "
            "HF_DATASETS_CACHE to a folder that has it"
        )
    source, file = source_of(args, split), file_of(args, split)
    reason = shorten(" ".join(str(cause).split()).rstrip("."))
    if "corresponds to no data" in reason:
        return DataError(f"{source} holds no records")
    if file is None:
        return DataError(f"{source} cannot be loaded: {type(cause).__name__}: {reason}")
    builder = BUILDERS[Path(file).suffix.lower()]
    fault = _utf8_fault(Path(file)) if builder != "parquet" else None
    if fault:
        return DataError(f"{source} is not UTF-8 text: {fault}")
    return DataError(f"{source} cannot be read as {builder}: {reason}: mend it, or rename it to what it is")


def _utf8_fault(path: Path) -> str | None:
    """The first byte of a text file that is not UTF-8, and how to mend it; None where all of it is UTF-8."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte {offset + error.start} is 0x{line[error.start]:02x}"
                if offset == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    return f"{byte}: convert it with iconv -f UTF-16 -t UTF-8"
                if b"\0" in line:
                    return f"{byte}, among binary data: is it of another kind than its ending says?"
                return f"{byte}: convert it, for instance with iconv -f LATIN1 -t UTF-8"
            offset += len(line)
    return None


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def shorten(text: str, most: int = 200) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= most else f"{text[:most]}…"
