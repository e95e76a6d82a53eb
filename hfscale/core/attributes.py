"""Replaces an attribute of one object for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an instance another attribute, or method, in the `with` block.

    Args:
        owner (`Any`): the instance.
        name (`str`): the attribute.
        value (`Any`): its value in the block.
    """
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)
