"""Errors of hfscale that end a program are printed as one line instead of a traceback."""

import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hfscale.core.logging import print_line

SHOW_TRACEBACK = "HFSCALE_TRACEBACK"
"""Environment variable: with `1`, the traceback is printed as for any other error."""

_OF_TORCH = "torch.distributed.distributed_c10d"
"""The module of the hook that torch sets in `init_process_group`."""


def show_in_one_line(kind: type[Exception]) -> None:
    """Print an error that ends this program in one line, and exit with its `exit_code`.

    Each rank of a training prints its own. Nothing is changed where the program, or a debugger, has set
    `sys.excepthook`, or where the environment variable `HFSCALE_TRACEBACK` is 1. torch sets one with the default
    process group, which names the rank in the traceback of other errors: it stays for them.

    Args:
        kind (`type`): the class of the errors; others keep their traceback.
    """
    if os.environ.get(SHOW_TRACEBACK) == "1":
        return
    hook = sys.excepthook
    is_of_torch = getattr(hook, "__module__", None) == _OF_TORCH  # it may have been set around ours
    if is_of_torch or hook is sys.__excepthook__:
        sys.excepthook = functools.partial(_print_one_line, kind, hook)


def _print_one_line(
    ours: type[Exception],
    other_hook: Callable[..., Any],
    kind: type[BaseException],
    error: Any,
    traceback: TracebackType | None,
) -> None:
    if not issubclass(kind, ours):
        other_hook(kind, error, traceback)
        return
    rank = os.environ.get("RANK")
    where = f" on rank {rank}" if rank not in (None, "0") else ""
    print_line(f"hfscale: error{where}: {error}")
    # Python exits with the code of a `SystemExit` that its excepthook raises
    raise SystemExit(error.exit_code)
