"""One logger for the package: short lines on standard error, from the main process only."""

import logging
import os
import sys

_ROOT = "hfscale"


def is_main_process() -> bool:
    """Whether this is the process of global rank 0, read from the launcher's `RANK` (absent: a single process)."""
    return int(os.environ.get("RANK", "0")) == 0


class _MainProcessOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return is_main_process() or record.levelno >= logging.ERROR


def get_logger(name: str) -> logging.Logger:
    """The logger `name`, below a root that prints INFO and above; set `logging.getLogger("hfscale")` to change it.

    A program that has configured Python's root logger gets the lines through its own handlers instead.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("hfscale: %(message)s"))
        handler.addFilter(_MainProcessOnly())
        root.addHandler(handler)
        root.propagate = False
    if root.level == logging.NOTSET:
        root.setLevel(logging.INFO)
    return logging.getLogger(name)
