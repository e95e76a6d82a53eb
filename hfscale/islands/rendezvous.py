"""The rendezvous of the islands: it decides whose pseudo-gradients a round has, and passes them on.

It is one small process without torch. Each island has one or more parts (ranks with different shards), and each part
has a connection. In a round, every part of an island uploads its payload. The round closes once: as soon as all
islands that are awaited are complete, or when the deadline after the first complete one has passed and a quorum is
complete. So all islands average the same payloads, wherever one of them dies, and stay equal to the last bit. Then
each part downloads the payloads of the other islands for its shard.

| an island that | gets |
|---|---|
| is complete when the round closes | the payloads of the other contributors |
| is late | the same; its own does not count, and the next round waits for it again |
| has older outer state, or none | outer state of a contributor, when the next round closes |
| is at an earlier step | the step of the others, at which it contributes again |

The number of a round is the optimizer step at which it takes place, and the anchor is the number of the last one.
Islands with the same anchor are at different steps after they have trained alone; they meet at the highest one.
"""

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hfscale.core.connections import Acceptor, Connection
from hfscale.core.logging import get_logger

logger = get_logger("hfscale.islands.rendezvous")  # also where it is the main module

TOKEN_VARIABLE = "HFSCALE_ISLAND_TOKEN"  # noqa: S105 (the name, not the secret)
"""Environment variable with the secret that all islands share."""
IDLE_S = 60.0
"""Seconds without any island after which the process ends."""
TELL_EVERY_S = 10.0
"""Seconds between two messages to an island that waits."""


@dataclass(kw_only=True)
class _Island:
    parts: int
    anchor: int
    digests: dict[int, str] = field(default_factory=dict)
    """Of the outer state of each part; while it needs that of a peer, the parts that have not got it yet."""
    connections: dict[int, Connection] = field(default_factory=dict)
    is_awaited: bool = False
    """Whether a round waits for it: it has the current outer state, and it was not late."""
    needs_state: bool = False
    inbox: dict[int, tuple[int, bytearray]] = field(default_factory=dict)
    """Outer state by part, with its anchor."""

    @property
    def is_joined(self) -> bool:
        return len(self.connections) == self.parts


@dataclass(kw_only=True)
class _Round:
    step: int
    anchor: int
    payloads: dict[int, dict[int, bytearray]] = field(default_factory=dict)
    """By island and part."""
    complete: set[int] = field(default_factory=set)
    first_at: float | None = None
    sender: int | None = None
    """The island that sends its outer state to those that need it."""
    is_closed: bool = False
    overtaken_by: int | None = None
    """The step of an island that is ahead: this round does not take place."""


