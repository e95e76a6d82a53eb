"""Preemption notices: their sources, the time until the end, and the collection that a training reads."""

import time
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from hfscale.core.lives import STOP_FILE as STOP_FILE

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h, "try again later": the run was preempted, and the same command resumes it."""

AWS, GCP, AZURE = "AWS spot notice", "GCP preemption", "Azure scheduled event"
SOURCES = ("SIGUSR1", "SIGTERM", "SIGINT", STOP_FILE, AWS, GCP, AZURE)
"""Every source of notices; ranks send each other the index of a source in this tuple."""


class Preempted(SystemExit):
    """Ends the process with exit code 75.

    Args:
        message (`str`): message that says why the run was preempted, and how to resume it.
    """

    code: int

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_CODE)
        self.message = message


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A notice that this machine or this process will be ended.

    Args:
        source (`str`): one of `SOURCES`.
        seconds (`float`, *optional*): seconds from `received` to the end; None if the source does not give a time.
        received (`float`): time at which it arrived, in seconds on the clock of `time.monotonic`.
    """

    source: str
    seconds: float | None = None
    received: float = field(default_factory=time.monotonic)

    def seconds_left(self, assumed_s: float | None = None) -> float | None:
        """Return the seconds until the end (negative after it), or None if the time is unknown.

        Args:
            assumed_s (`float`, *optional*): seconds from `received` to the end that are assumed if the source does not
                give a time.
        """
        seconds = self.seconds if self.seconds is not None else assumed_s
        return None if seconds is None else self.received + seconds - time.monotonic()


class PreemptionNotices:
    """Collects the notices of signal handlers and polling threads until the training reads them.

    It has no lock: a signal handler may run between any two instructions of the thread that would hold it. Each method
    is one operation on a dictionary, which the interpreter does not interrupt.
    """

    def __init__(self) -> None:
        self._notices: dict[str, Notice] = {}
        self._hints: dict[str, None] = {}

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Keep the collection of this process, which the signal handlers add to, in copies of what refers to it."""
        return "NOTICES" if self is NOTICES else super().__reduce_ex__(protocol)

    def add(self, notice: Notice) -> None:
        """Add a notice. Of several from one source only the first is kept, since its deadline is the correct one."""
        self._notices.setdefault(notice.source, notice)

    def withdraw(self, source: str) -> None:
        """Remove the notice of `source`, if there is one."""
        self._notices.pop(source, None)

    def has(self, source: str) -> bool:
        """Return whether there is a notice of `source`."""
        return source in self._notices

    def any_older_than(self, seconds: float) -> bool:
        """Return whether a notice that has not been withdrawn arrived more than `seconds` seconds ago."""
        return any(time.monotonic() - notice.received > seconds for notice in self.pending())

    def pending(self) -> list[Notice]:
        """Return all notices that have not been withdrawn."""
        return list(self._notices.values())

    def add_hint(self, source: str) -> None:
        """Record that a notice of `source` is likely to follow, so that the run can save a checkpoint now."""
        self._hints[source] = None

    def take_hint(self) -> bool:
        """Return whether a hint has been added since the last call, and remove all hints."""
        hinted = bool(self._hints)
        self._hints.clear()
        return hinted

    def clear(self) -> None:
        """Remove all notices and hints."""
        self._notices.clear()
        self._hints.clear()


NOTICES = PreemptionNotices()
"""The notices of this process: signals concern the process, so there is one collection."""
