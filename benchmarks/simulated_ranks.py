"""Runs the code of thousands of ranks on one machine, with a simulated clock and a real store (discrete events).

Each rank is a greenlet, and the store a process. One rank runs at a time, and the simulated clock moves as it would if
every rank had a core of its own: a rank's time passes with the CPU time that it uses and with what it sleeps; the
store serves one request after the other, each in the CPU time that its process uses for it, and every request takes
`NETWORK_S` to arrive and again to return. So the result does not depend on how many cores this machine has, or on what
else it does. Connecting is not simulated: torch's store looks up the name of each client, which takes as long as the
machine's name service does.
"""

import gc
import heapq
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist
from greenlet import getcurrent, greenlet

from hfscale.core import rank_store
from hfscale.core.rank_store import RankStore
from hfscale.health import hang, preflight

NETWORK_S = 100e-6
"""Time of a request to the store, and of its answer, between two nodes: TCP over Ethernet takes 20 to 100 us."""
CONNECTIONS = 64
"""Real connections, which the ranks share: one request is sent at a time."""
_CPU_CLOCK = 2
"""The kind of clock in the number of a process's clock (CPUCLOCK_SCHED, include/linux/posix-timers_types.h)."""


class Clock:
    """Replaces the module `time` in the modules that ranks run, and lets one rank run at a time."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, greenlet]] = []
        self._order = count()
        self._loop = getcurrent()
        self._resumed_at = 0.0
        self._cpu_s = 0.0

    def monotonic(self) -> float:
        """Return the simulated time of the rank that calls it, seconds."""
        return self._resumed_at + time.thread_time() - self._cpu_s

    def time(self) -> float:
        """Return the simulated time; all ranks have the same clock."""
        return self.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let other ranks run until `seconds` have passed."""
        self.sleep_until(self.monotonic() + seconds)

    def sleep_until(self, at: float) -> None:
        """Let other ranks run until the simulated time `at`."""
        heapq.heappush(self._events, (at, next(self._order), getcurrent()))
        self._loop.switch()

    def run(self, bodies: Iterable[Callable[[], Any]]) -> list[tuple[Any, float]]:
        """Run a function for each rank from time 0; return what each has returned, and when."""
        results: dict[int, tuple[Any, float]] = {}

        def run_rank(number: int, body: Callable[[], Any]) -> None:
            results[number] = (body(), self.monotonic())

        self._loop = getcurrent()
        for number, body in enumerate(bodies):
            heapq.heappush(self._events, (0.0, next(self._order), greenlet(partial(run_rank, number, body))))
        gc.collect()
        gc.freeze()  # the collector would charge one rank with the objects of all
        while self._events:
            self._resumed_at, _, rank = heapq.heappop(self._events)
            self._cpu_s = time.thread_time()
            rank.switch()  # returns when the rank sleeps or has ended
        gc.unfreeze()
        return [results[number] for number in sorted(results)]


class StoreProcess:
    """A process that serves a TCPStore on loopback at `port`."""

    def __init__(self) -> None:
        context = get_context("fork")
        ports, self._end = context.SimpleQueue(), context.Event()
        self._process = context.Process(target=self._serve, args=(ports, self._end))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._clock = (~self.pid << 3) | _CPU_CLOCK
        self.port: int = ports.get()

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used, seconds."""
        return time.clock_gettime(self._clock)

    def close(self) -> None:
        """End the process."""
        self._end.set()
        self._process.join(60)

    @staticmethod
    def _serve(ports: Any, end: Any) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports.put(store.port)
        end.wait()
        os._exit(0)


class _Requests:
    """The connection of one rank to the store, in simulated time."""

    def __init__(self, ranks: "SimulatedRanks", store: dist.Store) -> None:
        self._ranks = ranks
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        request = getattr(self._store, name)
        return lambda *given: self._ranks.serve(lambda: request(*given))


class SimulatedRanks:
    """Ranks that share one store; the modules of their protocols get the simulated clock.

    Args:
        number (`int`): the number of ranks.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock = Clock()
        self._is_free_at = 0.0
        self._store = StoreProcess()
        self._used_s = 0.0
        self._stores = [
            dist.TCPStore("127.0.0.1", self._store.port, is_master=False, wait_for_workers=False)
            for _ in range(CONNECTIONS)
        ]
        for module in (rank_store, preflight, hang):
            vars(module)["time"] = self.clock

    def run(self, name: str, body: Callable[[RankStore], Any]) -> list[tuple[Any, float]]:
        """Run `body` on each rank, with a `RankStore` of this name; return what each returned, and when, seconds."""
        self._is_free_at = 0.0
        self._used_s = self._store.cpu_s()

        def bodies() -> Iterable[Callable[[], Any]]:
            stores = [dist.PrefixStore(name, store) for store in self._stores]
            for rank in range(self.number):
                requests: Any = _Requests(self, stores[rank % CONNECTIONS])
                yield partial(body, RankStore(requests, rank, self.number))

        return self.clock.run(bodies())

    def serve(self, request: Callable[[], Any]) -> Any:
        """Send a request of the rank that calls it to the store, and return the answer when it has arrived."""
        self.clock.sleep(NETWORK_S)
        begins_at = max(self.clock.monotonic(), self._is_free_at)
        answer = request()
        used_s = self._store.cpu_s()
        self._is_free_at = begins_at + used_s - self._used_s
        self._used_s = used_s
        self.clock.sleep_until(self._is_free_at + NETWORK_S)
        return answer

    def close(self) -> None:
        """End the process of the store."""
        self._store.close()
