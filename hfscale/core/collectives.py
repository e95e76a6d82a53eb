"""Exchanges of small values between all ranks: every exchange of hfscale goes through a `Channel`.

An exchange is a collective: it completes when every rank has entered it. So the decision to enter must never depend on
what only one rank knows. Exchanges are entered where all ranks come by construction (the beginning of a training, a
step boundary, Trainer's own log, a save, the end), and what a rank has to say (an error, a finding, a reason to write
while training waits) is the value that it gives, from which all ranks then draw the same conclusion.

A channel has gloo groups of its own (`Tree`) and exchanges CPU tensors: it works next to NCCL, never queues behind the
collectives of the training, and never makes a GPU wait. The exchanges of one channel have one order, so a thread that
runs next to the training uses another channel than the training.

Every exchange has a name. With `HFSCALE_DEBUG_EXCHANGES` in the environment, as in the tests, the ranks compare the
names before each exchange, over the store of the process group; its value is the time in seconds that a rank waits for
the others there. The error names the rank that has entered another exchange, or none.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hfscale.core.distributed import is_distributed, rank, world_size
from hfscale.core.exchanges import (
    Exchanges,
    describe_error,
    first_failure,
    rebuild_error,
    wait_for_arrivals,
)
from hfscale.core.tree import Tree
from hfscale.core.versions import group_store

DEBUG_VARIABLE = "HFSCALE_DEBUG_EXCHANGES"
_ARRIVAL_POLL_S = 0.02
PATIENCE_S = 60.0
"""Seconds that a rank with an error waits for the others to learn of it. They may wait in a collective of another
library that this rank has left by its error: then only the end of its process ends theirs."""
_IN_VAIN = "_hfscale_waited_in_vain"
"""Attribute of an error with which this rank has waited for the others, which did not come."""


class Channel(Exchanges):
    """Exchanges values between all ranks, one exchange after the other.

    Every rank must make the same calls in the same order. The process group is created at the first exchange after the
    default group. With one process an exchange returns this process's value.

    Args:
        name (`str`): the name of the channel, for error messages.
        timeout (`timedelta`): longest time that an exchange may take, from the first rank to the last.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.name = name
        self.timeout = timeout
        self._world: dist.ProcessGroup | None = None
        self._tree: Tree | None = None
        self._pending: Callable[[], object] | None = None
        self._entered = 0
        self._arrivals = 0
        self._arrived: str | None = None
        self._within: str | None = None

    @property
    def rank(self) -> int:
        return rank()

    @property
    def world_size(self) -> int:
        return world_size()

    def open(self) -> None:
        """Create the process groups now. Every rank must call it at the same point; else the first exchange does."""
        if is_distributed():
            self._connect()

    def _connect(self) -> Tree:
        """Return the tree; it is created at the first call after the default group."""
        # The old default group was destroyed
        if self._tree is None or self._world is not dist.group.WORLD:
            self._world, self._pending = dist.group.WORLD, None
            self._tree = Tree.over_all_ranks(self.timeout)
        return self._tree

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order.

        Args:
            name (`str`): the name of the exchange.
            value (`Any`): anything that JSON can represent; its size may differ between ranks. Tuples are returned as
                lists.
        """
        return [json.loads(data) for data in self.gather_bytes(name, json.dumps(value).encode())]

    def gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order.

        Args:
            name (`str`): the name of the exchange.
            data (`bytes`): this rank's; their number may differ between ranks.
        """
        return self._connect().gather_bytes_everywhere(data) if self._enter(name) else [data]

    def combine(self, name: str, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Return `function(values)` on every rank, which is called on rank 0 only.

        Args:
            name (`str`): the name of the exchange.
            value (`Any`): this rank's; anything that JSON can represent.
            function (`Callable`): called with the values of all ranks in rank order; it may take as long as the
                channel's time-out. Its result is sent to all ranks.

        Raises:
            Exception: what `function` raised, on all ranks; its type is as in `agreed`.
        """
        if not self._enter(name):
            return json.loads(json.dumps(function([value])))
        values = self._connect().gather_bytes(json.dumps(value).encode())
        return self._from_rank_0(lambda: function([json.loads(data) for data in values or []]))

    def gather_numbers(self, name: str, numbers: Sequence[float]) -> torch.Tensor:
        """Return a table with the numbers of each rank, (ranks, numbers) in fp64.

        Args:
            name (`str`): the name of the exchange.
            numbers (`Sequence[float]`): as many on every rank.
        """
        row = torch.tensor(numbers, dtype=torch.float64)
        if not self._enter(name):
            return row[None]
        tree = self._connect()
        table = tree.gather_rows(row)
        if table is None:
            table = torch.empty(world_size(), len(row), dtype=torch.float64)
        tree.broadcast(table)
        return table

    def combine_numbers(
        self,
        name: str,
        numbers: Sequence[float],
        function: Callable[[torch.Tensor], Any],
        *,
        shared: int = 0,
    ) -> tuple[torch.Tensor, Any]:
        """Return the first numbers of each rank, and `function(table)`, which is called on rank 0 only, on every rank.

        It is `gather_numbers` for the first numbers and `combine` for all of them, in one exchange.

        Args:
            name (`str`): the name of the exchange.
            numbers (`Sequence[float]`): as many on every rank.
            function (`Callable`): called with a table of the numbers of each rank, (ranks, numbers) in fp64. Its
                result is sent to all ranks.
            shared (`int`): how many of the numbers every rank gets from every other one.

        Returns:
            `tuple`: the first columns of the table, (ranks, shared), and the result.

        Raises:
            Exception: what `function` raised, on all ranks; its type is as in `agreed`.
        """
        row = torch.tensor(numbers, dtype=torch.float64)
        if not self._enter(name):
            return row[None, :shared], json.loads(json.dumps(function(row[None])))
        tree = self._connect()
        table = tree.gather_rows(row)

        def of_table() -> Any:
            assert table is not None  # rank 0 has it
            return function(table)

        result = self._from_rank_0(of_table)
        if table is None:
            columns = torch.empty(world_size(), shared, dtype=torch.float64)
        else:
            columns = table[:, :shared].contiguous()
        if shared:
            tree.broadcast(columns)
        return columns, result

    def maximum(self, name: str, numbers: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over all ranks.

        Args:
            name (`str`): the name of the exchange.
            numbers (`Sequence[float]`): as many on every rank.
        """
        return self.start_max(name, numbers)()

    def start_max(self, name: str, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Start the exchange of `maximum`, and return the function that waits for it and returns its result.

        Args:
            name (`str`): the name of the exchange.
            numbers (`Sequence[float]`): as many on every rank.
        """
        if not self._enter(name):
            return lambda: list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64)
        work = self._pending = self._connect().start_max(tensor)

        def wait() -> list[float]:
            work()
            return tensor.tolist()

        return wait

    def barrier(self, name: str) -> None:
        """Wait for every rank.

        Args:
            name (`str`): the name of the exchange.
        """
        self.maximum(name, [0.0])

    def arrive(self, name: str, *, timeout_s: float) -> None:
        """Wait for every rank, as `Exchanges.arrive`; before torch 2.8 the next exchange waits instead."""
        store = self._store() if is_distributed() else None
        if store is None:
            return
        self._arrivals += 1
        keys = [f"arrivals/{self._arrivals}/{number}" for number in range(world_size())]
        store.set(keys[rank()], "")

        def missing() -> list[int]:
            return [number for number, key in enumerate(keys) if not store.check([key])]

        wait_for_arrivals(name, lambda: store.check(keys), missing, _ARRIVAL_POLL_S, timeout_s)

    def combine_outcomes(
        self,
        name: str,
        outcome: Any,
        function: Callable[[list[Any]], Any],
        *,
        error: Exception | None,
    ) -> Any:
        """Combine the outcomes of what every rank has just done, where it may have failed on some, as `combine` does.

        A rank with an error waits `PATIENCE_S` seconds for the others, and raises its error if they have not come.

        Args:
            name (`str`): the name of the exchange.
            outcome (`Any`): this rank's; anything that JSON can represent.
            function (`Callable`): as for `combine`.
            error (`Exception`, *optional*): what it failed with on this rank; None: it did not.

        Raises:
            Exception: `error`, if the other ranks do not come; else as `combine`.
        """
        self._wait_for_the_others(error)
        return self.combine(name, outcome, function)

    def distribute(
        self,
        name: str,
        value: Any,
        function: Callable[[list[Any]], list[Any]],
        *,
        error: Exception | None = None,
    ) -> Any:
        """Return this rank's item of `function(values of all ranks)`, which is called on rank 0 only.

        torch sends the objects, as it does for its own checkpoints: it pickles them.

        Args:
            name (`str`): the name of the exchange.
            value (`Any`): this rank's.
            function (`Callable`): called with the values of all ranks in rank order; returns an item for each rank.
            error (`Exception`, *optional*): as for `combine_outcomes`.

        Raises:
            Exception: what `function` raised, on all ranks; its type is as in `agreed`. Or `error`.
        """
        self._wait_for_the_others(error)
        if not self._enter(name):
            return function([value])[0]
        tree = self._connect()
        values = tree.gather_objects(value)
        items: list[tuple[Any, tuple[str, tuple[Any, ...], str] | None]] | None = None
        raised: Exception | None = None
        if values is not None:
            try:
                items = [(item, None) for item in function(values)]
            except Exception as problem:
                raised = problem
                items = [(None, describe_error(problem))] * len(values)
        item, failure = tree.scatter_objects(items)
        if failure is not None:
            raise raised or rebuild_error(0, *failure)
        return item

    def _wait_for_the_others(self, error: Exception | None) -> None:
        """Raise the error if the other ranks do not come."""
        store = self._store() if is_distributed() else None
        if store is None:
            return
        # All ranks have left the exchange that it was for
        if self._arrived is not None and rank() == 0:
            store.delete_key(self._arrived)
        self._arrived = key = f"arrived/{self._entered}"
        store.add(key, 1)
        # An error passes several exchanges on its way out, and the others come to none of them
        patience_s = PATIENCE_S
        if hasattr(error, _IN_VAIN):
            patience_s = 0.0
        until = time.monotonic() + patience_s
        while error is not None and store.add(key, 0) < world_size():
            if time.monotonic() > until:
                setattr(error, _IN_VAIN, True)
                raise error
            time.sleep(0.01)

    @contextmanager
    def agreed(self, name: str) -> Iterator[None]:
        """Raise on all ranks if the code of the `with` block raises on one. Every rank must enter it.

        The block must not contain an exchange on this channel. A block with collectives of another library is allowed:
        see `combine_outcomes`.

        Args:
            name (`str`): the name of the exchange at the end of the block.

        Raises:
            Exception: on the ranks that failed, their own error; on the others, that of the first rank that failed,
                as an error of the same type if that is one of `hfscale.errors` or OSError, else as RuntimeError.
        """
        error: Exception | None = None
        self._within = name
        try:
            yield
        except Exception as raised:
            error = raised
        finally:
            self._within = None
        self._wait_for_the_others(error)
        first = self.combine(name, error and describe_error(error), first_failure)
        if error is not None:
            raise error
        if first is not None:
            number, failure = first
            raise rebuild_error(number, *failure)

    def _from_rank_0(self, function: Callable[[], Any]) -> Any:
        """Return `function()`, which is called on rank 0 only, or raise its error, on all ranks."""
        result, failure, error, data = None, None, None, None
        if rank() == 0:
            try:
                result = function()
            except Exception as raised:
                error, failure = raised, describe_error(raised)
            data = json.dumps([result, failure]).encode()
        result, failure = json.loads(self._connect().broadcast_bytes(data))
        if failure is not None:
            raise error or rebuild_error(0, *failure)
        return result

    def _enter(self, name: str) -> bool:
        """Begin the exchange `name`; return whether there are other ranks."""
        if self._within is not None:
            raise RuntimeError(
                f"exchange {name!r} is nested in the agreed block {self._within!r}: if one rank raises before "
                f"{name!r}, all others wait forever; move it out of the block"
            )
        if not is_distributed():
            return False
        self._entered += 1
        timeout_s = float(os.environ.get(DEBUG_VARIABLE, "0"))
        store = self._store() if timeout_s else None
        if store is not None:
            self._check_names(name, store, timeout_s)
        tree = self._connect()  # the groups are created here, after all ranks have arrived
        if self._pending is not None:
            self._pending()
            self._pending = None
        return tree is not None

    def _store(self) -> dist.Store | None:
        """Return the store of the default group, with this channel's own keys; None before torch 2.8."""
        store = group_store(dist.group.WORLD)
        return dist.PrefixStore(f"hfscale/{self.name}", store) if store is not None else None

    def _check_names(self, name: str, store: dist.Store, timeout_s: float) -> None:
        """Raise a RuntimeError if another rank enters another exchange than this one, or none in time."""
        exchange = f"exchange {self._entered} of {self.name!r}"
        keys = [f"names/{self._entered}/{number}" for number in range(world_size())]
        store.set(keys[rank()], name)
        until = time.monotonic() + timeout_s
        while not store.check(keys) and time.monotonic() < until:
            # `store.wait` would block the other threads of this process that use the store
            time.sleep(0.001)
        names = [store.get(key).decode() if store.check([key]) else None for key in keys]
        absent = [number for number, other in enumerate(names) if other is None]
        if absent:
            raise RuntimeError(
                f"{exchange}: rank {rank()} is in {name!r}, ranks {absent} in none after {timeout_s} s"
            )
        if set(names) != {name}:
            raise RuntimeError(
                f"{exchange}: the ranks are in different exchanges: {dict(enumerate(names))}"
            )


START = Channel("start", timedelta(hours=24))
"""Before a training: rank 0 may verify, convert or download a checkpoint for hours while the others wait."""
TRAINING = Channel("training", timedelta(minutes=30))
"""On the training thread, from the beginning of a training to its end."""
ISLANDS = Channel("islands", timedelta(hours=24))
"""On the training thread, while some ranks exchange over a slow link."""
SAVING = Channel("saving", timedelta(hours=2))
"""On the thread that writes checkpoints."""


class StepAgreement:
    """Gives all ranks the greatest of their votes at the same step boundaries, about every `every_s` seconds.

    Several votes have one exchange, as an exchange at each step would add a considerable part of a millisecond to it.
    The number of steps between two exchanges is agreed on in the exchange itself (from the slowest rank's step time),
    so no rank waits for another that does not take part. The number at most doubles from one exchange to the next: a
    slow first step (compilation, warm-up of the allocator) and a later change of pace are both followed quickly.

    Overlapped exchanges start at the end of one step and are read at the end of the next, when they have long
    completed, so that reading them does not wait. If steps take longer than half of `every_s`, each step has an
    exchange, which takes little time compared with the step and is read at once.

    Args:
        name (`str`): the name of its exchanges, which are on the channel `TRAINING`. The names of the votes are added.
        every_s (`float`): seconds between two exchanges.
        overlapped (`bool`): whether exchanges run in the background of a step.
    """

    def __init__(self, name: str, every_s: float, *, overlapped: bool = False) -> None:
        self.name = name
        self.every_s = every_s
        self.overlapped = overlapped
        self._interval_steps = 1
        self._steps_since = 0
        self._interval_began_at = time.monotonic()
        self._pending: Callable[[], dict[str, float]] | None = None

    def step(
        self, votes: Callable[[], Mapping[str, float]], *, at_once: bool = False
    ) -> dict[str, float] | None:
        """Take part in this step; every rank must call it once per step.

        Args:
            votes (`Callable`): returns this rank's votes by name, each at least 0; the names are the same on every
                rank. It is called only if an exchange starts at this step.
            at_once (`bool`): exchange at this step and read it at once; the same on every rank.

        Returns:
            `dict[str, float]`: the greatest votes of all ranks if this step reads an exchange, else None.
        """
        self._steps_since += 1
        agreed = self._read() if self._pending is not None else None
        if self._steps_since < self._interval_steps and not at_once:
            return agreed
        step_s = (time.monotonic() - self._interval_began_at) / self._steps_since
        self._steps_since = 0
        self._interval_began_at = time.monotonic()
        if not is_distributed():
            self._set_interval(step_s)
            return dict(votes())
        self._pending = self._start(votes(), step_s)
        reads_at_once = at_once or not self.overlapped or self._interval_steps == 1
        if reads_at_once:
            agreed = _greatest(self._read(), agreed)
        return agreed

    def now(self, votes: Mapping[str, float]) -> dict[str, float]:
        """Exchange votes at once; every rank must call it at the same point.

        Args:
            votes (`Mapping[str, float]`): this rank's, as for `step`.

        Returns:
            `dict[str, float]`: the greatest of all ranks, including those of an exchange that is still in progress.
        """
        pending = self._read() if self._pending is not None else None
        return _greatest(self._start(votes, 0.0)(), pending)

    def finish(self) -> None:
        """Wait for an exchange that is still in progress. Call it before the process group is destroyed."""
        if self._pending is not None:
            self._read()

    def _start(self, votes: Mapping[str, float], step_s: float) -> Callable[[], dict[str, float]]:
        """Start an exchange; return the function that waits for it, follows the slowest step and returns the votes."""
        names = list(votes)
        exchange = f"{self.name}: {', '.join(names)}"
        wait = TRAINING.start_max(exchange, [*votes.values(), step_s])

        def read() -> dict[str, float]:
            *greatest, slowest_step_s = wait()
            if slowest_step_s > 0:
                self._set_interval(slowest_step_s)
            return dict(zip(names, greatest, strict=True))

        return read

    def _read(self) -> dict[str, float]:
        assert self._pending is not None
        read, self._pending = self._pending, None
        return read()

    def _set_interval(self, slowest_step_s: float) -> None:
        affordable = int(self.every_s / max(slowest_step_s, 1e-6))
        self._interval_steps = max(1, min(2 * self._interval_steps, affordable))


def _greatest(votes: dict[str, float], others: Mapping[str, float] | None) -> dict[str, float]:
    """Return the greater of two votes for each name."""
    if others is None:
        return votes
    return {name: max(vote, others[name]) for name, vote in votes.items()}
