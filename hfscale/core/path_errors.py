"""Recognises errors of a path that the user gave."""

import errno
import os

from hfscale.errors import HfScaleError, StorageError, UsageError

NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""Error numbers for a text that cannot be the path of a file."""


def path_error(error: BaseException) -> HfScaleError | None:
    """Return an error of one line if a path that the user gave caused `error`, else None.

    `Path.is_file` and its kind return False where nothing is there, and raise an error for a name of more than 255
    bytes, and for a folder that this user may not enter.

    Args:
        error (`BaseException`): an error that a command or a recipe raised. Its causes are not searched.
    """
    if not isinstance(error, OSError) or error.filename is None:
        return None
    name, problem = os.fsdecode(error.filename), error.strerror
    if error.errno in NO_PATH:
        return UsageError(f"{name} cannot be a path: {problem}: give another")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StorageError(f"no access at {name}: {problem}: give this user access to it")
    return None
