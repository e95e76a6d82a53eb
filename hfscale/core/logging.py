"""The logger of the package: short lines on standard error, from the main process only."""

import logging
import os
import sys

_ROOT = "hfscale"


def is_main_process() -> bool:
    """Return whether this process has global rank 0, according to the launcher's `RANK`; True without a launcher."""
    return int(os.environ.get("RANK", "0")) == 0


class _MainProcessOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return is_main_process() or record.levelno >= logging.ERROR


def get_logger(name: str) -> logging.Logger:
    """Return the logger `name`.

    The parent logger "hfscale" prints lines of level INFO and above; a program can configure it. If the program has
    configured Python's root logger, the lines go to its handlers instead.

    Args:
        name (`str`): the name of the calling module.
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
