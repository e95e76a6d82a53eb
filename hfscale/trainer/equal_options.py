"""Checks that all ranks were given the same options: many decide whether the ranks meet in an exchange."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from hfscale.core.collectives import START
from hfscale.core.options import Options
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError

OF_ONE_MACHINE = ("baseline", "peak_tflops", "usd_per_gpu_hour")
"""Options about a machine or its files, which may differ: no exchange depends on them."""


def check_equal_options(callbacks: Iterable[object]) -> None:
    """Check that the options of callbacks are equal on all ranks. Every rank must call it.

    Args:
        callbacks (`Iterable`): the callbacks, the same ones on every rank; those without `options` are left out.

    Raises:
        UsageError: an option differs; raised on every rank. Otherwise some ranks would wait for ever for the others.
    """
    START.combine("start: options", own_options(callbacks), _check)


def own_options(callbacks: Iterable[object]) -> dict[str, str]:
    """Return the options of callbacks as texts, by their names.

    Args:
        callbacks (`Iterable`): as for `check_equal_options`.
    """
    found = {}
    for callback in callbacks:
        options = getattr(callback, "options", None)
        if not isinstance(options, Options):
            continue
        for option in fields(options):
            if option.name not in OF_ONE_MACHINE:
                found[option.name] = _shown(getattr(options, option.name))
    return found


def _shown(value: Any) -> str:
    """Return a value as text; of an object whose text is another one in each process, its type."""
    if value is None:
        return "not given"
    is_plain = isinstance(value, bool | int | float | str | tuple | list)
    return str(value) if is_plain else type(value).__name__


def _check(ranks: list[Mapping[str, str]]) -> None:
    first = ranks[0]
    for number, other in enumerate(ranks):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            name = names[0]
            values = f"{first.get(name)} on rank 0, {other.get(name)} on rank {number}"
            raise UsageError(f"{spelled(name)} differs: {values}; give the same on all ranks")
