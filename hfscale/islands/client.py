"""The connection of one part of an island to the rendezvous."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import psutil

from hfscale.core.best_effort import best_effort
from hfscale.core.connections import Connection, WrongTokenError
from hfscale.core.logging import get_logger
from hfscale.core.run_memory import RunMemory
from hfscale.errors import HealthError, ParameterError, UsageError
from hfscale.islands.rendezvous import TOKEN_VARIABLE, listen

logger = get_logger(__name__)

_RETRY_S = 0.5
_LOG_WAIT_AFTER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the rendezvous has answered."""

    kind: str
    """`go`: train; `round`: a round has closed; `state`: outer state of another island, which this one must take;
    `ahead`: others are at a later step, at which this one must contribute."""
    anchor: int
    """The step of the last round, after this answer; of `ahead` the later step."""
    send_state: bool = False
    """Whether this island must send its outer state, for others, once it has applied the answer."""
    payloads: dict[int, bytearray] | None = None
    """Of `round`: payloads by island, without that of this island."""
    contributors: tuple[int, ...] = ()
    """Of `round`: the islands whose payloads count, in the order in which they are averaged."""
    state: bytearray | None = None
    """Of `state`: the outer state."""


class IslandClient:
    """Exchanges the payloads of one part of an island.

    Args:
        address (`tuple[str, int]`): host and port of the rendezvous.
        hello (`dict`): what this part says of itself: `island`, `part`, `parts`, `islands`, `quorum`, `deadline_s`,
            `terms` (values by name that must be equal on all islands), `layout` and `max_bytes` (the longest payload).
        starts_rendezvous (`bool`): whether to start the rendezvous, on this machine, when it is not there.
    """

    def __init__(
        self, address: tuple[str, int], hello: dict[str, Any], *, starts_rendezvous: bool = False
    ) -> None:
        self._address = address
        self._hello = hello
        self._starts_rendezvous = starts_rendezvous
        self._connection: Connection | None = None
        self._closed_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this part has sent so far."""
        return self._closed_bytes + (
            self._connection.sent_bytes if self._connection is not None else 0
        )

    def join(self, *, anchor: int, digest: str, timeout_s: float) -> Reply:
        """Connect, and wait until the islands have met.

        Args:
            anchor (`int`): the step of the last round of this island.
            digest (`str`): a hash of its outer state.
            timeout_s (`float`): seconds to try to connect.

        Raises:
            UsageError: the islands do not fit together, or the token is another one.
            HealthError: the rendezvous cannot be reached in time.
            OSError: the connection is lost.
        """
        until = time.monotonic() + timeout_s
        while True:
            connection = self._connect(until)
            self._connection = connection
            try:
                connection.send({**self._hello, "anchor": anchor, "digest": digest})
                message, payload = self._next()
            except OSError:  # the rendezvous of a run that was here before may be ending
                self.disconnect()
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_S)
                continue
            if message["kind"] != "busy":
                break
            self.disconnect()
            if time.monotonic() > until:
                raise ParameterError(
                    "island_rank",
                    self._hello["island"],
                    "another launch with this rank is connected to the rendezvous: give each island its own",
                )
            time.sleep(_RETRY_S)
        if message["kind"] == "refused":
            self.disconnect()
            raise UsageError(
                f"{message['reason']}: use the same model, data, layout and settings on all islands"
            )
        if message["kind"] == "state":
            return Reply(kind="state", anchor=message["anchor"], state=payload)
        return Reply(kind="go", anchor=message["anchor"], send_state=message["send_state"])

    def exchange(self, step: int, *, anchor: int, payload: Any) -> Reply:
        """Take part in a round, and wait until it closes.

        Args:
            step (`int`): the optimizer step, which is the number of the round.
            anchor (`int`): the step of the last round of this island.
            payload (buffer of bytes): the encoded pseudo-gradient of this part.

        Raises:
            OSError: the connection is lost.
        """
        terms = {name: self._hello[name] for name in ("quorum", "deadline_s")}
        self._connected.send(
            {"kind": "contribute", "step": step, "anchor": anchor, **terms}, payload
        )
        message, state = self._next()
        if message["kind"] == "state":
            return Reply(kind="state", anchor=message["anchor"], state=state)
        if message["kind"] == "ahead":
            return Reply(kind="ahead", anchor=message["step"])
        if message["kind"] != "round":  # all islands that were ahead have ended
            return Reply(kind="go", anchor=message["anchor"])
        contributors = message["contributors"]
        payloads = {}
        for island in contributors:
            if island != self._hello["island"]:
                payloads[island] = self._next()[1]
        return Reply(
            kind="round",
            anchor=message["step"],
            send_state=message["send_state"],
            payloads=payloads,
            contributors=tuple(contributors),
        )

    def send_state(self, anchor: int, state: Any) -> None:
        """Send the outer state of this part, for islands that need it.

        Args:
            anchor (`int`): the step of the last round.
            state (buffer of bytes): the outer state after it.

        Raises:
            OSError: the connection is lost.
        """
        self._connected.send({"kind": "state", "anchor": anchor}, state)

    def leave(self) -> None:
        """Tell the rendezvous that this island has ended."""
        if self._connection is not None:
            try:
                self._connection.send({"kind": "leave"})
            except OSError as error:
                logger.info("the rendezvous is gone already: %s", error)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection; the rendezvous then counts all parts of this island as lost."""
        if self._connection is not None:
            self._closed_bytes += self._connection.sent_bytes
            self._connection.close()
            self._connection = None

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise ConnectionError("there is no connection to the rendezvous")
        return self._connection

    def _next(self) -> tuple[dict[str, Any], bytearray]:
        """Return the next message that is not about waiting."""
        began = time.monotonic()
        told = False
        while True:
            message, payload = self._connected.receive(self._hello["max_bytes"])
            if message["kind"] != "wait":
                return message, payload
            if not told and time.monotonic() - began > _LOG_WAIT_AFTER_S:
                logger.info("waiting for the other islands since %.0f s", time.monotonic() - began)
                told = True

    def _connect(self, until: float) -> Connection:
        token = own_token()
        host, port = self._address
        while True:
            if self._starts_rendezvous:
                start_rendezvous(self._address)
            try:
                return Connection(
                    socket.create_connection((host, port), timeout=5.0), token, is_server=False
                )
            except WrongTokenError as error:
                raise UsageError(
                    f"the rendezvous {host}:{port}: {error}: set {TOKEN_VARIABLE} to the same secret on all islands"
                ) from None
            except OSError as error:
                if time.monotonic() > until:
                    raise HealthError(
                        f"the rendezvous {host}:{port} cannot be reached ({error}): start island 0 there, or "
                        f"python -m hfscale.islands.rendezvous --port {port}, and open the port"
                    ) from error
            time.sleep(_RETRY_S)


