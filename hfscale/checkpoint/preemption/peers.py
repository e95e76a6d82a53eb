"""Ends this process on SIGTERM when another rank of its launcher has died, although the main thread is blocked.

When a rank dies, the launcher sends SIGTERM to the other ranks of its node, and SIGKILL to those that have not ended
after 30 seconds (torch 2.13; `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` holds only where the launcher itself is signalled). A
rank takes SIGTERM for a preemption notice and continues to the end of its step, which it cannot reach: it waits for
the dead rank in a collective. Python runs a signal's handler only when the main thread returns from such a call, but
writes the signal's number to the descriptor of `signal.set_wakeup_fd` at once, where a thread reads it.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from hfscale.core.logging import get_logger
from hfscale.core.processes import find_process, is_alive

logger = get_logger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that leaves because of a dead rank: that of a process that SIGTERM has ended."""
GRACE_S = 3.0
"""Seconds from SIGTERM to the first look at the other ranks. A commit that has begun can end within them."""
_LOOK_EVERY_S = 1.0
_STOP = 0  # no signal has this number


def peers_of(rank: int, descriptions: Sequence[Mapping[str, Any]]) -> dict[str, psutil.Process]:
    """Return the other ranks that the same launcher has started on this machine.

    Args:
        rank (`int`): the rank of this process.
        descriptions (`Sequence[Mapping[str, Any]]`): what `describe_process` returned on each rank.

    Returns:
        `dict[str, psutil.Process]`: the processes by `rank N`; empty where each process has a parent of its own.
    """
    own = descriptions[rank]
    place = (own["host"], own["parent"])
    found = {
        other: find_process(description)
        for other, description in enumerate(descriptions)
        if other != rank and (description["host"], description["parent"]) == place
    }
    return {f"rank {other}": process for other, process in found.items() if process is not None}


def siblings(environ: Mapping[str, str] = os.environ) -> dict[str, psutil.Process]:
    """Return the other ranks that the same launcher has started on this machine, without an exchange with them.

    Args:
        environ (`Mapping[str, str]`): the launcher's variables.

    Returns:
        `dict[str, psutil.Process]`: the processes by what a log line calls them; empty unless the parent has as
        many living children as `LOCAL_WORLD_SIZE` says.
    """
    try:
        parent = psutil.Process().parent()
        children = [
            process
            for process in (parent.children() if parent is not None else [])
            if is_alive(process)
        ]
    except psutil.Error:
        return {}
    if str(len(children)) != environ.get("LOCAL_WORLD_SIZE"):
        return {}
    return {
        f"process {child.pid} of another rank": child
        for child in children
        if child.pid != os.getpid()
    }


_running: "PeerWatch | None" = None


class PeerWatch(threading.Thread):
    """Waits for SIGTERM, and then ends this process as soon as one of its peers is dead.

    The signal's handler must be a Python function; it is not replaced. A process has one watch: the next one to start
    stops it.

    Args:
        peers (`Mapping[str, psutil.Process]`): the other ranks of this launcher on this machine, by what the log line
            calls them (`peers_of`, `siblings`).
    """

    def __init__(self, peers: Mapping[str, psutil.Process]) -> None:
        super().__init__(name="hfscale-peers", daemon=True)
        self._peers = peers
        self._stop_now = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def start(self) -> None:
        """Start watching. Only the main thread may call it."""
        global _running
        stop_watching_peers()
        previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if previous != -1:  # of an event loop such as asyncio's
            signal.set_wakeup_fd(previous)
            logger.info(
                "if a rank dies, the others end when the launcher kills them: the wakeup descriptor is in use"
            )
            return
        _running = self
        super().start()

    def stop(self) -> None:
        """Stop watching. Only the main thread may call it."""
        global _running
        if self._stop_now.is_set():
            return
        self._stop_now.set()
        if _running is self:
            _running = None
        if self.is_alive():
            current = signal.set_wakeup_fd(-1)
            if current != self._writer:  # other code has replaced ours
                signal.set_wakeup_fd(current)
            os.write(self._writer, bytes([_STOP]))
            self.join()
        os.close(self._reader)
        os.close(self._writer)

    def run(self) -> None:
        """Wait for SIGTERM, then look at the peers every second until `stop` is called."""
        # A child process that was forked, and handles signals in Python, writes its own signals here, too: then the
        # peers are watched from now on, which does no harm.
        while signal.SIGTERM not in (numbers := os.read(self._reader, 64)):
            if _STOP in numbers:
                return
        # The launcher signals after the first death; later peers leave as this process does
        first = self._dead()
        pause_s = GRACE_S
        while not self._stop_now.wait(pause_s):
            pause_s = _LOOK_EVERY_S
            dead = first or self._dead()
            if dead:
                line = f"hfscale: {dead[0]} has died: this process does not wait for it (exit code {EXIT_CODE})\n"
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
                os._exit(EXIT_CODE)

    def _dead(self) -> list[str]:
        return [name for name, process in self._peers.items() if not is_alive(process)]


def stop_watching_peers() -> None:
    """Stop the `PeerWatch` of this process, if one runs. Only the main thread may call it."""
    if _running is not None:
        _running.stop()
