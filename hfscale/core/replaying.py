"""Says whether a part of a step is being computed a second time, only to be compared: nothing counts or records it."""

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


def is_replaying() -> bool:
    """Return whether this process is in `replaying`."""
    return _depth > 0


@contextmanager
def replaying() -> Iterator[None]:
    """Mark what runs in the `with` block as a repetition."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
