"""Ranks, a side group, and ways for all ranks to learn one value.

Everything here runs on a gloo group of its own, on CPU tensors: it works beside NCCL, never queues behind the
training collectives, and never makes a GPU wait.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_side_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def is_distributed() -> bool:
    """Whether a default process group of more than one process exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Global rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def side_group(timeout: timedelta = timedelta(minutes=30)) -> dist.ProcessGroup:
    """The gloo group over all ranks, made at the first call, which every rank must make at the same point."""
    world = dist.group.WORLD
    if world not in _side_groups:
        _side_groups.clear()  # a new default group means that the old one, and ours on it, were destroyed
        _side_groups[world] = dist.new_group(backend="gloo", timeout=timeout)
    return _side_groups[world]


def own_group(timeout: timedelta = timedelta(hours=2)) -> dist.ProcessGroup | None:
    """A further gloo group over all ranks, for one thread that must not meet the others' exchanges; None when alone.

    Every rank must call it at the same point.
    """
    return dist.new_group(backend="gloo", timeout=timeout) if is_distributed() else None


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The `value` of every rank, in rank order; anything that JSON can say. `group` is that of `own_group`."""
    if group is None:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([mine.numel()]), group=group)
    longest = int(max(lengths))
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - mine.numel())), group=group)
    return [json.loads(row[: int(n)].numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]


def barrier() -> None:
    """Wait for every rank, on the side group."""
    if is_distributed():
        dist.barrier(group=side_group())


def all_max(values: Sequence[float]) -> list[float]:
    """Element-wise maximum of `values` over all ranks; every rank must call it with as many values."""
    if not is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=side_group())
    return tensor.tolist()


def gather_rows(values: Sequence[float]) -> list[list[float]]:
    """The `values` of every rank, one row each, in rank order; every rank must call it with as many values."""
    if not is_distributed():
        return [list(values)]
    row = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(world_size())]
    dist.all_gather(rows, row, group=side_group())
    return [gathered.tolist() for gathered in rows]


def gather_columns(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Gather named numbers from every rank in one exchange.

    Args:
        values (`Mapping[str, float]`): The numbers of this rank, under the same names in the same order on every
            rank.

    Returns:
        `dict[str, list[float]]`: For each name the number of every rank, in rank order.
    """
    rows = gather_rows(list(values.values()))
    return {name: [row[index] for row in rows] for index, name in enumerate(values)}


class StepAgreement:
    """All ranks learn the maximum of their values at the same step boundary, about every `every_s` seconds.

    Exchanging at each step would cost a good part of a millisecond of every step. How many steps lie between two
    exchanges is agreed in the exchange itself (from the slowest rank's step time), so no rank ever waits for another
    that is not coming. The interval at most doubles from one exchange to the next: a slow first step (compilation,
    warm-up of the allocator) and a later change of pace are both followed quickly.

    Args:
        every_s (`float`): seconds between two exchanges, at the pace of the steps so far.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._interval_steps = 1
        self._steps_since = 0
        self._last_exchange = time.monotonic()

    def step(self, value: float) -> float | None:
        """Call once per step on every rank: the agreed maximum where this step is an exchange, else None."""
        self._steps_since += 1
        if self._steps_since < self._interval_steps:
            return None
        step_s = (time.monotonic() - self._last_exchange) / self._steps_since
        agreed, slowest_step_s = all_max([value, step_s])
        affordable = int(self.every_s / max(slowest_step_s, 1e-6))
        self._interval_steps = max(1, min(2 * self._interval_steps, affordable))
        self._steps_since = 0
        self._last_exchange = time.monotonic()
        return agreed
