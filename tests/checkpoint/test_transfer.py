"""The ring of a copy: in any job every node gets all chunks, each is read once, and no rank waits for ever."""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks.load_once import MESSAGE_S, ring_time, rounds_of_ring
from hfscale.checkpoint import transfer
from hfscale.checkpoint.transfer import CopiedFile, Nodes, Transfer

CHUNK = 64


def copy_in_threads(folder, files, *, nodes, ranks, readers, has_copy=()):
    """Copy files with a thread for each rank; return how often each chunk was read, and by which nodes.

    Args:
        folder (`Path`): has `source`, and gets `node-N`.
        files (`list[CopiedFile]`): the files.
        nodes (`int`): number of nodes.
        ranks (`list[int]`): the number of ranks of each node.
        readers (`list[int]`): the nodes that see the source.
        has_copy (`tuple[int]`): the nodes that get none.
    """
    first = [sum(ranks[:node]) for node in range(nodes)]
    members = tuple(tuple(range(begin, begin + count)) for begin, count in zip(first, ranks, strict=True))
    read = []

    def run(node, local_rank):
        target = None if node in has_copy else folder / f"node-{node}"
        place = Nodes(ranks=members, number=node, local_rank=local_rank)
        Transfer(folder / "source", target, nodes=place, readers=readers, name="copy").run(files)

    def counted(source, chunk, buffer):
        read.append((chunk.name, chunk.start))
        read_chunk(source, chunk, buffer)

    read_chunk = transfer.read_chunk
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(sum(ranks)) as pool:
        patch.setattr(transfer, "CHUNK_BYTES", CHUNK)
        patch.setattr(transfer, "SEND_TIMEOUT", timedelta(seconds=30))
        patch.setattr(transfer, "read_chunk", counted)
        patch.setattr(transfer, "_store_of_all", lambda: store)
        started = [pool.submit(run, node, rank) for node in range(nodes) for rank in range(ranks[node])]
        for each in started:
            each.result(60)
    return Counter(read)


def make_files(folder, lengths, owner_of, nodes):
    """Write files of random content, and make room for them on each node."""
    (folder / "source").mkdir()
    files = []
    for number, length in enumerate(lengths):
        file = CopiedFile(name=f"file-{number}", bytes=length, node=owner_of(number))
        (folder / "source" / file.name).write_bytes(os.urandom(length))
        files.append(file)
    for node in range(nodes):
        (folder / f"node-{node}").mkdir()
        for file in files:
            if file.node in (None, node):
                (folder / f"node-{node}" / file.name).write_bytes(bytes(file.bytes))
    return files


@pytest.mark.parametrize("seed", range(24))
def test_each_node_gets_all_chunks_and_each_is_read_once(seed, tmp_path):
    draw = random.Random(seed)
    nodes = draw.choice((1, 2, 3, 4, 5, 8, 9))
    ranks = [draw.randint(1, 3)] * nodes if draw.random() < 0.7 else [draw.randint(1, 3) for _ in range(nodes)]
    readers = list(range(nodes))
    if draw.random() < 0.5:
        readers = sorted(draw.sample(readers, draw.randint(1, nodes)))
    lengths = [draw.choice((0, 1, CHUNK, draw.randint(1, 60 * CHUNK))) for _ in range(draw.randint(1, 5))]
    owners = [draw.choice((None, None, draw.randrange(nodes))) for _ in lengths]
    if len(readers) < nodes:
        owners = [None] * len(lengths)  # a link needs the original
    files = make_files(tmp_path, lengths, owners.__getitem__, nodes)
    has_copy = tuple(node for node in readers[:-1] if draw.random() < 0.2)
    read = copy_in_threads(tmp_path, files, nodes=nodes, ranks=ranks, readers=readers, has_copy=has_copy)
    for node in set(range(nodes)) - set(has_copy):
        for file in files:
            if file.node in (None, node):
                assert (tmp_path / f"node-{node}" / file.name).read_bytes() == (
                    tmp_path / "source" / file.name
                ).read_bytes()
    assert set(read.values()) <= {1}
    wanted = sum(-(-file.bytes // CHUNK) for file in files if file.node is None or file.node not in has_copy)
    assert sum(read.values()) >= wanted


def test_nodes_read_equal_parts(tmp_path, monkeypatch):
    files = make_files(tmp_path, [240 * CHUNK], lambda _: None, 8)
    readers = []
    read = Transfer._read
    monkeypatch.setattr(
        Transfer, "_read", lambda self, *given: (readers.append(self._nodes.number), read(self, *given))[1]
    )
    copy_in_threads(tmp_path, files, nodes=8, ranks=[2] * 8, readers=list(range(8)))
    assert set(Counter(readers).values()) == {30}


def test_each_round_of_a_ring_has_each_reader_once():
    rounds = rounds_of_ring(5, 12)
    assert [int(reads.sum()) for reads in rounds] == [5, 5, 2]


@pytest.mark.parametrize(
    ("nodes", "chunks", "read_s", "send_s", "expected"),
    [
        (1, 10, 2.0, 0.0, 20.0),  # the file system alone
        (8, 8, 0.0, 3.0, 7 * (3.0 + MESSAGE_S)),  # each node gets seven chunks, one after the other
        (8, 80, 0.0, 3.0, 70 * (3.0 + MESSAGE_S)),  # ten rounds without a gap
        (4, 400, 1.0, 0.01, 400.0 + 3 * (0.01 + MESSAGE_S)),  # the last chunk that is read passes three links
    ],
)
def test_the_simulated_ring_takes_what_its_bottleneck_takes(nodes, chunks, read_s, send_s, expected):
    assert ring_time(nodes, chunks, read_s=read_s, send_s=send_s) == pytest.approx(expected, rel=0.01)
