"""Recognises errors of a full, read-only or forbidden disk, whichever library raises them."""

import errno
import os
import re

from hfscale.errors import StorageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a disk, a quota or a file-size limit that is exhausted: free some space."""
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers for a file system or file that may not be written: change permissions, or use another path."""
# How safetensors and tokenizers, which are written in Rust, report an error number.
_ERRNO_IN_TEXT = re.compile(r"\bOs \{ code: (\d+)|\(os error (\d+)\)")
# The C++ code of torch.save drops the error number.
_TORCH_WRITE_FAILED = re.compile(
    r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos|write\(\): fd \d+ failed"
)


def is_failed_torch_write(message: str) -> bool:
    """Return whether `message` is the error of a `torch.save` whose file could not be written completely."""
    return bool(_TORCH_WRITE_FAILED.search(message))


def storage_error(error: BaseException) -> StorageError | None:
    """Return a `StorageError` if a full, read-only or forbidden disk caused `error`, else None.

    The causes of `error` are searched too.

    safetensors and torch raise their own exceptions, which have the error number in their text or not at all.
    """
    cause: BaseException | None = error
    while cause is not None:
        found = _ERRNO_IN_TEXT.search(str(cause))
        code = getattr(cause, "errno", None) or (int(found[1] or found[2]) if found else None)
        name = getattr(cause, "filename", None)
        where = f" at {name}" if name else ""
        if code in FULL or is_failed_torch_write(str(cause)):
            reason = os.strerror(code) if code else "a checkpoint file could not be written"
            return StorageError(
                f"writing stopped{where}: {reason}; the checkpoints committed before are complete: make room and "
                "relaunch the same command"
            )
        if code in NOT_WRITABLE and (name or found):  # without a file it may be a socket
            return StorageError(f"no access{where}: {os.strerror(code)}: make it writable, then relaunch the command")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None
