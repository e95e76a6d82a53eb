"""What a supervisor says: lines on standard error and in the file of `--log`. Neither of them can end the run."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hfscale.core.best_effort import best_effort
from hfscale.core.logging import print_line
from hfscale.core.records import append_record, unix_time
from hfscale.recovery.restarts import Failure

WRITING_LOG = "writing the log of hfscale run"
"""Name of this work in warnings."""


class EventLog:
    """Reports the events of one supervised run, without secrets. Threads may use it at the same time.

    Args:
        path (`Path`, *optional*): file to which one JSON line per event is appended.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def say(
        self, event: str, text: str | None, fields: "Failure | Mapping[str, Any] | None" = None
    ) -> None:
        """Report one event.

        Args:
            event (`str`): its name in the file.
            text (`str`, *optional*): the line for a person; None: the event is for the file only.
            fields (`Failure` or `Mapping`, *optional*): further fields of the line in the file.
        """
        known = asdict(fields) if isinstance(fields, Failure) else dict(fields or {})
        if text is not None:
            with suppress(OSError, ValueError):  # it was closed, or its reader has ended
                print_line(f"hfscale run: {text}")
        if self._path is not None:
            line = {"time": unix_time(), "event": event, "text": text, **known}
            with best_effort(WRITING_LOG, self._path):
                append_record(self._path, line)
