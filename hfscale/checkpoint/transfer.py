"""Copies files to each node of a job: all nodes together read each byte once, and send it to each other.

A file is cut into chunks. Rank r of every node belongs to rail r, whose ranks are a ring in the order of the nodes.
Each chunk is read by one rank of one rail, and each rank sends what it has read or received to the next one of its
ring, until all have it. The nodes take turns as readers, so that each of them reads an equal part. So every node sends
and receives each byte at most once, at the same time, and a rank has two connections, however many nodes there are.

Meanwhile a rank holds four chunks: the one that it reads for its next turn, the one that it receives, the one that it
writes, and one that is still being sent.
"""

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfscale.core.exchanges import Exchanges
from hfscale.core.launch_variables import launch_number
from hfscale.core.spelling import spelled
from hfscale.core.versions import group_store
from hfscale.errors import UsageError

_LOCAL_RANK = "LOCAL_RANK"
CHUNK_BYTES = 8 * 2**20
_BUFFERS = 4
BUFFER_BYTES = _BUFFERS * CHUNK_BYTES
"""Memory that a copy takes in each rank."""
_RECEIVED_AHEAD = 1
"""Chunks that a rank may receive while it writes one."""
SEND_TIMEOUT = timedelta(minutes=30)
"""Longest time for one chunk: the time limit of gloo, in which the reader may wait for its file system."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The ranks of each node of a job."""

    ranks: tuple[tuple[int, ...], ...]
    """The global ranks of each node, in ascending order."""
    number: int
    """The node of this process, from 0."""
    local_rank: int
    """Which of its node's ranks this process is, from 0."""

    @classmethod
    def of_launch(cls, exchanges: Exchanges) -> "Nodes":
        """Learn which ranks share a node, from what the launcher has told each of them. Every rank must call it.

        Args:
            exchanges (`Exchanges`): between all ranks.

        Raises:
            UsageError: the launcher has not numbered the processes of a node.
        """
        local_rank = 0
        if exchanges.world_size > 1:
            local_rank = launch_number(_LOCAL_RANK, -1)
            if local_rank < 0:
                given = spelled("load_once")
                raise UsageError(
                    f"{given} needs {_LOCAL_RANK}, the number of a process on its node, which torchrun and accelerate "
                    "launch set: set it in your launcher, or leave the other out"
                )
        mine = [socket.gethostname(), local_rank]
        places = exchanges.combine("places of the ranks", mine, lambda found: found)
        nodes: list[dict[int, int]] = []
        by_host: dict[str, list[dict[int, int]]] = {}
        for rank, (host, number) in enumerate(places):
            # Nodes can have one name; then they follow each other
            named_so = by_host.setdefault(host, [])
            free = (members for members in named_so if number not in members)
            node = next(free, None)
            if node is None:
                node = {}
                nodes.append(node)
                named_so.append(node)
            node[number] = rank
        ranks = tuple(tuple(sorted(members.values())) for members in nodes)
        number = next(n for n, members in enumerate(ranks) if exchanges.rank in members)
        return cls(ranks=ranks, number=number, local_rank=ranks[number].index(exchanges.rank))

    @property
    def neighbours(self) -> int:
        """The number of ranks of this node."""
        return len(self.ranks[self.number])

    @property
    def rails(self) -> int:
        """The number of ranks that every node has."""
        return min(len(members) for members in self.ranks)

    def share(self, items: Sequence[str]) -> list[str]:
        """Return the items that this rank takes, where the ranks of a node share them."""
        return list(items[self.local_rank :: self.neighbours])


@dataclass(frozen=True, kw_only=True)
class CopiedFile:
    """A file that is copied."""

    name: str
    """Its path relative to the folder, in POSIX form."""
    bytes: int
    """Its length in bytes."""
    node: int | None = None
    """The only node that needs it; None: all do."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a file."""

    name: str
    start: int
    length: int


def chunks_of(files: Sequence[CopiedFile]) -> list[Chunk]:
    """Cut files into chunks, in order.

    Args:
        files (`Sequence[CopiedFile]`): the files.
    """
    return [
        Chunk(name=file.name, start=start, length=min(CHUNK_BYTES, file.bytes - start))
        for file in files
        for start in range(0, file.bytes, CHUNK_BYTES)
    ]


