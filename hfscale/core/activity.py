"""What the threads of this process do that may take long, as reported by the code that does it.

The hang watch (`hfscale.health`) reads it, so that a rank that writes a large checkpoint is not taken for one that
hangs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Kind = Literal["saving", "exchanging"]
"""`saving`: writes or copies a checkpoint, or waits for one; `exchanging`: exchanges with other islands."""
_of_thread: dict[int, Kind] = {}
"""The innermost activity of each thread that has one, by `threading.get_ident()`. A thread changes only its own."""


@contextmanager
def activity(kind: Kind) -> Iterator[None]:
    """Report what the calling thread does within the `with` block, or within the function that it decorates.

    Args:
        kind (`Kind`): what it does.
    """
    thread = threading.get_ident()
    outer = _of_thread.get(thread)
    _of_thread[thread] = kind
    try:
        yield
    finally:
        if outer is None:
            del _of_thread[thread]
        else:
            _of_thread[thread] = outer


def activity_of(thread_id: int) -> Kind | None:
    """Return what a thread does that may take long; None if it has reported nothing.

    Args:
        thread_id (`int`): the thread's `threading.get_ident()`.
    """
    return _of_thread.get(thread_id)


def threads_in(kind: Kind) -> set[int]:
    """Return the threads that have reported an activity, as `threading.get_ident()`.

    Args:
        kind (`Kind`): the activity.
    """
    return {thread for thread, running in list(_of_thread.items()) if running == kind}
