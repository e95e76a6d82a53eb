"""Ranks for the health tests: forked processes, so that imports happen once, with a store in the parent process.

As under a launcher, the store is in the parent, so a rank that is stopped or killed does not take it with it.
"""

import os
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

from hfscale.core.rank_store import RankStore


@dataclass(frozen=True)
class Ended:
    """What each rank that ended returned, and after how many seconds."""

    results: dict[int, Any]
    seconds: dict[int, float]


class Ranks:
    """`world_size` forked processes that call `work(rank_store, rank, *arguments)`."""

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
        # A fork during a call of the store would copy a held lock of the store's thread, which is in the parent.
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
        os._exit(0)  # a thread may hang in a collective, as some tests intend

    def finish(self, timeout_s: float = 60.0, without: tuple[int, ...] = ()) -> Ended:
        """Wait for the answers of all ranks except those in `without`, then end all processes."""
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


def gloo(rank_store: RankStore, timeout_s: float = 60.0) -> None:
    """Create the default process group."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", rank_store.store.clone()),  # who waits in it must not block the rank's notes
        rank=rank_store.rank,
        world_size=rank_store.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
