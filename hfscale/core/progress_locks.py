"""Gives a forked process its own locks for progress bars.

tqdm guards its output by a lock of `multiprocessing`, which all processes share that are forked from one where tqdm is
imported. A process that is killed while it holds the lock never releases it, and every process that is forked later
waits for ever at its first progress bar, such as that of `from_pretrained`.
"""

import sys
import threading
from typing import Any


def own_progress_locks() -> None:
    """Replace tqdm's locks in this process. Call it in a forked process, before it has threads."""
    module = sys.modules.get("tqdm.std")
    if module is None:
        return
    lock = threading.RLock()
    module.tqdm.set_lock(lock)  # also where there was none yet: classes below it take it
    waiting: list[Any] = module.tqdm.__subclasses__()
    while waiting:
        kind = waiting.pop()
        if "_lock" in vars(kind):
            kind.set_lock(lock)
        waiting += kind.__subclasses__()
