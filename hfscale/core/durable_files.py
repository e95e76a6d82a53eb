"""Writes files so that they are on the disk after a crash of the process or of the machine.

A rename is atomic, but neither the content of a file nor its name in its folder is on the disk before fsync is called
on the file and on the folder.
"""

import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from hfscale.core.best_effort import best_effort

_TEMPORARY = re.compile(r"\.\w+\.jsonl?\.\d+-\d+\.tmp")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that readers find either the old or the new content, even after a crash.

    The text is written to a temporary file, flushed to the disk and renamed to `path`; then the folder is flushed.

    Args:
        path (`Path`): the file, which is replaced if it exists; its folder must exist.
        text (`str`): the complete content, written as UTF-8.

    Raises:
        OSError: the disk is full or read-only; the old content then stays.
    """
    # The name has the thread's id too: a background save can write the status at the same time as the training loop.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the error above says what is wrong
            temporary.unlink()
        raise
    flush(path.parent)


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files that `write_atomically` leaves in `folder` when its process is killed."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            with best_effort("deleting temporary files", folder):
                path.unlink(missing_ok=True)


def flush_folders(checkpoint: Path) -> None:
    """Call fsync on a folder and those in it, so that the names of all files in them reach the disk."""
    for folder, _, _ in os.walk(checkpoint):
        flush(Path(folder))


def flush_parents(path: Path) -> None:
    """Call fsync on all folders above `path`, so that its own name reaches the disk, also where folders are new."""
    for folder in path.resolve().parents:
        with suppress(OSError):  # a folder that this user cannot read, and so has not created
            flush(folder)


def flush(path: Path) -> None:
    """Call fsync on a file or a folder, so that its content reaches the disk.

    Some file systems have no fsync of folders, which is no error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def make_inside(folder: Path, path: Path) -> None:
    """Make a folder and those between it and another one, but not that: another part has made it and looks after it.

    Args:
        folder (`Path`): an existing folder.
        path (`Path`): the folder to make, in `folder` or deeper.

    Raises:
        OSError: it cannot be made, or `folder` was removed.
    """
    made = folder
    for name in path.relative_to(folder).parts:
        made = made / name
        made.mkdir(exist_ok=True)
