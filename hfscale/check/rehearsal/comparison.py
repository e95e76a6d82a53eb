"""Compares what the ranks enter while they run: the first collective that cannot match. This module imports no torch.

A rank announces each collective before it enters it, and waits for nobody. The collectives of one process group must
be the same, in the same order, on all of its ranks; so the k-th of each rank are compared as soon as two of them are
known. When a rank has ended, nothing more comes from it: a collective that another rank has announced never matches.
Sends and receives are compared in the order of each pair of ranks.

This needs no time limit, and does not depend on how long a rank takes. Two ranks that wait for each other in different
groups are not seen here: each group is right so far. The caller asks for `waiting` when nothing has come for long.
"""

from collections import defaultdict, deque

from hfscale.check.rehearsal.entries import Difference, Entry, Side, kind_of_difference

_PAIRED = {"send": "recv", "recv": "send"}


class _Sequence:
    """What the ranks of one group, or the two ends of one pair of ranks, have entered and others have not yet."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.matched = 0
        self.pending: dict[int, deque[Entry]] = {rank: deque() for rank in ranks}

    def drop_matched(self) -> None:
        while all(self.pending.values()):
            for entries in self.pending.values():
                entries.popleft()
            self.matched += 1


class Comparison:
    """Compares the entries of all ranks as they come."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = defaultdict(int)
        """Collectives that have been entered, by phase, over all ranks."""
        self.groups: dict[str, tuple[int, ...]] = {}
        """The ranks of each group."""
        self._sequences: dict[str, _Sequence] = {}
        self._last: dict[int, Entry] = {}
        self._ended: dict[int, str] = {}

    def add(self, rank: int, entry: Entry) -> Difference | None:
        """Take an entry of a rank; return the difference if it cannot match.

        Args:
            rank (`int`): the rank.
            entry (`Entry`): what it is about to enter.
        """
        self.counts[entry.phase] += 1
        self.groups[entry.group] = entry.ranks
        self._last[rank] = entry
        name, ranks = _sequence_of(rank, entry)
        sequence = self._sequences.setdefault(name, _Sequence(ranks))
        queue = sequence.pending[rank]
        queue.append(entry)
        index = len(queue) - 1
        for other, entries in sequence.pending.items():
            if other == rank:
                continue
            if index < len(entries):
                kind = _kind(entries[index], entry, other, rank)
                if kind is not None:
                    sides = Side(rank=other, entry=entries[index]), Side(rank=rank, entry=entry)
                    first, second = sorted(sides, key=lambda side: side.rank)
                    position = sequence.matched + index + 1
                    return Difference(
                        kind=kind, group=entry.group, position=position, a=first, b=second
                    )
            elif other in self._ended:
                return self._missing(sequence, rank, other, index)
        sequence.drop_matched()
        return None

    def ended(self, rank: int, how: str) -> Difference | None:
        """Take that a rank has ended; return the difference if another rank waits for it.

        Args:
            rank (`int`): the rank.
            how (`str`): how it has ended: its error, or nothing.
        """
        self._ended[rank] = how or "it has ended"
        for sequence in self._sequences.values():
            if rank not in sequence.pending:
                continue
            index = len(sequence.pending[rank])
            for other, entries in sequence.pending.items():
                if len(entries) > index:
                    return self._missing(sequence, other, rank, index)
        return None

    def waiting(self) -> Difference | None:
        """Return the first collective that some ranks of a group have entered and others have not, if there is one."""
        for sequence in self._sequences.values():
            absent = [rank for rank, entries in sequence.pending.items() if not entries]
            present = [rank for rank, entries in sequence.pending.items() if entries]
            if absent and present:
                a = Side(rank=present[0], entry=sequence.pending[present[0]][0])
                b = Side(rank=absent[0], entry=self._last.get(absent[0]))
                assert a.entry is not None
                return Difference(
                    kind="silent", group=a.entry.group, position=sequence.matched + 1, a=a, b=b
                )
        return None

    def _missing(self, sequence: _Sequence, waits: int, ended: int, index: int) -> Difference:
        entry = sequence.pending[waits][index]
        return Difference(
            kind="missing",
            group=entry.group,
            position=sequence.matched + index + 1,
            a=Side(rank=waits, entry=entry),
            b=Side(rank=ended, entry=self._last.get(ended), ended=self._ended[ended]),
        )


def _sequence_of(rank: int, entry: Entry) -> tuple[str, tuple[int, ...]]:
    """Return the name and the ranks of the sequence to which an entry belongs."""
    if entry.peer is None:
        return entry.group, entry.ranks
    source, target = (rank, entry.peer) if entry.name == "send" else (entry.peer, rank)
    return f"{entry.group} from {source} to {target} {entry.how}", (source, target)


def _kind(a: Entry, b: Entry, rank_a: int, rank_b: int) -> str | None:
    if a.peer is None:
        return kind_of_difference(a, b, rank_a=rank_a, rank_b=rank_b)
    return None if (a.sizes, a.dtype) == (b.sizes, b.dtype) else "size"
