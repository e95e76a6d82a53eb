"""Islands that join: those that do not fit together are told why in one line, and a lost connection is tried again."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ports import free_port

from hfscale.core.connections import _GREETING, _RANDOM_BYTES, Connection
from hfscale.errors import HealthError, UsageError
from hfscale.islands.client import IslandClient
from hfscale.islands.rendezvous import TOKEN_VARIABLE, Rendezvous, listen

TOKEN = "a secret of the tests"  # noqa: S105
TERMS = {"version": "1.0", "model": "Llama of 10", "tokenizer": "a", "fragments": 1, "compression": "32 bits"}


def hello(island, *, layout="shapes", **terms):
    return {
        "island": island,
        "part": 0,
        "parts": 1,
        "islands": 2,
        "quorum": 1,
        "deadline_s": 60.0,
        "terms": {**TERMS, **terms},
        "layout": layout,
        "max_bytes": 8,
    }


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"version": "1.1"}, "version"),
        ({"model": "Llama of 20"}, "model"),
        ({"tokenizer": "b"}, "tokenizer"),
        ({"fragments": 2}, "fragments"),
        ({"compression": "4 bits"}, "compression"),
        ({"layout": "other shapes"}, "shapes of the shards"),
    ],
)
def test_islands_that_differ_are_all_refused(monkeypatch, other, reason):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()[:2]
    threading.Thread(target=Rendezvous(TOKEN).serve, args=(listener,), daemon=True).start()

    def join(said):
        client = IslandClient(address, said)
        with pytest.raises(UsageError) as raised:
            client.join(anchor=0, digest="", timeout_s=60.0)
        client.disconnect()
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(join, [hello(0), hello(1, **other)]))
    for message in messages:
        assert f"differs from the others in: {reason}" in message
        assert "\n" not in message


def test_a_rendezvous_that_cannot_be_reached_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    port = free_port()
    with pytest.raises(HealthError, match=f"the rendezvous 127.0.0.1:{port} cannot be reached") as raised:
        IslandClient(("127.0.0.1", port), hello(1)).join(anchor=0, digest="", timeout_s=0.0)
    assert "\n" not in str(raised.value)


def test_an_island_tries_again_when_the_rendezvous_of_a_run_before_is_ending(monkeypatch):
    """It ends during the proof of the token, then before it has answered; another one then has the port."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    listener = listen("127.0.0.1", 0)

    def serve():
        during_the_proof = listener.accept()[0]
        during_the_proof.sendall(_GREETING + bytes(_RANDOM_BYTES))
        during_the_proof.recv(1, socket.MSG_PEEK)
        during_the_proof.close()
        Connection(listener.accept()[0], TOKEN.encode(), is_server=True).close()
        Rendezvous(TOKEN).serve(listener)

    threading.Thread(target=serve, daemon=True).start()
    client = IslandClient(listener.getsockname()[:2], hello(0) | {"islands": 1})
    assert client.join(anchor=4, digest="", timeout_s=60.0).kind == "go"
    client.leave()


@pytest.mark.parametrize("first", [2, 4])
def test_islands_with_one_anchor_at_different_steps_meet_at_the_later_one(monkeypatch, first):
    """Whichever contributes first, the one that is behind is told where the other is."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    listener = listen("127.0.0.1", 0)
    rendezvous = Rendezvous(TOKEN)
    threading.Thread(target=rendezvous.serve, args=(listener,), daemon=True).start()
    steps = {0: first, 1: 6 - first}

    def run(island):
        client = IslandClient(listener.getsockname()[:2], hello(island))
        client.join(anchor=0, digest="", timeout_s=60.0)
        while island == 1 and (rendezvous._round is None or not rendezvous._round.complete):
            threading.Event().wait(0.01)
        replies = [client.exchange(steps[island], anchor=0, payload=bytes([island]))]
        if replies[0].kind == "ahead":
            replies.append(client.exchange(replies[0].anchor, anchor=0, payload=bytes([10 + island])))
        client.leave()
        return replies

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    behind, ahead = sorted(found, key=len, reverse=True)
    assert [(reply.kind, reply.anchor) for reply in behind] == [("ahead", 4), ("round", 4)]
    assert [(reply.kind, reply.anchor, reply.contributors) for reply in ahead] == [("round", 4, (0, 1))]
    number = 0 if first == 2 else 1  # of the island that was behind
    assert ahead[0].payloads == {number: bytes([10 + number])}


def test_a_round_needs_the_quorum_and_waits_for_a_late_island_until_the_deadline(monkeypatch):
    """The late one learns that its contribution does not count; it takes part in the next round."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    listener = listen("127.0.0.1", 0)
    rendezvous = Rendezvous(TOKEN)
    threading.Thread(target=rendezvous.serve, args=(listener,), daemon=True).start()
    has_passed, is_closed = threading.Event(), threading.Event()
    all_joined = threading.Barrier(3)

    def run(island):
        terms = {"islands": 3, "quorum": 2, "deadline_s": 0.2}
        client = IslandClient(listener.getsockname()[:2], hello(island) | terms)
        client.join(anchor=0, digest="", timeout_s=60.0)
        all_joined.wait()
        if island > 0:
            has_passed.wait()
        if island == 2:
            is_closed.wait(30.0)
        first = client.exchange(100, anchor=0, payload=bytes([island]))
        is_closed.set()
        all_joined.wait()
        client._hello["deadline_s"] = 60.0
        second = client.exchange(200, anchor=first.anchor, payload=bytes([island]))
        client.leave()
        return first.contributors, second.contributors

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(run, island) for island in range(3)]
        while rendezvous._round is None or not rendezvous._round.complete:
            threading.Event().wait(0.01)
        threading.Event().wait(1.0)  # five times the deadline
        is_open = rendezvous._round is not None
        has_passed.set()
        assert is_open  # one contribution of a quorum of two
        assert [one.result() for one in found] == [((0, 1), (0, 1, 2))] * 3
