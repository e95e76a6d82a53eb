"""Exchanges notes between ranks when collectives may hang, in the launcher's key-value store.

`torchrun` and `accelerate launch` keep a TCPStore in the launcher's own process. A rank that is stopped, dead or stuck
in a collective does not block it for the others, which can read there who has not written.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import xxhash

from hfscale.core.launch_variables import launch_number
from hfscale.errors import HealthError

CONNECT_S = 10.0
"""Seconds to reach the store; the launcher opens it before it starts a rank."""
REQUESTS_PER_S = 8192
"""Polls per second that all ranks together make: a tenth of what one store answers (`benchmarks/control_plane.py`)."""
_MIN_POLL_S = 0.02


class RankStore:
    """Exchanges notes of each rank under a topic, and flags that all ranks see.

    Every `RankStore` has its own connection: a client of the store serves one call at a time, and the connection of
    the process group may be blocked by the very call that hangs.

    Args:
        store (`torch.distributed.Store`): shared by all ranks.
        rank (`int`): the rank of this process.
        world_size (`int`): the number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def connect(
        cls,
        name: str,
        environ: Mapping[str, str] = os.environ,
        *,
        timeout_s: float | None = None,
        opens: bool = False,
    ) -> "RankStore":
        """Connect to the store that the launcher's `MASTER_ADDR` and `MASTER_PORT` point to.

        Args:
            name (`str`): stores of the same name share their notes; each launch and restart has its own.
            environ (`Mapping[str, str]`): the launcher's variables.
            timeout_s (`float`, *optional*): seconds to reach the store, by default `CONNECT_S`.
            opens (`bool`): whether rank 0 opens the store where the launcher has not (mpirun, srun). Needed when there
                is no process group yet, since creating one would open it.

        Raises:
            HealthError: the store does not answer.
        """
        address = environ["MASTER_ADDR"]
        port = launch_number("MASTER_PORT", 0, environ)
        is_host = opens and environ["RANK"] == "0" and not launcher_has_store(environ)
        timeout = timedelta(seconds=timeout_s or CONNECT_S)
        try:
            store = dist.TCPStore(
                address, port, is_master=is_host, wait_for_workers=False, timeout=timeout
            )
        except (dist.DistError, RuntimeError) as error:
            raise HealthError(
                f"the launcher's store at {address}:{port} does not answer ({_first_line(error)}): check that the "
                "node of rank 0 is up and that the port is open between the nodes"
            ) from None
        launch = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        prefixed = dist.PrefixStore(f"hfscale/{launch}/{name}", store)
        rank = launch_number("RANK", 0, environ)
        return cls(prefixed, rank, launch_number("WORLD_SIZE", 1, environ))

    def next_number(self) -> int:
        """Return how often this rank has called this, in this launch, from 1."""
        return int(self._store.add(f"number/{self.rank}", 1))

    @property
    def poll_s(self) -> float:
        """Seconds between two polls of one rank, so that the store can serve all of them."""
        return max(_MIN_POLL_S, self.world_size / REQUESTS_PER_S)

    @property
    def store(self) -> dist.Store:
        """The underlying store, to create a process group with it."""
        return self._store

    def write(self, topic: str, note: Mapping[str, Any]) -> None:
        """Write this rank's note under a topic. Call it once per topic, since each call counts as one rank.

        Args:
            topic (`str`): the name that the ranks' notes share.
            note (`Mapping[str, Any]`): the note; JSON must be able to hold it.
        """
        self._store.set(f"{topic}/{self.rank}", json.dumps(note))
        self._store.add(f"{topic}/count", 1)

    def count(self, topic: str) -> int:
        """Return the number of ranks that have written under a topic."""
        return int(self._store.add(f"{topic}/count", 0))

    def is_complete(self, topic: str) -> bool:
        """Return whether all ranks have written under a topic."""
        return self.count(topic) >= self.world_size

    def find(self, topic: str, rank: int) -> dict[str, Any] | None:
        """Return a rank's note under a topic, or None if it has not written one yet."""
        key = f"{topic}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def read(self, topic: str) -> dict[int, dict[str, Any]]:
        """Return the notes that have been written under a topic, by rank, without waiting for more.

        Its cost grows with the number of ranks: where all ranks need the result, one of them reads, and publishes what
        the others need to know.
        """
        ranks = list(range(self.world_size))
        if not self.is_complete(topic):
            ranks = self._written(topic, ranks)
        if not ranks:
            return {}
        notes = self._store.multi_get([f"{topic}/{rank}" for rank in ranks])
        return {rank: json.loads(note) for rank, note in zip(ranks, notes, strict=True)}

    def _written(self, topic: str, ranks: list[int]) -> list[int]:
        """Return those of the ranks that have written under a topic: few requests where few have not."""
        if self._store.check([f"{topic}/{rank}" for rank in ranks]):
            return ranks
        middle = len(ranks) // 2
        return (
            [*self._written(topic, ranks[:middle]), *self._written(topic, ranks[middle:])]
            if middle
            else []
        )

    def claim(self, name: str) -> bool:
        """Return whether this rank is the first that claims `name`; True only once for all ranks."""
        return (
            self._store.compare_set(f"claim/{name}", "", str(self.rank)) == str(self.rank).encode()
        )

    def publish(self, name: str, note: Any) -> None:
        """Write a note that all ranks read, instead of one per rank.

        Args:
            name (`str`): its name.
            note (`Any`): the note; JSON must be able to hold it.
        """
        self._store.set(f"published/{name}", json.dumps(note))

    def published(self, name: str) -> Any:
        """Return what a rank has published under `name`, or None if none has yet."""
        key = f"published/{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def decide(
        self,
        name: str,
        judge: Callable[[], Any],
        *,
        after_s: float,
        limit_s: float,
        is_ready: Callable[[], bool] = bool,
    ) -> tuple[Any, bool]:
        """Let one rank judge the notes of all, and return its verdict on every rank that calls this.

        It is rank 0, unless rank 0 has not judged in time.

        Args:
            name (`str`): the name of the verdict.
            judge (`Callable[[], Any]`): reads the notes and returns the verdict; JSON must be able to hold it.
            after_s (`float`): seconds after which rank 0 judges; twice that for the other ranks.
            limit_s (`float`): longest time to wait, seconds.
            is_ready (`Callable[[], bool]`, *optional*): whether rank 0 may judge earlier.

        Returns:
            `tuple[Any, bool]`: the verdict, and whether this rank has judged. The verdict is None if the rank that
            claimed to judge has not published one in time.
        """
        began = time.monotonic()
        may_judge_after_s = after_s if self.rank == 0 else 2 * after_s
        while (waited_s := time.monotonic() - began) < limit_s:
            verdict = self.published(name)
            if verdict is not None:
                return verdict, False
            if (waited_s >= may_judge_after_s or (self.rank == 0 and is_ready())) and self.claim(
                name
            ):
                verdict = judge()
                self.publish(name, verdict)
                return verdict, True
            time.sleep(max(0.05, self.poll_s))
        return None, False

    def keep(self, text: str) -> str:
        """Keep a text once, however many ranks keep the same one, and return the key of `kept`."""
        key = xxhash.xxh3_64_hexdigest(text.encode())
        if not self._store.check([f"kept/{key}"]):
            self._store.set(f"kept/{key}", text)
        return key

    def kept(self, keys: Collection[str]) -> dict[str, str]:
        """Return the texts that `keep` has kept, by key; each key must be one that `keep` returned."""
        if not keys:
            return {}
        texts = self._store.multi_get([f"kept/{key}" for key in keys])
        return {key: text.decode() for key, text in zip(keys, texts, strict=True)}

    def raise_flag(self, name: str, text: str) -> None:
        """Raise a flag for all ranks.

        Args:
            name (`str`): the name of the flag.
            text (`str`): the text of the flag; that of the first rank that raises it stays.
        """
        self._store.compare_set(f"flag/{name}", "", text)

    def flag(self, name: str) -> str | None:
        """Return the text of a flag, or None if no rank has raised it."""
        key = f"flag/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None


def launcher_has_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher keeps the store, as torchrun and `accelerate launch` do; otherwise rank 0 keeps it.

    Args:
        environ (`Mapping[str, str]`): the launcher's variables.
    """
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