@dataclass(kw_only=True)
class PendingRound:
    """A round that this island has begun."""

    step: int
    """The step at which it has begun."""
    fragment: int | None
    """Number of the fragment that it exchanges; None: all parameters."""
    exchange: Callable[[IslandClient], Reply]
    """Sends what this island contributes, and waits for the reply."""
    reply: "Future[Reply] | None" = None
    """Of the leader of a part, while the exchange runs in the background."""

    def run(self, client: IslandClient) -> Reply:
        """Exchange, or wait for the exchange that is running.

        Args:
            client (`IslandClient`): the connection to the rendezvous.

        Returns:
            The reply of the rendezvous.
        """
        return self.reply.result() if self.reply is not None else self.exchange(client)


def own_token() -> bytes:
    """Return the secret that the islands share.

    Raises:
        UsageError: the environment does not have it.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise UsageError(
            f"{TOKEN_VARIABLE} is not set: set it to the same secret on all islands, before the launch"
        )
    return token.encode()


def start_rendezvous(address: tuple[str, int]) -> None:
    """Start the rendezvous on this machine if the address is of this machine and nothing listens there.

    It is a process of its own session: it continues when this island dies, and ends a minute after the last island.
    `hfscale run` does not end it either.

    Args:
        address (`tuple[str, int]`): host and port.
    """
    own_token()
    try:
        listener = listen(*address)
    except OSError:  # it runs already, or on another machine: the connection will tell
        return
    logger.info("island 0 starts the rendezvous at %s:%d", *address)
    with listener:
        descriptor = listener.fileno()
        started = subprocess.Popen(  # noqa: S603 (no argument comes from outside)
            [sys.executable, "-m", "hfscale.islands.rendezvous", "--fd", str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    memory = RunMemory.of_environment()
    if memory is not None:
        with best_effort(
            "telling hfscale run of the rendezvous", memory.folder, (OSError, psutil.Error)
        ):
            memory.let_outlive(psutil.Process(started.pid))


def on_thread(exchange: Callable[[], Reply]) -> "Future[Reply]":
    """Call a function on a thread that does not keep the process alive.

    Args:
        exchange (`Callable`): called without arguments.

    Returns:
        `Future`: what it returned, or the error that it raised.
    """
    future: Future[Reply] = Future()

    def run() -> None:
        try:
            future.set_result(exchange())
        except BaseException as error:  # it is raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="hfscale-island", daemon=True).start()
    return future
