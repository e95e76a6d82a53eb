"""Groups of ranks that hold the same part of the parameters: one of each sends it over the slow link."""

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hfscale.core.collectives import Channel
from hfscale.core.distributed import rank


class Replicas:
    """Groups the ranks that hold the same values; the lowest of each group, its leader, sends to the others.

    Args:
        channel (`Channel`): the channel whose exchanges these are. Every rank must make its `Replicas` at the same
            point.
        name (`str`): the name of the exchange.
        key (`str`): what this rank holds; ranks with the same key are one group.
    """

    def __init__(self, channel: Channel, name: str, key: str) -> None:
        self._channel = channel
        self._name = name
        keys = channel.gather(name, hashlib.blake2b(key.encode(), digest_size=16).hexdigest())
        members: dict[str, list[int]] = {}
        for number, other in enumerate(keys):
            members.setdefault(other, []).append(number)
        self.parts = len(members)
        """Number of groups."""
        self.part = list(members).index(keys[rank()])
        """Number of this rank's group, in the order of the leaders."""
        self._leader = members[keys[rank()]][0]
        self.is_leader = self._leader == rank()
        """Whether this rank is the lowest of its group."""
        self._group = _groups_of(list(members.values()), channel.timeout)

    def send(self, tensor: torch.Tensor) -> None:
        """Copy the leader's tensor to the other ranks of its group. Every rank must call it.

        Args:
            tensor (`torch.Tensor`): on the CPU, of the same shape on all ranks of the group; changed in place.
        """
        self._channel.barrier(f"{self._name}: values")
        if self._group is not None:
            dist.broadcast(tensor, src=self._leader, group=self._group)


_replica_groups: dict[tuple[Any, ...], dist.ProcessGroup | None] = {}
"""Groups of the default group, so that trainings of one process use the same ones."""


def _groups_of(members: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Return this rank's group among `members`, which are the same on all ranks; None if it is alone in it."""
    key = (dist.group.WORLD, tuple(map(tuple, members)))
    if key not in _replica_groups:
        own = None
        for ranks in members:
            if len(ranks) > 1:
                group = dist.new_group(ranks, backend="gloo", timeout=timeout)
                own = group if rank() in ranks else own
        _replica_groups[key] = own
    return _replica_groups[key]
