"""Best-effort work, which a run can do without: its failures are counted and logged, and the run continues.

Deleting old checkpoints, the status file, the files of measurements, remote copies and GPU telemetry are such work. A
network file system or a store that is away for a moment must not end a run.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hfscale.core.logging import get_logger
from hfscale.core.redaction import redact

logger = get_logger(__name__)

WARN_EVERY_S = 300.0
"""Seconds between two warnings about the same work at the same place."""

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_warned: dict[tuple[str, str], tuple[float, int]] = {}


@contextmanager
def best_effort(
    work: str, where: object, errors: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Count and log an error of the code inside, and continue after it.

    Args:
        work (`str`): what the code does, as a noun, such as "deleting old checkpoints"; the report shows it.
        where (`object`): the folder, file or URL that it works on.
        errors (`tuple[type[Exception], ...]`): the errors that are handled.
    """
    try:
        yield
    except errors as error:
        count_failure(work, where, error)


def count_failure(work: str, where: object, error: Exception) -> None:
    """Count a failure of best-effort work; log it unless the last warning about this work was a short time ago.

    Args:
        work (`str`): what failed, as for `best_effort`.
        where (`object`): where it failed.
        error (`Exception`): the error.
    """
    key = (work, str(where))
    with _lock:
        _counts[work] += 1
        warned_at, since = _warned.get(key, (float("-inf"), 0))
        is_due = time.monotonic() - warned_at >= WARN_EVERY_S
        _warned[key] = (time.monotonic(), 0) if is_due else (warned_at, since + 1)
    if is_due:
        more = f", and {since} more since the last warning" if since else ""
        text = redact(" ".join(str(error).split()))[:400]
        logger.warning(
            "%s failed at %s: %s%s; continuing without it",
            work,
            where,
            text or type(error).__name__,
            more,
        )


def take_counts() -> dict[str, int]:
    """Return how often each work has failed since the last call."""
    with _lock:
        counts = dict(_counts)
        _counts.clear()
    return counts


def return_counts(counts: dict[str, int]) -> None:
    """Give back what `take_counts` returned, if it could not be recorded."""
    with _lock:
        _counts.update(counts)
