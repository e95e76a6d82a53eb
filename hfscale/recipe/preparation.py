"""Data prepared by one process of each node while the others wait, outside any collective with a time limit.

`TrainingArguments.main_process_first` lets the other ranks wait in a barrier of the default group: a tokenisation that
takes longer than its time limit (10 minutes with NCCL, 30 with gloo) ends the run. Here they wait for notes in the
launcher's store, which has no time limit, and see there at once that a rank has failed.
"""

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch.distributed as dist

from hfscale.core.disk_errors import writing
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.processes import describe_process, find_process, is_alive
from hfscale.core.rank_store import RankStore
from hfscale.errors import HealthError, HfScaleError

logger = get_logger(__name__)

LOG_EVERY_S = 60.0
"""Seconds between two log lines about a preparation."""
SILENCE_S = 120.0
"""Seconds without a sign of life after which a process on another machine is taken to be dead."""
_BEAT_S = 5.0
_POLL_S = 0.1  # between two looks at the notes of the other ranks, for up to 64 of them
_STORE_S = 60.0  # for one call of the store
_RECORDS_PER_WORKER = 1000

_numbers = itertools.count()


@contextmanager
def one_process_prepares(what: str) -> Iterator[None]:
    """Let one process of each node run a block first; the others then run it and find its results in the cache.

    Use it around code that downloads or tokenises. If all nodes see the same cache folder of `datasets`, rank 0 runs
    the block first for all of them. The others wait without a time limit; a line is logged every minute. A process
    leaves the block when all have finished it, so that none of them waits for another in a collective later.

    With one process the block just runs. All ranks must reach it.

    Args:
        what (`str`): what is prepared, for log lines and errors, for instance `"the training data"`.

    Raises:
        HealthError: another rank has failed or died, or the launcher's store does not answer.
        StorageError: the cache folder cannot be written.
    """
    if launch_number("WORLD_SIZE", 1) == 1:
        with _pool_workers_end_on_signals():
            yield
        return
    name = f"prepare/{next(_numbers)}"
    ranks = _Ranks(RankStore.connect(name, os.environ, timeout_s=_STORE_S), what)
    probe = Path(
        datasets.config.HF_DATASETS_CACHE, f".hfscale-shared-{socket.gethostname()}-{os.getpid()}"
    )
    try:
        with _signs_of_life(RankStore.connect(name, os.environ, timeout_s=_STORE_S), what):
            if ranks.rank == 0:
                with writing(
                    f"the cache {probe.parent}", "set HF_DATASETS_CACHE to a folder that can"
                ):
                    probe.parent.mkdir(parents=True, exist_ok=True)
                    probe.touch()
            ranks.meet(probe)
            ranks.wait_until_prepared()
            with _pool_workers_end_on_signals():
                yield
            ranks.wait_until_all_are_done()
    except BaseException as error:
        ranks.report_failure(error)
        raise
    finally:
        if ranks.rank == 0:
            probe.unlink(missing_ok=True)


@contextmanager
def _pool_workers_end_on_signals() -> Iterator[None]:
    """Let processes that are forked meanwhile have the default handler of SIGTERM, with which their pool ends them.

    They would inherit ours, which adds a preemption notice: a pool that ends them would wait for them forever. Until
    they have the default handler, SIGTERM is blocked: a pool may end a process that it has only just forked.
    """
    global _is_preparing
    _is_preparing = True
    try:
        yield
    finally:
        _is_preparing = False


def _block_signals() -> None:
    _forking.mask = (
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _is_preparing else None
    )


def _unblock_signals() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset_signals() -> None:
    if _forking.mask is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _unblock_signals()


_is_preparing = False
_forking = threading.local()
os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_signals
)


@contextmanager
def kept_environment() -> Iterator[None]:
    """Keep `os.environ` as it is: `Dataset.map` with several processes (datasets 5.2) puts a copy in its place.

    What holds the first object, such as default arguments of functions, would not see later changes.
    """
    environ = os.environ
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ = environ  # noqa: B003 (it is the first object)
        for name in environ.keys() - before.keys():
            del environ[name]
        environ.update(before)


