"""How a recipe starts and ends: one line for a user's mistake, a clean end of the process group, an exit code."""

import errno
import gc
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
import transformers

from hfscale.checkpoint.lock import lock_output_dir
from hfscale.errors import HfScaleError, MissingDependencyError, StorageError, UsageError
from hfscale.health.build_locks import remove_abandoned_locks
from hfscale.preemption import Preempted, end_workers, watch_signals
from hfscale.utils.logging import is_main_process

if TYPE_CHECKING:
    from hfscale.callbacks.scaling import ScalingCallback

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_ERRNO_IN_TEXT = re.compile(r"\bOs \{ code: (\d+)|\(os error (\d+)\)")  # how safetensors and tokenizers word an errno
_TORCH_WRITE_FAILED = re.compile(  # torch.save, whose C++ drops the errno
    r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos|write\(\): fd \d+ failed"
)
_SAYS_WHAT_TO_INSTALL = re.compile(r"pip install|requires \S+ to be installed")
_MAIN_PROCESS_GRACE_S = 10.0


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main` and exit the process as its users expect.

    An `HfScaleError` becomes one line on standard error and its exit code (2: wrong usage, 1: it cannot be done); so
    do a full or read-only output directory and a package that transformers says to install. Any other exception keeps
    its traceback. With several ranks the line comes from the main process: the others wait for the launcher to end
    them, and speak only if the fault was theirs.

    Signals are watched from here on. A run that was preempted (`end_if_preempted`) ends with exit code 75 on every
    rank, and one line that says so.
    """
    watch = watch_signals(whole_process=True)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and os.environ.get("LOCAL_RANK", "0") == "0":
        remove_abandoned_locks(os.environ)  # on a CPU DeepSpeed loads an extension with the process group already
    preempted = None
    transformers.utils.logging.disable_progress_bar()  # a bar per saved file would cut through the training's own
    try:
        with watch.restored_by_an_error():
            main()
    except Preempted as ended:
        preempted = ended
    except HfScaleError as error:
        _exit_with_line(error)
    except Exception as error:
        known = storage_error(error) or missing_dependency(error)
        if known is None:
            raise
        _exit_with_line(known)
    end_workers()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # without it a rank that ends early can abort the others' last collective (SIGABRT)
        gc.collect()  # without it a sharded model holds on to process groups, and one exit in eight aborts
        dist.destroy_process_group()
    if preempted is None:
        watch.restore()
    else:
        watch.ignore()  # the launcher signals the other ranks as soon as the first one has ended
        if is_main_process():
            print(f"hfscale: {preempted.words}", file=sys.stderr, flush=True)
        sys.exit(preempted.code)


def end_if_preempted(scaling: "ScalingCallback") -> None:
    """To be called when `Trainer.train` has returned: evaluating and exporting are for the run that gets to its end.

    Raises:
        Preempted: the training was stopped before its end; it ends the process with exit code 75.
    """
    reason = scaling.spot_checkpoint.preempted
    if reason is not None:
        raise Preempted(f"preempted by {reason}; relaunch the same command to go on (exit code 75)")


def _exit_with_line(error: HfScaleError) -> None:
    sys.last_value = error  # as for an uncaught one, so that what runs at exit can tell why
    message = " ".join(str(error).split())
    if not is_main_process():
        time.sleep(_MAIN_PROCESS_GRACE_S)  # ended by the launcher meanwhile, if the main process failed too
        print(f"hfscale: error on rank {os.environ['RANK']}: {message}", file=sys.stderr, flush=True)
    else:
        print(f"hfscale: error: {message}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def check_output_dir(output_dir: str) -> None:
    """Make the output directory, write a file in it and keep other runs out, before any time is spent on training.

    Raises:
        UsageError: it is a file, or lies in one; or another run is using it.
        StorageError: it cannot be made or written.
    """
    folder = Path(output_dir)
    probe = folder / f".hfscale-write-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)  # ranks of two machines can share a process id, and so a probe
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise UsageError(f"--output_dir {output_dir} is a file, or lies in one: name a folder") from None
        raise StorageError(
            f"--output_dir {output_dir} cannot be written: {error.strerror}: make it writable or name another"
        ) from None
    if is_main_process():
        lock_output_dir(output_dir)


def storage_error(error: BaseException) -> StorageError | None:
    """A StorageError where `error`, or what caused it, is a full, read-only or forbidden disk; else None.

    safetensors and torch raise errors of their own that carry the errno in their text, or not at all.
    """
    cause: BaseException | None = error
    while cause is not None:
        found = _ERRNO_IN_TEXT.search(str(cause))
        code = getattr(cause, "errno", None) or (int(found[1] or found[2]) if found else None)
        name = getattr(cause, "filename", None)
        where = f" at {name}" if name else ""
        if code in _FULL or _TORCH_WRITE_FAILED.search(str(cause)):
            reason = os.strerror(code) if code else "a checkpoint file could not be written"
            return StorageError(
                f"writing stopped{where}: {reason}; the checkpoints committed before are whole: make room and "
                "relaunch the same command"
            )
        if code in _FORBIDDEN and (name or found):  # without a file it may be a socket
            return StorageError(f"no access{where}: {os.strerror(code)}: make it writable, then relaunch the command")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def missing_dependency(error: BaseException) -> MissingDependencyError | None:
    """A MissingDependencyError where transformers says what to install; None for an import that fails by itself."""
    words = str(error)
    says_so = (isinstance(error, ImportError) and error.name is None) or _SAYS_WHAT_TO_INSTALL.search(words)
    return MissingDependencyError(words) if says_so else None
