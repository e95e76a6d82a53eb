"""Ranks for the health tests: forked, so that they import once, around a store in a process that no fault reaches.

As under a launcher, the store lives in the parent; a rank that is stopped or killed cannot take it along.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from hfscale.health.rank_store import RankStore


@dataclass(frozen=True)
class Ended:
    """What the ranks returned, or None for one that did not end by itself, and when each did (seconds)."""

    results: dict[int, Any]
    seconds: dict[int, float]


class Ranks:
    """`world_size` forked processes that call `work(board, rank, *arguments)`."""

    def __init__(self, world_size: int, work: Callable[..., Any], *arguments: Any) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        fork = get_context("fork")
        self._answers = fork.SimpleQueue()
        self._all_are_forked = fork.Event()
        self.begun = time.monotonic()
        self.processes = [
            fork.Process(target=self._body, args=(rank, world_size, work, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()
        self._all_are_forked.set()

    def _body(self, rank: int, world_size: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        # While one speaks with the store, whose thread is the parent's, a lock of that thread would be forked too.
        self._all_are_forked.wait()
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.store.port),
        )
        try:
            answer = work(RankStore.connect("test"), rank, *arguments)
        except BaseException as error:
            traceback.print_exc()
            answer = error if isinstance(error, AssertionError) else RuntimeError(repr(error))
        self._answers.put((rank, time.monotonic() - self.begun, answer))
        sys.stderr.flush()
        os._exit(0)  # a thread may hang in a collective, as it must

    def note(self, key: str, text: str = "1") -> None:
        """Write into the store, for the ranks to see."""
        self.store.set(key, text)

    def wait_for(self, key: str, timeout_s: float = 30.0) -> None:
        """Until a rank has written `key` into the store."""
        self.store.wait([key], timedelta(seconds=timeout_s))

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send one rank a signal."""
        os.kill(self.processes[rank].pid, number)

    def finish(self, timeout_s: float = 60.0, without: tuple[int, ...] = ()) -> Ended:
        """Wait for the answers of all ranks but those in `without`, then end what is left."""
        results: dict[int, Any] = {}
        seconds: dict[int, float] = {}
        until = time.monotonic() + timeout_s
        try:
            while len(results) < len(self.processes) - len(without) and time.monotonic() < until:
                if self._answers._reader.poll(0.1):
                    rank, after_s, answer = self._answers.get()
                    results[rank], seconds[rank] = answer, after_s
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join(10)
        for answer in results.values():
            if isinstance(answer, BaseException):
                raise answer
        return Ended(results, seconds)


def mark(name: str) -> None:
    """Write `name` into the store, over a connection of its own."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    store.set(name, "1")


def gloo(rank_store: RankStore, timeout_s: float = 60.0) -> None:
    """Make the default group."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", rank_store.store),
        rank=rank_store.rank,
        world_size=rank_store.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
