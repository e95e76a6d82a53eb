"""Copies of snapshots on other nodes: only files with the right content are kept, and no name leads out of them."""

import json
import threading
from contextlib import suppress

import pytest

from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import commit
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.run_memory import PARTS, RunMemory, replicated_step, trust_again, trust_until, trusted_step
from hfscale.recovery.connections import connect, receive
from hfscale.recovery.replicas import (
    REPLICAS,
    Pace,
    ReplicaServer,
    assemble,
    choose,
    keep_only,
    list_parts,
    send_part,
)

TOKEN = b"a secret of the tests"
TRAINING = "0123456789abcdef"


class Node:
    """The memory of one node and its server."""

    def __init__(self, folder):
        folder.mkdir()
        self.memory = RunMemory.create(folder)
        self.folder = self.memory.folder / TRAINING
        self.server = ReplicaServer(self.memory.folder, "127.0.0.1", TOKEN)
        self.server.begin(1, [TRAINING], [])

    def write_part(self, step, **files):
        part = self.folder / PARTS / f"checkpoint-{step}"
        part.mkdir(parents=True)
        for name, content in files.items():
            (part / name).write_text(content)
        commit(part, step=step, strategy="ddp", world_size=2, global_batch_size=8)
        self.server.committed()
        return part

    def send_to(self, other, step, launch=1):
        with connect(other.server.address, TOKEN) as connection:
            return send_part(connection, self.memory.folder, TRAINING, step, launch=launch, pace=Pace(None))


@pytest.fixture
def nodes(tmp_path):
    made = [Node(tmp_path / name) for name in ("first", "second")]
    yield made
    for node in made:
        node.server.close()
        node.memory.delete()


def test_a_part_is_copied_without_the_files_that_its_partner_has_written_too(nodes):
    first, second = nodes
    first.write_part(5, own="of the first", common="of both")
    second.write_part(5, other="of the second", common="of both")
    assert first.send_to(second, 5) == len("of the first")
    replica = second.folder / REPLICAS / "checkpoint-5"
    assert (replica / "own").read_text() == "of the first"
    assert (replica / "common").samefile(second.folder / PARTS / "checkpoint-5" / "common")


def test_a_file_of_the_same_length_and_another_content_is_not_taken_for_a_copy(nodes):
    first, second = nodes
    first.write_part(5, common="1234")
    second.write_part(5, common="1235")
    assert first.send_to(second, 5) == 4
    assert (second.folder / REPLICAS / "checkpoint-5" / "common").read_text() == "1234"


def test_a_file_that_is_damaged_on_its_way_is_refused(nodes):
    first, second = nodes
    part = first.write_part(5, own="1234")
    second.write_part(5, other="x")
    (part / "own").write_text("1235")  # after its manifest
    with pytest.raises(OSError, match="own has another content"):
        first.send_to(second, 5)
    assert not (second.folder / REPLICAS / "checkpoint-5").exists()


def test_a_part_of_another_launch_is_refused(nodes):
    first, second = nodes
    first.write_part(5, own="x")
    second.write_part(5, other="x")
    with pytest.raises(ConnectionError):
        first.send_to(second, 5, launch=2)
    assert not (second.folder / REPLICAS).exists()


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", ""])
def test_a_name_in_a_manifest_that_leads_out_of_the_snapshot_is_refused(nodes, name):
    _, second = nodes
    second.write_part(5, other="x")
    content = {"bytes": 1, "xxh3_128": "0" * 32}
    put = {"event": "put", "launch": 1, "folder": TRAINING, "snapshot": "checkpoint-5"}
    with connect(second.server.address, TOKEN) as connection:
        connection.send(put | {"manifest": {"files": {name: content}}})
        with pytest.raises(ConnectionError):
            receive(connection)
    assert not list(second.memory.folder.rglob("outside"))


