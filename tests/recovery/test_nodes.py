"""`hfscale run --nodes`: supervisors that start, end and recover one run together, with copies of snapshots."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait

import psutil
import pytest
from conftest import REPOSITORY
from ports import free_port

from hfscale.core import connections as core_connections
from hfscale.errors import UsageError
from hfscale.recovery import coordinator as coordinator_module
from hfscale.recovery.connections import Server, connect, receive
from hfscale.recovery.coordinator import Coordinator

RANK = REPOSITORY / "tests" / "workers" / "node_rank.py"


class Nodes:
    """Supervisors of several nodes on this machine."""

    def __init__(self, folder, count, *options, last=6):
        self.folder, self.count, self.options, self.last = folder, count, options, last
        self.port = free_port()
        self.running = {}

    def start(self, *ranks):
        for rank in ranks:
            self.running[rank] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hfscale", "run", "--memory-dir", str(self.folder)),
                    *("--nodes", str(self.count), "--node-rank", str(rank)),
                    *("--rendezvous", f"127.0.0.1:{self.port}", "--log", str(self.folder / f"log-{rank}")),
                    *(*self.options, "--", sys.executable, str(RANK), str(self.folder), str(self.last)),
                ],
                env=os.environ | {"HFSCALE_RUN_TOKEN": "secret"},
                stderr=subprocess.PIPE,
                text=True,
            )

    def launches(self):
        path = self.folder / "launches"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, rank):
        path = self.folder / f"log-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition):
        until = time.monotonic() + 100
        while not condition():
            assert time.monotonic() < until, [process.poll() for process in self.running.values()]
            time.sleep(0.05)

    def wait_for_copies(self, step):
        self.wait_for(lambda: all(step in [e.get("step") for e in self.events(rank)] for rank in self.running))

    def lose(self, rank):
        """End all processes of a node and remove its memory."""
        launch = [launch for launch in self.launches() if launch["parent"] == self.running[rank].pid][-1]
        supervisor = self.running.pop(rank)
        supervisor.kill()
        psutil.Process(launch["pid"]).kill()
        supervisor.communicate()
        shutil.rmtree(launch["memory"])

    def finish(self):
        (self.folder / "go").touch()
        errors = {rank: process.communicate(timeout=100)[1] for rank, process in self.running.items()}
        return {rank: process.returncode for rank, process in self.running.items()}, errors


@pytest.fixture
def nodes(tmp_path):
    made = []

    def make(count, *options, **more):
        made.append(Nodes(tmp_path, count, *options, **more))
        return made[-1]

    yield make
    for process in [process for one in made for process in one.running.values()]:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()


@pytest.mark.parametrize(("count", "lost"), [(2, 0), pytest.param(3, 1, marks=pytest.mark.long)])
def test_a_lost_node_is_replaced_and_its_state_comes_from_the_partner(nodes, tmp_path, count, lost):
    run = nodes(count)
    run.start(*range(count))
    run.wait_for_copies(3)
    run.lose(lost)
    run.start(lost)
    run.wait_for(lambda: len(run.launches()) == 2 * count)
    codes, errors = run.finish()
    assert codes == dict.fromkeys(range(count), 0), errors
    assert [launch["from"] for launch in run.launches()] == [0] * count + [3] * count
    states = [f"state-{rank}" for rank in range(count)]
    assert all(launch["files"] == states for launch in run.launches()[count:])
    assert "loss of any one node" in errors[lost]
    sent = [event for event in run.events(0) if event["event"] == "replicated"]
    assert {event["bytes"] for event in sent} == {3_000_002}  # not the file that both nodes have
    assert not list(tmp_path.glob("hfscale-run-*"))


@pytest.mark.faults  # nodes that start more than ten seconds apart do not meet
def test_the_remaining_nodes_resume_from_the_copies_of_a_node_that_is_not_replaced(nodes):
    run = nodes(3, "--min-nodes", "2", "--node-wait", "10")
    run.start(0, 1, 2)
    run.wait_for_copies(3)
    run.lose(1)
    codes, errors = run.finish()
    assert codes == {0: 0, 2: 0}, errors
    assert "goes on without node 1" in errors[0]
    assert [[launch["nodes"], launch["from"]] for launch in run.launches()[3:]] == [[2, 3]] * 2
    assert all(launch["files"] == ["state-0", "state-1", "state-2"] for launch in run.launches()[3:])


class Client:
    """What the supervisor of one node says to the coordinator."""

    def __init__(self, address, node):
        self.address, self.node = address, node
        self.connection = connect(address, b"secret")

    def send(self, **message):
        self.connection.send(message)

    def say_ready(self, host=None):
        about = {
            "host": host or f"host-{self.node}",
            "address": ["127.0.0.1", 1],
            "parts": [],
            "folders": [],
            "failure": None,
        }
        self.send(event="ready", node=self.node, nodes=2, **about)

    def receive(self, event):
        assert wait([self.connection], 60)
        message = receive(self.connection)
        assert message["event"] == event
        return message

    def is_left(self):
        assert wait([self.connection], 60)
        with pytest.raises(ConnectionError):
            receive(self.connection)
        return True


@pytest.fixture
def two_clients(request):
    """A coordinator that waits 0.5 s for nodes, its lines, and two nodes that are ready; by default one is enough."""
    address, lines = ("127.0.0.1", free_port()), []
    limits = {"nodes": 2, "min_nodes": getattr(request, "param", 1), "wait_s": 0.5, "max_restarts": 3}
    coordinator = Coordinator(address, b"secret", report=lines.append, **limits)
    clients = [Client(address, 0), Client(address, 1)]
    for client in clients:
        client.coordinator = coordinator
        client.say_ready()
    yield clients, lines
    for client in clients:
        client.connection.close()
    coordinator.close()


def test_a_node_that_does_not_collect_its_snapshot_counts_as_lost(two_clients):
    (working, stuck), lines = two_clients
    told = working.receive("assemble")
    stuck.receive("assemble")
    working.send(event="assembling")  # it may take long, as long as it says so
    working.send(event="assembled", round=told["round"], failed=[])
    assert stuck.is_left()
    assert any("node 1 did not collect" in line for line in lines)
    told = working.receive("assemble")
    working.send(event="assembled", round=told["round"], failed=[])
    assert len(working.receive("start")["addresses"]) == 1


def test_a_node_that_does_not_end_its_launch_counts_as_lost(two_clients, monkeypatch):
    monkeypatch.setattr(coordinator_module, "_END_S", 0.5)
    (failed, stuck), lines = two_clients
    for client in (failed, stuck):
        client.send(event="assembled", round=client.receive("assemble")["round"], failed=[])
    for client in (failed, stuck):
        client.receive("start")
    failed.send(event="failed")
    stuck.receive("stop")
    failed.receive("stop")
    failed.send(event="ended", code=None, failure=FAILURE | {"is_consequence": False, "samples": {}}, is_blamed=False)
    assert "bad luck" in failed.receive("again")["text"]
    assert stuck.is_left()
    assert any("node 1 did not end" in line for line in lines)


FAILURE = {"failed_at": 1.0, "ended_at": 2.0, "rank": 0, "reason": "bad luck", "begun_step": 5, "completed_step": 4}


def fail(clients, blamed, *, is_lost=False):
    """A launch starts and fails; the health checks blame the host of one node, which may be lost before the end."""
    for client in clients:
        client.send(event="assembled", round=client.receive("assemble")["round"], failed=[])
    for client in clients:
        client.receive("start")
    clients[0].send(event="failed")
    for client in clients:
        client.receive("stop")
        failure = FAILURE | {"is_consequence": False, "samples": {}}
        client.send(event="ended", code=None, failure=failure, is_blamed=client.node == blamed)
        if is_lost and client.node == blamed:
            client.connection.close()
            while blamed in client.coordinator._connections:
                time.sleep(0.01)


def test_a_node_whose_host_is_blamed_leaves_and_another_host_may_take_its_place(two_clients):
    clients, lines = two_clients
    kept, blamed = clients
    fail(clients, blamed=1)
    kept.receive("again")
    assert "blame this host, host-1" in blamed.receive("leave")["text"]
    assert any("node 1 leaves: the health checks blame host-1" in line for line in lines)
    blamed.connection.close()
    clients[1] = same = Client(kept.address, 1)
    same.say_ready()
    refused = same.receive("refused")
    assert "blame host-1: start --node-rank 1 on another machine" in refused["reason"]
    assert not refused["may_pass"]
    same.connection.close()
    clients[1] = other = Client(kept.address, 1)
    other.say_ready("host-2")
    kept.say_ready()
    for client in clients:
        client.send(event="assembled", round=client.receive("assemble")["round"], failed=[])
    assert len(kept.receive("start")["addresses"]) == len(other.receive("start")["addresses"]) == 2


def test_a_blamed_node_that_is_lost_at_the_end_of_a_launch_ends_nothing(two_clients):
    clients, lines = two_clients
    fail(clients[::-1], blamed=1, is_lost=True)
    clients[0].receive("again")
    assert not any("blame" in line for line in lines)


@pytest.mark.parametrize(
    ("two_clients", "blamed", "why"),
    [(1, 0, "the run needs node 0"), (2, 1, "--min-nodes is 2")],
    indirect=["two_clients"],
)
def test_a_node_whose_host_is_blamed_stays_where_the_run_needs_it(two_clients, blamed, why):
    clients, lines = two_clients
    fail(clients, blamed)
    for client in clients:
        assert "bad luck" in client.receive("again")["text"]
    assert any(f"blame host-{blamed}, but node {blamed} stays: {why}" in line for line in lines)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_coordinator_that_fails_ends_the_run_on_all_nodes():
    address = ("127.0.0.1", free_port())
    limits = {"nodes": 2, "min_nodes": 2, "wait_s": 100.0, "max_restarts": 1}
    coordinator = Coordinator(address, b"secret", report=lambda text: None, **limits)
    first, broken = connect(address, b"secret"), connect(address, b"secret")
    about = {"host": "a", "address": address, "parts": [], "folders": [], "failure": None}
    ready = {"event": "ready", "node": 0, "nodes": 2} | about
    first.send(ready)
    while not coordinator._ready:
        time.sleep(0.01)
    broken.send({"event": "ready", "node": 1})  # without its other fields
    assert wait([first], 60)
    message = receive(first)
    assert [message["event"], message["code"]] == ["end", 1]
    assert "KeyError: 'nodes'" in message["text"]
    coordinator.close()


def test_an_end_that_never_proves_the_token_is_left_and_one_that_has_may_be_silent(monkeypatch):
    monkeypatch.setattr(core_connections, "CHALLENGE_S", 1.0)
    monkeypatch.setattr(core_connections, "SILENCE_S", 1.0)
    server = Server(("127.0.0.1", 0), b"secret", lambda connection: connection.send(receive(connection)))
    known, silent = connect(server.address, b"secret"), socket.create_connection(server.address, timeout=60)
    with known, silent, silent.makefile("rb") as stream:
        assert stream.read().startswith(core_connections._GREETING)  # until the server has closed it
        known.send({"after": "the time limits"})
        assert receive(known) == {"after": "the time limits"}
    server.close()
    with socket.create_server(("127.0.0.1", 0)) as never, pytest.raises(TimeoutError):
        connect(never.getsockname(), b"secret")


def test_another_token_is_named_with_the_supervisor_that_has_refused_it():
    server = Server(("127.0.0.1", 0), b"secret", lambda connection: connection.send({"never": "sent"}))
    with pytest.raises(UsageError, match=f"HFSCALE_RUN_TOKEN is not that of .* at 127.0.0.1:{server.address[1]}"):
        connect(server.address, b"another")
    server.close()
    with pytest.raises(ConnectionRefusedError):  # the port is free again
        connect(server.address, b"secret")
