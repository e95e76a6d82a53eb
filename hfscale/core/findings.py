"""What a check or an analysis found: what is wrong, where, and how to fix it.

The health checks (`hfscale.health`) report findings about nodes and ranks; the triage (`hfscale.metrics.triage`)
reports the cause of lost time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hfscale.core.counts import nouns

Level = Literal["error", "warning", "note"]
UNEVEN_BATCHES_FIX = "sort sequences by length or pack them"
"""What to do where ranks wait for each other because their batches differ."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong or worth knowing."""

    check: str
    """What was checked (`interfaces`, `matmul`, `all_reduce` …) or, for lost time, its cause (`data wait` …)."""
    problem: str
    """What is wrong, with the measured value or the setting."""
    fix: str = ""
    """How to fix it; empty for a record without a fault."""
    level: Level = "warning"
    """`error`: do not train like this; `warning`: it costs time or safety; `note`: for the record."""
    ranks: tuple[int, ...] = ()
    """The ranks that it is about; empty: all ranks, or a node without ranks."""
    host: str | None = None
    """The host of these ranks, if they share one and it is known."""
    share: float | None = None
    """The fraction of the step time that it accounts for, if it is known."""
    blames_host: bool = True
    """Whether an error with a host says that the host is bad: it is not for an exception of the program."""

    @property
    def message(self) -> str:
        """Problem and fix in one line."""
        return f"{self.problem}; {self.fix}" if self.fix else self.problem

    @property
    def where(self) -> str:
        """`rank 3 (node-b)`, `ranks 2, 3 (node-b)`, `node-b`, or an empty string."""
        return name_ranks(self.ranks, self.host) if self.ranks else (self.host or "")

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def to_dict(self) -> dict[str, Any]:
        """Return the finding of a health check as a dictionary for JSON; `message` has problem and fix in one line."""
        return {
            "level": self.level,
            "check": self.check,
            "message": self.message,
            "problem": self.problem,
            "fix": self.fix,
            "ranks": list(self.ranks),
            "host": self.host,
            "blames_host": self.blames_host,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Finding":
        """Return the finding from the dictionary that `to_dict` returned."""
        kept = {name: fields[name] for name in ("level", "check", "problem", "fix", "host")}
        return cls(
            **kept,
            ranks=tuple(fields["ranks"]),
            blames_host=fields.get("blames_host", True),
        )

    def to_cause(self) -> dict[str, Any]:
        """Return the cause of lost time as a dictionary for JSON; its key `mend` is the older name of `fix`."""
        return {
            "cause": self.check,
            "share": self.share,
            "numbers": self.problem,
            "mend": self.fix,
            "fix": self.fix,
        }


def rank_error(check: str, rank: int, hosts: Mapping[int, str], problem: str, fix: str) -> Finding:
    """Return an error about one rank.

    Args:
        check (`str`): what was checked.
        rank (`int`): the rank.
        hosts (`Mapping[int, str]`): the host of each rank, as far as it is known.
        problem (`str`): what is wrong.
        fix (`str`): how to fix it.
    """
    return Finding(
        level="error", check=check, problem=problem, fix=fix, ranks=(rank,), host=hosts.get(rank)
    )


def name_ranks(ranks: Iterable[int], host: str | None = None) -> str:
    """Return `rank 3 (node-b)` or `ranks 2, 3`: the ranks in ascending order, for a message.

    Args:
        ranks (`Iterable[int]`): the ranks; those after the first eight are only counted.
        host (`str`, *optional*): the host of these ranks.
    """
    listed = sorted(ranks)
    names = ", ".join(map(str, listed[:8])) + (
        f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    )
    return f"{nouns(len(listed), 'rank')} {names}" + (f" ({host})" if host else "")


def has_errors(findings: Iterable[Finding]) -> bool:
    """Return whether one of the findings has the level `error`."""
    return any(finding.level == "error" for finding in findings)


def blamed_hosts(findings: Iterable[Finding]) -> list[str]:
    """Return the hosts that errors among the findings blame, each once, in alphabetical order."""
    hosts = set()
    for finding in findings:
        if finding.level == "error" and finding.host and finding.blames_host:
            hosts.add(finding.host)
    return sorted(hosts)


def limit_findings(findings: list[Finding], most: int = 64) -> list[Finding]:
    """Return at most `most` findings, errors first; the last one counts those that are left out.

    Args:
        findings (`list[Finding]`): the findings.
        most (`int`): the number to keep, at least 2.
    """
    if len(findings) <= most:
        return findings
    ordered = sorted(
        findings, key=lambda finding: ("error", "warning", "note").index(finding.level)
    )
    kept, left_out = ordered[: most - 1], ordered[most - 1 :]
    ranks = tuple(sorted({rank for finding in left_out for rank in finding.ranks}))
    problem = f"{len(left_out)} further findings like those before"
    return [
        *kept,
        Finding(level=left_out[0].level, check=left_out[0].check, problem=problem, ranks=ranks),
    ]


def join_errors(findings: Iterable[Finding]) -> str:
    """Return the first four errors among the findings in one line, for an exception; the others are counted."""
    return join_findings([finding for finding in findings if finding.level == "error"])


def join_findings(findings: list[Finding]) -> str:
    """Return the first four findings in one line; the others are counted."""
    return "; ".join(map(str, findings[:4])) + (
        f"; and {len(findings) - 4} more" if len(findings) > 4 else ""
    )
