"""What one rank enters: a collective, its group and size, and from where. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NEW_GROUP = "new_group"
_SHARDING = ("/torch/distributed/fsdp/", "/deepspeed/runtime/zero/")
"""Where FSDP2 and ZeRO-3 gather the parameters of a module."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One call of a collective, or of a send or receive, by one rank."""

    group: str
    """The process group: its name and its ranks."""
    ranks: tuple[int, ...]
    """The ranks of the group."""
    name: str
    """What is called, as torch names the operation: `allreduce`, `broadcast`, `send`, …"""
    sizes: tuple[int, ...] = ()
    """Elements of each tensor that must be equal on all ranks."""
    dtype: str = ""
    """The type of their elements."""
    how: str = ""
    """The reduction, the root or the tag, where there is one."""
    sends: tuple[int, ...] = ()
    """Elements for each rank of the group, of an all-to-all."""
    receives: tuple[int, ...] = ()
    """Elements from each rank of the group, of an all-to-all."""
    peer: int | None = None
    """The other rank of a send or receive."""
    phase: str = "script"
    """What the training does: forward, backward, clipping, optimizer, log, evaluation, save, data or script."""
    step: int = 0
    """Optimizer steps that are complete."""
    module: str = ""
    """The module of the model that is being computed, if it is known."""
    stack: tuple[str, ...] = ()
    """The calls of Python that lead to it, the innermost last, as `file:line in function`."""

    @property
    def label(self) -> str:
        """What is entered, in words."""
        shown = ", ".join(map(str, self.sizes[:4])) + (", …" if len(self.sizes) > 4 else "")
        size = f" of {shown} {self.dtype}" if self.sizes else ""
        if self.sends:
            size = f" sending {list(self.sends)} and receiving {list(self.receives)} {self.dtype}"
        peer = (
            f" {'to' if self.name == 'send' else 'from'} rank {self.peer}"
            if self.peer is not None
            else ""
        )
        return f"{self.name}{size}{peer}" + (f" ({self.how})" if self.how else "")

    @property
    def place(self) -> str:
        """Where it is entered, in words."""
        module = f", {self.module}" if self.module else ""
        return f"{self.phase}, after step {self.step}{module}"

    @property
    def gathered_module(self) -> str:
        """The module whose parameters are gathered for its forward pass; empty for anything else."""
        is_gather = self.phase == "forward" and self.name.startswith("allgather")
        return (
            self.module
            if is_gather and any(part in frame for frame in self.stack for part in _SHARDING)
            else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Entry":
        """Return the entry of `to_dict`, after JSON."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one rank did where two ranks differ."""

    rank: int
    """The rank."""
    entry: Entry | None
    """What it entered, or the last that it entered before it ended."""
    ended: str = ""
    """How it has ended, if it has; then it does not enter what the other rank waits for."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first collective that depends on the rank."""

    kind: str
    """`entry`, `size`, `dtype`, `arguments`, `module` (the parameters of two modules), `missing` (a rank has ended
    without it) or `silent`."""
    group: str
    """The process group."""
    position: int
    """How many collectives of this group all ranks have entered alike before, plus 1."""
    a: Side
    """A rank that waits."""
    b: Side
    """A rank that does something else."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def kind_of_difference(a: Entry, b: Entry, *, rank_a: int, rank_b: int) -> str | None:
    """Return in what two entries at the same position of a group differ so that they cannot match; None if they match.

    Args:
        a (`Entry`): of one rank.
        b (`Entry`): of another.
        rank_a (`int`): the first rank.
        rank_b (`int`): the second rank.
    """
    if a.name != b.name:
        return "entry"
    if a.dtype != b.dtype:
        return "dtype"
    if a.how != b.how:
        return "arguments"
    if a.sends or b.sends:
        index_a, index_b = a.ranks.index(rank_a), a.ranks.index(rank_b)
        fits = a.sends[index_b] == b.receives[index_a] and b.sends[index_a] == a.receives[index_b]
        return None if fits else "size"
    if a.sizes != b.sizes:
        return "size"
    return None if a.gathered_module == b.gathered_module else "module"
