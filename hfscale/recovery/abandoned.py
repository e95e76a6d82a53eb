"""Deletes what supervisors that were killed have left in host memory."""

import fcntl
import os
import shutil
from pathlib import Path

from hfscale.core.run_memory import DEFAULT_ROOT, FOLDER_PREFIX, OWNER_NAME, is_own_folder


def remove_abandoned(root: Path = DEFAULT_ROOT) -> list[Path]:
    """Delete the folders of this user whose supervisor no longer lives.

    Args:
        root (`Path`): the folder that was given to `create`.

    Returns:
        `list[Path]`: the folders that were deleted.
    """
    removed = []
    for folder in root.glob(f"{FOLDER_PREFIX}*"):
        if not is_own_folder(folder):
            continue
        try:
            owner = os.open(folder / OWNER_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it is being made or deleted now
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(owner)
    return removed
