"""Errors of hfscale that end a program are printed as one line instead of a traceback."""

import functools
import os
import sys
from types import TracebackType
from typing import Any

from hfscale.core.logging import print_line

SHOW_TRACEBACK = "HFSCALE_TRACEBACK"
"""Environment variable: with `1`, the traceback is printed as for any other error."""


def show_in_one_line(kind: type[Exception]) -> None:
    """Print an error that ends this program in one line, and exit with its `exit_code`.

    Each rank of a training prints its own. Nothing is changed where the program, or a debugger, has set
    `sys.excepthook`, or where the environment variable `HFSCALE_TRACEBACK` is 1.

    Args:
        kind (`type`): the class of the errors; others keep their traceback.
    """
    if sys.excepthook is sys.__excepthook__ and os.environ.get(SHOW_TRACEBACK) != "1":
        sys.excepthook = functools.partial(_print_one_line, kind)


def _print_one_line(
    ours: type[Exception],
    kind: type[BaseException],
    error: Any,
    traceback: TracebackType | None,
) -> None:
    if not issubclass(kind, ours):
        sys.__excepthook__(kind, error, traceback)
        return
    rank = os.environ.get("RANK")
    where = f" on rank {rank}" if rank not in (None, "0") else ""
    print_line(f"hfscale: error{where}: {error}")
    # Python exits with the code of a `SystemExit` that its excepthook raises
    raise SystemExit(error.exit_code)
