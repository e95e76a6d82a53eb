"""Exchanges of small values between all ranks: what each way of exchanging them offers. This module imports no torch.

`hfscale.core.collectives.Channel` exchanges through process groups. Before a process group exists, `StoreExchanges`
uses the launcher's key-value store. `OneProcess` is for a process that decides alone.
"""

import json
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hfscale import errors
from hfscale.core.logging import get_logger
from hfscale.errors import HealthError

if TYPE_CHECKING:
    from hfscale.core.rank_store import RankStore

logger = get_logger(__name__)

_REPORT_ARRIVAL_S = 30.0
_OF_ANOTHER_RANK = "hfscale_of_another_rank"


class Exchanges(ABC):
    """Exchanges values between all ranks, one exchange after the other.

    Every rank must make the same calls in the same order. With one process an exchange returns this process's value.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of processes."""

    @abstractmethod
    def combine(self, name: str, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Return `function(values)` on every rank, which is called on rank 0 only.

        Args:
            name (`str`): the name of the exchange.
            value (`Any`): this rank's; anything that JSON can represent.
            function (`Callable`): called with the values of all ranks in rank order. Its result is sent to all ranks.

        Raises:
            Exception: what `function` raised, on all ranks; its type is as in `agreed`.
        """

    @abstractmethod
    def arrive(self, name: str, *, timeout_s: float) -> None:
        """Wait for every rank, where user code may have called this on some ranks only.

        Args:
            name (`str`): what the ranks call, for the error message.
            timeout_s (`float`): longest time to wait, in seconds.

        Raises:
            HealthError: a rank has not come in time.
        """

    def on_rank_0(self, name: str, function: Callable[[], Any]) -> Any:
        """Return `function()` on every rank, which is called on rank 0 only.

        Args:
            name (`str`): the name of the exchange.
            function (`Callable`): its result is sent to all ranks.

        Raises:
            Exception: what `function` raised, on all ranks; its type is as in `agreed`.
        """
        return self.combine(name, None, lambda _: function())

    @contextmanager
    def agreed(self, name: str) -> Iterator[None]:
        """Raise on all ranks if the code of the `with` block raises on one. Every rank must enter it.

        The block must not contain an exchange of this object.

        Args:
            name (`str`): the name of the exchange at the end of the block.

        Raises:
            Exception: on the ranks that failed, their own error; on the others, that of the first rank that failed,
                as an error of the same type if that is one of `hfscale.errors` or OSError, else as RuntimeError.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        first = self.combine(name, error and describe_error(error), first_failure)
        if error is not None:
            raise error
        if first is not None:
            number, failure = first
            raise rebuild_error(number, *failure)


class OneProcess(Exchanges):
    """The exchanges of a process that decides alone, also where it is one of several ranks."""

    rank = 0
    world_size = 1

    def combine(self, name: str, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        return json.loads(json.dumps(function([value])))

    def arrive(self, name: str, *, timeout_s: float) -> None:
        pass


class StoreExchanges(Exchanges):
    """Exchanges through the launcher's key-value store, for the time before a process group exists.

    Args:
        store (`RankStore`): a store that all ranks use for the same sequence of exchanges, and for nothing else.
    """

    def __init__(self, store: "RankStore") -> None:
        self._store = store
        self._entered = 0

    @property
    def rank(self) -> int:
        return self._store.rank

    @property
    def world_size(self) -> int:
        return self._store.world_size

    def combine(self, name: str, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        topic = self._write(name, value)
        if self.rank == 0:
            self._wait_until(lambda: self._store.is_complete(topic))
            notes = self._store.read(topic)
            raised: Exception | None = None
            result = failure = None
            try:
                result = function([notes[rank]["value"] for rank in range(self.world_size)])
            except Exception as error:
                raised = error
                failure = describe_error(error)
            self._store.publish(topic, [result, failure])
            if raised is not None:
                raise raised
        self._wait_until(lambda: self._store.published(topic) is not None)
        result, failure = self._store.published(topic)
        if failure is not None:
            raise rebuild_error(0, *failure)
        return result

    def arrive(self, name: str, *, timeout_s: float) -> None:
        topic = self._write(name, None)
        wait_for_arrivals(
            name,
            lambda: self._store.is_complete(topic),
            lambda: self._missing(topic),
            self._store.poll_s,
            timeout_s,
        )

    def _write(self, name: str, value: Any) -> str:
        """Write this rank's value of the next exchange, and return the topic of the exchange in the store."""
        self._entered += 1
        topic = f"{self._entered}/{name}"
        self._store.write(topic, {"value": value})
        return topic

    def _missing(self, topic: str) -> list[int]:
        return sorted(set(range(self.world_size)) - set(self._store.read(topic)))

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            time.sleep(self._store.poll_s)


def wait_for_arrivals(
    name: str,
    is_complete: Callable[[], bool],
    missing: Callable[[], list[int]],
    poll_s: float,
    timeout_s: float,
) -> None:
    """Wait until all ranks have come; say after half a minute which have not.

    Args:
        name (`str`): what the ranks call.
        is_complete (`Callable[[], bool]`): whether all have come.
        missing (`Callable[[], list[int]]`): returns the ranks that have not.
        poll_s (`float`): seconds between two looks.
        timeout_s (`float`): longest time to wait, in seconds.

    Raises:
        HealthError: a rank has not come in time.
    """
    began = time.monotonic()
    is_reported = False
    while not is_complete():
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            raise HealthError(
                f"ranks {missing()} have not called {name} after {timeout_s:.0f} s: call it on every rank, at the "
                "same point of the script"
            )
        if waited_s >= _REPORT_ARRIVAL_S and not is_reported:
            logger.warning("%s waits for ranks %s", name, missing())
            is_reported = True
        time.sleep(poll_s)


def first_failure(outcomes: list[Any]) -> tuple[int, Any] | None:
    """Return the lowest rank that has failed, and how; None if none has.

    Args:
        outcomes (`list`): what each rank's error is described by, None for a rank without one.
    """
    return next(
        ((number, outcome) for number, outcome in enumerate(outcomes) if outcome is not None), None
    )


def describe_error(error: Exception) -> tuple[str, tuple[Any, ...], str]:
    """Return the type, the values and the traceback of an error, for the other ranks."""
    values = (
        (error.errno, error.strerror, str(error.filename))
        if isinstance(error, OSError)
        else (str(error),)
    )
    # The other ranks get the message, from which a ParameterError cannot be made.
    kind = errors.UsageError if isinstance(error, errors.ParameterError) else type(error)
    return kind.__name__, values, "".join(traceback.format_exception(error))


def rebuild_error(failed: int, kind: str, values: Sequence[Any], trace: str) -> Exception:
    """Return the error of another rank.

    Args:
        failed (`int`): the rank.
        kind (`str`): the type of the error, as the next two from `describe_error`.
        values (`Sequence`): its values.
        trace (`str`): its traceback.
    """
    own = getattr(errors, kind, None)
    error: Exception
    if own is not None:
        error = own(f"rank {failed}: {values[0]}")
    elif len(values) == 3:
        error = OSError(values[0], f"{values[1]} (on rank {failed})", values[2])
    else:
        error = RuntimeError(f"rank {failed}: {kind}: {values[0]}\n\n{trace}")
    vars(error)[_OF_ANOTHER_RANK] = True
    return error


def is_of_another_rank(error: BaseException) -> bool:
    """Return whether an exchange has raised the error on this rank because another rank had it.

    Args:
        error (`BaseException`): an error.
    """
    return _OF_ANOTHER_RANK in vars(error)
