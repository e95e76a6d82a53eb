"""The order in which an evaluation sends and receives, run by a simulation of NCCL's queues.

NCCL runs what is put into one queue in order, and a send ends only when its receive has begun. A batch of sends and
receives is one entry of the queue of the group's communicator. Single ones have a queue for each pair of ranks, or, if
the group was made for one device from the start, share the queue of the group (`ProcessGroupNCCL::pointToPoint`).
Gloo has no such queues, so no test on a CPU can hang.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from hfscale.facts.schedules import SCHEDULES
from hfscale.parallel import pipeline
from hfscale.parallel.pipeline import Pipeline
from hfscale.parallel.stages import StagePlan

SEND, RECEIVE = "send", "receive"
PLANS = [
    StagePlan(schedule=name, pp=pp, virtual_stages=stages)
    for name, placement in SCHEDULES.items()
    for pp in (2, 4, 8)
    for stages in {"line": [1], "loop": [1, 2, 4], "v": [2]}[placement]
]


@dataclass
class Entry:
    """One entry of a queue: a batch, or a single send or receive."""

    transfers: list  # (send or receive, the other rank, what is transferred)
    is_batch: bool
    waits_for: frozenset  # numbers of the rank's earlier entries that its stream has waited for
    open: list = field(default_factory=list)


def hangs(entries, *, shared_queue):
    """Whether the entries of all ranks, lists in the order of the calls, wait for each other forever."""
    queues = defaultdict(list)
    for rank, of_rank in entries.items():
        for number, entry in enumerate(of_rank):
            entry.open = list(entry.transfers)
            pair = tuple(sorted((rank, entry.transfers[0][1])))
            queues[rank, "group" if entry.is_batch or shared_queue else pair].append(number)
    ended = {rank: set() for rank in entries}
    progress = True
    while progress:
        progress = False
        running = defaultdict(list)
        for (rank, _), queue in queues.items():
            if queue and entries[rank][queue[0]].waits_for <= ended[rank]:
                running[rank].append(entries[rank][queue[0]])
        for rank, of_rank in running.items():
            for entry in of_rank:
                for transfer in [one for one in entry.open if one[0] == SEND]:
                    _, peer, content = transfer
                    for other in running.get(peer, ()):
                        first = next((one for one in other.open if one[:2] == (RECEIVE, rank)), None)
                        if first is not None and other.is_batch == entry.is_batch:
                            assert first[2] == content, "received as something else"
                            entry.open.remove(transfer)
                            other.open.remove(first)
                            progress = True
                            break
        for (rank, _), queue in queues.items():
            if queue and not entries[rank][queue[0]].open and entries[rank][queue[0]].waits_for <= ended[rank]:
                ended[rank].add(queue.pop(0))
                progress = True
    return any(queues.values())


class Recorder:
    """Stands in for torch.distributed, and records the calls of one rank."""

    def __init__(self):
        self.calls = []  # (transfers with their tensors, whether a batch, what was waited for)
        self.waited = set()

    @staticmethod
    def P2POp(op, tensor, *, group, group_peer):  # noqa: N802
        return {"isend": SEND, "irecv": RECEIVE}[op.__name__], group_peer, tensor

    def batch_isend_irecv(self, operations):
        return [self._add(operations, is_batch=True)]

    def isend(self, tensor, *, group_dst, group):
        return self._add([(SEND, group_dst, tensor)], is_batch=False)

    def irecv(self, tensor, *, group_src, group):
        return self._add([(RECEIVE, group_src, tensor)], is_batch=False)

    def recv(self, tensor, *, group_src, group):
        self.irecv(tensor, group_src=group_src, group=group).wait()

    def _add(self, operations, *, is_batch):
        number = len(self.calls)
        self.calls.append((operations, is_batch, frozenset(self.waited)))
        return SimpleNamespace(wait=lambda: self.waited.add(number))


class RecordedStage:
    """A stage that computes nothing, and remembers which tensor was which hidden state."""

    def __init__(self, index, stages, contents):
        self.spec = SimpleNamespace(index=index, is_first=index == 0, is_last=index == stages - 1)
        self.contents = contents  # id of a tensor -> (stage that has computed it, micro-batch)
        self.kept = []

    def __call__(self, hidden, labels):
        number = int(labels[0, 0])
        if self.spec.is_first:
            assert hidden[0, 0] == number
        else:
            assert self.contents.setdefault(id(hidden), (self.spec.index - 1, number)) == (self.spec.index - 1, number)
        output = torch.zeros(()) if self.spec.is_last else torch.zeros(1, 2, 3)
        self.contents[id(output)] = (self.spec.index, number)
        self.kept += [hidden, output]
        return output

    def take_balance_losses(self):
        return []


def entries_of(plan, micro_batches, monkeypatch, evaluate=Pipeline.evaluate):
    """The entries of the queues of each rank in an evaluation."""
    rows = torch.arange(micro_batches)[:, None].expand(-1, 2)
    entries = {}
    for rank in range(plan.pp):
        contents = {}
        stages = [RecordedStage(index, plan.stages, contents) for index in plan.stages_of(rank)]
        recorded = Recorder()
        monkeypatch.setattr(pipeline, "dist", recorded)
        of_rank = Pipeline(stages, plan, None, torch.device("cpu"), hidden_size=3, dtype=torch.float32)
        evaluate(of_rank, micro_batches, {"input_ids": rows, "labels": rows})
        entries[rank] = [
            Entry([(kind, peer, contents[id(tensor)]) for kind, peer, tensor in transfers], is_batch, waited)
            for transfers, is_batch, waited in recorded.calls
        ]
    return entries


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.schedule}-{plan.pp}-{plan.per_rank}")
def test_an_evaluation_never_hangs_in_the_queues_of_nccl(plan, monkeypatch):
    for micro_batches in range(1, 9):
        entries = entries_of(plan, micro_batches, monkeypatch)
        for shared_queue in (False, True):
            assert not hangs(entries, shared_queue=shared_queue), (micro_batches, shared_queue)
        sent = [one for of_rank in entries.values() for entry in of_rank for one in entry.transfers if one[0] == SEND]
        crossings = sum(plan.rank_of(stage) != plan.rank_of(stage + 1) for stage in range(plan.stages - 1))
        assert len(sent) == micro_batches * crossings
        assert all(entry.is_batch for of_rank in entries.values() for entry in of_rank)  # no communicator of a pair


def evaluate_unbatched(self, micro_batches, inputs):
    """`Pipeline.evaluate` with single sends and receives, in the order in which a rank's stages need them."""
    dist, local, sends = pipeline.dist, {}, []
    for stage in self.stages:
        index = stage.spec.index
        for number, tokens in enumerate(inputs["input_ids"].tensor_split(micro_batches)):
            hidden = tokens if stage.spec.is_first else local.pop((index - 1, number), None)
            if hidden is None:
                hidden = torch.empty(1, 2, 3)
                dist.recv(hidden, group_src=self.plan.rank_of(index - 1), group=self.group)
            output = stage(hidden, labels=tokens)
            if not stage.spec.is_last and self.plan.rank_of(index + 1) == self.plan.rank_of(index):
                local[index, number] = output
            elif not stage.spec.is_last:
                sends.append(dist.isend(output, group_dst=self.plan.rank_of(index + 1), group=self.group))
    for send in sends:
        send.wait()


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_the_simulation_finds_the_hang_of_unbatched_transfers(schedule, monkeypatch):
    for pp, shared_queue, expected in ((2, False, True), (2, True, True), (4, False, False), (4, True, True)):
        plan = StagePlan(schedule=schedule, pp=pp, virtual_stages=2)
        entries = entries_of(plan, 4, monkeypatch, evaluate_unbatched)
        assert hangs(entries, shared_queue=shared_queue) == expected, (pp, shared_queue)
