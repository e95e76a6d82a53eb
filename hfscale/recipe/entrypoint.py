"""The process of a recipe, `run(main)`: errors as one line, exit codes, and the lock of the output directory."""

import gc
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

import torch.distributed as dist
import transformers

from hfscale.checkpoint.lock import lock_output_dir
from hfscale.checkpoint.preemption import PeerWatch, Preempted, end_workers, siblings, watch_signals
from hfscale.core import distributed
from hfscale.core.build_locks import remove_locks_before_deepspeed
from hfscale.core.disk_errors import storage_error
from hfscale.core.logging import is_main_process, print_line
from hfscale.core.options import names_of
from hfscale.core.path_errors import path_error
from hfscale.core.rank_link import connect
from hfscale.core.spelling import speaking, spelled
from hfscale.errors import HfScaleError, MissingDependencyError, StorageError, UsageError
from hfscale.recipe.arguments import OF_CALLBACKS, one_line

if TYPE_CHECKING:
    from hfscale.scaling import ScalingCallback

_SAYS_WHAT_TO_INSTALL = re.compile(r"pip install|requires \S+ to be installed")
_MAIN_PROCESS_GRACE_S = 10.0
_TRL_AND_BELOW = ("trl", "transformers", "accelerate", "peft", "datasets")
"""Packages whose errors in the constructor of TRL's trainers are about flags or records."""


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main` and exit the process with a meaningful code.

    An `HfScaleError` becomes one line on standard error and its exit code (2: wrong usage or a missing package, 1: it
    cannot be done). So does a full or read-only output directory, a missing package that transformers asks to install,
    and a flag or a record that the constructor of one of TRL's trainers refuses. Any other exception keeps its
    traceback. With several ranks the main process prints the line: the other ranks wait until the launcher ends them,
    and print a line of their own only if the main process did not fail.

    Preemption signals are handled from here on. A run that was preempted (`end_if_preempted`) ends with exit code 75
    on every rank, and the main process prints one line about it.

    Args:
        main (`Callable[[], None]`): the recipe.

    Raises:
        SystemExit: the recipe ended with an error of hfscale, or the run was preempted.
    """
    link = connect()  # to the supervisor, if there is one
    watch = watch_signals(whole_process=True)
    if others := siblings():
        PeerWatch(others).start()  # until training begins
    remove_locks_before_deepspeed()
    preempted = None
    # One bar per saved file would interrupt the training's own bar
    transformers.utils.logging.disable_progress_bar()
    try:
        with watch.restored_by_an_error(), speaking("recipe"), names_of(*OF_CALLBACKS):
            main()
    except Preempted as ended:
        preempted = ended
    except HfScaleError as error:
        _exit_with_line(error)
    except Exception as error:
        known = (
            storage_error(error)
            or path_error(error)
            or missing_dependency(error)
            or refused_by_trl(error)
        )
        if known is None:
            raise
        _exit_with_line(known)
    end_workers()
    if dist.is_available() and dist.is_initialized():
        distributed.last_barrier()
        # Without it a sharded model keeps process groups alive, and one exit in eight aborts
        gc.collect()
        dist.destroy_process_group()
    if preempted is None:
        watch.restore()
    else:
        if link is not None:
            link.ending(preempted.code)
        watch.ignore()  # the launcher signals the other ranks as soon as the first one has ended
        if is_main_process():
            print_line(f"hfscale: {preempted.message}")
        sys.exit(preempted.code)


def _exit_with_line(error: HfScaleError) -> None:
    link = connect()
    if link is not None:
        link.ending_by(error)
    # As Python does for an uncaught error, so that exit handlers can read the reason
    sys.last_value = error
    message = " ".join(_of_loader(str(error)).split())
    where = ""
    if not is_main_process():
        # If the main process failed too, the launcher ends this one meanwhile
        time.sleep(_MAIN_PROCESS_GRACE_S)
        where = f" on rank {os.environ['RANK']}"
    print_line(f"hfscale: error{where}: {message}")
    sys.exit(error.exit_code)


def _of_loader(message: str) -> str:
    """Return the message of an error without the traceback of the data loader's process that has raised it."""
    if not message.startswith("Caught ") or " in DataLoader worker process " not in message:
        return message
    return message.rstrip().rpartition("\n")[2].partition(": ")[2]


def check_output_dir(output_dir: str) -> None:
    """Create the output directory, write a file in it and lock it against other runs, before anything is loaded.

    Args:
        output_dir (`str`): the run's `--output_dir`.

    Raises:
        UsageError: it is a file or lies in one, or another run is using it.
        StorageError: it cannot be created or written.
    """
    folder = Path(output_dir)
    named = spelled("output_dir", output_dir)
    probe = folder / f".hfscale-write-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            # Processes on two machines can have the same id, and so the same probe
            probe.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise UsageError(f"{named} is a file, or lies in one: name a folder") from None
        raise StorageError(
            f"{named} cannot be written: {error.strerror}: make it writable or name another"
        ) from None
    if is_main_process():
        lock_output_dir(output_dir)


def missing_dependency(error: BaseException) -> MissingDependencyError | None:
    """Return a MissingDependencyError if an error's message tells what to install, None for any other error.

    Args:
        error (`BaseException`): an error that a library raised.
    """
    message = str(error)
    says_so = (
        isinstance(error, ImportError) and error.name is None
    ) or _SAYS_WHAT_TO_INSTALL.search(message)
    return MissingDependencyError(message) if says_so else None


def refused_by_trl(error: BaseException) -> UsageError | None:
    """Return a UsageError if the constructor of one of TRL's trainers has refused a flag or a record, else None.

    An error that was raised in hfscale, or outside of the constructor, is none of them.

    Args:
        error (`BaseException`): an error that a library raised.
    """
    from jinja2 import TemplateError

    if not isinstance(
        error, ValueError | TypeError | KeyError | NotImplementedError | TemplateError
    ):
        return None
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        for frame, _ in walk_tb(error.__traceback__)
    ]
    if not any(
        module.startswith("trl.trainer.") and function == "__init__" for module, function in frames
    ):
        return None
    packages = [module.partition(".")[0] for module, _ in frames]
    if (
        next(name for name in reversed(packages) if name in (*_TRL_AND_BELOW, "hfscale"))
        == "hfscale"
    ):
        return None
    return UsageError(
        f"TRL refuses these flags or records: {type(error).__name__}: {one_line(error)}"
    )


def end_if_preempted(scaling: "ScalingCallback") -> None:
    """End a preempted run. Call it after `Trainer.train`: only a completed run is evaluated and exported.

    The callbacks of the recipes have `on_preemption="return"`, so that `run` ends all ranks in the same way.

    Args:
        scaling (`ScalingCallback`): the callback of the run.

    Raises:
        Preempted: the training was stopped before its end; `run` turns it into exit code 75.
    """
    reason = scaling.spot_checkpoint.preempted
    if reason is not None:
        raise Preempted(
            f"preempted by {reason}; relaunch the same command to resume (exit code 75)"
        )
