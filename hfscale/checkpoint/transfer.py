"""Copies files to each node of a job: all nodes together read each byte once, and send it to each other.

A file is cut into chunks. Rank r of every node belongs to rail r, which has a gloo group of its own; each chunk is
read by one rank of one rail, and broadcast to the ranks of that rail on the other nodes. The ranks of a node thus
share its network connection, and the nodes take turns as readers, so that each of them reads an equal part. A rank
holds two chunks: the one that is sent, and the next one that it reads.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hfscale.core.exchanges import Exchanges
from hfscale.core.launch_variables import launch_number
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError

_LOCAL_RANK = "LOCAL_RANK"
CHUNK_BYTES = 16 * 2**20
BUFFER_BYTES = 2 * CHUNK_BYTES
"""Memory that a copy takes in each rank."""
BROADCAST_TIMEOUT = timedelta(minutes=30)
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
        hosts: list[str] = []
        for rank, (host, number) in enumerate(places):
            # Nodes can have one name; then they follow each other
            free = (n for n, name in enumerate(hosts) if name == host and number not in nodes[n])
            node = next(free, None)
            if node is None:
                node = len(nodes)
                nodes.append({})
                hosts.append(host)
            nodes[node][number] = rank
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

    An error of this rank does not end its part in the broadcasts, in which the others would wait for it: it is kept,
    and raised at the end.

    Args:
        source (`Path`): where this rank reads from: the shared folder, or a copy that its node has already.
        target (`Path`, *optional*): the folder of the copy, whose files have their lengths; None: this node has a copy
            already, and only reads.
        nodes (`Nodes`): the ranks of each node.
        readers (`Sequence[int]`): the nodes that read, which can read every file that all nodes need.
    """

    def __init__(
        self, source: Path, target: Path | None, *, nodes: Nodes, readers: Sequence[int]
    ) -> None:
        self._source = source
        self._target = target
        self._nodes = nodes
        self._readers = readers
        self._error: OSError | None = None
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]

    def run(self, files: Sequence[CopiedFile]) -> None:
        """Copy files. Every rank must call it with the same ones.

        Args:
            files (`Sequence[CopiedFile]`): the files.

        Raises:
            OSError: this rank could not read or write a part.
        """
        own = [file for file in files if file.node == self._nodes.number]
        shared = [file for file in files if file.node is None]
        with ThreadPoolExecutor(1, "hfscale-read-ahead") as pool:
            for number, chunk in enumerate(chunks_of(own)):
                if number % self._nodes.neighbours == self._nodes.local_rank:
                    self._read(chunk, self._buffers[0])
                    self._write(chunk, self._buffers[0])
            self._copy_shared(chunks_of(shared), pool)
        if self._error is not None:
            raise self._error

    def _copy_shared(self, chunks: Sequence[Chunk], pool: ThreadPoolExecutor) -> None:
        with _Rails(self._nodes) as group:
            if self._nodes.local_rank >= self._nodes.rails:
                return  # this node has more ranks than another one
            rail = list(self._of_rail(chunks))
            mine = (chunk for chunk, reader in rail if reader == self._nodes.number)
            ahead = self._read_ahead(pool, mine)
            for chunk, reader in rail:
                if reader == self._nodes.number and ahead is not None:
                    ahead.result()
                    self._buffers.reverse()  # the second one is read into
                    buffer = self._buffers[0][: chunk.length]
                    ahead = self._read_ahead(pool, mine)
                else:
                    buffer = self._buffers[0][: chunk.length]
                if group is not None:
                    dist.broadcast(buffer, group=group, group_src=reader)
                self._write(chunk, buffer)

    def _of_rail(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, int]]:
        """Iterate over the chunks of this rank's rail, each with the node that reads it."""
        rails, rail = self._nodes.rails, self._nodes.local_rank
        for turn, chunk in enumerate(chunks[rail::rails]):
            # At one time the rails have different readers, so that all nodes send
            yield chunk, self._readers[(turn + rail) % len(self._readers)]

    def _read_ahead(self, pool: ThreadPoolExecutor, mine: Iterator[Chunk]) -> "Future[None] | None":
        chunk = next(mine, None)
        return None if chunk is None else pool.submit(self._read, chunk, self._buffers[1])

    def _read(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        if self._error is None:
            try:
                read_chunk(self._source, chunk, buffer.numpy().data)
            except OSError as error:
                self._error = error

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


class _Rails:
    """The process group of this rank's rail while it is needed; None on one node. Every rank must enter it."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> dist.ProcessGroup | None:
        if len(self._nodes.ranks) == 1:
            return None
        for rail in range(self._nodes.rails):
            members = [ranks[rail] for ranks in self._nodes.ranks]
            group = dist.new_group(members, timeout=BROADCAST_TIMEOUT, backend="gloo")
            if rail == self._nodes.local_rank:
                self._group = group
        return self._group

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
