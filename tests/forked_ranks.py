"""Runs a function in several ranks that are forks of the test process, which has already imported the libraries."""

import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ports import free_port

from hfscale.core.progress_locks import own_progress_locks


def import_what_ranks_import() -> None:
    """Import DeepSpeed where it is installed: Accelerate would, in each rank, which takes it two seconds or more."""
    with suppress(ImportError):
        import deepspeed  # noqa: F401


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    log: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    ends_all: bool = True,
) -> list[int]:
    """Call `function(*args)` in `world_size` forked processes with the environment that torchrun would give them.

    Args:
        world_size (`int`): number of processes.
        function (`Callable`): the function of each rank.
        args: its arguments.
        log (`Path`): a folder; each rank's output is written to `rank-N.log` in it.
        env (`Mapping[str, str]`, *optional*): further environment variables, as a launcher's config would set them.
        timeout_s (`float`): time limit in seconds, after which the ranks are killed.
        ends_all (`bool`): whether a rank that fails ends the others, as a launcher does.

    Returns:
        `list[int]`: the exit code of each rank.
    """
    import_what_ranks_import()
    log.mkdir(parents=True, exist_ok=True)
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size), **(env or {})}
    common |= {"LOCAL_WORLD_SIZE": str(world_size)}
    pids = []
    sys.stdout.flush()
    sys.stderr.flush()
    # No rank begins before all are forked: a thread of this process that answers the first rank, such as that of a
    # store, may hold a lock of the C library, which a later rank would inherit locked.
    is_held, release = os.pipe()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.close(release)
            os.read(is_held, 1)  # until this process has closed the other end
            os.close(is_held)
            _run_rank(rank, common, function, args, log, timeout_s)
        pids.append(pid)
    os.close(is_held)
    os.close(release)
    return _wait(pids, timeout_s, ends_all)


def _run_rank(
    rank: int, env: Mapping[str, str], function: Callable[..., Any], args: tuple[Any, ...], log: Path, timeout_s: float
) -> None:
    """Run the function in this forked process and end the process."""
    code = 1
    try:
        descriptor = os.open(log / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        faulthandler.dump_traceback_later(timeout_s - 5, file=sys.stderr)  # where a rank hangs that will be killed
        _log_to_standard_error()
        own_progress_locks()  # an earlier rank may have been killed in a progress bar
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
            del os.environ[name]
        os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
        function(*args)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(ValueError):  # a library has closed them: the process must not go on as pytest
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _log_to_standard_error() -> None:
    """Redirect the loggers that were set up before the fork; they still write to the streams of the test process.

    torch's handler for traces of the compiler has no stream, and would close the one that it is given.
    """
    loggers = [logging.root, *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        is_console = isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
        if not is_console or handler.stream is None:
            continue
        if getattr(handler.stream, "closed", False):  # it was that of a test that has ended
            handler.stream = sys.stderr
        else:
            handler.setStream(sys.stderr)


def _wait(pids: list[int], timeout_s: float, ends_all: bool) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline or (ends_all and any(codes.values())):
            for pid in [pid for pid in pids if pid not in codes]:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                codes[pid] = -9
        time.sleep(0.01)
    return [codes[pid] for pid in pids]
