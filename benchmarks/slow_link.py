"""A link of limited bandwidth: a TCP proxy in user space with a token bucket per direction."""

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_PIECE = 4096


class _Bucket:
    """Lets `rate` bytes per second pass, and at most a tenth of a second's worth at once."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.passed = 0
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, number: int) -> None:
        """Wait until `number` bytes may pass."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.1) + number / self.rate
            self.passed += number
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class SlowLink:
    """Forwards the connections to a port to another address, both directions at `bytes_s` each.

    All connections share the bandwidth, as those of an island share its line.

    Args:
        target (`tuple[str, int]`): where connections are forwarded to.
        bytes_s (`float`): bandwidth of one direction, bytes/s.
    """

    def __init__(self, target: tuple[str, int], bytes_s: float) -> None:
        self._target = target
        self._up, self._down = _Bucket(bytes_s), _Bucket(bytes_s)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        """The port to connect to."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def bytes_up(self) -> int:
        """Bytes that were sent to the target."""
        return self._up.passed

    @property
    def bytes_down(self) -> int:
        """Bytes that came back."""
        return self._down.passed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:  # closed, or nothing listens there yet: the client tries again
                if self._listener.fileno() < 0:
                    return
                client.close()
                continue
            for pair in ((client, server, self._up), (server, client, self._down)):
                threading.Thread(target=_forward, args=pair, daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket, bucket: _Bucket) -> None:
    # A small buffer: what the sender has handed over must be on its way, not in the memory of the kernel.
    source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _PIECE)
    try:
        while data := source.recv(_PIECE):
            bucket.take(len(data))
            sink.sendall(data)
    except OSError:
        pass  # one end has died: the other one is told below
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
