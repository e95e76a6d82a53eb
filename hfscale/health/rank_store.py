"""A notice board for all ranks that works when a collective hangs: the launcher's key-value store.

`torchrun` and `accelerate launch` keep a TCPStore in the launcher's own process. A rank that is stopped, dead or stuck
in a collective cannot take it away from the others, so they can read there who has not written.
"""

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hfscale.errors import HealthError

CONNECT_S = 10.0
"""Seconds to reach the store; the launcher has opened it before it starts a rank."""


class RankStore:
    """What each rank has posted under a topic.

    Every `RankStore` has a connection of its own: a client of the store serves one call at a time, and the process
    group's may be blocked by the very call that hangs.

    Args:
        store (`torch.distributed.Store`): shared by all ranks.
        rank (`int`): this process.
        world_size (`int`): how many there are.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def connect(
        cls, name: str, environ: Mapping[str, str] = os.environ, *, timeout_s: float | None = None, opens: bool = False
    ) -> "RankStore":
        """A board over the store that the launcher's `MASTER_ADDR` and `MASTER_PORT` point to.

        Args:
            name (`str`): boards of the same name are the same board; each launch and restart has its own.
            timeout_s (`float`, *optional*): seconds to reach the store, by default `CONNECT_S`.
            opens (`bool`): whether rank 0 opens the store where the launcher has not (mpirun, srun): when no process
                group is made yet, which would.

        Raises:
            HealthError: the store does not answer.
        """
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        is_host = opens and environ["RANK"] == "0" and not launcher_has_store(environ)
        timeout = timedelta(seconds=timeout_s or CONNECT_S)
        try:
            store = dist.TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=timeout)
        except (dist.DistError, RuntimeError) as error:
            raise HealthError(
                f"the launcher's store at {address}:{port} does not answer ({_first_line(error)}): is the node of "
                "rank 0 up, and is the port open between the nodes?"
            ) from None
        launch = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        prefixed = dist.PrefixStore(f"hfscale/{launch}/{name}", store)
        return cls(prefixed, int(environ["RANK"]), int(environ["WORLD_SIZE"]))

    @property
    def store(self) -> dist.Store:
        """The store under this board, to make a process group on."""
        return self._store

    def post(self, topic: str, note: Mapping[str, Any]) -> None:
        """Write this rank's note; once per topic."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(note))
        self._store.add(f"{topic}/count", 1)

    def count(self, topic: str) -> int:
        """How many ranks have posted."""
        return int(self._store.add(f"{topic}/count", 0))

    def is_complete(self, topic: str) -> bool:
        """Whether all ranks have posted."""
        return self.count(topic) >= self.world_size

    def read(self, topic: str) -> dict[int, dict[str, Any]]:
        """The notes that are there, by rank."""
        ranks = list(range(self.world_size))
        if not self.is_complete(topic):
            ranks = [rank for rank in ranks if self._store.check([f"{topic}/{rank}"])]
        if not ranks:
            return {}
        notes = self._store.multi_get([f"{topic}/{rank}" for rank in ranks])
        return {rank: json.loads(note) for rank, note in zip(ranks, notes, strict=True)}

    def raise_flag(self, name: str, text: str) -> None:
        """Put up a flag for all; the first one up stays."""
        self._store.compare_set(f"flag/{name}", "", text)

    def flag(self, name: str) -> str | None:
        """The text of a flag that is up, else None."""
        key = f"flag/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None


def launcher_has_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher keeps the store, as torchrun and `accelerate launch` do; else rank 0 does."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