@pytest.mark.parametrize(
    ("wanted", "leads_to"),
    [
        ({"file": "../../../../secret"}, "../secret"),
        ({"file": "/secret"}, None),
        ({"folder": ".."}, f"../{PARTS}/checkpoint-5/other"),
        ({"folder": "a/b"}, f"a/b/{PARTS}/checkpoint-5/other"),
        ({"snapshot": ".."}, f"{TRAINING}/other"),
        ({"snapshot": ""}, f"{TRAINING}/{PARTS}/other"),
        ({"place": ".."}, "checkpoint-5/other"),
    ],
)
def test_only_files_of_snapshots_are_given(nodes, tmp_path, wanted, leads_to):
    _, second = nodes
    second.write_part(5, other="x")
    secret = tmp_path / "secret" if leads_to is None else second.memory.folder / leads_to
    wanted = wanted if leads_to is not None else {"file": str(secret)}
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text("not for others")
    get = {"event": "get", "folder": TRAINING, "place": PARTS, "snapshot": "checkpoint-5", "file": "other"}
    with connect(second.server.address, TOKEN) as connection:
        connection.send(get)
        assert connection.receive(100)[1] == b"x"
        assert connection.receive(100)[1] == b""
        connection.send(get | wanted)
        connection.send(get)  # one that is not answered is followed by this one, or the connection has ended
        with suppress(ConnectionError):
            assert connection.receive(100)[1] in (b"", b"x")


def test_a_snapshot_is_assembled_from_sources_with_the_right_content_only(nodes, tmp_path):
    first, second = nodes
    part = first.write_part(5, own="1234")
    second.write_part(5, other="5678")
    first.send_to(second, 5)
    parts = [
        part | {"address": node.server.address}
        for index, node in enumerate(nodes)
        for part in list_parts(node.memory.folder, index, 2)
    ]
    (chosen,) = choose(parts, set())
    assert set(chosen["manifest"]["files"]) == {"own", "other"}
    assert choose(parts, {(TRAINING, 5)}) == []
    (part / "own").write_text("1235")
    third = RunMemory.create(tmp_path)
    assert assemble(third.folder, chosen, TOKEN) is None  # the damaged file comes from its replica
    assembled = third.folder / TRAINING / "assembling" / "checkpoint-5"
    assert (assembled / "own").read_text() == "1234"
    assert set(read_manifest(assembled).files) == {"own", "other"}
    (second.folder / REPLICAS / "checkpoint-5" / "own").write_text("1236")
    assert assemble(third.folder, chosen, TOKEN) == "checkpoint-5/own"
    third.delete()


def test_a_snapshot_of_which_a_part_is_missing_is_not_chosen(nodes):
    first, second = nodes
    first.write_part(5, own="x")
    second.write_part(5, other="y")
    first.write_part(6, own="z")
    parts = [
        part | {"address": node.server.address}
        for index, node in enumerate(nodes)
        for part in list_parts(node.memory.folder, index, 2)
    ]
    assert [snapshot["step"] for snapshot in choose(parts, set())] == [5]


def test_older_snapshots_are_deleted_only_when_a_newer_one_has_a_replica(nodes):
    first, _ = nodes
    for step in (4, 5, 6):
        first.write_part(step, own="x")
    keep_only(first.folder, 5)
    assert sorted(path.name for path in (first.folder / PARTS).iterdir()) == ["checkpoint-5", "checkpoint-6"]
    assert replicated_step(first.folder) == 5
    keep_only(first.folder, 9)  # of a training that has ended
    assert replicated_step(first.folder) == 5


def test_the_rate_of_a_copy_is_limited():
    pace = Pace(1000.0)
    pace.wait(50)
    free_at = pace._free_at
    pace.wait(50)
    assert pace._free_at >= free_at + 0.05


def test_a_replica_waits_for_the_own_part_of_the_same_step(nodes):
    first, second = nodes
    first.write_part(5, own="x")
    sender = threading.Thread(target=first.send_to, args=(second, 5))
    sender.start()
    second.write_part(5, other="y")
    sender.join(60)
    assert json.loads((second.folder / REPLICAS / "checkpoint-5" / MANIFEST_NAME).read_text())["files"].keys() == {
        "own"
    }


def test_snapshots_after_the_last_trusted_step_are_not_used_until_the_next_training(nodes):
    node, _ = nodes
    for step in (3, 5):
        node.write_part(step, weights="w")

    def usable():
        return sorted(part["step"] for part in list_parts(node.memory.folder, 0, 2))

    assert usable() == [3, 5]
    trust_until(node.folder, 4)
    assert usable() == [3]
    node.write_part(5, weights="w")  # one that was still being copied
    assert usable() == [3]
    trust_again(node.folder)
    assert trusted_step(node.folder) is None
    assert usable() == [3]
    node.write_part(5, weights="w")
    assert usable() == [3, 5]
