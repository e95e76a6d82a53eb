"""Decides, for all nodes of a run, when the command is started, ended and started again.

The supervisor of node 0 runs it in a thread; the supervisors of all nodes, that of node 0 too, are connected to it.
It keeps no state that a restarted one would need: what the nodes have in memory is said by themselves each time.

| message of a node | fields | meaning |
|---|---|---|
| `ready` | `node`, `nodes`, `host`, `address`, `parts`, `folders`, `failure` | it can start; what it has in memory |
| `assembling` | | it still collects files |
| `assembled` | `round`, `failed` | it has all files of the chosen snapshots, but for those |
| `failed` | | a rank of this node has failed, or its launcher has |
| `replicated` | `launch`, `folder`, `step` | its part of a snapshot lies on its partner |
| `ended` | `code`, `failure`, `is_blamed` | its launch is over: an exit code, or how it failed; is the host to blame |

| message to a node | fields | meaning |
|---|---|---|
| `refused` | `reason`, `may_pass` | it cannot take part, or not yet |
| `assemble` | `round`, `snapshots` | collect these (`replicas.choose`) |
| `start` | `launch`, `index`, `addresses`, `restarts`, `failure`, `folders`, `snapshots` | start the command |
| `stop` | | end the launch, since another node has failed |
| `replicated` | `folder`, `step` | all parts of a snapshot lie on two nodes |
| `again` | `text`, `failure` | another launch follows: say `ready` |
| `leave` | `text` | another launch follows on the other nodes only |
| `end` | `code`, `text`, `failure` | the run is over |
"""

import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hfscale.core.connections import Address, Connection
from hfscale.core.counts import nouns
from hfscale.core.final_errors import PREEMPTED
from hfscale.core.records import unix_time
from hfscale.recovery.connections import Server, receive
from hfscale.recovery.replicas import choose
from hfscale.recovery.restarts import Failure, RestartPolicy

_LOST = {"event": "lost"}
# For the launcher, and for what it has left behind, to end on a node after a failure
_END_S = 180.0


