"""Messages on a TCP connection whose two ends have proved that they know the same token; nothing is unpickled.

A connection begins with a challenge in both directions (HMAC-SHA256 over two random numbers), of fixed length. Only
then is a message read. A message is a JSON object and a payload of bytes, both with a length that is checked before it
is read. The connection is not encrypted: use a tunnel (WireGuard, ssh) between sites.
"""

import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

TOKEN_VARIABLE = "HFSCALE_ISLAND_TOKEN"  # noqa: S105 (the name, not the secret)
"""Environment variable with the secret that all islands share."""
SILENCE_S = 60.0
"""Seconds without a byte after which the other end counts as lost."""
_GREETING = b"hfscale-islands-1"
_RANDOM_BYTES = 32
_MAX_JSON_BYTES = 1 << 20
_LENGTHS = struct.Struct(">IQ")  # of the JSON text, of the payload
_CHUNK_BYTES = 1 << 20


class WrongTokenError(ConnectionError):
    """The other end does not know the token."""


class Wire:
    """One authenticated connection.

    Args:
        connection (`socket.socket`): a connected socket; it is closed if the other end fails the challenge.
        token (`str`): the secret.
        is_server (`bool`): whether this end has accepted the connection.

    Raises:
        WrongTokenError: the other end does not know the token.
        OSError: it does not answer.
    """

    def __init__(self, connection: socket.socket, token: str, *, is_server: bool) -> None:
        self._socket = connection
        self.sent_bytes = 0
        """Bytes sent so far."""
        self.received_bytes = 0
        """Bytes received so far."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # Linux; a lost machine is detected after a minute
            for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.settimeout(SILENCE_S)
        # Bounds the whole challenge: one that sends a byte now and then would pass the time-out of each call.
        limit = threading.Timer(SILENCE_S, self.close)
        limit.daemon = True
        limit.start()
        try:
            self._authenticate(token.encode(), is_server=is_server)
        except BaseException:
            connection.close()
            raise
        finally:
            limit.cancel()

    def _authenticate(self, token: bytes, *, is_server: bool) -> None:
        own = secrets.token_bytes(_RANDOM_BYTES)
        self._send(_GREETING + own)
        greeting = self._receive(len(_GREETING) + _RANDOM_BYTES)
        if not greeting.startswith(_GREETING):
            raise WrongTokenError("it is no rendezvous of this version of hfscale")
        other = bytes(greeting[len(_GREETING) :])
        roles = (b"server", b"client") if is_server else (b"client", b"server")
        self._send(hmac.digest(token, roles[0] + own + other, "sha256"))
        try:
            proof = self._receive(32)
        except ConnectionError:
            if not is_server:  # a server sends its proof whatever the client knows: this one has just ended
                raise
            raise WrongTokenError("it has refused the token") from None
        if not hmac.compare_digest(proof, hmac.digest(token, roles[1] + other + own, "sha256")):
            raise WrongTokenError("it does not know the token")

    def send(self, message: Mapping[str, Any], payload: Any = b"") -> None:
        """Send a message.

        Args:
            message (`Mapping`): anything that JSON can represent.
            payload (`bytes` or a buffer of bytes): sent after it.

        Raises:
            OSError: the connection is lost.
        """
        text = json.dumps(message).encode()
        view = memoryview(payload).cast("B")
        self._send(_LENGTHS.pack(len(text), len(view)) + text)
        for start in range(0, len(view), _CHUNK_BYTES):  # the time-out of a socket is that of one call
            self._send(view[start : start + _CHUNK_BYTES])

    def receive(self, max_payload_bytes: int = 0, *, patient: bool = False) -> tuple[dict[str, Any], bytearray]:
        """Receive a message.

        Args:
            max_payload_bytes (`int`): longest payload that is accepted.
            patient (`bool`): whether to wait without a limit for the first byte.

        Raises:
            OSError: the connection is lost, or what comes is no message.
        """
        if patient:
            self._socket.settimeout(None)
        first = self._receive(1)
        self._socket.settimeout(SILENCE_S)
        text_bytes, payload_bytes = _LENGTHS.unpack(first + self._receive(_LENGTHS.size - 1))
        if text_bytes > _MAX_JSON_BYTES or payload_bytes > max_payload_bytes:
            raise ConnectionError(f"a message of {text_bytes} + {payload_bytes} bytes is too long")
        try:
            message = json.loads(self._receive(text_bytes))
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

    def _send(self, data: Any) -> None:
        self._socket.sendall(data)
        self.sent_bytes += len(data)

    def _receive(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            read = self._socket.recv_into(view)
            if read == 0:
                raise ConnectionError("the other end has closed the connection")
            view = view[read:]
            self.received_bytes += read
        return data
