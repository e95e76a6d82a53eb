"""The values of objects that change while a training goes on: which they are, and how they get earlier ones."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from hfscale.checkpoint.program_state.objects import Holder
from hfscale.checkpoint.program_state.values import (
    NOTHING,
    are_equal,
    from_json,
    is_unchanged,
    kept,
    mark_of,
    put_back,
    to_json,
)
from hfscale.core.logging import get_logger
from hfscale.core.records import unix_time

logger = get_logger(__name__)


class KeptValues:
    """The values in places of a program, and what they were first.

    Args:
        holders (`Mapping[str, Holder]`): the places by path.
    """

    def __init__(self, holders: Mapping[str, Holder]) -> None:
        self._holders = dict(holders)
        self._began = _clocks()
        self._first = self._now()
        self._marks = self._large()
        self._restored: set[tuple[str, str]] = set()

    @property
    def places(self) -> list[str]:
        """The paths of the places."""
        return list(self._holders)

    def _now(self) -> dict[tuple[str, str], Any]:
        return {
            (path, name): copy
            for path, holder in self._holders.items()
            for name, value in holder.read().items()
            if (copy := kept(value)) is not NOTHING
        }

    def _large(self) -> dict[str, float]:
        """Return a number for each tensor and array that is too large to be kept."""
        return {
            f"{path}.{name}": mark
            for path, holder in self._holders.items()
            for name, value in holder.read().items()
            if (mark := mark_of(value)) is not None and kept(value) is NOTHING
        }

    def changed_and_not_kept(self) -> list[str]:
        """Return the names of the tensors and arrays that have changed and are too large to be kept."""
        now = self._large()
        return [name for name, mark in now.items() if self._marks.get(name) != mark]

    def changed(self, *, only_single: bool = False) -> dict[str, dict[str, Any]]:
        """Return the values that are not the first ones, as JSON values by path and name.

        A number that a clock has shown since then is left out: it means nothing in another launch.

        Args:
            only_single (`bool`): leave out what holds several numbers.
        """
        clocks = _clocks()
        found: dict[str, dict[str, Any]] = {}
        for path, holder in self._holders.items():
            for name, value in holder.read().items():
                first = self._first.get((path, name), NOTHING)
                if is_unchanged(first, value) or (
                    only_single and not isinstance(value, int | float)
                ):
                    continue
                copy = kept(value)
                if copy is NOTHING or are_equal(first, copy) or self._is_time(copy, clocks):
                    continue
                found.setdefault(path, {})[name] = to_json(copy)
        return found

    def _is_time(self, value: Any, now: tuple[float, ...]) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # A count may well be as large as the seconds since this machine has started
        clocks = _OF_DATE if float(value).is_integer() else len(now)
        return any(self._began[at] <= value <= now[at] for at in range(clocks))

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each place the values that it had. What only an earlier call has named gets its first value.

        Args:
            saved (`Mapping`): what `changed` returned in another launch.
        """
        wanted = {place: self._first[place] for place in self._restored if place in self._first}
        for path, values in saved.items():
            if path not in self._holders:
                logger.warning(
                    "the checkpoint has values of %s (%s), which this launch does not have: they are not restored",
                    path,
                    ", ".join(values),
                )
                continue
            wanted |= {(path, name): from_json(value) for name, value in values.items()}
        # Each place is read once: one of them is the whole model
        values_now: dict[str, dict[str, Any]] = {}
        for (path, name), value in wanted.items():
            holder = self._holders[path]
            if path not in values_now:
                values_now[path] = holder.read()
            before = values_now[path].get(name, NOTHING)
            is_same = are_equal(kept(before), value)
            if not is_same:
                holder.write(name, put_back(before, value))
        self._restored |= wanted.keys()

    def take(self) -> Callable[[], None]:
        """Return the function that gives each place the value that it has now."""
        saved = self.changed()

        def put_back() -> None:
            changed = self.changed()
            self._restored |= {(path, name) for path, values in changed.items() for name in values}
            self.restore(saved)

        return put_back


def check_values(saved: Any) -> None:
    """Check values that were read from a file.

    Args:
        saved (`Any`): what `KeptValues.changed` returned, as JSON values.

    Raises:
        ValueError: they are no such values.
    """
    if not isinstance(saved, dict) or not all(
        isinstance(values, dict) for values in saved.values()
    ):
        raise ValueError("they are no values by path and name")
    for values in saved.values():
        for value in values.values():
            from_json(value)


_OF_DATE = 3


def _clocks() -> tuple[float, ...]:
    """Return what clocks show: of the date in seconds, milliseconds and nanoseconds, and those that only count."""
    date = unix_time()
    return date, date * 1e3, date * 1e9, time.monotonic(), time.perf_counter()
