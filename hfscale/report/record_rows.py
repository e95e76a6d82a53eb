"""The records of a long run in little memory: eight bytes a number, and each set of keys once."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import overload


class RecordRows(Sequence[Mapping[str, float]]):
    """Holds records of numbers, of which most have the same keys. Records are only added, also while others read."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, ...], int] = {}
        self._places: list[
            dict[str, int]
        ] = []  # of each layout, the place of a key among the values of a record
        self._layout_of = array("L")
        self._begins = array("Q")
        self._values = array("d")

    def add(self, record: Mapping[str, float]) -> None:
        """Add a record.

        Args:
            record (`Mapping[str, float]`): its numbers.
        """
        keys = tuple(record)
        layout = self._layouts.setdefault(keys, len(self._layouts))
        if layout == len(self._places):
            self._places.append({key: place for place, key in enumerate(keys)})
        begin = len(self._values)
        self._values.extend(record.values())
        self._begins.append(begin)
        self._layout_of.append(layout)  # the last: the record counts from now on

    def so_far(self) -> "RecordRows":
        """Return the records so far, which later ones do not change; they share the memory."""
        return _RowsSoFar(self)

    def __len__(self) -> int:
        return len(self._layout_of)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, float]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, float]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> Mapping[str, float] | Sequence[Mapping[str, float]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return _Row(self._places[self._layout_of[number]], self._values, self._begins[number])

    def column(self, key: str) -> list[tuple[int, float]]:
        """Return the number of each record that has a key, with its value.

        Args:
            key (`str`): the key.
        """
        found = []
        for number, place in self._with(key, range(len(self))):
            found.append((number, self._values[self._begins[number] + place]))
        return found

    def last(self, key: str) -> float | None:
        """Return the value of the newest record that has a key; None if none has it.

        Args:
            key (`str`): the key.
        """
        for number, place in self._with(key, reversed(range(len(self)))):
            return self._values[self._begins[number] + place]
        return None

    def keys(self) -> list[str]:
        """Return every key of a record, in the order in which they first came."""
        return list(dict.fromkeys(key for places in self._places for key in places))

    def _with(self, key: str, numbers: "range | Iterator[int]") -> Iterator[tuple[int, int]]:
        """Yield those of the numbers whose record has the key, with the place of the key."""
        places = {at: found[key] for at, found in enumerate(self._places) if key in found}
        if not places:
            return
        for number in numbers:
            place = places.get(self._layout_of[number])
            if place is not None:
                yield number, place


class _RowsSoFar(RecordRows):
    """The first records of another object, which goes on."""

    def __init__(self, rows: RecordRows) -> None:
        self._layouts = rows._layouts
        self._places = rows._places
        self._layout_of = rows._layout_of
        self._begins = rows._begins
        self._values = rows._values
        self._length = len(rows)

    def __len__(self) -> int:
        return self._length

    def add(self, record: Mapping[str, float]) -> None:
        raise TypeError("these records are those of one moment")


class _Row(Mapping[str, float]):
    """One record."""

    __slots__ = ("_begin", "_places", "_values")

    def __init__(self, places: Mapping[str, int], values: "array[float]", begin: int) -> None:
        self._places = places
        self._values = values
        self._begin = begin

    def __getitem__(self, key: str) -> float:
        return self._values[self._begin + self._places[key]]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
