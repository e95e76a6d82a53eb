"""How the supervisor of one node takes part in a run on several nodes."""

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from hfscale.core.connections import Address, Connection
from hfscale.core.run_memory import NODE_RANK_VARIABLE, NODES_VARIABLE, PARTS, RunMemory
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.recovery.connections import connect, receive
from hfscale.recovery.coordinator import Coordinator
from hfscale.recovery.replicas import (
    Pace,
    ReplicaServer,
    assemble,
    keep_only,
    list_parts,
    send_part,
)
from hfscale.recovery.restarts import Failure

_RETRY_S = 0.5
_SEND_ATTEMPTS = 3
_TAKEN_S = 30.0  # until a lost node is noticed by its connection, with some reserve
_TELL_EVERY_S = 5.0  # while files of a snapshot are collected
_LAST_WORD_S = 30.0  # for the other nodes to end after a signal


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What `hfscale run` is given about the nodes of a run."""

    nodes: int
    """Nodes that take part."""
    node_rank: int
    """The number of this one, from 0."""
    rendezvous: Address
    """Host and port of node 0."""
    token: bytes
    """The secret that all nodes share."""
    min_nodes: int
    """With how many the run goes on if a lost node is not replaced."""
    wait_s: float
    """How long to wait for a node, in seconds."""
    bytes_per_s: float | None = None
    """Limit of the copies to the partner; None: none."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A launch that all nodes begin now."""

    launch: int
    """Its number, from 1."""
    index: int
    """The number of this node in it."""
    addresses: list[Address]
    """Where the nodes take replicas."""
    restarts: int
    """Failures before it."""
    failure: Failure | None
    """The last of them."""

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of the launcher."""
        return {NODES_VARIABLE: str(len(self.addresses)), NODE_RANK_VARIABLE: str(self.index)}


class NodeGroup:
    """This node's connection to the coordinator of the run, and to its partner.

    Args:
        settings (`NodeSettings`): the nodes.
        memory (`RunMemory`): the folder of the run on this node.
        max_restarts (`int`): restarts in 24 hours after which the run is given up.
        interrupted (`Callable`): whether a signal has asked this process to end.
        say (`Callable`): called with an event, a line or None, and fields.

    Raises:
        UsageError: node 0 cannot listen at the rendezvous address.
    """

    def __init__(
        self,
        settings: NodeSettings,
        memory: RunMemory,
        *,
        max_restarts: int,
        interrupted: Callable[[], bool],
        say: Callable[..., None],
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._say = say
        self._interrupted = interrupted
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self.connection: Connection | None = None
        """To the coordinator; None: lost."""
        self._lock = threading.Lock()  # of sending
        self._told_at = 0.0
        self._server: ReplicaServer | None = None
        self._start: Start | None = None
        # Of the last launch, if no coordinator has heard of it
        self._failure: Failure | None = None
        self._snapshots: queue.SimpleQueue[tuple[int, str, int] | None] = queue.SimpleQueue()
        self._coordinator: Coordinator | None = None
        if settings.node_rank == 0:
            host, port = settings.rendezvous
            try:
                self._coordinator = Coordinator(
                    settings.rendezvous,
                    settings.token,
                    nodes=settings.nodes,
                    min_nodes=settings.min_nodes,
                    wait_s=settings.wait_s,
                    max_restarts=max_restarts,
                    report=lambda text: say("nodes", text),
                )
            except OSError as error:
                address = spelled("rendezvous", f"{host}:{port}")
                raise UsageError(
                    f"{address} cannot be used: {error.strerror}; give an address of node 0 and a free port"
                ) from None
        threading.Thread(target=self._replicate, daemon=True, name="hfscale-replicas").start()

    def wake(self) -> None:
        """Interrupt a wait, from a signal handler."""
        with suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """End the connections."""
        self._snapshots.put(None)
        for part in (self.connection, self._server, self._coordinator):
            if part is not None:
                part.close()

    def wait_for_start(self) -> Start | int | None:
        """Wait until all nodes can start the launch, with the same snapshots in their memory.

        Returns:
            `Start`, `int` or `None`: the launch; an exit code if the run is over; None if a signal has interrupted.

        Raises:
            UsageError: node 0 refuses this node.
        """
        began = time.monotonic()
        while not self._interrupted():
            if self.connection is None:
                if not self._connect():
                    if time.monotonic() - began > self._settings.wait_s:
                        self._say("gave_up", self._no_answer())
                        return 1
                    time.sleep(_RETRY_S)
                continue
            self._say_ready()
            message = self._next_of("start", "again", "end", "refused", "assemble")
            while message is not None and message["event"] == "assemble":
                failed = self._assemble(message["snapshots"])
                self._send(event="assembled", round=message["round"], failed=failed)
                message = self._next_of("start", "again", "end", "refused", "assemble")
            if message is None:  # a signal, or the connection is lost
                continue
            if message["event"] == "end":
                return self._end(message)
            if message["event"] == "start":
                return self._begin(message)
            if message["event"] == "refused":
                self.disconnect()
                if not message["may_pass"] or time.monotonic() - began > _TAKEN_S:
                    raise UsageError(message["reason"])
                # The lost supervisor whose number this one has may not be noticed yet
                time.sleep(_RETRY_S)
        return None

    def _no_answer(self) -> str:
        host, port = self._settings.rendezvous
        return (
            f"gives up: --rendezvous {host}:{port} did not answer for {self._settings.wait_s:.0f} s; start hfscale "
            "run on node 0 too"
        )

    def _connect(self) -> bool:
        try:
            self.connection = connect(self._settings.rendezvous, self._settings.token)
        except OSError:
            return False
        if self._server is None:
            self._server = ReplicaServer(
                self._memory.folder, self.connection.own_host, self._settings.token
            )
        return True

    def disconnect(self) -> None:
        """Close a connection to the coordinator that is lost."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _send(self, **message: Any) -> None:
        with self._lock, suppress(OSError):  # a lost connection is noticed when it is read
            if self.connection is not None:
                self.connection.send(message)

    def receive(self) -> dict[str, Any] | None:
        """Read the next message of the coordinator; None if the connection is lost: then call `disconnect`."""
        assert self.connection is not None
        try:
            return receive(self.connection)
        except OSError:
            return None

    def _next_of(self, *events: str, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for one of these messages; None if the connection is lost.

        After a signal it waits for `timeout_s` at most, and not at all without that.
        """
        while self.connection is not None and (timeout_s is not None or not self._interrupted()):
            woken = [] if self._interrupted() else [self._woken]
            watched: list[Any] = [self.connection, *woken]  # `wait` takes whatever has a `fileno`
            ready: list[Any] = wait(watched, timeout_s if self._interrupted() else None)
            if self.connection in ready:
                message = self.receive()
                if message is None:
                    self.disconnect()
                elif message["event"] in events:
                    return message
            elif not ready:
                return None
        return None

    def _say_ready(self) -> None:
        assert self._server is not None
        last = self._start
        parts = (
            list_parts(self._memory.folder, last.index, len(last.addresses))
            if last is not None
            else []
        )
        self._send(
            event="ready",
            node=self._settings.node_rank,
            nodes=self._settings.nodes,
            host=socket.gethostname(),
            address=self._server.address,
            parts=parts,
            failure=None if self._failure is None else asdict(self._failure),
            folders=[path.name for path in self._memory.folder.iterdir() if path.is_dir()],
        )

    def _assemble(self, snapshots: list[dict[str, Any]]) -> list[tuple[str, int]]:
        failed = []
        for snapshot in snapshots:
            try:
                missing = assemble(
                    self._memory.folder,
                    snapshot,
                    self._settings.token,
                    progressed=self._say_assembling,
                )
                problem = None if missing is None else f"no node has {missing}"
            except (OSError, ValueError) as error:
                problem = f"step {snapshot['step']} cannot be collected: {error}"
            if problem is not None:
                self._say("nodes", f"{problem}: an older snapshot is used")
                failed.append((snapshot["folder"], snapshot["step"]))
        return failed

    def _say_assembling(self) -> None:
        """Tell the coordinator that this node still collects files, from time to time."""
        if time.monotonic() - self._told_at > _TELL_EVERY_S:
            self._told_at = time.monotonic()
            self._send(event="assembling")

    def _begin(self, message: dict[str, Any]) -> Start:
        assert self._server is not None
        snapshots = [(folder, step) for folder, step in message["snapshots"]]
        self._server.begin(message["launch"], message["folders"], snapshots)
        failure = message["failure"]
        start = Start(
            launch=message["launch"],
            index=message["index"],
            addresses=[(host, port) for host, port in message["addresses"]],
            restarts=message["restarts"],
            failure=None if failure is None else Failure(**failure),
        )
        if self._start is None:
            self._say("nodes", _survivable(start))
        self._start = start
        self._failure = None
        return start

    def _end(self, message: dict[str, Any]) -> int:
        if message["text"] is not None:
            self._say("gave_up", message["text"], message.get("failure"))
        return int(message["code"])

    # --- while a launch runs ----------------------------------------------------------------------------------------

    def failed(self) -> None:
        """Tell the others that the launch has failed on this node."""
        self._send(event="failed")

    def committed(self, folder: str, step: int) -> None:
        """Send the part of a snapshot that this node has committed to the partner, in the background.

        Args:
            folder (`str`): the training.
            step (`int`): its step.
        """
        assert self._start is not None
        assert self._server is not None
        self._server.committed()
        self._snapshots.put((self._start.launch, folder, step))

    def replicated(self, message: dict[str, Any]) -> None:
        """Delete what is older than a snapshot whose parts all lie on two nodes.

        Args:
            message (`dict`): the message of the coordinator.
        """
        keep_only(self._memory.folder / message["folder"], message["step"])

    def ended(self, code: int | None, failure: Failure | None, *, is_blamed: bool) -> int | None:
        """Say how the launch has ended on this node, and wait until it has ended on all.

        Args:
            code (`int`, *optional*): the exit code if the command is not to be started again.
            failure (`Failure`, *optional*): otherwise, how it failed.
            is_blamed (`bool`): whether the health checks blame this host, so that it should leave the run.

        Returns:
            `int` or `None`: the exit code if the run is over, if this node leaves it, or if node 0 is lost and this
                one was done; None if another launch follows.
        """
        if failure is not None and self.connection is None:
            failure = replace(failure, reason="node 0 was lost")
        self._failure = failure
        fields = None if failure is None else asdict(failure)
        self._send(event="ended", code=code, failure=fields, is_blamed=is_blamed)
        message = self._next_of("again", "leave", "end", timeout_s=_LAST_WORD_S)
        if message is None:
            return code
        if message["event"] == "end":
            return self._end(message)
        if message["event"] == "leave":
            self._say("left", message["text"])
            return 1
        self._failure = None
        self._say("restart", message["text"], message["failure"])
        return None

    def _replicate(self) -> None:
        """Send parts to the partner, one after another."""
        pace = Pace(self._settings.bytes_per_s)
        connection: Connection | None = None
        connected: tuple[int, Address] | None = None
        while (item := self._snapshots.get()) is not None:
            launch, folder, step = item
            start = self._start
            part = self._memory.folder / folder / PARTS / f"checkpoint-{step}"
            # The launch or the training has ended
            if start is None or start.launch != launch or not part.is_dir():
                continue
            began = time.monotonic()
            partner = start.addresses[(start.index + 1) % len(start.addresses)]
            problem: Exception | None = None
            sent = 0
            for _ in range(_SEND_ATTEMPTS if len(start.addresses) > 1 else 0):
                try:
                    if connection is None or connected != (launch, partner):
                        connection = connect(partner, self._settings.token)
                        connected = (launch, partner)
                    sent = send_part(
                        connection, self._memory.folder, folder, step, launch=launch, pace=pace
                    )
                    problem = None
                    break
                except Exception as error:  # also of a file that a full memory has cut off
                    problem = error
                    connected = None
                    time.sleep(_RETRY_S)
            if problem is None:
                fields = {"step": step, "bytes": sent, "seconds": time.monotonic() - began}
                self._say("replicated", None, fields)
                self._send(event="replicated", launch=launch, folder=folder, step=step)
            elif self._start is start and self.connection is not None:
                self._say(
                    "nodes",
                    f"no more snapshots in this launch: {partner[0]} does not take its copy: {problem}",
                )


def _survivable(start: Start) -> str:
    count = len(start.addresses)
    if count == 1:
        return "runs on one node: after the loss of this node the run resumes from the disk"
    return (
        f"node {start.index} of {count} sends its snapshots to node {(start.index + 1) % count}: the run survives the "
        "loss of any one node with the last of them"
    )
