"""Lets a training use what few runs ask for, or what stands above it, without importing the package that has it.

Classes that an option of a callback asks for (`hfscale.replays`) would be loaded by each run, and a package that reads
what a training writes (`hfscale.report`) must not be imported by it. `hfscale/__init__.py`, which is always imported
first, registers where they are; the module is loaded when `late` is first called.
"""

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], Any]] = {}


def register_late(name: str, load: Callable[[], Any]) -> None:
    """Register what loads an object; a later call replaces an earlier one.

    Args:
        name (`str`): the name by which it is asked for.
        load (`Callable`): called by `late`.
    """
    _loaders[name] = load


def late(name: str) -> Any:
    """Return a registered object, and load its module first where no one has.

    Args:
        name (`str`): the name of the object.
    """
    return _loaders[name]()
