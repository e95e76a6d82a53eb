"""Messages on a TCP connection whose two ends have proved that they know the same token; nothing is unpickled.

A connection begins with a challenge in both directions (HMAC-SHA256 over two random numbers), of fixed length. Only
then is a message read. A message is a JSON object and a payload of bytes, both with a length that is checked before it
is read. The connection is not encrypted: use a tunnel (WireGuard, ssh) between sites.
"""

import errno
import hmac
import json
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hfscale.core.best_effort import count_failure
from hfscale.core.text_files import parse_json

Address = tuple[str, int]
"""Host and port."""
SILENCE_S = 60.0
"""Seconds without a byte, in the middle of a message, after which the other end counts as lost."""
CHALLENGE_S = 60.0
"""Seconds that the other end has to prove that it knows the token."""
MAX_JSON_BYTES = 1 << 20
"""Longest JSON object that is accepted, unless the connection has another limit."""
_GREETING = b"hfscale-connection-1"
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_LENGTHS = struct.Struct(">IQ")  # of the JSON text, of the payload
_CHUNK_BYTES = 1 << 20
_KEEP_ALIVE_PROBES = 3
_MAX_UNPROVEN = 1024
_RETRY_S = 0.1
_CLOSED = (errno.EBADF, errno.EINVAL)  # of a listener
_IN_SHORT_SUPPLY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class WrongTokenError(ConnectionError):
    """The other end does not know the token."""


