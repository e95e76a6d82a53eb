"""Gathers values on rank 0 and sends values from it, over gloo groups none of which is large.

A gloo group connects each of its ranks with every other one, and each of them reads the addresses of all from the
store of the launcher. Over 16,384 ranks that would be 16,384 open connections in each process, and 48 TB of addresses.
Up to `LARGEST_GROUP` ranks one group is used. Beyond, consecutive ranks form groups; the first rank of each is its
leader, and the leaders form groups in the same way, until one group is left: at 16,384 ranks there are three levels of
groups of 26 ranks, and each process has at most 74 connections. A training has up to four trees, one for each
`Channel`.
"""

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hfscale.errors import HealthError

LARGEST_GROUP = 32
"""Most ranks of one group. What the store has to send grows with it: with two levels of groups of 128 ranks, it needed
five times as long to connect 16,384 ranks (`benchmarks/control_plane.py`)."""
_SPARE_FILES = 256
"""Open files that a process needs apart from the connections of the tree."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Level:
    """One group of the tree that this rank is a member of. Its first rank is its leader."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """The global ranks of the group, in ascending order."""
    rows: int = 1
    """Number of values that each member hands on: those of all ranks below it."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader."""
        return dist.get_rank(self.group) == 0

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the rows of all members on the leader, (members x rows, width), and None elsewhere.

        Args:
            rows (`torch.Tensor`): the rows of this member, (at most `self.rows`, width), of the same width and type on
                all members.
        """
        padded = torch.nn.functional.pad(rows, (0, 0, 0, self.rows - len(rows)))
        if not self.is_leader:
            dist.gather(padded, None, group=self.group, group_dst=0)
            return None
        table = rows.new_empty(len(self.ranks), *padded.shape)
        dist.gather(padded, list(table.unbind()), group=self.group, group_dst=0)
        return table.flatten(0, 1)

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return the data of all members on the leader, and None elsewhere; their lengths may differ."""
        longest = torch.tensor([len(data)])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        framed = _framed([data]) + bytes(int(longest) - len(data))
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        if not self.is_leader:
            dist.gather(mine, None, group=self.group, group_dst=0)
            return None
        rows = mine.new_empty(len(self.ranks), len(mine))
        dist.gather(mine, list(rows.unbind()), group=self.group, group_dst=0)
        return [next(_parts(row.numpy().tobytes())) for row in rows]

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return the objects of all members on the leader, and None elsewhere. torch pickles them."""
        found: list[Any] | None = [None] * len(self.ranks) if self.is_leader else None
        dist.gather_object(value, found, group=self.group, group_dst=0)
        return found

    def scatter_objects(self, values: list[Any] | None) -> Any:
        """Return each member's item of the leader's list; elsewhere `values` is None. torch pickles them."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, group=self.group, group_src=0)
        return mine[0]


