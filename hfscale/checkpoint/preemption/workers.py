"""Protects DataLoader workers from the signals that are meant for their rank.

A launcher sends a signal to the process group of a rank, Slurm to every process of a job. Without protection the
workers die first, and the save that the signal should cause never happens ("DataLoader worker is killed by signal:
Terminated"). A protected worker ignores SIGUSR1 and SIGINT, and reacts to SIGTERM only from its own rank, which uses
it to end workers that do not end by themselves.

torch installs its own handler of SIGTERM in each worker after the start. It does not unblock a blocked signal, and a
process that is started with the signal blocked is protected from its first instruction on.
"""

import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from multiprocessing.process import BaseProcess
from typing import Any

_IGNORED = (signal.SIGUSR1, signal.SIGINT)
_loaders: weakref.WeakSet[Any] = weakref.WeakSet()


def shield_workers(loader: Any) -> None:
    """Protect the workers that `loader` will start; a loader without workers is not changed.

    Args:
        loader (`torch.utils.data.DataLoader`): a loader, or Accelerate's wrapper of one.
    """
    loader = getattr(loader, "base_dataloader", loader)
    if getattr(loader, "num_workers", 0) == 0:
        return
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    loader.multiprocessing_context = _SHIELDED[method]
    _loaders.add(loader)


def end_workers() -> None:
    """End the workers that protected loaders keep between epochs (`persistent_workers`).

    A loader that is read again starts new ones. torch itself ends workers when their loader is garbage-collected.
    Trainer's loaders are part of a reference cycle, whose collection destroys the workers' queues first: the workers
    never receive the request to end, and torch waits five seconds for each (2.13,
    `_MultiProcessingDataLoaderIter._shutdown_workers`), which can be longer than the time left after a notice.
    """
    for loader in list(_loaders):
        end_workers_of(loader)


def end_workers_of(loader: Any) -> None:
    """End the workers that a loader keeps between epochs; it starts new ones when it is read again.

    Args:
        loader (`DataLoader`): any data loader.
    """
    loader._iterator = None  # torch has no public way


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block `signals` in this thread and in processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_by_rank_only(rank_pid: int) -> None:
    """Wait for SIGTERM, and end this process if it comes from its rank."""
    while True:
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid == rank_pid:
            os._exit(0)  # like torch's own handler: the rank is shutting its loader down


class _Shielded(BaseProcess):
    def start(self) -> None:
        with _blocked(signal.SIGTERM):
            super().start()

    def run(self) -> None:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        rank = multiprocessing.parent_process()
        if rank is not None and rank.pid is not None:
            threading.Thread(target=_end_by_rank_only, args=(rank.pid,), daemon=True).start()
        super().run()


class _ForkedWorker(_Shielded, context.ForkProcess):
    pass


class _SpawnedWorker(_Shielded, context.SpawnProcess):
    pass


class _ServedWorker(_Shielded, context.ForkServerProcess):
    pass


class _ShieldedFork(context.ForkContext):
    Process = _ForkedWorker


class _ShieldedSpawn(context.SpawnContext):
    Process = _SpawnedWorker


class _ShieldedForkServer(context.ForkServerContext):
    Process = _ServedWorker


_SHIELDED = {
    "fork": _ShieldedFork(),
    "spawn": _ShieldedSpawn(),
    "forkserver": _ShieldedForkServer(),
}
