"""Recognises errors of a full, read-only or forbidden disk, whichever library raises them."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from hfscale.errors import StorageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a disk, a quota or a file-size limit that is exhausted: free some space."""
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers for a file system or file that may not be written: change permissions, or use another path."""
PROGRAM_ERRORS = (AttributeError, TypeError, NameError, AssertionError)
"""Errors of code, never of a disk or a store: they are raised as they are, whatever error was handled before."""
# How safetensors and tokenizers, which are written in Rust, report an error number.
_ERRNO_IN_TEXT = re.compile(r"\bOs \{ code: (\d+)|\(os error (\d+)\)")
# The C++ code of torch.save drops the error number.
_TORCH_WRITE_FAILED = re.compile(
    r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos|write\(\): fd \d+ failed"
)


@contextmanager
def writing(target: object, fix: str) -> Iterator[None]:
    """Raise one clear error if the code inside cannot write a file.

    Args:
        target (`object`): the file or folder, with the flag that names it, for the message.
        fix (`str`): what the user can do about it.

    Raises:
        StorageError: the code inside raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{target} cannot be written: {error.strerror or error}; {fix}"
        ) from None


def is_failed_torch_write(message: str) -> bool:
    """Return whether `message` is the error of a `torch.save` whose file could not be written completely."""
    return bool(_TORCH_WRITE_FAILED.search(message))


def how_to_fix_write(error: BaseException) -> str | None:
    """Return what the user must do if a file could not be written, or None if `error` has another reason.

    Args:
        error (`BaseException`): an error raised while files were written. Its causes are searched too.
    """
    fix = None
    for cause in causes_of(error):
        code, _ = _error_number(cause)
        if code in FULL or is_failed_torch_write(str(cause)):
            return "make room"
        if isinstance(cause, OSError) or code is not None:
            fix = fix or ("make it writable" if code in NOT_WRITABLE else "remove the cause")
    return fix


def storage_error(error: BaseException) -> StorageError | None:
    """Return a `StorageError` if a full, read-only or forbidden disk caused `error`, else None.

    The causes of `error` are searched too.

    safetensors and torch raise their own exceptions, which have the error number in their text or not at all.
    """
    for cause in causes_of(error):
        code, found = _error_number(cause)
        name = getattr(cause, "filename", None)
        where = f" at {name}" if name else ""
        if code in FULL or is_failed_torch_write(str(cause)):
            reason = os.strerror(code) if code else "a checkpoint file could not be written"
            return StorageError(
                f"writing stopped{where}: {reason}; the checkpoints committed before are complete: make room and "
                "relaunch the same command"
            )
        if code in NOT_WRITABLE and (name or found):  # without a file it may be a socket
            return StorageError(
                f"no access{where}: {os.strerror(code)}: make it writable, then relaunch the command"
            )
    return None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what caused it, then what caused that.

    Args:
        error (`BaseException`): any error.
    """
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        hides_context = cause.__suppress_context__ or isinstance(cause, PROGRAM_ERRORS)
        cause = cause.__cause__ or (None if hides_context else cause.__context__)


def _error_number(error: BaseException) -> tuple[int | None, bool]:
    """Return the operating system's error number, if there is one, and whether it is a part of the message."""
    found = _ERRNO_IN_TEXT.search(str(error))
    return getattr(error, "errno", None) or (
        int(found[1] or found[2]) if found else None
    ), found is not None