class Tree:
    """Exchanges values between all ranks over the groups that this rank is a member of.

    All calls are collectives: every rank makes the same ones in the same order.

    Args:
        levels (`list[Level]`): the groups of this rank, from the lowest.
        depth (`int`): number of levels of rank 0.
        world_size (`int`): number of ranks.
    """

    def __init__(self, levels: list[Level], *, depth: int, world_size: int) -> None:
        self._levels = levels
        self._depth = depth
        self._world_size = world_size
        self._thread = ThreadPoolExecutor(1, "hfscale-exchange") if depth > 1 else None

    @classmethod
    def over_all_ranks(cls, timeout: timedelta, *, largest: int = LARGEST_GROUP) -> "Tree":
        """Create the groups over all ranks of the default group.

        Args:
            timeout (`timedelta`): longest time that one collective may take.
            largest (`int`): most ranks of one group.

        Raises:
            HealthError: the limit of open files is too low for the connections.
        """
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        layers = groups_of_levels(ranks, largest)
        _allow_files(sum(len(group) for groups in layers for group in groups if rank in group))
        levels = []
        rows = 1
        for groups in layers:
            # Every rank names every group, so that all count alike; only the members connect
            for members in groups:
                group = dist.new_group(list(members), backend="gloo", timeout=timeout)
                if rank in members:
                    levels.append(Level(group=group, ranks=members, rows=rows))
            rows *= len(groups[0])
        return cls(levels, depth=len(layers), world_size=ranks)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor | None:
        """Return a table with the row of each rank on rank 0, (ranks, width), and None elsewhere.

        Args:
            row (`torch.Tensor`): this rank's row, (width,), of the same width and type on all ranks.
        """
        rows: torch.Tensor | None = row[None]
        for level in self._levels:
            assert rows is not None
            rows = level.gather_rows(rows)
        if rows is None:
            return None
        return rows[: self._world_size]

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return the data of each rank on rank 0, in rank order, and None elsewhere; their lengths may differ."""
        parts = [data]
        for level in self._levels:
            packed = level.gather_bytes(_framed(parts))
            if packed is None:
                return None
            parts = [part for pack in packed for part in _parts(pack)]
        return parts

    def gather_bytes_everywhere(self, data: bytes) -> list[bytes]:
        """Return the data of each rank on all ranks, in rank order."""
        parts = self.gather_bytes(data)
        framed = None
        if parts is not None:
            framed = _framed(parts)
        return list(_parts(self.broadcast_bytes(framed)))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor of the same shape and type on all ranks by that of rank 0."""
        for level in reversed(self._levels):
            dist.broadcast(tensor, group=level.group, group_src=0)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return the data of rank 0 on all ranks; elsewhere `data` is None."""
        length = torch.tensor([len(data or b"")])
        self.broadcast(length)
        sent = torch.empty(int(length), dtype=torch.uint8)
        if data:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(sent):
            self.broadcast(sent)
        return sent.numpy().tobytes()

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return the objects of all ranks on rank 0, in rank order, and None elsewhere. torch pickles them."""
        values = [value]
        for level in self._levels:
            found = level.gather_objects(values)
            if found is None:
                return None
            values = [value for of_member in found for value in of_member]
        return values

    def scatter_objects(self, values: list[Any] | None) -> Any:
        """Return each rank's item of the list of rank 0; elsewhere `values` is None. torch pickles them."""
        for level in reversed(self._levels):
            shares = None
            if values is not None:  # this rank leads the group
                firsts = range(0, len(level.ranks) * level.rows, level.rows)
                shares = [values[first : first + level.rows] for first in firsts]
            values = level.scatter_objects(shares)
        assert values is not None
        return values[0]

    def start_max(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start overwriting `tensor` by its element-wise maximum over all ranks, and return what waits for it.

        Wait before the next exchange.
        """
        if self._thread is None:
            work = dist.all_reduce(
                tensor, dist.ReduceOp.MAX, group=self._levels[0].group, async_op=True
            )
            wait: Callable[[], object] = work.wait
            return wait
        return self._thread.submit(self._max, tensor).result

    def _max(self, tensor: torch.Tensor) -> None:
        for level in self._levels:
            dist.reduce(tensor, op=dist.ReduceOp.MAX, group=level.group, group_dst=0)
        self.broadcast(tensor)


def groups_of_levels(ranks: int, largest: int = LARGEST_GROUP) -> list[list[tuple[int, ...]]]:
    """Return the groups of each level of a tree, from the lowest.

    All groups have the same number of ranks, apart from the last of each level, which may have fewer.

    Args:
        ranks (`int`): number of ranks.
        largest (`int`): most ranks of one group, at least 2.
    """
    depth = next(depth for depth in count(1) if largest**depth >= ranks)
    size = next(size for size in count(1) if size**depth >= ranks)
    layers = []
    members = list(range(ranks))
    for _ in range(depth):
        layers.append(
            [tuple(members[first : first + size]) for first in range(0, len(members), size)]
        )
        members = [group[0] for group in layers[-1]]
    return layers


def _framed(parts: list[bytes]) -> bytes:
    """Return the parts one after the other, each behind its length."""
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)


def _parts(framed: bytes) -> Iterator[bytes]:
    """Return the parts that `_framed` has joined."""
    at = 0
    while at < len(framed):
        end = at + _LENGTH_BYTES + int.from_bytes(framed[at : at + _LENGTH_BYTES], "little")
        yield framed[at + _LENGTH_BYTES : end]
        at = end


def _allow_files(connections: int) -> None:
    """Raise the limit of open files of this process to what the connections need.

    Raises:
        HealthError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE_FILES + psutil.Process().num_fds()
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise HealthError(
                f"the limit of open files is {hard}, and the connections to the other ranks need {needed}: raise it "
                "on this node (ulimit -Hn; LimitNOFILE in systemd; --ulimit nofile in Docker)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
