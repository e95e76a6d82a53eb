"""Connections between the supervisors of a run's nodes: each message is one frame of JSON.

Both ends prove that they know the run's token (the HMAC challenge of `multiprocessing.connection`) before anything
else is read. Nothing is unpickled.
"""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from hfscale.errors import UsageError

TOKEN_VARIABLE = "HFSCALE_RUN_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the secret that all nodes of a run share."""
MAX_MESSAGE = 2**30
_BACKLOG = 4096
# A node that has lost its power or network is noticed after 5 + 3 x 2 seconds without an answer (tcp(7)).
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
_UNACKNOWLEDGED_MS = 11_000
_CONNECT_S = 10.0
_CHALLENGE_S = 60  # for the other end to prove that it knows the token

Address = tuple[str, int]


def read_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the token of the run.

    Args:
        environ (`Mapping[str, str]`): the environment variables.

    Raises:
        UsageError: it is not set.
    """
    token = environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise UsageError(f"{TOKEN_VARIABLE} is not set: give the same secret to hfscale run on all nodes")
    return token.encode()


def listen(address: Address, token: bytes, serve: Callable[[Connection], None]) -> Listener:
    """Accept connections in the background, each in a thread of its own.

    Args:
        address (`tuple[str, int]`): host and port; port 0 takes a free one.
        token (`bytes`): the token of the run.
        serve (`Callable`): called with each connection that knows the token; the connection is closed afterwards.

    Raises:
        OSError: the address cannot be used.
    """
    listener = Listener(address, backlog=_BACKLOG)

    def handle(connection: Connection) -> None:
        with connection:
            try:
                _set_options(connection, receive_within_s=_CHALLENGE_S)
                deliver_challenge(connection, token)
                answer_challenge(connection, token)
                _set_options(connection)
                serve(connection)
            except (OSError, EOFError, AuthenticationError, ValueError):
                return  # the other end is gone, or does not know the token

    def accept() -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:  # the listener was closed
                return
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True, name="hfscale-accept").start()
    return listener


def connect(address: Address, token: bytes) -> Connection:
    """Connect to a supervisor.

    Args:
        address (`tuple[str, int]`): its host and port.
        token (`bytes`): the token of the run.

    Raises:
        OSError: it does not answer.
        UsageError: it has another token.
    """
    with socket.create_connection(address, timeout=_CONNECT_S) as opened:
        opened.settimeout(None)
        connection = Connection(opened.detach())
    try:
        _set_options(connection, receive_within_s=_CHALLENGE_S)
        answer_challenge(connection, token)
        deliver_challenge(connection, token)
        _set_options(connection)
    except AuthenticationError:
        connection.close()
        raise UsageError(f"{TOKEN_VARIABLE} is not that of the supervisor at {address[0]}:{address[1]}") from None
    except EOFError:
        connection.close()
        raise ConnectionResetError(f"{address[0]}:{address[1]} has closed the connection") from None
    except OSError:
        connection.close()
        raise
    return connection


def local_host(connection: Connection) -> str:
    """Return the address of this node by which the other end of a connection reaches it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        return str(own.getsockname()[0])


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send one message."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Wait for one message.

    Raises:
        EOFError: the connection was closed.
        OSError: it is lost.
    """
    message: dict[str, Any] = json.loads(connection.recv_bytes(MAX_MESSAGE))
    return message


def _set_options(connection: Connection, *, receive_within_s: int = 0) -> None:
    """Have a lost machine be noticed, and limit the time of each read in seconds; 0: no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", receive_within_s, 0))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        for option, value in _KEEP_ALIVE.items():
            own.setsockopt(socket.IPPROTO_TCP, option, value)
