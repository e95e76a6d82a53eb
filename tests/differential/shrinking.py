"""Makes a program that shows a fault smaller, with few runs: choices go back to the simplest ones, many at a time.

A run of a program takes seconds, so a fault is not shrunk by hypothesis, which tries hundreds of variations.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import replace

from drawing import possible
from program import Interruption, Program

Change = Callable[[Program], Program]


def changes_of(program: Program) -> list[Change]:
    """Return what can be made simpler: each returned function takes one choice back."""
    changes: list[Change] = []
    for field in dataclasses.fields(Program):
        if field.name != "interruptions" and getattr(program, field.name) != field.default:
            changes.append(lambda given, field=field: replace(given, **{field.name: field.default}))
    for number in range(len(program.interruptions)):
        changes.append(lambda given, number=number: with_interruption(given, number, None))
        for field in dataclasses.fields(Interruption):
            if getattr(program.interruptions[number], field.name) != field.default:
                simple = {field.name: field.default}
                changes.append(lambda given, number=number, simple=simple: with_interruption(given, number, simple))
    return changes


def with_interruption(program: Program, number: int, changed: dict | None) -> Program:
    """Return the program with one interruption changed, or, with None, left out if it is not the only one."""
    interruptions = list(program.interruptions)
    if changed is not None:
        interruptions[number] = replace(interruptions[number], **changed)
    elif len(interruptions) > 1:
        interruptions[number] = Interruption(percent=0)  # marks it: the numbers of the others stay
    return replace(program, interruptions=tuple(interruptions))


def applied(program: Program, changes: Iterable[Change]) -> Program:
    """Return the program with all changes."""
    for change in changes:
        program = change(program)
    left = tuple(each for each in program.interruptions if each.percent)
    return possible(replace(program, interruptions=left or (Interruption(),)))


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return the smallest program that still fails.

    Args:
        program (`Program`): it fails.
        fails (`Callable`): runs a program and says whether it fails in the same way.
    """
    known: dict[Program, bool] = {program: True}

    def still_fails(candidate: Program) -> bool:
        if candidate not in known:
            known[candidate] = fails(candidate)
        return known[candidate]

    size = len(changes_of(program))
    while size >= 1:
        smaller = program
        changes = changes_of(program)
        for first in range(0, len(changes), size):
            candidate = applied(program, changes[first : first + size])
            if candidate != program and still_fails(candidate):
                smaller = candidate
                break
        if smaller != program:
            program = smaller
            size = min(size, len(changes_of(program)))
        elif size == 1:
            return program
        else:
            size = (size + 1) // 2
    return program
