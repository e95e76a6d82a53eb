"""The rank of this process, and small exchanges of values between all ranks.

All exchanges use a separate gloo group and CPU tensors: they work next to NCCL, never queue behind the collectives of
the training, and never make a GPU wait.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_side_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def is_distributed() -> bool:
    """Return whether a default process group of more than one process exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return the global rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def side_group() -> dist.ProcessGroup:
    """Return the gloo group over all ranks that the exchanges of this module use, except those with their own group.

    It is created at the first call after the default group, and every rank must make that call at the same point.
    """
    world = dist.group.WORLD
    if world not in _side_groups:
        _side_groups.clear()  # a new default group means that the old one and its side group were destroyed
        _side_groups[world] = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
    return _side_groups[world]


def own_group(timeout: timedelta = timedelta(hours=2)) -> dist.ProcessGroup | None:
    """Create a gloo group over all ranks, for a thread whose exchanges must not mix with others.

    Every rank must call it at the same point.

    Args:
        timeout (`timedelta`): longest time that one collective of the group may take.

    Returns:
        `ProcessGroup`: the new group, or None if there is only one process.
    """
    return dist.new_group(backend="gloo", timeout=timeout) if is_distributed() else None


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather the `value` of every rank. Every rank of the group must call it at the same point.

    Args:
        value (`Any`): anything that JSON can represent; its size may differ between ranks. Tuples are returned as
            lists.
        group (`ProcessGroup`, *optional*): the group that `own_group` returned; None for one process.

    Returns:
        `list[Any]`: the value of every rank, in rank order.
    """
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
    """Return the element-wise maximum of `values` over all ranks; every rank must pass the same number of values."""
    if not is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=side_group())
    return tensor.tolist()


def gather_rows(values: Sequence[float]) -> list[list[float]]:
    """Return one row with the `values` of each rank, in rank order; all ranks must pass the same number of values."""
    return gather_table(values).tolist()


def gather_table(values: Sequence[float]) -> torch.Tensor:
    """Return a table with the `values` of each rank, (ranks, values) in fp64; all ranks must pass as many values."""
    row = torch.tensor(values, dtype=torch.float64)
    if not is_distributed():
        return row[None]
    table = torch.empty(world_size(), len(row), dtype=torch.float64)
    dist.all_gather(list(table.unbind()), row, group=side_group())
    return table


def gather_columns(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Gather named numbers from every rank in one exchange.

    Args:
        values (`Mapping[str, float]`): the numbers of this rank, under the same names in the same order on every
            rank.

    Returns:
        `dict[str, list[float]]`: for each name the number of every rank, in rank order.
    """
    return dict(zip(values, gather_table(list(values.values())).T.tolist(), strict=True))


class StepAgreement:
    """Gives all ranks the maximum of their values at the same step boundaries, about every `every_s` seconds.

    An exchange at each step would add a considerable part of a millisecond to it. The number of steps between two
    exchanges is agreed on in the exchange itself (from the slowest rank's step time), so no rank waits for another
    that does not take part. The number at most doubles from one exchange to the next: a slow first step (compilation,
    warm-up of the allocator) and a later change of pace are both followed quickly.

    Overlapped exchanges start at the end of one step and are read at the end of the next, when they have long
    completed, so that reading them does not wait. If steps take longer than half of `every_s`, each step has an
    exchange, which takes little time compared with the step and is read at once.

    Args:
        every_s (`float`): seconds between two exchanges.
        overlapped (`bool`): whether exchanges run in the background of a step.
    """

    def __init__(self, every_s: float, *, overlapped: bool = False) -> None:
        self.every_s = every_s
        self.overlapped = overlapped
        self._interval_steps = 1
        self._steps_since = 0
        self._interval_began_at = time.monotonic()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def step(self, value: Callable[[], float]) -> float | None:
        """Take part in this step; every rank must call it once per step.

        Args:
            value (`Callable[[], float]`): returns this rank's value (at least 0). It is called only if an exchange
                starts at this step.

        Returns:
            `float`: the maximum over all ranks if this step reads an exchange, else None.
        """
        self._steps_since += 1
        agreed = self._read() if self._pending is not None else None
        if self._steps_since < self._interval_steps:
            return agreed
        step_s = (time.monotonic() - self._interval_began_at) / self._steps_since
        self._steps_since = 0
        self._interval_began_at = time.monotonic()
        if not is_distributed():
            self._set_interval(step_s)
            return value()
        self._start(value(), step_s)
        if not self.overlapped or self._interval_steps == 1:
            agreed = max(self._read(), agreed or 0.0)
        return agreed

    def now(self, value: float) -> float:
        """Exchange `value` at once; every rank must call it at the same point.

        Args:
            value (`float`): this rank's value, at least 0.

        Returns:
            `float`: the maximum over all ranks, including the values of an exchange that is still in progress.
        """
        pending = self._read() if self._pending is not None else 0.0
        return max(pending, all_max([value])[0])

    def finish(self) -> None:
        """Wait for an exchange that is still in progress. Call it before the process group is destroyed."""
        if self._pending is not None:
            self._read()

    def _start(self, value: float, step_s: float) -> None:
        tensor = torch.tensor([value, step_s], dtype=torch.float64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=side_group(), async_op=True)
        self._pending = (tensor, work)

    def _read(self) -> float:
        assert self._pending is not None
        tensor, work = self._pending
        self._pending = None
        work.wait()
        agreed, slowest_step_s = map(float, tensor.tolist())
        self._set_interval(slowest_step_s)
        return agreed

    def _set_interval(self, slowest_step_s: float) -> None:
        affordable = int(self.every_s / max(slowest_step_s, 1e-6))
        self._interval_steps = max(1, min(2 * self._interval_steps, affordable))
