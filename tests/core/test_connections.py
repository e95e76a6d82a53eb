"""Connections that both ends have proved the token on, and what they do with ends that have not."""

import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import pytest

from hfscale.core import connections
from hfscale.core.connections import (
    _GREETING,
    _PROOF_BYTES,
    _RANDOM_BYTES,
    CHALLENGE_S,
    Connection,
    WrongTokenError,
)

TOKEN = b"a secret of the tests"


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def accepted(listener, token=TOKEN, **limits):
    """Accept one connection on another thread; return a function that returns it, or raises why there is none."""
    outcome = []

    def accept():
        try:
            outcome.append(Connection(listener.accept()[0], token, is_server=True, **limits))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()

    def result():
        thread.join(60)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return result


@pytest.fixture
def pair(listener):
    """Both ends of a connection."""
    server = accepted(listener)
    client = Connection(socket.create_connection(listener.getsockname()), TOKEN, is_server=False)
    with client, server() as accepted_end:
        yield client, accepted_end


def test_messages_and_their_payloads_arrive_in_both_directions(pair):
    client, server = pair
    payload = bytes(range(256)) * (3 << 12)  # more than one piece
    sender = threading.Thread(target=client.send, args=({"round": 1}, payload))
    sender.start()
    assert server.receive(len(payload)) == ({"round": 1}, payload)
    sender.join()
    server.send({"done": True})
    assert client.receive(patient=True) == ({"done": True}, b"")
    assert client.own_host == "127.0.0.1"
    assert client.sent_bytes > len(payload)


@pytest.mark.parametrize(("servers", "clients"), [(TOKEN, b"another"), (b"another", TOKEN)])
def test_nothing_is_read_from_a_connection_without_the_token(listener, servers, clients):
    server = accepted(listener, servers)
    with pytest.raises(WrongTokenError):
        Connection(socket.create_connection(listener.getsockname()), clients, is_server=False)
    with pytest.raises(WrongTokenError, match="token"):
        server()


def test_what_a_server_proves_is_no_proof_of_the_other_end(listener):
    """An end without the token sends back the server's random number, and then the server's own proof."""
    server = accepted(listener)
    with socket.create_connection(listener.getsockname(), timeout=60) as thief, thief.makefile("rb") as stream:
        thief.sendall(stream.read(len(_GREETING) + _RANDOM_BYTES))
        thief.sendall(stream.read(_PROOF_BYTES))
        with pytest.raises(WrongTokenError):
            server()


def test_an_end_that_sends_another_greeting_is_refused(listener):
    server = accepted(listener)
    with socket.create_connection(listener.getsockname(), timeout=60) as other:
        other.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(_RANDOM_BYTES))
        with pytest.raises(WrongTokenError, match="no rendezvous"):
            server()


def test_an_end_that_sends_a_byte_now_and_then_is_dropped(listener, monkeypatch):
    monkeypatch.setattr(connections, "CHALLENGE_S", 1.0)
    server, dropped = accepted(listener), threading.Event()

    def wait():
        with pytest.raises(TimeoutError):
            server()
        dropped.set()

    threading.Thread(target=wait, daemon=True).start()
    with socket.create_connection(listener.getsockname()) as client:
        for number in range(len(_GREETING) + _RANDOM_BYTES - 1):  # the last byte is never sent
            if dropped.wait(0.25):
                break
            with suppress(OSError):
                client.sendall((_GREETING + bytes(_RANDOM_BYTES))[number : number + 1])
        assert dropped.is_set()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack(">IQ", 101, 0), "too long"),
        (struct.pack(">IQ", 2, 9) + b"{}", "too long"),
        (struct.pack(">IQ", 4, 0) + b"\x80\x04K.", "not JSON"),  # a pickle
        (struct.pack(">IQ", 2, 0) + b"[]", "no JSON object"),
    ],
)
def test_what_is_no_message_ends_the_connection(listener, sent, reason):
    server = accepted(listener, max_json_bytes=100)
    with Connection(socket.create_connection(listener.getsockname()), TOKEN, is_server=False) as client:
        client._send(sent)
        with pytest.raises(ConnectionError, match=reason):
            server().receive(8)