def read_chunk(folder: Path, chunk: Chunk, buffer: memoryview) -> None:
    """Read a chunk. All bytes of a source are read here.

    Args:
        folder (`Path`): the folder of the file.
        chunk (`Chunk`): which part of which file.
        buffer (`memoryview`): takes the bytes at its beginning.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    with (folder / chunk.name).open("rb", buffering=0) as file:
        done = 0
        while done < chunk.length:
            count = os.preadv(file.fileno(), [buffer[done : chunk.length]], chunk.start + done)
            if count == 0:
                raise OSError(f"{folder / chunk.name} has become shorter while it was read")
            done += count


class Transfer:
    """One copy of files from `source` to `target`.

    An error of this rank does not end its part in the ring, in which the others would wait for it: it is kept, and
    raised at the end.

    Args:
        source (`Path`): where this rank reads from: the shared folder, or a copy that its node has already.
        target (`Path`, *optional*): the folder of the copy, whose files have their lengths; None: this node has a copy
            already, and only reads.
        nodes (`Nodes`): the ranks of each node.
        readers (`Sequence[int]`): the nodes that read, which can read every file that all nodes need, in ascending
            order.
        name (`str`): the name of this copy, the same on every rank, and of no other copy of this job.
    """

    def __init__(
        self,
        source: Path,
        target: Path | None,
        *,
        nodes: Nodes,
        readers: Sequence[int],
        name: str,
    ) -> None:
        self._source = source
        self._target = target
        self._nodes = nodes
        self._readers = readers
        self._name = name
        self._error: OSError | None = None
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(_BUFFERS)]
        self._sent: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def run(self, files: Sequence[CopiedFile]) -> None:
        """Copy files. Every rank must call it with the same ones.

        Args:
            files (`Sequence[CopiedFile]`): the files.

        Raises:
            OSError: this rank could not read or write a part.
        """
        own = [file for file in files if file.node == self._nodes.number]
        shared = [file for file in files if file.node is None]
        for number, chunk in enumerate(chunks_of(own)):
            if number % self._nodes.neighbours == self._nodes.local_rank:
                self._read(chunk, self._buffers[0])
                self._write(chunk, self._buffers[0])
        # A rank that not every node has is in no ring
        if self._nodes.local_rank < self._nodes.rails:
            self._copy_shared(list(self._of_rail(chunks_of(shared))))
        if self._error is not None:
            raise self._error

    def _copy_shared(self, rail: Sequence[tuple[Chunk, int]]) -> None:
        """Copy chunks, each of which one node of this rank's rail reads."""
        count = len(self._nodes.ranks)
        following = (self._nodes.number + 1) % count
        ring = _Ring(self._nodes, self._name) if count > 1 else nullcontext()
        with ring as links, ThreadPoolExecutor(1, "hfscale-read-ahead") as pool:
            for chunk, reader, buffer, received in self._arrivals(rail, links, pool):
                if received is not None:
                    received.wait()
                if links is None or reader == following:
                    self._buffers.append(buffer)
                else:
                    work = links.send(buffer[: chunk.length])
                    self._sent.append((buffer, work))
                self._write(chunk, buffer)
            self._wait_for_sends()

    def _of_rail(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, int]]:
        """Iterate over the chunks of this rank's rail with the nodes that read them, in the order in which this rank
        gets them: in each round what it reads, then what the node before has read, and so on."""
        rail = self._nodes.local_rank
        nodes = len(self._nodes.ranks)
        readers = len(self._readers)
        mine = chunks[rail :: self._nodes.rails]
        for start in range(0, len(mine), readers):
            of_round = mine[start : start + readers]
            by_distance = []
            for turn, chunk in enumerate(of_round, start):
                # Where the last round has too few for all, the rails have different readers
                reader = self._readers[(turn + rail) % readers]
                distance = (self._nodes.number - reader) % nodes
                by_distance.append((distance, chunk, reader))
            by_distance.sort(key=itemgetter(0))
            for _, chunk, reader in by_distance:
                yield chunk, reader

    def _arrivals(
        self, rail: Sequence[tuple[Chunk, int]], links: "_Ring | None", pool: ThreadPoolExecutor
    ) -> Iterator[tuple[Chunk, int, torch.Tensor, dist.Work | None]]:
        """Iterate over the chunks of the rail, each with its buffer, and for what it is to wait."""
        own = iter([chunk for chunk, reader in rail if reader == self._nodes.number])
        ahead = self._read_ahead(pool, own)
        begun: deque[tuple[Chunk, int, torch.Tensor, dist.Work | None]] = deque()
        for chunk, reader in rail:
            if reader == self._nodes.number:
                yield from begun
                begun.clear()
                assert ahead is not None
                buffer = ahead.result()
                ahead = self._read_ahead(pool, own)
                yield chunk, reader, buffer, None
                continue
            assert links is not None
            buffer = self._free_buffer()
            work = links.receive(buffer[: chunk.length])
            begun.append((chunk, reader, buffer, work))
            if len(begun) > _RECEIVED_AHEAD:
                yield begun.popleft()
        yield from begun

    def _read_ahead(
        self, pool: ThreadPoolExecutor, own: Iterator[Chunk]
    ) -> "Future[torch.Tensor] | None":
        chunk = next(own, None)
        if chunk is None:
            return None
        buffer = self._free_buffer()
        return pool.submit(self._read, chunk, buffer)

    def _free_buffer(self) -> torch.Tensor:
        """Return a buffer, after what was sent from it has been."""
        if self._buffers:
            return self._buffers.pop()
        buffer, work = self._sent.popleft()
        work.wait()
        return buffer

    def _wait_for_sends(self) -> None:
        for _, work in self._sent:
            work.wait()

    def _read(self, chunk: Chunk, buffer: torch.Tensor) -> torch.Tensor:
        if self._error is None:
            try:
                read_chunk(self._source, chunk, buffer.numpy().data)
            except OSError as error:
                self._error = error
        return buffer

    def _write(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        if self._target is None or self._error is not None:
            return
        data = buffer.numpy().data[: chunk.length]
        try:
            with (self._target / chunk.name).open("r+b", buffering=0) as file:
                done = 0
                while done < chunk.length:
                    done += os.pwrite(file.fileno(), data[done:], chunk.start + done)
        except OSError as error:
            self._error = error


class _Ring:
    """The connections of this rank to the ranks of its rail on the node before and the one after, while needed.

    Args:
        nodes (`Nodes`): the ranks of each node, of which there are several.
        name (`str`): the name of the copy.
    """

    def __init__(self, nodes: Nodes, name: str) -> None:
        self._nodes = nodes
        self._name = name
        self._links: dict[int, Any] = {}

    def __enter__(self) -> "_Ring":
        number = self._nodes.number
        prefix = f"hfscale/load_once/{self._name}/{self._nodes.local_rank}"
        rail = dist.PrefixStore(prefix, _store_of_all())
        links = {number, self._before()}
        # Link n leads from node n to the next. In this order no circle of nodes waits for each other.
        for link in sorted(links, key=lambda link: (link % 2, link)):
            place = int(link != number)  # 0 sends to 1
            store = dist.PrefixStore(str(link), rail)
            self._links[link] = dist.ProcessGroupGloo(store, place, 2, SEND_TIMEOUT)
        return self

    def send(self, buffer: torch.Tensor) -> dist.Work:
        """Begin to send a buffer to the next node."""
        work: dist.Work = self._links[self._nodes.number].send([buffer], 1, 0)
        return work

    def receive(self, buffer: torch.Tensor) -> dist.Work:
        """Begin to receive what the node before sends."""
        work: dist.Work = self._links[self._before()].recv([buffer], 0, 0)
        return work

    def _before(self) -> int:
        """Return the number of the node before this one."""
        return (self._nodes.number - 1) % len(self._nodes.ranks)

    def __exit__(self, *_: object) -> None:
        self._links.clear()


def _store_of_all() -> dist.Store:
    """Return a key-value store that all ranks share: that of the process group, or before torch 2.8 the launcher's."""
    store: dist.Store | None = group_store(dist.group.WORLD)
    if store is not None:
        return store
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], launch_number("MASTER_PORT", 0), is_master=False
    )