class Coordinator:
    """The thread that coordinates the nodes of one run.

    Args:
        address (`tuple[str, int]`): where the nodes connect to.
        token (`bytes`): the token of the run.
        nodes (`int`): how many nodes take part.
        min_nodes (`int`): with how many the run goes on if a lost node is not replaced in time.
        wait_s (`float`): how long to wait for nodes, in seconds.
        max_restarts (`int`): restarts in 24 hours after which the run is given up.
        report (`Callable`): called with each line that a person should see.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        *,
        nodes: int,
        min_nodes: int,
        wait_s: float,
        max_restarts: int,
        report: Callable[[str], None],
    ) -> None:
        self._nodes = nodes
        self._min_nodes = min_nodes
        self._wait_s = wait_s
        self._report = report
        self._policy = RestartPolicy(max_restarts)
        self._messages: queue.SimpleQueue[tuple[int, Connection, dict[str, Any]]] = (
            queue.SimpleQueue()
        )
        self._connections: dict[int, Connection] = {}
        self._ready: dict[int, dict[str, Any]] = {}
        self._hosts: dict[int, str] = {}
        self._blamed: set[str] = set()
        self._launches = self._rounds = 0
        self._server = Server(address, token, self._read)
        threading.Thread(
            target=self._run_and_report, daemon=True, name="hfscale-coordinator"
        ).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _read(self, connection: Connection) -> None:
        """Pass on what one node says, until its connection ends."""
        node = -1
        try:
            while True:
                message = receive(connection)
                node = int(message.get("node", node))
                self._messages.put((node, connection, message))
        finally:
            self._messages.put((node, connection, _LOST))

    def _next(self, deadline: float | None = None) -> tuple[int, dict[str, Any]] | None:
        """Return the next message of a node that takes part; None after the deadline on the monotonic clock."""
        while True:
            try:
                timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                node, connection, message = self._messages.get(timeout=timeout)
            except queue.Empty:
                return None
            known = self._connections.get(node)
            if message["event"] == "ready" and known is not connection:
                reason = self._why_refuse(node, message)
                if reason is None:
                    self._connections[node] = connection
                    self._hosts[node] = message["host"]
                else:
                    self._tell(
                        connection,
                        event="refused",
                        reason=reason,
                        may_pass=node in self._connections,
                    )
                    continue
            elif known is not connection:  # of a node that was refused, or that is lost
                continue
            if message["event"] == "ready":
                self._ready[node] = message
            elif message["event"] == "lost":
                del self._connections[node]
                self._ready.pop(node, None)
            return node, message

    def _why_refuse(self, node: int, message: dict[str, Any]) -> str | None:
        if message["nodes"] != self._nodes:
            return f"--node-rank {node} of --nodes {message['nodes']} does not fit --nodes {self._nodes} of node 0"
        if node in self._connections:
            return f"--node-rank {node} is taken by another supervisor"
        if message["host"] in self._blamed:
            return (
                f"the health checks of this run blame {message['host']}: "
                f"start --node-rank {node} on another machine"
            )
        return None

    @staticmethod
    def _tell(connection: Connection, **message: Any) -> None:
        with suppress(OSError):  # a lost node is noticed by its reader
            connection.send(message)

    def _tell_all(self, **message: Any) -> None:
        for connection in list(self._connections.values()):
            self._tell(connection, **message)

    def _run_and_report(self) -> None:
        """End the run on all nodes if the coordinator itself fails: they would wait for it for ever."""
        try:
            self._run()
        except Exception as error:
            self._tell_all(
                event="end",
                code=1,
                text=f"gives up: the coordinator failed: {type(error).__name__}: {error}",
            )
            raise

    def _run(self) -> None:
        failure: Failure | None = None
        wait_until = 0.0
        while True:
            members = self._meet()
            if members is None:
                text = f"gives up: {self._missing()} did not come within {self._wait_s:.0f} s"
                self._tell_all(event="end", code=1, text=text)
                return
            unheard = [
                ready["failure"] for ready in self._ready.values() if ready["failure"] is not None
            ]
            if unheard:  # of a launch whose node 0 was lost
                failure = Failure.merged(unheard)
            chosen = self._assemble(members)
            if chosen is None:  # a node was lost meanwhile
                continue
            time.sleep(max(wait_until - time.monotonic(), 0.0))
            self._start(members, chosen, failure)
            endings = self._wait_for_the_end(members)
            code = _final_code(list(endings.values()))
            if code is not None:
                self._tell_all(event="end", code=code, text=None)
                return
            failure = Failure.merged(
                [ending["failure"] for ending in endings.values() if ending["failure"] is not None]
            )
            why = self._policy.why_give_up(failure)
            if why is not None:
                self._tell_all(
                    event="end", code=1, text=f"gives up: {why}", failure=asdict(failure)
                )
                return
            wait_s, text = self._policy.next_restart(failure)
            wait_until = time.monotonic() + wait_s
            self._ready.clear()
            self._dismiss([node for node, ending in endings.items() if ending.get("is_blamed")])
            self._tell_all(event="again", text=text, failure=asdict(failure))

    def _dismiss(self, nodes: list[int]) -> None:
        """Let the nodes leave whose hosts the health checks blame, if the run can go on without them."""
        for node in nodes:
            if node not in self._connections:  # it was lost before the launch had ended on all
                continue
            host = self._hosts[node]
            if node == 0 or len(self._connections) <= self._min_nodes:
                why = "the run needs node 0" if node == 0 else f"--min-nodes is {self._min_nodes}"
                self._report(f"the health checks blame {host}, but node {node} stays: {why}")
                continue
            self._report(
                f"node {node} leaves: the health checks blame {host}; start it on another machine"
            )
            self._blamed.add(host)
            connection = self._connections.pop(node)
            self._tell(
                connection,
                event="leave",
                text=f"leaves the run: the health checks blame this host, {host}",
            )

    def _missing(self) -> str:
        missing = [str(node) for node in range(self._nodes) if node not in self._ready]
        return f"{nouns(len(missing), 'node')} {', '.join(missing)}"

    def _meet(self) -> list[int] | None:
        """Wait for all nodes, or for some time; return those that take part, or None if they are too few."""
        deadline = time.monotonic() + self._wait_s
        while len(self._ready) < self._nodes:
            if self._next(deadline) is None:
                if len(self._ready) < self._min_nodes:
                    return None
                self._report(f"goes on without {self._missing()}")
                break
        return sorted(self._ready)

    def _assemble(self, members: list[int]) -> list[dict[str, Any]] | None:
        """Have all nodes collect the newest snapshots that exist completely; return what they have agreed on.

        None: a node was lost, and the nodes must meet again.
        """
        excluded: set[tuple[str, int]] = set()
        said = [self._ready[node] for node in members]
        parts = [{**part, "address": one["address"]} for one in said for part in one["parts"]]
        while True:
            chosen = choose(parts, excluded)
            self._rounds += 1
            for node in members:
                self._tell(
                    self._connections[node], event="assemble", round=self._rounds, snapshots=chosen
                )
            waiting = set(members)
            failed: set[tuple[str, int]] = set()
            while waiting:
                found = self._next(time.monotonic() + self._wait_s)
                if found is None:
                    self._lose(waiting, f"did not collect its snapshot in {self._wait_s:.0f} s")
                    continue
                node, message = found
                if message["event"] == "lost" and node in members:
                    self._report(f"node {node} was lost")
                    return None
                if message["event"] == "assembled" and message["round"] == self._rounds:
                    waiting.discard(node)
                    failed |= {(folder, step) for folder, step in message["failed"]}
            if not failed:
                return chosen
            excluded |= failed

    def _lose(self, nodes: Collection[int], what: str) -> None:
        """Close the connections of nodes that are connected but do nothing, so that they count as lost."""
        for node in sorted(nodes):
            self._report(f"node {node} {what}: it counts as lost")
            self._connections[node].close()

    def _start(
        self, members: list[int], chosen: list[dict[str, Any]], failure: Failure | None
    ) -> None:
        self._launches += 1
        folders = sorted({folder for node in members for folder in self._ready[node]["folders"]})
        addresses = [self._ready[node]["address"] for node in members]
        for index, node in enumerate(members):
            self._tell(
                self._connections[node],
                event="start",
                launch=self._launches,
                index=index,
                addresses=addresses,
                restarts=self._policy.failures,
                failure=None if failure is None else asdict(failure),
                folders=folders,
                snapshots=[[snapshot["folder"], snapshot["step"]] for snapshot in chosen],
            )

    def _wait_for_the_end(self, members: list[int]) -> dict[int, dict[str, Any]]:
        """Pass on failures and complete snapshots until the launch is over on all nodes; return how, by node."""
        running = set(members)
        endings: dict[int, dict[str, Any]] = {}
        is_stopped = False
        deadline: float | None = None
        replicated: dict[tuple[str, int], set[int]] = {}
        while running:
            found = self._next(deadline)
            if found is None:
                self._lose(running, f"did not end its launch in {_END_S:.0f} s")
                deadline = None  # their connections end now
                continue
            node, message = found
            event = message["event"]
            if event == "replicated" and message["launch"] == self._launches:
                snapshot = (message["folder"], message["step"])
                nodes = replicated.setdefault(snapshot, set())
                nodes.add(node)
                if nodes == set(members):
                    del replicated[snapshot]
                    self._tell_all(event="replicated", folder=snapshot[0], step=snapshot[1])
            elif event == "ended":
                running.discard(node)
                endings[node] = message
            elif event == "lost" and node in running:
                running.discard(node)
                now = unix_time()
                reason = f"node {node} was lost"
                lost = Failure(
                    failed_at=now,
                    ended_at=now,
                    rank=None,
                    reason=reason,
                    begun_step=0,
                    completed_step=0,
                )
                endings[node] = {"code": None, "failure": asdict(lost)}
            has_failed = event in ("failed", "lost") or (
                event == "ended" and message["code"] not in (0, PREEMPTED)
            )
            if has_failed and node in members and not is_stopped:
                is_stopped = True
                deadline = time.monotonic() + _END_S
                for other in running:
                    if other in self._connections:
                        self._tell(self._connections[other], event="stop")
        return endings


def _final_code(endings: list[dict[str, Any]]) -> int | None:
    """Return the exit code of the run; None if the launch is to be started again."""
    codes = [ending["code"] for ending in endings]
    if PREEMPTED in codes:
        return PREEMPTED
    final = next((code for code in codes if code), None)
    if final is not None:
        return int(final)
    return 0 if set(codes) == {0} else None
