"""What counts as a collective that cannot match, from the entries of the ranks in any order of arrival."""

import itertools
import json
import socket

import pytest

from hfscale.check.rehearsal.comparison import Comparison
from hfscale.check.rehearsal.entries import Entry
from hfscale.check.rehearsal.launch import Listener


def entry(name="allreduce", *sizes, group="world", ranks=(0, 1), **fields):
    return Entry(group=group, ranks=ranks, name=name, sizes=sizes, dtype=fields.pop("dtype", "float32"), **fields)


def first_difference(*steps):
    """Compare `(rank, entry)` and `(rank, "how it ended")` in this order."""
    comparison = Comparison()
    found = None
    for rank, what in steps:
        found = found or (comparison.ended(rank, what) if isinstance(what, str) else comparison.add(rank, what))
    return found


def every_order(*of_ranks):
    """All orders in which the entries of the ranks can arrive; those of one rank keep theirs."""
    steps = [[(rank, what) for what in entries] for rank, entries in enumerate(of_ranks)]
    turns = [rank for rank, entries in enumerate(of_ranks) for _ in entries]
    for order in sorted(set(itertools.permutations(turns))):
        queues = [iter(entries) for entries in steps]
        yield [next(queues[rank]) for rank in order]


def kinds(*of_ranks):
    found = [first_difference(*order) for order in every_order(*of_ranks)]
    return {one and (one.kind, one.position) for one in found}


def test_equal_sequences_match_in_every_order():
    same = [entry("broadcast", 4, how="root 0"), entry("allreduce", 8), ""]
    assert kinds(same, same) == {None}


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (entry("barrier"), "entry"),
        (entry("allreduce", 9), "size"),
        (entry("allreduce", 8, dtype="bfloat16"), "dtype"),
        (entry("allreduce", 8, how="max"), "arguments"),
    ],
)
def test_the_first_that_differs_is_found_in_every_order(other, kind):
    first = entry("allreduce", 2)
    assert kinds([first, entry("allreduce", 8, how="")], [first, other]) == {(kind, 2)}


def test_a_rank_that_ends_without_a_collective_of_another_is_found_in_every_order():
    assert kinds([entry("allreduce", 2), entry("barrier"), ""], [entry("allreduce", 2), ""]) == {("missing", 2)}


def test_the_error_of_the_rank_that_ended_is_in_the_report():
    found = first_difference((0, entry("barrier")), (1, "it has ended with ValueError: no"))
    assert (found.a.rank, found.b.rank, found.b.ended) == (0, 1, "it has ended with ValueError: no")


def test_groups_are_compared_by_themselves():
    one, two = entry(group="a"), entry("barrier", group="b")
    assert kinds([one, two], [two, one]) == {None}


def test_ranks_outside_of_a_group_do_not_matter():
    assert kinds([entry(ranks=(0, 1))], [entry(ranks=(0, 1))], [""]) == {None}


def test_an_all_to_all_may_have_other_sizes_on_each_rank_if_they_fit():
    a = entry("alltoall_base", sends=(1, 0), receives=(1, 5))
    b = entry("alltoall_base", sends=(5, 2), receives=(0, 2))
    assert kinds([a], [b]) == {None}
    assert kinds([a], [entry("alltoall_base", sends=(4, 2), receives=(0, 2))]) == {("size", 1)}


def test_sends_and_receives_match_by_pairs_and_tags():
    def send(tag):
        return entry("send", 3, peer=1, how=f"tag {tag}")

    def receive(tag, size=3):
        return entry("recv", size, peer=0, how=f"tag {tag}")

    assert kinds([send(1), send(2), ""], [receive(2), receive(1), ""]) == {None}
    assert kinds([send(1)], [receive(1, 4)]) == {("size", 1)}
    assert kinds([send(1), ""], [receive(1), receive(1)]) == {("missing", 2)}


def test_ranks_that_wait_in_different_groups_are_found_when_nothing_comes_any_more():
    comparison = Comparison()
    for rank, group in ((0, "a"), (1, "b")):
        assert comparison.add(rank, entry(group=group)) is None
    found = comparison.waiting()
    assert (found.kind, found.a.rank, found.b.rank, found.b.entry.group) == ("silent", 0, 1, "b")


def test_nothing_is_reported_as_waiting_while_all_have_entered_the_same():
    comparison = Comparison()
    for rank in (0, 1):
        comparison.add(rank, entry())
    assert comparison.waiting() is None


def test_parameters_of_different_modules_do_not_match():
    hook = "/x/torch/distributed/fsdp/_fully_shard/_fsdp_state.py:250 in _pre_forward"
    for stack, kind in (((hook,), "module"), ((), None)):  # what a model itself gathers may differ
        comparison = Comparison()
        first, second = (
            entry("allgather_base", 16, phase="forward", module=module, stack=stack) for module in ("a", "b")
        )
        assert comparison.add(0, first) is None
        found = comparison.add(1, second)
        assert (found and found.kind) == kind


def test_what_ranks_have_said_is_read_also_when_the_command_has_ended(tmp_path):
    """The end of the command and the messages of its ranks arrive on different sockets, in any order."""
    ended, tell = socket.socketpair()
    hello = {"kind": "hello", "pid": 0, "argv": [], "world_size": 2}
    entered = {"kind": "entry", "entry": entry("all_reduce").to_dict()}
    with socket.socket(socket.AF_UNIX) as server, ended, tell:
        server.bind(str(tmp_path / "ranks"))
        server.listen()
        tell.send(b"x")
        for rank, messages in enumerate(([hello, entered], [hello])):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(tmp_path / "ranks"))
                connection.sendall(b"".join(json.dumps({**one, "rank": rank}).encode() + b"\n" for one in messages))
        listener = Listener(server, ended, 60.0)
        listener.run()
    assert listener.world_size == 2
    assert listener.difference.kind == "missing"