def worker_processes(wanted: int | None, records: int) -> int:
    """Return with how many processes one rank tokenises.

    Args:
        wanted (`int`, *optional*): `--preprocessing_num_workers`. By default there are as many as the node has ranks,
            since the others wait, but each has at least 1,000 records.
        records (`int`): number of records.
    """
    if wanted is not None:
        return max(1, min(wanted, records))
    return max(1, min(launch_number("LOCAL_WORLD_SIZE", 1), records // _RECORDS_PER_WORKER))


class _Ranks:
    """What the ranks tell each other about one block.

    Args:
        store (`RankStore`): the notes of the block.
        what (`str`): what is prepared.
    """

    def __init__(self, store: RankStore, what: str) -> None:
        self.rank = store.rank
        self._store = store
        self._what = what
        self._prepares_here = store.rank  # the rank that runs the block before this one
        # Processes of this machine; None: it is dead already
        self._neighbours: dict[int, psutil.Process | None] = {}
        # The last sign of life of other machines, and its time
        self._beats: dict[int, tuple[int, float]] = {}

    def meet(self, probe: Path) -> None:
        """Learn where the other ranks run and who prepares for this one.

        Args:
            probe (`Path`): a file in the cache folder of this process; rank 0 has written its own.
        """
        store = self._store
        local_rank = launch_number("LOCAL_RANK", 0)
        first = store.rank - local_rank
        store.write("place", describe_process() | {"first": local_rank == 0, "probe": probe.name})
        node = range(first, first + launch_number("LOCAL_WORLD_SIZE", 1))
        needed: Iterable[int] = {0, *node}
        if self.rank == 0:
            needed = range(store.world_size)
        places = {rank: self._note(rank) for rank in needed}
        # A neighbour is watched as a process; of other nodes the first rank is, by its beats.
        for rank, other in places.items():
            if rank == self.rank:
                continue
            process = find_process(other)
            if process is not None or (rank in node and other["host"] == socket.gethostname()):
                self._neighbours[rank] = process
            elif local_rank == 0 and other["first"]:
                self._beats[rank] = (0, time.monotonic())
        self._prepares_here = 0 if (probe.parent / places[0]["probe"]).exists() else first

    def wait_until_prepared(self) -> None:
        """Wait until the process that runs the block first has finished it."""
        while self._prepares_here != self.rank and not self._store.find(
            "done", self._prepares_here
        ):
            self._look()

    def wait_until_all_are_done(self) -> None:
        """Tell the others that this process has finished the block, and wait until all have."""
        self._store.write("done", {"rank": self.rank})
        while not self._store.is_complete("done"):
            self._look()

    def report_failure(self, error: BaseException) -> None:
        """Let the block fail on all ranks."""
        reason = (
            str(error) if isinstance(error, HfScaleError) else f"{type(error).__name__}: {error}"
        )
        with suppress(dist.DistError, RuntimeError):  # without the store the others fail too
            self._store.raise_flag(
                "failed", f"rank {self.rank} could not prepare {self._what}: {reason}"
            )

    def _note(self, rank: int) -> dict[str, Any]:
        while True:
            note = self._store.find("place", rank)
            if note is not None:
                return note
            self._look()

    def _look(self) -> None:
        """Pause for a moment, then raise an error if another rank has failed or died."""
        time.sleep(_POLL_S * max(1.0, self._store.world_size / 64))
        try:
            dead = self._dead()
            if dead is not None:
                self._store.raise_flag(
                    "failed", f"{dead} while {self._what} was prepared: see its output"
                )
            reason = self._store.flag("failed")
        except (dist.DistError, RuntimeError) as error:
            raise HealthError(
                f"the launcher's store does not answer any more while {self._what} is prepared "
                f"({str(error).splitlines()[0]}): check the node of rank 0"
            ) from None
        if reason is not None:
            raise HealthError(reason)

    def _dead(self) -> str | None:
        for rank, process in self._neighbours.items():
            if process is None or not is_alive(process):
                return f"rank {rank} has died"
        now = time.monotonic()
        for rank, (last, since) in self._beats.items():
            beat = int(self._store.store.add(f"beat/{rank}", 0))
            if beat != last:
                self._beats[rank] = (beat, now)
            elif now - since > SILENCE_S:
                return f"rank {rank} has shown no sign of life for {SILENCE_S:.0f} seconds"
        return None


@contextmanager
def _signs_of_life(store: RankStore, what: str) -> Iterator[None]:
    """Show other machines that this process is alive, and log every minute how far the ranks are."""
    stop = threading.Event()
    began_at = logged_at = time.monotonic()

    def beat() -> None:
        nonlocal logged_at
        while not stop.wait(_BEAT_S):
            store.store.add(f"beat/{store.rank}", 1)
            if time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at = time.monotonic()
                minutes = (logged_at - began_at) / 60
                done = f"{store.count('done')} of {store.world_size}"
                logger.info(
                    "preparing %s for %.0f minutes: %s processes have it", what, minutes, done
                )

    def beat_until_the_store_is_gone() -> None:
        with suppress(dist.DistError, RuntimeError):  # the other ranks notice it
            beat()

    thread = threading.Thread(
        target=beat_until_the_store_is_gone, name="hfscale-preparation", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
