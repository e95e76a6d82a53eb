"""What a check found, said about a rank and its host."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    level: Level
    """`error`: do not train like this; `warning`: it will cost time or safety; `note`: for the record."""
    check: str
    """What was looked at: `environment`, `matmul`, `all_reduce` …"""
    message: str
    """The value, the reason and the mend, in one line."""
    ranks: tuple[int, ...] = ()
    """The ranks it is about; empty: all, or a node without ranks."""
    host: str | None = None
    """Their host, where it is one and is known."""

    @property
    def where(self) -> str:
        """`rank 3 (node-b)`, `ranks 2, 3 (node-b)`, `node-b` or nothing."""
        return name_ranks(self.ranks, self.host) if self.ranks else (self.host or "")

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ranks": list(self.ranks)}


def name_ranks(ranks: Iterable[int], host: str | None = None) -> str:
    """`rank 3 (node-b)` or `ranks 2, 3`; more than eight are counted."""
    listed = sorted(ranks)
    names = ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    return f"rank{'s' if len(listed) > 1 else ''} {names}" + (f" ({host})" if host else "")


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether one of them forbids training."""
    return any(finding.level == "error" for finding in findings)
