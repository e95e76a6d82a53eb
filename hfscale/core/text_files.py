"""Reads text and JSON of files that may be hostile: every error is one of those that a reader expects.

Python's parser of JSON raises a RecursionError for deep nesting, and a plain ValueError for a number of thousands of
digits; a device such as `/dev/zero` has no end. Files are read through this module, which ruff checks for JSON.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 2**28
"""Bytes of the largest file that is read at once: configs, records of a checkpoint, lists of prompts."""

_MOST_LINE_BYTES = 2**26


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading bytes. A pipe or a socket, whose other end may never come, is refused.

    Args:
        path (`Path`): the file.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    # A pipe that nobody writes to would be waited for
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISCHR(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device: give a regular file", str(path))


def bounded_lines(path: Path, *, encoding: str = "utf-8", errors: str = "strict") -> Iterator[str]:
    """Yield the lines of a file with their ends, so that neither a long file nor a long line fills the memory.

    Args:
        path (`Path`): the file.
        encoding (`str`): of its text.
        errors (`str`): what to do with bytes that are no text, as for `bytes.decode`.

    Raises:
        OSError: it cannot be read, or a line is larger than 64 MiB.
        UnicodeDecodeError: a line is not in this encoding.
    """
    with open_regular(path) as file:
        while line := file.readline(_MOST_LINE_BYTES + 1):
            if len(line) > _MOST_LINE_BYTES:
                limit = f"a line is larger than {_MOST_LINE_BYTES // 2**20} MiB"
                raise OSError(errno.EFBIG, limit, str(path))
            yield line.decode(encoding, errors)


def read_text(path: Path, *, errors: str = "strict", most_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file in UTF-8.

    Args:
        path (`Path`): the file.
        errors (`str`): what to do with bytes that are no UTF-8, as for `bytes.decode`.
        most_bytes (`int`): the size from which a file is refused.

    Raises:
        OSError: it cannot be read, or is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        limit = f"it is larger than {most_bytes // 2**20} MiB"
        raise OSError(errno.EFBIG, limit, str(path))
    return content.decode("utf-8", errors)


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Args:
        text (`str`, `bytes` or `bytearray`): the text.

    Raises:
        json.JSONDecodeError: it is not JSON, is nested too deeply, or has a number with too many digits.
        UnicodeDecodeError: the bytes are no text.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except ValueError:
        raise json.JSONDecodeError("it has a number with too many digits", "", 0) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Args:
        path (`Path`): the file.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is not UTF-8 or not JSON.
    """
    return parse_json(read_text(path))
