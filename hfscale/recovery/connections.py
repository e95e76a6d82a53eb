"""Connections between the supervisors of a run's nodes: their token and their limits."""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hfscale.core.connections import Acceptor, Address, Connection, WrongTokenError
from hfscale.errors import UsageError

TOKEN_VARIABLE = "HFSCALE_RUN_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the secret that all nodes of a run share."""
_BACKLOG = 4096
_CONNECT_S = 10.0
_LIMITS = {
    "max_json_bytes": 2**30,  # manifests of all nodes
    "lost_after_s": 11,  # a node that has lost its power or network
}


def read_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the token of the run.

    Args:
        environ (`Mapping[str, str]`): the environment variables.

    Raises:
        UsageError: it is not set.
    """
    token = environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise UsageError(
            f"{TOKEN_VARIABLE} is not set: give the same secret to hfscale run on all nodes"
        )
    return token.encode()


class Server:
    """Accepts connections in the background, each in a thread of its own.

    Args:
        address (`tuple[str, int]`): host and port; port 0 takes a free one.
        token (`bytes`): the token of the run.
        serve (`Callable`): called with each connection that knows the token; the connection is closed afterwards.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, address: Address, token: bytes, serve: Callable[[Connection], None]) -> None:
        self._listener = socket.create_server(address, backlog=_BACKLOG)
        acceptor = Acceptor(self._listener, token, serve, **_LIMITS)
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (str(host), int(port))
        """Where it listens."""
        threading.Thread(target=acceptor.run, daemon=True, name="hfscale-accept").start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread that accepts
        self._listener.close()


def connect(address: Address, token: bytes) -> Connection:
    """Connect to a supervisor.

    Args:
        address (`tuple[str, int]`): its host and port.
        token (`bytes`): the token of the run.

    Raises:
        OSError: it does not answer.
        UsageError: it has another token.
    """
    connected = socket.create_connection(address, timeout=_CONNECT_S)
    try:
        return Connection(connected, token, is_server=False, **_LIMITS)
    except WrongTokenError:
        raise UsageError(
            f"{TOKEN_VARIABLE} is not that of the supervisor at {address[0]}:{address[1]}"
        ) from None


def receive(connection: Connection) -> dict[str, Any]:
    """Wait for one message without a payload.

    Args:
        connection (`Connection`): the connection to another supervisor.

    Raises:
        OSError: the connection is lost or was closed.
    """
    return connection.receive(patient=True)[0]
