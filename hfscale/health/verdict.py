"""Who keeps all others waiting: from what each rank last said, and from who says nothing."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hfscale.health.collectives import KINDS
from hfscale.utils.findings import Finding

PHASES = ("arrive", "matmul", "connect", *KINDS, "matmul again", "clock", "done")
"""A rank's way through the pre-flight."""
LOCAL = ("arrive", "matmul", "matmul again")
"""Phases in which a rank waits for no other."""


def accuse(
    world_size: int, hello: Mapping[int, Mapping[str, Any]], present: Mapping[int, Mapping[str, Any]]
) -> list[Finding]:
    """Why a pre-flight did not end, as errors about ranks.

    Args:
        world_size: how many ranks there should be.
        hello: what each rank said when it arrived; a rank that never came is missing.
        present: what each rank that lives says at the end: its `phase`, and the `error` that ended it, if any.
    """
    hosts = known_hosts(world_size, hello)
    found = []
    for rank in range(world_size):
        if rank in present:
            continue
        text = "does not answer: its process is dead, stopped or cut off from the launcher"
        if rank not in hello:
            text = "never came: its process did not start, or its node does not reach the launcher's"
        found.append(Finding(level="error", check="presence", problem=text, ranks=(rank,), host=hosts.get(rank)))
    if found:
        return found
    phases = {rank: str(note["phase"]) for rank, note in present.items()}
    most = _reference(phases)
    if most is None:
        text = "are not in the same place: " + ", ".join(f"rank {rank} in {phases[rank]}" for rank in sorted(phases))
        text += "; one left a collective out, or called them in another order"
        return [Finding(level="error", check="order", problem=text, ranks=tuple(phases))]
    for rank, phase in sorted(phases.items()):
        if phase == most:
            continue
        behind = PHASES.index(phase) < PHASES.index(most)
        text = f"is {'still in' if behind else 'already in'} {phase} while the others are in {most}: "
        text += "it hangs there" if behind else f"it left out or did not finish {most} with them"
        found.append(Finding(level="error", check=most, problem=text, ranks=(rank,), host=hosts.get(rank)))
    if found:
        return found
    errors = {rank: note["error"] for rank, note in present.items() if note.get("error")}
    if 0 < len(errors) < world_size:
        return [
            Finding(level="error", check=most, problem=f"{most} failed: {error}", ranks=(rank,), host=hosts.get(rank))
            for rank, error in sorted(errors.items())
        ]
    text = f"{most} ended on no rank ({next(iter(errors.values()), 'all wait')}): the links between "
    text += f"{', '.join(sorted(set(hosts.values())))} do not carry it; look at interfaces, firewalls, NCCL_DEBUG=INFO"
    return [Finding(level="error", check=most, problem=text)]


def known_hosts(world_size: int, hello: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """The host of each rank; of one that never spoke, that of the others on its node, where they did."""
    hosts = {rank: str(note["host"]) for rank, note in hello.items()}
    for rank in set(range(world_size)) - set(hosts):
        for other, note in hello.items():
            first = other - int(note.get("local_rank", 0))
            if first <= rank < first + int(note.get("local_world_size", 0)):
                hosts[rank] = str(note["host"])
    return hosts


def _reference(phases: Mapping[int, str]) -> str | None:
    """The phase that most ranks are in: the others are to blame. None where two are as common, unless the ranks of one
    wait for nobody in it: then those hang by themselves."""
    counts = Counter(phases.values())
    (first, most), *rest = counts.most_common()
    tied = [first, *(phase for phase, count in rest if count == most)]
    waiting = [phase for phase in tied if phase not in LOCAL]
    return tied[0] if len(tied) == 1 else waiting[0] if len(waiting) == 1 else None
