"""Alarms: what somebody should learn at once. Whoever detects it raises it; recorders and webhooks listen.

An alarm is raised on one process only: the main process, or for a hang the one that reports it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hfscale.core.best_effort import count_failure
from hfscale.core.findings import Level

HANG = "hang"
LOSS = "loss"
PREEMPTION = "preemption"
RESTART = "restart"
DISK = "disk"
END = "end"
HEALTH = "health"
"""Everything else that the health checks find during the run."""
KINDS = (HANG, LOSS, PREEMPTION, RESTART, DISK, END, HEALTH)
LISTENING = "passing on an alarm"
"""Name of this work in warnings."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Describes one thing that happened."""

    kind: str
    """One of `KINDS`."""
    text: str
    """What happened, in one line."""
    step: int
    """The optimizer step."""
    level: Level = "warning"
    """How bad it is; an expected event is a `note`."""
    about: str = ""
    """What it is about, such as `straggler: rank 3 (node-b)`, if it may be withdrawn later; else empty."""
    withdraws: str = ""
    """The `about` of earlier alarms that do not hold any more; else empty. Such an alarm is no news by itself."""
    time: float = field(default_factory=time.time)
    """Unix seconds."""


_listeners: dict[int, Callable[[Alarm], None]] = {}
_settlers: dict[int, Callable[[float], None]] = {}
_listened = 0


def listen(
    listener: Callable[[Alarm], None], settle: Callable[[float], None] | None = None
) -> Callable[[], None]:
    """Pass every later alarm of this process to a listener, in the thread that raises it.

    Args:
        listener (`Callable[[Alarm], None]`): called for each alarm; it must return at once.
        settle (`Callable[[float], None]`, *optional*): waits until the listener has finished its work, at most the
            given seconds. It is called before a process ends without Python's own end.

    Returns:
        `Callable[[], None]`: ends it.
    """
    global _listened
    _listened += 1
    number = _listened
    _listeners[number] = listener
    if settle is not None:
        _settlers[number] = settle

    def end() -> None:
        _listeners.pop(number, None)
        _settlers.pop(number, None)

    return end


def raise_alarm(
    kind: str,
    text: str,
    *,
    step: int,
    level: Level = "warning",
    about: str = "",
    withdraws: str = "",
) -> None:
    """Tell all listeners of this process. An error of a listener is counted and logged; it is not raised.

    Args:
        kind (`str`): one of `KINDS`.
        text (`str`): what happened, in one line.
        step (`int`): the optimizer step.
        level (`str`): how bad it is.
        about (`str`): what it is about, for a later withdrawal.
        withdraws (`str`): what the withdrawn alarms are about.
    """
    alarm = Alarm(kind=kind, text=text, step=step, level=level, about=about, withdraws=withdraws)
    for listener in list(_listeners.values()):
        try:
            listener(alarm)
        except Exception as error:
            count_failure(LISTENING, kind, error)


def settle_alarms(limit_s: float) -> None:
    """Wait until the listeners have finished their work, before this process ends at once.

    Args:
        limit_s (`float`): the longest time to wait for each listener, seconds.
    """
    for settle in list(_settlers.values()):
        settle(limit_s)


def raise_end(status: str, step: int, reason: str | None) -> None:
    """Raise the alarm about the end of a run.

    Args:
        status (`str`): `completed`, `preempted` or `failed`.
        step (`int`): its last step.
        reason (`str`, *optional*): why it was preempted or failed.
    """
    levels: dict[str, Level] = {"completed": "note", "failed": "error"}
    why = f": {reason}" if reason else ""
    raise_alarm(
        END,
        f"the run is {status} at step {step}{why}",
        step=step,
        level=levels.get(status, "warning"),
    )
