"""What was said, by whom, and how much time it leaves."""

import time
from dataclasses import dataclass, field

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h, "try again later": preempted, the same command continues."""

STOP_FILE = "stop file"
AWS, GCP, AZURE = "AWS spot notice", "GCP preemption", "Azure scheduled event"
SOURCES = ("SIGUSR1", "SIGTERM", "SIGINT", STOP_FILE, AWS, GCP, AZURE)
"""Every source; ranks tell each other which one it was by its place here."""


class Preempted(SystemExit):
    """Ends the process with exit code 75; its words tell why, and what to do."""

    def __init__(self, words: str) -> None:
        super().__init__(EXIT_CODE)
        self.words = words


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Word that this machine, or this process, is to end.

    Args:
        source (`str`): one of `SOURCES`.
        seconds (`float`, *optional*): how long after `received` the end comes; None: the source does not say.
        received (`float`): on the monotonic clock.
    """

    source: str
    seconds: float | None = None
    received: float = field(default_factory=time.monotonic)

    def seconds_left(self, assumed_s: float | None = None) -> float | None:
        """Seconds until the end, negative when it is over, with `assumed_s` for what the source did not say; None
        where neither is known."""
        seconds = self.seconds if self.seconds is not None else assumed_s
        return None if seconds is None else self.received + seconds - time.monotonic()


class NoticeBoard:
    """Where signal handlers and polling threads leave their notices for the training to find.

    It has no lock: a signal handler may run between any two instructions of the thread that would hold it. Each
    method is one operation on a dictionary, which the interpreter does not interrupt.
    """

    def __init__(self) -> None:
        self._notices: dict[str, Notice] = {}
        self._hints: dict[str, None] = {}

    def post(self, notice: Notice) -> None:
        """Add a notice; of several from one source the first stands, for its deadline is the true one."""
        self._notices.setdefault(notice.source, notice)

    def withdraw(self, source: str) -> None:
        """Take back what `source` said, if it said anything."""
        self._notices.pop(source, None)

    def has(self, source: str) -> bool:
        """Whether `source` has left a notice."""
        return source in self._notices

    def older_than(self, seconds: float) -> bool:
        """Whether a notice has stood for longer than that."""
        return any(time.monotonic() - notice.received > seconds for notice in self.notices())

    def notices(self) -> list[Notice]:
        """All that stand."""
        return list(self._notices.values())

    def hint(self, source: str) -> None:
        """Note that a notice is likely to follow, so that a save now is well spent."""
        self._hints[source] = None

    def take_hint(self) -> bool:
        """Whether a hint has come since the last call."""
        hinted = bool(self._hints)
        self._hints.clear()
        return hinted

    def clear(self) -> None:
        """Forget everything: a new run begins."""
        self._notices.clear()
        self._hints.clear()


BOARD = NoticeBoard()
"""The board of this process: signals are the process's, so their board is too."""
