"""SIGTERM, SIGUSR1 and SIGINT become notices: a handler does nothing but note the time and the name."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hfscale.preemption.notice import BOARD, EXIT_CODE, Notice, NoticeBoard
from hfscale.utils.logging import is_main_process

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LAUNCHER_GRACE_S = 30.0
"""Between the signal and SIGKILL by default: torch.distributed.elastic, and Kubernetes' termination grace period."""

_REPEATED_AFTER_S = 5.0  # one stop can bring several signals: the scheduler's own and, through the launcher, another
_BEFORE_THE_FIRST_STEP = "hfscale: {name}: the run stops after its first step\n"
_INTERRUPTED = "\nhfscale: Ctrl-C: the run saves and stops when this step ends; once more stops it at once\n"


def assumed_notice_s(source: str, environ: Mapping[str, str] = os.environ) -> float | None:
    """Seconds that a signal is taken to leave where nobody said: what the launcher waits before SIGKILL after SIGTERM
    or SIGINT (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, 30 by default). None for SIGUSR1, which comes ahead of the end by what a
    scheduler was told, and for what is no signal."""
    if source not in ("SIGTERM", "SIGINT"):
        return None
    try:
        return float(environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    except (KeyError, ValueError):
        return LAUNCHER_GRACE_S


class SignalWatch:
    """Handlers of `SIGNALS` that post notices while a training serves them, and step aside while none does.

    Args:
        board (`NoticeRankStore`): where the notices go.
        whole_process (`bool`): the process is a recipe's: SIGTERM and SIGUSR1 before the training are served by its
            first step (were they to end this rank at once, others might have begun), and once it is over they no
            longer disturb the last evaluation and the export. Where no training comes, a repetition ends the process
            with exit code 75. Otherwise a signal outside the training does what it did before the watch.
    """

    def __init__(self, board: NoticeBoard = BOARD, *, whole_process: bool = False) -> None:
        self.board = board
        self.whole_process = whole_process
        self._previous: dict[signal.Signals, Any] = {}
        self._is_serving: Callable[[FrameType | None], bool] | None = None
        self._has_served = False

    @property
    def is_installed(self) -> bool:
        """Whether the handlers are in place."""
        return bool(self._previous)

    def install(self) -> bool:
        """Put the handlers in place; False outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self.is_installed:
            self._previous = {number: signal.getsignal(number) for number in SIGNALS}  # first: one may come right away
            for number in SIGNALS:
                signal.signal(number, self._handle)
        return True

    def restore(self) -> None:
        """Put the previous handlers back, where ours still stand."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}

    def ignore(self) -> None:
        """Heed no signal any more, to the very end: at its end Python undoes handlers, but leaves what is ignored."""
        if self.is_installed:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def restored_by_an_error(self) -> Iterator[None]:
        """Put the previous handlers back when an error leaves the block: what waits for the launcher to end it must
        not hold out against that."""
        try:
            yield
        except SystemExit:
            raise
        except BaseException:
            self.restore()
            raise

    def serve(self, is_serving: Callable[[FrameType | None], bool]) -> None:
        """From now on notices are read.

        Args:
            is_serving: told the interrupted frame, says whether the training is still under way in it. A training
                that an exception has ended does not call `done`, and must not leave a process that no signal ends.
        """
        self._is_serving = is_serving
        self._has_served = True

    def done(self) -> None:
        """The training is over; a watch of its own is taken down."""
        self._is_serving = None
        if not self.whole_process:
            self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        is_again = number == signal.SIGINT and self.board.has(name)
        if self._is_serving is not None and self._is_serving(frame) and not is_again:
            self.board.post(Notice(source=name))
            if number == signal.SIGINT and is_main_process():
                _say(_INTERRUPTED)
        elif self.whole_process and number != signal.SIGINT:
            if not self._has_served:
                if self.board.older_than(_REPEATED_AFTER_S):
                    os._exit(EXIT_CODE)  # not by unwinding: other ranks may wait in a collective that this one left
                if is_main_process():
                    _say(_BEFORE_THE_FIRST_STEP.format(name=name))
            self.board.post(Notice(source=name))
        else:
            self.restore()
            signal.raise_signal(number)


def _say(line: str) -> None:
    """Past Python's buffers, which the interrupted code may be writing to right now."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())


_watch = SignalWatch()


def watch_signals(*, whole_process: bool = False) -> SignalWatch:
    """Install this process's one watch, or return it as it stands."""
    global _watch
    if whole_process and not _watch.is_installed:
        _watch = SignalWatch(whole_process=True)
    _watch.install()
    return _watch
