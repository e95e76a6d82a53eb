"""Turns SIGTERM, SIGUSR1 and SIGINT into preemption notices: a handler only records the time and the signal's name."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hfscale.checkpoint.preemption.notice import EXIT_CODE, NOTICES, Notice, PreemptionNotices
from hfscale.core.logging import is_main_process
from hfscale.core.rank_link import connect

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LAUNCHER_GRACE_S = 30.0
"""Default seconds between the signal and SIGKILL: torch.distributed.elastic, and Kubernetes' termination grace
period."""

# One stop can bring several signals: the scheduler's own, and another through the launcher
_REPEATED_AFTER_S = 5.0
_BEFORE_THE_FIRST_STEP = "hfscale: {name}: the run stops after its first step\n"
_INTERRUPTED = (
    "\nhfscale: Ctrl-C: the run saves and stops after this step; press it again to stop at once\n"
)


def assumed_notice_s(source: str, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds that are assumed between a notice of `source` and the end of the process.

    For SIGTERM and SIGINT it is the time that the launcher waits before SIGKILL (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 30 by
    default). It is None for SIGUSR1, which schedulers send a configured time before the end, and for other sources.

    Args:
        source (`str`): one of `hfscale.checkpoint.preemption.SOURCES`.
        environ (`Mapping[str, str]`): the environment variables.
    """
    if source not in ("SIGTERM", "SIGINT"):
        return None
    try:
        return float(environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    except (KeyError, ValueError):
        return LAUNCHER_GRACE_S


class SignalWatch:
    """Installs handlers of `SIGNALS` that add notices while a training reads them.

    While no training reads notices, a signal has its previous effect.

    Args:
        notices (`PreemptionNotices`): collection to which the notices are added.
        whole_process (`bool`): whether the watch covers the process from start to end, as in a recipe. Then SIGTERM
            and SIGUSR1 before the training also add notices, and the run stops after its first step: if they ended
            this rank at once, other ranks might have started already. After the training they no longer interrupt the
            last evaluation and the export. Before the training, such a signal that arrives more than five seconds
            after a pending notice ends the process with exit code 75.
    """

    def __init__(
        self, notices: PreemptionNotices = NOTICES, *, whole_process: bool = False
    ) -> None:
        self.notices = notices
        self.whole_process = whole_process
        self._previous: dict[signal.Signals, Any] = {}
        self._is_serving: Callable[[FrameType | None], bool] | None = None
        self._has_served = False

    @property
    def is_installed(self) -> bool:
        """Whether the handlers are installed."""
        return bool(self._previous)

    def install(self) -> bool:
        """Install the handlers and return True; outside the main thread Python does not allow it: return False."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self.is_installed:
            # first: one may come right away
            self._previous = {number: signal.getsignal(number) for number in SIGNALS}
            for number in SIGNALS:
                signal.signal(number, self._handle)
        return True

    def restore(self) -> None:
        """Restore the previous handlers of those signals whose handler has not been replaced since `install`."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}

    def ignore(self) -> None:
        """Ignore the signals until the process has ended: Python removes handlers at exit, but not SIG_IGN.

        It has no effect if the handlers are not installed.
        """
        if self.is_installed:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def restored_by_an_error(self) -> Iterator[None]:
        """Restore the previous handlers when an error leaves the block.

        After an error a rank waits for the launcher to end it, and must then react to SIGTERM.
        """
        try:
            yield
        except SystemExit:
            raise
        except BaseException:
            self.restore()
            raise

    def serve(self, is_serving: Callable[[FrameType | None], bool]) -> None:
        """Add notices from now on, since a training reads them.

        Args:
            is_serving (`Callable[[FrameType | None], bool]`): receives the interrupted frame and returns whether the
                training is still running in it. A training that ends with an exception does not call `done`, and the
                process must then react to signals again.
        """
        self._is_serving = is_serving
        self._has_served = True

    def done(self) -> None:
        """Stop adding notices for a training; without `whole_process` the previous handlers are restored."""
        self._is_serving = None
        if not self.whole_process:
            self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        is_repeated = number == signal.SIGINT and self.notices.has(name)
        if self._is_serving is not None and self._is_serving(frame) and not is_repeated:
            self.notices.add(Notice(source=name))
            if number == signal.SIGINT and is_main_process():
                _print(_INTERRUPTED)
        elif self.whole_process and number != signal.SIGINT:
            if not self._has_served:
                if self.notices.any_older_than(_REPEATED_AFTER_S):
                    link = connect()
                    if link is not None:
                        link.ending(EXIT_CODE)
                    # Without unwinding: other ranks may wait in a collective that this one left
                    os._exit(EXIT_CODE)
                if is_main_process():
                    _print(_BEFORE_THE_FIRST_STEP.format(name=name))
            self.notices.add(Notice(source=name))
        else:
            self.restore()
            signal.raise_signal(number)


def _print(line: str) -> None:
    """Write to standard error without Python's buffers, which the interrupted code may be writing to right now."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())


_watch = SignalWatch()


def watch_signals(*, whole_process: bool = False) -> SignalWatch:
    """Install the `SignalWatch` of this process if it is not installed, and return it.

    Args:
        whole_process (`bool`): see `SignalWatch`; it has no effect if the watch is already installed.
    """
    global _watch
    if whole_process and not _watch.is_installed:
        _watch = SignalWatch(whole_process=True)
    _watch.install()
    return _watch
