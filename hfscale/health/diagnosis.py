"""Who keeps a hanging run waiting, from what each rank was doing when it stood still.

A rank that waits in a collective waits for those of its group that have not entered it. Of these, the ones that wait
for nobody themselves are the cause. Where all wait, the ranks whose collective is not the one that most are in are.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hfscale.health.flight import POINT_TO_POINT, Position
from hfscale.utils.findings import Finding


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank at the moment of an alarm."""

    host: str
    """Its node."""
    step: int
    """Optimizer steps begun."""
    phase: str
    """`starting`, `compute` or `between steps` (data, log, evaluation, save)."""
    idle_s: float
    """Seconds since it last moved on."""
    occupation: str | None
    """`compiling`, `saving` or `evaluating`: rightly slow; None otherwise."""
    place: str
    """Where its main thread is: `file.py:12 function`."""
    positions: tuple[Position, ...]
    """Where it is in its collectives."""
    error: str | None = None
    """The exception that ends it, if one does."""
    stacks: str = ""
    """All its threads."""

    def to_dict(self) -> dict[str, Any]:
        """For the board."""
        return {**asdict(self), "positions": [position.to_dict() for position in self.positions]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Snapshot":
        """The reverse of `to_dict`."""
        return cls(**{**fields, "positions": tuple(map(Position.from_dict, fields["positions"]))})

    @property
    def waiting(self) -> Position | None:
        """The collective it waits in, the first one where they are several."""
        return next((position for position in self.positions if position.waiting is not None), None)


def diagnose(world_size: int, hosts: Mapping[int, str], snapshots: Mapping[int, Snapshot]) -> list[Finding]:
    """The ranks that are to blame, or one finding about all where no rank is; empty where a rank is rightly slow.

    Args:
        world_size: how many ranks there are.
        hosts: the host of each rank.
        snapshots: of the ranks that answered.
    """

    def blame(rank: int, message: str) -> Finding:
        return Finding(level="error", check="hang", problem=message, ranks=(rank,), host=hosts.get(rank))

    absent = [rank for rank in range(world_size) if rank not in snapshots]
    if absent:
        text = "does not answer: its process is dead, stopped, or held by a call that never returns"
        return [blame(rank, text) for rank in absent]
    failed = {rank: snap.error for rank, snap in snapshots.items() if snap.error}
    if failed:
        own = {rank: error for rank, error in failed.items() if not _is_of_a_peer(error)}
        return [blame(rank, f"failed: {error}") for rank, error in sorted((own or failed).items())]
    if any(snap.occupation for snap in snapshots.values()):
        return []
    waiting = {rank: snap.waiting for rank, snap in snapshots.items() if snap.waiting is not None}
    if not waiting:
        return _nobody_waits(snapshots, blame)
    late = _not_arrived(waiting, snapshots)
    roots = sorted(rank for rank in late if rank not in waiting)
    if roots:
        return [
            blame(
                rank,
                f"has not come to {late[rank].operation} ({late[rank].waiting} of group {late[rank].group}), in which "
                f"{len(waiting)} wait: it is {_doing(snapshots[rank])}",
            )
            for rank in roots
        ]
    return _all_wait(waiting, snapshots, blame)


def _not_arrived(waiting: Mapping[int, Position], snapshots: Mapping[int, Snapshot]) -> dict[int, Position]:
    """The ranks that have not entered a collective in which others wait, each with that collective."""
    late: dict[int, Position] = {}
    for position in waiting.values():
        if position.group.endswith(POINT_TO_POINT) or position.waiting is None:
            continue
        for rank, snap in snapshots.items():
            mine = next((p for p in snap.positions if p.group == position.group), None)
            is_member = rank in position.ranks if position.ranks else (mine is not None or position.group == "0")
            if is_member and (mine is None or mine.entered < position.waiting):
                late.setdefault(rank, position)
    return late


def _all_wait(waiting: Mapping[int, Position], snapshots: Mapping[int, Snapshot], blame: Any) -> list[Finding]:
    """Everybody who could be waited for waits too: the odd ones are named, or else the GPU that has not begun."""
    places = {rank: (p.group, p.waiting, p.operation, p.sizes) for rank, p in waiting.items()}
    (first, most), *rest = Counter(places.values()).most_common()
    if rest and rest[0][1] == most:
        text = "are not in the same place: " + ", ".join(f"rank {rank} {p}" for rank, p in sorted(waiting.items())[:8])
        text += "; one left a collective out, or called them in another order"
        return [Finding(level="error", check="hang", problem=text, ranks=tuple(sorted(waiting)))]
    if rest:
        reference = next(p for rank, p in waiting.items() if places[rank] == first)
        return [
            blame(
                rank,
                f"is {waiting[rank]} while {most} ranks are {reference}: it left a collective out, or called "
                f"them in another order ({_doing(snapshots[rank])})",
            )
            for rank in sorted(waiting)
            if places[rank] != first
        ]
    not_begun = [rank for rank, position in waiting.items() if position.started is False]
    if 0 < len(not_begun) < len(waiting):
        text = f"has called {first[2]} but its GPU has not begun it: an earlier kernel hangs there"
        return [blame(rank, text) for rank in sorted(not_begun)]
    text = f"all ranks are {next(iter(waiting.values()))}, and it does not end: a link, a switch or a GPU's DMA hangs"
    return [Finding(level="error", check="hang", problem=text)]


def _nobody_waits(snapshots: Mapping[int, Snapshot], blame: Any) -> list[Finding]:
    """No rank is in a collective: those that are behind are named, or else what all do is."""
    ahead = max(snap.step for snap in snapshots.values())
    behind = [rank for rank, snap in snapshots.items() if snap.step < ahead]
    if behind:
        return [
            blame(rank, f"is at step {snapshots[rank].step}, others at {ahead}: it is {_doing(snapshots[rank])}")
            for rank in sorted(behind)
        ]
    idle = max(snap.idle_s for snap in snapshots.values())
    stalled = [rank for rank, snap in snapshots.items() if snap.idle_s > idle / 2]
    places = Counter(f"{snapshots[rank].phase}, at {snapshots[rank].place}" for rank in stalled)
    text = f"no rank waits for another, {len(stalled)} stand still in {places.most_common(1)[0][0]}"
    ranks = tuple(sorted(stalled)) if len(stalled) < len(snapshots) else ()
    return [Finding(level="error", check="hang", problem=text, ranks=ranks)]


def _doing(snap: Snapshot) -> str:
    return f"in {snap.phase} of step {snap.step} for {snap.idle_s:.0f} s, at {snap.place}"


def _is_of_a_peer(error: str) -> bool:
    """Whether an exception only tells that another rank has gone."""
    return any(
        word in error for word in ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Timed out")
    )
