"""Shows what `hfscale check --collectives` has found."""

import sysconfig
from collections.abc import Sequence

from hfscale.check.rehearsal.entries import Difference, Side
from hfscale.check.rehearsal.launch import Rehearsal

_INNERMOST = 3
"""Calls inside of libraries that are shown, below those of the user."""
_OPTIONAL = ("evaluation", "save", "end of data")
_KINDS = {
    "entry": "they enter different collectives",
    "size": "they enter the same collective with different sizes",
    "dtype": "they enter the same collective with different types",
    "arguments": "they enter the same collective with different arguments",
    "module": "they gather the parameters of different modules, and compute with a mixture of both",
    "missing": "the second has ended without entering it",
    "silent": "the second does not enter it, and no rank has gone on for long",
}


def text_of(found: Rehearsal) -> str:
    """Return the report for people.

    Args:
        found (`Rehearsal`): what was found.
    """
    if found.difference is not None:
        return "\n".join([*_difference(found.difference), "", *_covered(found)])
    if found.failure:
        return "\n".join(["The command failed by itself:", "", found.failure, "", *_covered(found)])
    return "\n".join(["No collective depends on the rank.", *_covered(found)])


def _difference(one: Difference) -> list[str]:
    lines = [
        f"Ranks {one.a.rank} and {one.b.rank} do not match in collective {one.position} of group {one.group}: "
        f"{_KINDS[one.kind]}.",
    ]
    for side in (one.a, one.b):
        lines += ["", *_side(side)]
    return lines


def _side(side: Side) -> list[str]:
    if side.entry is None:
        return [f"Rank {side.rank}: {side.ended or 'has entered nothing'}"]
    what = f"{side.entry.label}, in {side.entry.place}"
    title = f"{side.ended}; its last collective was {what}" if side.ended else what
    return [
        f"Rank {side.rank}: {title}",
        *(f"  {frame}" for frame in shown_frames(side.entry.stack)),
    ]


def shown_frames(stack: Sequence[str]) -> list[str]:
    """Return the calls of a stack that say where it comes from: those of the user, and the innermost.

    Args:
        stack (`Sequence[str]`): the calls, the innermost last.
    """
    libraries = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], "<frozen")
    own = [index for index, frame in enumerate(stack) if not frame.startswith(libraries)]
    kept = sorted({*own, *range(max(0, len(stack) - _INNERMOST), len(stack))})
    return [stack[index] for index in kept]


def _covered(found: Rehearsal) -> list[str]:
    total = sum(found.phases.values())
    phases = ", ".join(f"{phase} {number}" for phase, number in sorted(found.phases.items()))
    lines = [
        f"Compared: {total} collectives of {found.world_size} ranks in {len(found.groups)} groups ({phases}).",
        f"Steps: {found.events.get('step', 0)}.",
    ]
    reached = [name for name in _OPTIONAL if found.events.get(name)]
    missed = [name for name in _OPTIONAL if not found.events.get(name)]
    lines.append(
        f"Reached: {', '.join(reached) or 'none'}; not reached: {', '.join(missed) or 'none'}."
    )
    return lines