class Connection:
    """One authenticated connection. One thread may send while another one receives.

    Args:
        connected (`socket.socket`): a connected socket; it is closed if the other end fails the challenge.
        token (`bytes`): the secret.
        is_server (`bool`): whether this end has accepted the connection.
        max_json_bytes (`int`): longest JSON object that is accepted.
        lost_after_s (`int`): seconds after which the machine of the other end counts as lost if it does not answer
            the probes of TCP. Without messages, a connection is kept as long as it answers them.

    Raises:
        WrongTokenError: the other end does not know the token.
        OSError: it does not answer.
    """

    def __init__(
        self,
        connected: socket.socket,
        token: bytes,
        *,
        is_server: bool,
        max_json_bytes: int = MAX_JSON_BYTES,
        lost_after_s: int = 60,
    ) -> None:
        self._socket = connected
        self._max_json_bytes = max_json_bytes
        self.sent_bytes = 0
        """Bytes sent so far."""
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _set_keep_alive(connected, lost_after_s)
            self._authenticate(token, is_server=is_server)
        except BaseException:
            connected.close()
            raise
        connected.settimeout(SILENCE_S)

    def _authenticate(self, token: bytes, *, is_server: bool) -> None:
        # One that sends a byte now and then would pass a time limit of each call.
        until = time.monotonic() + CHALLENGE_S
        self._socket.settimeout(CHALLENGE_S)
        own = secrets.token_bytes(_RANDOM_BYTES)
        self._send(_GREETING + own)
        greeting = self._receive(len(_GREETING) + _RANDOM_BYTES, until)
        if not greeting.startswith(_GREETING):
            raise WrongTokenError("it is no rendezvous of this version of hfscale")
        other = bytes(greeting[len(_GREETING) :])
        roles = (b"server", b"client") if is_server else (b"client", b"server")
        self._send(hmac.digest(token, roles[0] + own + other, "sha256"))
        try:
            proof = self._receive(_PROOF_BYTES, until)
        except ConnectionError:
            # A server sends its proof whatever the client knows: this one has just ended
            if not is_server:
                raise
            raise WrongTokenError("it has refused the token") from None
        if not hmac.compare_digest(proof, hmac.digest(token, roles[1] + other + own, "sha256")):
            raise WrongTokenError("it does not know the token")

    @property
    def own_host(self) -> str:
        """Address of this machine by which the other end reaches it."""
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        """Return the file descriptor, for a selector; -1 after `close`."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], payload: Any = b"") -> None:
        """Send a message.

        Args:
            message (`Mapping`): anything that JSON can represent.
            payload (`bytes` or a buffer of bytes): sent after it.

        Raises:
            OSError: the connection is lost. It is closed then, since a part of the message may have been sent.
        """
        text = json.dumps(message).encode()
        content = memoryview(payload).cast("B")
        try:
            for part in (memoryview(_LENGTHS.pack(len(text), len(content)) + text), content):
                # The time-out of a socket is that of one call
                for start in range(0, len(part), _CHUNK_BYTES):
                    self._send(part[start : start + _CHUNK_BYTES])
        except OSError:
            self.close()
            raise

    def receive(
        self, max_payload_bytes: int = 0, *, patient: bool = False
    ) -> tuple[dict[str, Any], bytearray]:
        """Receive a message.

        Args:
            max_payload_bytes (`int`): longest payload that is accepted.
            patient (`bool`): whether to wait without a limit for the first byte.

        Returns:
            `tuple[dict, bytearray]`: the JSON object and the payload.

        Raises:
            OSError: the connection is lost, or what comes is no message.
        """
        if patient:
            self._wait_for_first_byte()
        text_bytes, payload_bytes = _LENGTHS.unpack(self._receive(_LENGTHS.size))
        if text_bytes > self._max_json_bytes or payload_bytes > max_payload_bytes:
            raise ConnectionError(f"a message of {text_bytes} + {payload_bytes} bytes is too long")
        try:
            message = parse_json(self._receive(text_bytes))
        except ValueError as error:
            raise ConnectionError("a message is not JSON") from error
        if not isinstance(message, dict):
            raise ConnectionError("a message is no JSON object")
        return message, self._receive(payload_bytes)

    def close(self) -> None:
        """Close the connection, also while another thread waits for it."""
        with suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_first_byte(self) -> None:
        """Wait until there is something to read. The time limit of the socket stays: another thread may be sending."""
        with selectors.PollSelector() as selector:
            try:
                selector.register(self._socket, selectors.EVENT_READ)
            except ValueError:
                raise ConnectionError("the connection is closed") from None
            selector.select()

    def _send(self, data: Any) -> None:
        self._socket.sendall(data)
        self.sent_bytes += len(data)

    def _receive(self, length: int, until: float | None = None) -> bytearray:
        """Return so many bytes.

        Args:
            length (`int`): the bytes.
            until (`float`, *optional*): time of the monotonic clock by which they must have come.
        """
        data = bytearray(length)
        view = memoryview(data)
        while view:
            if until is not None:
                self._socket.settimeout(max(until - time.monotonic(), 0.001))
            read = self._socket.recv_into(view)
            if read == 0:
                raise ConnectionError("the other end has closed the connection")
            view = view[read:]
        return data


class Acceptor:
    """Accepts connections, and serves each one whose other end proves that it knows the token, on a thread of its own.

    Only so many connections without a proof are open at a time, a quarter of the files that this process may open:
    after that the oldest of them is closed for each new one. So an end without the token can neither exhaust files or
    threads nor keep others out for long.

    Args:
        listener (`socket.socket`): a listening socket; with a time-out, `is_over` is asked so often.
        token (`bytes`): the secret.
        serve (`Callable`): called with each connection that has the proof. The connection is closed afterwards, and an
            `OSError` or `ValueError` ends it only: the other end is gone, or breaks the protocol.
        **limits (`int`): those of `Connection`.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        serve: Callable[[Connection], None],
        **limits: int,
    ) -> None:
        self._listener = listener
        self._token = token
        self._serve = serve
        self._limits = limits
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []  # the oldest first
        self._max_unproven = max(
            1, min(_MAX_UNPROVEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        )

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Accept connections until the listener is shut down, or until `is_over()`.

        Args:
            is_over (`Callable`): asked before each connection.
        """
        while not is_over():
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                self._make_room(error)
                continue
            self._register(accepted)
            try:
                threading.Thread(target=self._handle, args=(accepted,), daemon=True).start()
            except RuntimeError as error:  # there are too many threads
                self._forget(accepted)
                accepted.close()
                self._make_room(error)

    def _register(self, accepted: socket.socket) -> None:
        with self._lock:
            self._unproven.append(accepted)
            surplus = self._unproven[: -self._max_unproven]
            del self._unproven[: len(surplus)]
        for one in surplus:
            _shut_down(one)

    def _forget(self, accepted: socket.socket) -> None:
        with self._lock, suppress(ValueError):  # it was closed for a newer one
            self._unproven.remove(accepted)

    def _make_room(self, error: Exception) -> None:
        """Close the oldest connection without a proof if files or threads are used up, and wait a moment."""
        # The other end was faster
        if isinstance(error, OSError) and error.errno not in _IN_SHORT_SUPPLY:
            return
        count_failure("accepting connections", self._listener.getsockname(), error)
        with self._lock:
            oldest = self._unproven.pop(0) if self._unproven else None
        if oldest is not None:
            _shut_down(oldest)
        time.sleep(_RETRY_S)

    def _handle(self, accepted: socket.socket) -> None:
        where = self._listener.getsockname() if self._listener.fileno() >= 0 else "a closed port"
        try:
            connection = Connection(accepted, self._token, is_server=True, **self._limits)
        except OSError as error:
            count_failure("proving the token of a connection", where, error)
            return
        finally:
            self._forget(accepted)
        try:
            with suppress(OSError, ValueError), connection:
                self._serve(connection)
        except Exception as error:  # of a message with other fields than are expected
            count_failure("serving a connection", where, RuntimeError(type(error).__name__))


def _shut_down(connected: socket.socket) -> None:
    with suppress(OSError):  # the thread that has it has closed it
        connected.shutdown(socket.SHUT_RDWR)


def _set_keep_alive(connected: socket.socket, lost_after_s: int) -> None:
    """Have a connection end if the machine of the other end is lost: half of the time is silence, half are probes."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not hasattr(socket, "TCP_KEEPIDLE"):  # not Linux
        return
    idle_s = lost_after_s // 2
    interval_s = max((lost_after_s - idle_s) // _KEEP_ALIVE_PROBES, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_PROBES)
    # Of what it was sent
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * lost_after_s)
