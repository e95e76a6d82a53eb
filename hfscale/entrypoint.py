"""How a recipe starts and ends: one line for a user's mistake, a clean end of the process group, an exit code."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import transformers

from hfscale.errors import HfScaleError, StorageError, UsageError
from hfscale.logs import is_main_process

_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_OS_ERROR = re.compile(r"os error (\d+)|code: (\d+)")  # how safetensors words an errno
_MAIN_PROCESS_GRACE_S = 10.0


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main` and exit the process as its users expect.

    An `HfScaleError` becomes one line on standard error and its exit code (2: wrong usage, 1: it cannot be done); so
    does a full or read-only output directory. Any other exception keeps its traceback. With several ranks the line
    comes from the main process: the others wait for the launcher to end them, and speak only if the fault was theirs.
    """
    transformers.utils.logging.disable_progress_bar()  # a bar per saved file would cut through the training's own
    try:
        main()
    except HfScaleError as error:
        _exit_with_line(error)
    except Exception as error:
        storage = storage_error(error)
        if storage is None:
            raise
        _exit_with_line(storage)
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # without it a rank that ends early can abort the others' last collective (SIGABRT)
        dist.destroy_process_group()


def _exit_with_line(error: HfScaleError) -> None:
    if not is_main_process():
        time.sleep(_MAIN_PROCESS_GRACE_S)  # ended by the launcher meanwhile, if the main process failed too
        print(f"hfscale: error on rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
    else:
        print(f"hfscale: error: {error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def check_output_dir(output_dir: str) -> None:
    """Make the output directory and write a file in it, before any time is spent on training.

    Raises:
        StorageError: it cannot be made or written.
    """
    folder = Path(output_dir)
    probe = folder / f".hfscale-write-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise UsageError(f"--output_dir {output_dir} is a file, or lies in one: name a folder") from None
        raise StorageError(f"--output_dir {output_dir} cannot be written: {error.strerror}") from None


def storage_error(error: BaseException) -> StorageError | None:
    """A StorageError where `error`, or what caused it, is a full or read-only disk; else None.

    safetensors and torch raise errors of their own that carry the errno in their text only.
    """
    cause: BaseException | None = error
    while cause is not None:
        code = cause.errno if isinstance(cause, OSError) else None
        if code is None and (found := _OS_ERROR.search(str(cause))):
            code = int(found[1] or found[2])
        if code in _STORAGE_ERRNOS:
            name = getattr(cause, "filename", None)
            where = f" at {name}" if name else ""
            return StorageError(
                f"writing stopped{where}: {os.strerror(code)}; the checkpoints committed before are whole: make room "
                "and relaunch the same command"
            )
        cause = cause.__cause__ or cause.__context__
    return None
