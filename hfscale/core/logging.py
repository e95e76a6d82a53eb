"""Lines on standard error without secrets: the logger of the package, for the main process only, and `print_line`."""

import logging
import os
import sys

from hfscale.core.redaction import redact

_ROOT = "hfscale"


def is_main_process() -> bool:
    """Return whether this process has global rank 0, according to the launcher's `RANK`; True without a launcher."""
    rank = os.environ.get("RANK", "")
    return rank.strip() in ("", "0")


class _Redacted(logging.Filter):
    """Removes secrets from each line, whichever handler prints it: errors of other libraries quote URLs."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


_redacted = _Redacted()


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
    logger = logging.getLogger(name)
    logger.addFilter(_redacted)  # a second call adds nothing
    return logger


def on_one_line(text: str) -> str:
    """Return a text as one line: names of files and keys of a file may have line ends and codes of a terminal.

    Args:
        text (`str`): such as the message of an error.
    """
    line = ""
    for letter in " ".join(text.split()):
        if letter.isprintable():
            line += letter
        else:
            line += letter.encode("unicode_escape").decode()
    return line


def print_line(text: str) -> None:
    """Print a line to standard error, without secrets; on every process, unlike a logger.

    Args:
        text (`str`): the line, without its end.
    """
    if sys.stderr is not None:  # it was closed before Python started
        sys.stderr.write(f"{redact(text)}\n")
        sys.stderr.flush()