class Rendezvous:
    """Coordinates islands; `serve` answers on a socket until none is left.

    Args:
        token (`str`): the secret that islands must know.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._changed = threading.Condition()
        self._islands: dict[int, _Island] = {}
        self._terms: dict[str, Any] | None = None  # of the first island that has joined
        self._layouts: dict[int, str] = {}
        self._refusal: str | None = None
        self._first_joined_at = 0.0
        self._has_started = False
        self._anchor = 0
        self._source = -1  # the island whose outer state the run has started with
        self._round: _Round | None = None
        self._last: _Round | None = None
        self._idle_since = time.monotonic()
        self._all_left = False

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until all islands have left, or none has been connected for `IDLE_S` seconds.

        Args:
            listener (`socket.socket`): a listening socket.
        """
        listener.settimeout(0.2)
        Acceptor(listener, self._token, self._answer).run(self._is_over)
        listener.close()

    def _is_over(self) -> bool:
        with self._changed:
            if self._islands:
                self._idle_since = time.monotonic()
                return False
            return self._all_left or time.monotonic() - self._idle_since > IDLE_S

    def _answer(self, connection: Connection) -> None:
        """Serve one part of one island until it leaves or its connection is lost."""
        number: int | None = None
        left = False
        try:
            hello, _ = connection.receive()
            refusal = self._join(hello, connection)
            if refusal is not None:
                connection.send(refusal)
                return
            number = hello["island"]
            part = hello["part"]
            self._start(connection, number, part, hello)
            while not left:
                message, payload = connection.receive(hello["max_bytes"], patient=True)
                if message["kind"] == "contribute":
                    self._contribute(connection, number, part, message, payload)
                elif message["kind"] == "state":
                    self._pass_state(part, message["anchor"], payload)
                left = message["kind"] == "leave"
        except (OSError, KeyError, TypeError) as error:
            if number is not None:
                logger.warning("rendezvous: island %d: the connection is lost: %s", number, error)
        finally:
            connection.close()
            if number is not None:
                self._remove(number, connection, left=left)

    # --- joining ----------------------------------------------------------------------------------------------------

    def _join(self, hello: dict[str, Any], connection: Connection) -> dict[str, Any] | None:
        """Register a part of an island; return a refusal if it does not fit to the others."""
        with self._changed:
            number = hello["island"]
            part = hello["part"]
            if self._refusal is None:
                refusal = self._differs(hello)
                if refusal is not None:
                    if not self._has_started:
                        self._refusal = refusal
                        self._changed.notify_all()
                    return {"kind": "refused", "reason": refusal}
            else:
                return {"kind": "refused", "reason": self._refusal}
            island = self._islands.get(number)
            if island is not None and part in island.connections:
                return {"kind": "busy"}
            if island is None:
                island = self._islands[number] = _Island(
                    parts=hello["parts"], anchor=hello["anchor"]
                )
            self._all_left = False
            island.connections[part] = connection
            island.digests[part] = hello["digest"]
            if island.is_joined:
                self._first_joined_at = self._first_joined_at or time.monotonic()
                if self._has_started:
                    self._admit(number, island)
            self._changed.notify_all()
            return None

    def _differs(self, hello: dict[str, Any]) -> str | None:
        if self._terms is None:
            self._terms = hello["terms"]
        differing = [
            name for name, value in self._terms.items() if hello["terms"].get(name) != value
        ]
        if not differing and hello["layout"] != self._layouts.setdefault(
            hello["part"], hello["layout"]
        ):
            differing = ["shapes of the shards"]
        if not differing:
            return None
        values = ", ".join(
            f"{n} ({hello['terms'].get(n)} here, {self._terms.get(n)} there)" for n in differing
        )
        return f"island {hello['island']} differs from the others in: {values}"

    def _admit(self, number: int, island: _Island) -> None:
        """Await an island that has the current outer state; have the others sent to it."""
        if island.anchor == self._anchor and (
            self._last is not None or self._equals_source(island)
        ):
            island.is_awaited = True
        else:
            island.needs_state = True

    def _equals_source(self, island: _Island) -> bool:
        source = self._islands.get(self._source)
        return source is None or source.digests == island.digests

    def _start(self, connection: Connection, number: int, part: int, hello: dict[str, Any]) -> None:
        """Wait until the run has started, and tell the part what it has to do first."""
        island = self._islands[number]
        wanted = hello["islands"]
        quorum = hello["quorum"]
        deadline_s = hello["deadline_s"]

        def ready() -> bool:
            if self._has_started or self._refusal is not None:
                return True
            joined = [n for n, other in self._islands.items() if other.is_joined]
            late = self._first_joined_at and time.monotonic() - self._first_joined_at > deadline_s
            if len(joined) < wanted and not (late and len(joined) >= quorum):
                return False
            self._source = max(joined, key=lambda n: (self._islands[n].anchor, -n))
            self._anchor = self._islands[self._source].anchor
            self._has_started = True
            for n in joined:
                self._admit(n, self._islands[n])
            self._changed.notify_all()
            return True

        self._wait(connection, ready)
        with self._changed:
            if self._refusal is not None:
                connection.send({"kind": "refused", "reason": self._refusal})
                raise ConnectionError(self._refusal)
            sends = number == self._source and self._last is None and self._in_need()
            needs_state = island.needs_state
        if needs_state:
            self._wait_for_state(connection, number, part)
        else:
            connection.send({"kind": "go", "anchor": self._anchor, "send_state": sends})

    def _in_need(self) -> bool:
        return any(island.needs_state and not island.inbox for island in self._islands.values())

    # --- outer state of a peer --------------------------------------------------------------------------------------

    def _pass_state(self, part: int, anchor: int, payload: bytearray) -> None:
        with self._changed:
            for island in self._islands.values():
                if island.needs_state and part not in island.inbox:
                    island.inbox[part] = (anchor, payload)
            self._changed.notify_all()

    def _wait_for_state(self, connection: Connection, number: int, part: int) -> None:
        island = self._islands[number]

        def arrived() -> bool:
            self._forget_outdated(island)
            return len(island.inbox) == island.parts or not self._has_peers(number)

        self._wait(connection, arrived)
        with self._changed:
            if len(island.inbox) < island.parts:  # the others have ended
                self._become_source(number, island)
                connection.send({"kind": "go", "anchor": island.anchor, "send_state": False})
                return
            anchor, payload = island.inbox[part]
        connection.send({"kind": "state", "anchor": anchor}, payload)
        with self._changed:
            island.digests.pop(part, None)
            island.anchor = anchor
            if not island.digests and island.needs_state:  # all parts have it
                island.needs_state = False
                island.is_awaited = anchor == self._anchor
                island.inbox.clear()

    def _forget_outdated(self, island: _Island) -> None:
        """Drop outer state that is older than the last round, or of several rounds: its sender has died."""
        anchors = {anchor for anchor, _ in island.inbox.values()}
        if len(anchors) > 1:
            newest = max(anchors)
            island.inbox = {
                part: state for part, state in island.inbox.items() if state[0] == newest
            }

    def _has_peers(self, number: int) -> bool:
        return any(n != number and not other.needs_state for n, other in self._islands.items())

    def _become_source(self, number: int, island: _Island) -> None:
        island.needs_state = False
        island.is_awaited = True
        self._source = number
        self._anchor = island.anchor
        self._last = None
        self._round = None

    # --- a round ----------------------------------------------------------------------------------------------------

    def _contribute(
        self,
        connection: Connection,
        number: int,
        part: int,
        message: dict[str, Any],
        payload: bytearray,
    ) -> None:
        island = self._islands[number]
        with self._changed:
            last = self._last
            if message["anchor"] == self._anchor:
                island.is_awaited = True
                if self._round is not None and message["step"] < self._round.step:
                    connection.send({"kind": "ahead", "step": self._round.step})
                    return
                if self._round is not None and message["step"] > self._round.step:
                    self._round.overtaken_by = message["step"]
                    self._round = None
                    self._changed.notify_all()
                current = self._round = self._round or _Round(
                    step=message["step"], anchor=self._anchor
                )
                current.payloads.setdefault(number, {})[part] = payload
                if len(current.payloads[number]) == island.parts:
                    current.complete.add(number)
                    current.first_at = current.first_at or time.monotonic()
                    self._changed.notify_all()
            elif (
                last is not None
                and message["anchor"] == last.anchor
                and message["step"] == last.step
            ):
                current = last
                island.is_awaited = True
                island.anchor = last.step
            else:
                if not island.needs_state:
                    island.needs_state = True
                    island.is_awaited = False
                    island.digests = dict.fromkeys(island.connections, "")
                current = None
        if current is None:
            self._wait_for_state(connection, number, part)
            return
        self._wait(
            connection,
            lambda: self._close_if_due(current, message["quorum"], message["deadline_s"]),
        )
        if current.overtaken_by is not None:
            connection.send({"kind": "ahead", "step": current.overtaken_by})
            return
        contributors = sorted(current.complete)
        sends = number == current.sender and number in current.complete
        connection.send(
            {
                "kind": "round",
                "step": current.step,
                "contributors": contributors,
                "send_state": sends,
            }
        )
        for other in contributors:
            if other != number:
                connection.send({"kind": "payload", "island": other}, current.payloads[other][part])

    def _close_if_due(self, current: _Round, quorum: int, deadline_s: float) -> bool:
        """Return whether the round is closed or overtaken; close it if that is due. The lock is held."""
        if current.is_closed or current.overtaken_by is not None:
            return True
        if current.first_at is None or len(current.complete) < quorum:
            return False
        missing = [
            n
            for n, island in self._islands.items()
            if island.is_awaited and n not in current.complete
        ]
        if missing and time.monotonic() - current.first_at < deadline_s:
            return False
        current.is_closed = True
        current.payloads = {n: current.payloads[n] for n in current.complete}
        self._anchor = current.step
        self._last = current
        self._round = None
        for number in missing:
            self._islands[number].is_awaited = False
        for number in current.complete & self._islands.keys():
            self._islands[number].anchor = current.step
        needing = [island for island in self._islands.values() if island.needs_state]
        present = sorted(current.complete & self._islands.keys())
        if needing and present:
            current.sender = present[0]
            for island in needing:
                island.inbox.clear()
        self._changed.notify_all()
        return True

    # --- connections ------------------------------------------------------------------------------------------------

    def _wait(self, connection: Connection, done: Callable[[], bool]) -> None:
        """Wait until `done()`, which is called with the lock held; tell the island from time to time that it waits."""
        told_at = time.monotonic()
        while True:
            with self._changed:
                if done():
                    return
                self._changed.wait(0.5)
                if done():
                    return
            if time.monotonic() - told_at > TELL_EVERY_S:
                connection.send({"kind": "wait"})
                told_at = time.monotonic()

    def _remove(self, number: int, connection: Connection, *, left: bool) -> None:
        """Remove an island of which one part has left or is lost. What it has contributed completely counts."""
        with self._changed:
            island = self._islands.get(number)
            if island is None or connection not in island.connections.values():
                return
            if left:
                island.connections = {
                    part: other
                    for part, other in island.connections.items()
                    if other is not connection
                }
                island.is_awaited = False
                if island.connections:
                    return
            del self._islands[number]
            if self._round is not None and number not in self._round.complete:
                self._round.payloads.pop(number, None)
            others = list(island.connections.values())
            self._all_left = left and not self._islands
            if not self._islands:
                self._forget_all()
            self._changed.notify_all()
        for other in others:
            if other is not connection:
                other.close()

    def _forget_all(self) -> None:
        """Begin anew when no island is left: those that come next say where they are."""
        self._terms = None
        self._layouts = {}
        self._refusal = None
        self._first_joined_at = 0.0
        self._has_started = False
        self._round = None
        self._last = None
        self._anchor = 0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host (`str`): address of an interface; empty: all of them.
        port (`int`): the port.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    return socket.create_server((host, port), backlog=1024)


def main() -> None:
    """Serve on a socket that is handed over, or on `--port`: `python -m hfscale.islands.rendezvous --port 29600`."""
    parser = argparse.ArgumentParser(description="The rendezvous of islands (docs/islands.md).")
    parser.add_argument("--host", default="", help="Address to listen on. Default: all interfaces.")
    parser.add_argument("--port", type=int, help="Port to listen on.")
    # From the process that has started this one
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        parser.error(f"{TOKEN_VARIABLE} is not set: set it to the same secret on all islands")
    if arguments.fd is None and arguments.port is None:
        parser.error("--port is missing: give the port of --island_rendezvous")
    try:
        taken_over = arguments.fd is not None
        listener = (
            socket.socket(fileno=arguments.fd)
            if taken_over
            else listen(arguments.host, arguments.port)
        )
    except OSError as error:
        parser.error(f"--port {arguments.port} cannot be listened on ({error}): choose another")
    Rendezvous(token).serve(listener)


if __name__ == "__main__":
    main()