def test_an_end_that_stops_within_a_message_is_lost_and_one_between_two_is_not(pair, monkeypatch):
    client, server = pair
    server._socket.settimeout(0.2)
    client._send(struct.pack(">IQ", 2, 0) + b"{")
    with pytest.raises(TimeoutError):
        server.receive(patient=True)
    client._socket.settimeout(0.2)
    later = threading.Timer(1.0, server.send, ({},))
    later.start()
    assert client.receive(patient=True) == ({}, b"")
    later.join()


def test_a_connection_can_be_closed_while_another_thread_waits_for_it(pair):
    client, _ = pair
    is_waiting = threading.Event()
    ended = threading.Event()

    def wait():
        is_waiting.set()
        with pytest.raises(OSError, match=r"closed|descriptor"):
            client.receive(patient=True)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait()
    client.close()
    thread.join(60)
    assert ended.is_set()
    with pytest.raises(ConnectionError, match="closed"):
        client.receive(patient=True)


def test_a_message_that_was_sent_in_part_is_not_followed_by_another(pair):
    client, server = pair
    client._socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.send({}, bytes(1 << 26))  # nobody reads
    with pytest.raises(OSError, match="descriptor"):
        client.send({})
    with pytest.raises(ConnectionError):
        server.receive(1 << 26)


SERVE = (  # with 64 files at most
    "import resource, socket, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
    "from hfscale.core.connections import Acceptor; listener = socket.socket(fileno=int(sys.argv[1])); "
    "Acceptor(listener, sys.argv[2].encode(), lambda one: one.send(one.receive(patient=True)[0])).run()"
)


@pytest.fixture
def server_of_few_files(listener):
    argv = [sys.executable, "-c", SERVE, str(listener.fileno()), TOKEN.decode()]
    process = subprocess.Popen(argv, pass_fds=[listener.fileno()], stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_ends_without_the_token_keep_nobody_out(listener, server_of_few_files):
    address = listener.getsockname()
    with ExitStack() as held:
        for _ in range(90):  # more than the files that the server may open
            held.enter_context(socket.create_connection(address, timeout=60))
        for number in range(2):
            with Connection(socket.create_connection(address, timeout=60), TOKEN, is_server=False) as client:
                client.send({"number": number})
                assert client.receive() == ({"number": number}, b"")
    assert server_of_few_files.poll() is None


def test_the_oldest_of_too_many_connections_without_a_proof_is_closed(listener, server_of_few_files):
    with ExitStack() as held:
        first, *others = [
            held.enter_context(socket.create_connection(listener.getsockname(), timeout=CHALLENGE_S / 4))
            for _ in range(64 // 4 + 1)
        ]
        while first.recv(100):  # the greeting
            pass
        greeting = len(_GREETING) + _RANDOM_BYTES
        assert len(others[-1].recv(greeting, socket.MSG_WAITALL)) == greeting
        others[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it is open
            others[-1].recv(1)


def test_connections_with_the_token_that_use_up_all_files_end_nothing(listener, server_of_few_files):
    address = listener.getsockname()
    with ExitStack() as held:
        for _ in range(40):  # with the threads' and the interpreter's files below 64
            held.enter_context(Connection(socket.create_connection(address, timeout=60), TOKEN, is_server=False))
        waiting = [held.enter_context(socket.create_connection(address, timeout=60)) for _ in range(90)]
        assert waiting[0].recv(1) in (b"h", b"")  # greeted, and then closed for newer ones
    with Connection(socket.create_connection(address, timeout=60), TOKEN, is_server=False) as client:
        client.send({})
        assert client.receive() == ({}, b"")
