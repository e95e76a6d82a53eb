"""The pre-flight: findings from given results, and real ranks of which one is at fault. More in tests/faults/."""

import threading

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_trainer
from workers.health_preflight import run

from benchmarks import control_plane
from hfscale.check.links import compare_links
from hfscale.core.findings import Finding, has_errors, join_errors, name_ranks
from hfscale.core.rank_store import RankStore
from hfscale.facts.hardware import accelerator
from hfscale.health import measure, preflight, rank_notes
from hfscale.health.callback import check_ranks, preflight_deadline_s
from hfscale.health.hang import Limits
from hfscale.health.preflight import blame_ranks, known_hosts
from hfscale.health.rank_notes import compare_arrivals

HELLO = {rank: {"host": f"node-{rank // 2}", "local_rank": rank % 2, "local_world_size": 2} for rank in range(4)}


@pytest.mark.parametrize("ranks", [600, 1024, 16_384])
def test_sums_over_any_number_of_ranks_are_exact_in_any_order(ranks):
    """As a ring adds them, from any rank on, and as a tree does."""
    pattern = measure._buffer_pattern(97, torch.device("cpu"))
    expected = ranks * (ranks + 1) // 2 * pattern.to(torch.int64)
    for first in (0, 1, ranks // 3, ranks // 2):
        total = torch.zeros_like(pattern)
        for number in range(ranks):
            total += ((first + number) % ranks + 1) * pattern
        assert torch.equal(total.to(torch.int64), expected)
    parts = [(rank + 1) * pattern for rank in range(ranks)]
    while len(parts) > 1:
        parts = [sum(parts[at : at + 2]) for at in range(0, len(parts), 2)]
    assert torch.equal(parts[0].to(torch.int64), expected)


def at(*phases, error=None):
    """The notes that ranks write at the end: their phases; None for a rank that does not write."""
    return {rank: {"phase": phase, "error": error} for rank, phase in enumerate(phases) if phase}


@pytest.mark.world(2)
def test_a_rank_that_gloo_cannot_connect_is_named_with_the_variable():
    for result in run(2, "interface", 1, 120).results.values():  # it ends as soon as the rank is known
        ((ranks, _, check, message),) = result["errors"]
        assert (ranks, check) == ((1,), "gloo")
        assert "nowhere9" in message
        assert "set GLOO_SOCKET_IFNAME" in message


class TestBlame:
    def test_gloo_that_connects_no_ranks_names_the_variable(self):
        for notes in (at(*["gloo"] * 4, error="time-out"), at("gloo", "gloo", "all_reduce", "all_reduce")):
            (found,) = blame_ranks(4, HELLO, notes)
            assert "GLOO_SOCKET_IFNAME" in found.fix

    def test_a_rank_with_an_exception_is_named_where_the_others_had_not_come_so_far(self):
        """It stops them with its exception, wherever they are."""
        for others in ("connect", "matmul"):
            notes = at(others, "gloo", others, others)
            notes[1]["error"] = "RuntimeError: no interface"
            (found,) = blame_ranks(4, HELLO, notes)
            assert (found.ranks, found.check) == ((1,), "gloo")
            assert "gloo failed: RuntimeError: no interface" in found.message

    def test_a_rank_that_does_not_answer_is_named_with_its_host(self):
        (found,) = blame_ranks(4, HELLO, at("all_reduce", "all_reduce", None, "all_reduce"))
        assert (found.ranks, found.host) == ((2,), "node-1")
        assert "dead, stopped or cut off" in found.message

    def test_a_rank_that_never_arrived_has_the_host_of_its_neighbours(self):
        hello = {rank: note for rank, note in HELLO.items() if rank != 3}
        assert known_hosts(4, hello) == {0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1"}
        (found,) = blame_ranks(4, hello, at("arrive", "arrive", "arrive", None))
        assert (found.ranks, found.host) == ((3,), "node-1")
        assert "never arrived" in found.message
        assert blame_ranks(4, {0: HELLO[0]}, at("arrive", None, None, None))[2].host is None

    def test_a_rank_behind_most_is_named_and_a_rank_ahead_only_if_it_has_skipped_something(self):
        (behind,) = blame_ranks(4, HELLO, at("all_reduce", "matmul", "all_reduce", "all_reduce"))
        assert (behind.ranks, "still in matmul" in behind.message) == ((1,), True)
        notes = at("all_reduce", "all_reduce", "all_reduce", "all_gather")
        (found,) = blame_ranks(4, HELLO, notes)
        assert (found.ranks, "ended on rank 3 and not" in found.message) == ((), True)
        for rank, note in notes.items():
            note["entered"] = {"collectives": 9, "p2p": 4, "waits_in": None if rank == 3 else 9}
        (found,) = blame_ranks(4, HELLO, notes)
        assert found.ranks == (), "it has ended what the others wait in, and entered nothing since"
        notes[3]["entered"]["waits_in"] = 9
        (found,) = blame_ranks(4, HELLO, notes)
        assert (found.ranks, "already in all_gather" in found.message) == ((3,), True)
        notes = at("neighbours", "neighbours", "neighbours", "all_to_all")
        for note in notes.values():
            note["done"] = []
        (found,) = blame_ranks(4, HELLO, notes)
        assert found.ranks == (3,), "it has not done what the others are in"

    def test_several_ranks_that_hang_by_themselves_are_named(self):
        found = blame_ranks(4, HELLO, at("matmul", "matmul", "connect", "matmul"))
        assert [finding.ranks for finding in found] == [(0,), (1,), (3,)]
        (found,) = blame_ranks(2, HELLO, at("all_reduce", "all_gather"))
        assert found.ranks == ()

    def test_ranks_that_come_when_the_others_have_given_up_are_named(self):
        notes = at("arrive", "arrive", "arrive", "arrive")
        for rank, waited_s in enumerate((50.0, 52.0, 2.0, 1.0)):
            notes[rank]["waited_s"] = waited_s
        (found,) = blame_ranks(4, HELLO, notes)
        assert (found.ranks, found.check, found.host) == ((2, 3), "arrival", "node-1")

    def test_an_error_of_one_rank_and_a_hang_of_all(self):
        notes = at("connect", "connect", "connect", "connect")
        notes[1]["error"] = "RuntimeError: no route"
        (found,) = blame_ranks(4, HELLO, notes)
        assert (found.ranks, "no route" in found.message) == ((1,), True)
        (found,) = blame_ranks(4, HELLO, at(*["all_reduce"] * 4))
        assert found.ranks == ()
        assert "all_reduce" in found.message

    def test_ranks_and_errors_are_listed(self):
        assert name_ranks([3], "n") == "rank 3 (n)"
        assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
        errors = [Finding(level="error", check="x", problem=str(i), fix="y", ranks=(i,)) for i in range(6)]
        assert join_errors(errors).endswith("; and 2 more")
        assert has_errors(errors)


class TestComparison:
    def notes(self, **changes):
        notes = {}
        for rank in range(4):
            note = {"host": f"n{rank}", "device": "H100", "versions": {"torch": "2.13"}, "variables": {}}
            notes[rank] = note | (changes if rank == 2 else {})
        return notes

    @pytest.mark.parametrize(
        ("change", "level", "part"),
        [
            ({"versions": {"torch": "2.12"}}, "error", "has torch 2.12, the others 2.13"),
            ({"versions": {}}, "error", "has torch none"),
            ({"device": "A100"}, "warning", "has the device A100, the others H100"),
            ({"variables": {"NCCL_ALGO": "Ring"}}, "warning", "NCCL_ALGO=Ring, the others unset"),
        ],
    )
    def test_a_rank_that_differs_is_named(self, change, level, part):
        (found,) = rank_notes.compare_ranks(self.notes(**change))
        assert (found.level, found.ranks, found.host) == (level, (2,), "n2")
        assert part in found.message

    def test_equal_ranks_have_no_findings_and_no_secret_is_shared(self, monkeypatch):
        assert rank_notes.compare_ranks(self.notes()) == []
        environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "WANDB_API_KEY": "secret", "NCCL_SOCKET_IFNAME": "eth0"}
        note = rank_notes.describe_rank(environ)
        assert note["variables"] == {"NCCL_DEBUG": "INFO"}
        assert "secret" not in str(note)

    def test_late_ranks_are_named_with_their_host(self):
        hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
        (found,) = compare_arrivals({0: 31.0, 1: 30.0, 2: 0.0, 3: 0.5}, hosts)
        assert (found.level, found.ranks, found.host) == ("warning", (2, 3), "b")
        assert compare_arrivals({0: 8.0, 1: 9.0, 2: 0.0, 3: 4.0}, hosts) == []

    def test_a_wrong_clock_is_named_with_its_host(self):
        hosts = dict.fromkeys(range(4), "a") | {3: "b"}
        (found,) = rank_notes.compare_clocks({0: 100.0, 1: 100.01, 2: 100.02, 3: 90.0}, hosts)
        assert (found.ranks, found.host) == ((3,), "b")
        assert "-10.0 s" in found.message
        assert rank_notes.compare_clocks({0: 1.0, 1: 1.5}, hosts) == []

    def test_slow_and_wrong_devices_are_named(self):
        well = {"wrong": 0.0, "seconds": 1.0, "slow_ratio": 1.4, "shares_cores": 0.0}
        results = {rank: dict(well) for rank in range(4)}
        assert measure.compare_matmul(results, {}) == []
        results[1]["seconds"], results[2]["wrong"] = 1.5, 3.0
        found = measure.compare_matmul(results, {1: "h"})
        assert [(f.ranks, f.check) for f in found] == [((1,), "speed"), ((2,), "matmul")]
        results[0]["seconds"] = 1.5
        assert [f.ranks for f in measure.compare_matmul(results, {}) if f.check == "speed"] == [(0,), (1,)]
        results[0]["shares_cores"] = results[1]["shares_cores"] = (
            1.0  # CPUs, and half of the ranks: other work on their cores
        )
        assert [f.check for f in measure.compare_matmul(results, {})] == ["matmul"]

    def test_links_far_below_their_datasheet_are_reported(self):
        row = {"kind": "all_reduce", "bytes": 2**28, "seconds": 0.01}
        rows = [{**row, "where": "node", "gb_s": 40.0}, {**row, "where": "network", "gb_s": 300.0}]
        (found,) = compare_links(rows, accelerator("H100-80GB"), 8)
        assert "inside a node moves 40.0 GB/s" in found.message
        assert "225 or more" in found.message  # half of NVLink's 450 in one direction
        assert compare_links(rows, None, 8) == []


def test_a_slow_link_is_reported_for_both_ends():
    def rows(seconds, size=2**24):
        return [{"kind": "neighbours", "bytes": size, "seconds": seconds}, {"kind": "all_reduce", "seconds": 9.0}]

    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    (found,) = measure.compare_neighbours({0: rows(1.0), 1: rows(4.0), 2: rows(4.0), 3: rows(1.1)}, hosts)
    assert (found.ranks, found.host, found.level) == ((1, 2), None, "warning")
    assert measure.compare_neighbours({0: rows(1.0), 1: rows(2.0)}, hosts) == []
    assert measure.compare_neighbours({0: rows(1.0, 4096), 1: rows(9.0, 4096)}, hosts) == []


@pytest.mark.parametrize("n", [4, 100, 256])
def test_the_known_product_is_the_product(n):
    left, right, known = measure.known_product(n, torch.device("cpu"))
    expected = left.to(torch.int64) @ right.to(torch.int64)
    assert torch.equal(known.to(torch.int64), expected)
    assert known.abs().max() > 0


def errors(ended):
    """The errors that the living ranks found, which must be the same on all."""
    found = [result["errors"] for result in ended.results.values()]
    assert all(one == found[0] for one in found), found
    return found[0]


@pytest.mark.world(3)
def test_healthy_ranks_are_not_blamed():
    ended = run(3, "none", 0, 100.0)
    assert errors(ended) == []
    assert not any(result["stuck"] for result in ended.results.values())
    assert {row["kind"] for row in ended.results[0]["links"]} == set(measure.KINDS)


@pytest.mark.world(3)
def test_a_training_connects_no_rank_to_every_other_one():
    ended = run(3, "trains", 0, 100.0)
    assert errors(ended) == []
    assert {row["kind"] for row in ended.results[0]["links"]} == set(measure.KINDS) - {"all_to_all"}


def test_the_deadline_of_a_training_grows_with_the_number_of_nodes():
    def deadline_s(nodes):
        return preflight_deadline_s({"WORLD_SIZE": str(8 * nodes), "LOCAL_WORLD_SIZE": "8"})

    assert preflight_deadline_s({}) == deadline_s(1) == 60.0
    assert deadline_s(128) > 120.0


@pytest.mark.faults
@pytest.mark.world(4)
def test_ranks_that_come_up_slowly_are_not_refused():
    """They arrive within 15 seconds; the limit is less, and counts from the last arrival."""
    ended = run(4, "staggered:5", -1, 18.0)
    assert errors(ended) == []
    assert ended.results[0]["seconds"] > 15.0


@pytest.mark.parametrize("longer_s", [0.0, 60.0])
def test_a_rank_that_is_later_than_the_deadline_is_waited_for_when_training_begins(caplog, longer_s):
    stores = [RankStore(shared, rank, 3) for shared in [dist.HashStore()] for rank in range(3)]
    stores[0].write("hello", {})
    stores[2].write("hello", {})
    late = threading.Timer(1.0, stores[1].write, ["hello", {}])
    late.start()
    arrived = preflight._wait_for_arrivals(stores[0], lambda: True, 0.3, longer_s)
    late.join()
    assert arrived == bool(longer_s)
    assert ("not yet arrived after 0 s: rank 1;" in caplog.text) == bool(longer_s)


def test_the_callback_waits_for_late_ranks_as_long_as_for_a_slow_first_step(tmp_path, monkeypatch):
    def run(rank_store, plan):
        assert plan.arrival_s == Limits.outside_s
        assert not plan.all_to_all
        raise KeyboardInterrupt

    monkeypatch.setattr(preflight, "run", run)
    with pytest.raises(KeyboardInterrupt):
        check_ranks(tiny_trainer(tmp_path), RankStore(dist.HashStore(), 0, 1))


@pytest.mark.world(3)
@pytest.mark.parametrize(
    ("fault", "guilty", "check"),
    [
        ("wrong:matmul", 1, "matmul"),
        ("wrong:all_reduce", 0, "all_reduce"),
        ("corrupt:all_gather", 2, "all_gather"),
        ("slow:5", 1, "speed"),
        ("killed:all_gather", 1, "presence"),
    ],
)
def test_a_faulty_rank_is_named_by_every_other_rank(fault, guilty, check):
    is_killed = fault.startswith("killed")
    ended = run(3, fault, guilty, 20.0 if is_killed else 100.0)
    assert len(ended.results) == (2 if is_killed else 3)
    blamed = errors(ended)
    assert len(blamed) == 1, blamed
    ((ranks, host, found, _),) = blamed
    assert (ranks, found) == ((guilty,), check)
    assert host


class RecordedStore:
    """Passes the calls of a store on, and keeps the names of the notes that they read."""

    def __init__(self, store):
        self.store = store
        self.read = []

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def recorded(*arguments):
            if name in ("get", "multi_get", "check"):
                self.read += arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            return call(*arguments)

        return recorded


@pytest.mark.parametrize("ranks", [1024, 16_384])
def test_the_polls_of_all_ranks_are_fewer_than_the_store_can_answer(ranks):
    """A store answers about 87,000 requests per second; each rank makes a few at every poll."""
    assert ranks / RankStore(dist.HashStore(), 0, ranks).poll_s <= 87_000 / 8


def test_one_rank_reads_the_notes_and_all_learn_the_verdict(monkeypatch):
    """One rank's clock is wrong. Where each rank reads all notes, the work grows with the square of the ranks."""
    monkeypatch.setattr(preflight, "describe_rank", control_plane._describe_rank)
    monkeypatch.setattr(preflight._Checks, "start", control_plane._run_checks)
    ranks, shared = 24, dist.HashStore()
    stores = [RecordedStore(shared) for _ in range(ranks)]
    right = []
    asked = [
        threading.Thread(
            target=lambda rank=rank: right.append(control_plane._preflight_rank(RankStore(stores[rank], rank, ranks)))
        )
        for rank in range(ranks)
    ]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()
    assert right == [True] * ranks
    of_notes = [[key for key in store.read if key.split("/")[0] in ("hello", "results")] for store in stores]
    assert len(of_notes[0]) >= 2 * ranks
    assert not any(of_notes[1:])


def test_gloo_on_gpus_is_asked_for_what_it_has(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert measure.kinds_on(torch.device("cuda")) == ("all_reduce",)
        assert measure.kinds_on(torch.device("cpu")) == measure.KINDS
    finally:
        dist.destroy_process_group()
