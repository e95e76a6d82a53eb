"""Lets a callback use a class that one of its options asks for, without importing the package that has it.

Few runs compute steps again (`hfscale.replays`), and what does it would be loaded by each. `hfscale/__init__.py`,
which is always imported first, registers where the class is; its module is loaded when `late_class` is first called.
"""

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], type[Any]]] = {}


def register_late_class(name: str, load: Callable[[], type[Any]]) -> None:
    """Register what loads a class; a later call replaces an earlier one.

    Args:
        name (`str`): the name of the class.
        load (`Callable`): called by `late_class`.
    """
    _loaders[name] = load


def late_class(name: str) -> type[Any]:
    """Return a registered class, and load its module first where no one has.

    Args:
        name (`str`): the name of the class.
    """
    return _loaders[name]()
