"""How much host memory a process can still allocate, also in a container with a limit."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Names(NamedTuple):
    """Names of the files of a control group, and of its statistic of unused page cache, in one of the two versions."""

    limit: str
    used: str
    cache: str


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping and without exceeding the limit of a control group.

    A limit holds for a group and all groups below it, so each level from the group of this process upwards is read
    (https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html). Page cache that has not been used
    lately (`inactive_file`) counts as free: the kernel drops it before a limit is exceeded.

    Args:
        root (`Path`): folder below which `proc/self` and the mounted control groups are.
    """
    available = int(psutil.virtual_memory().available)
    for group in _memory_groups(root):
        names = _VERSION_1
        if (group / _VERSION_2.used).is_file():
            names = _VERSION_2
        limit = _number(group / names.limit)
        used = _number(group / names.used)
        if limit is None or used is None:
            continue
        cache = _statistic(group / "memory.stat", names.cache)
        available = min(available, max(limit - used + cache, 0))
    return available


def _memory_groups(root: Path) -> Iterator[Path]:
    """Yield the folder of this process's memory control group and those above it, of both versions."""
    mounts = {}  # hierarchy -> folder where it is mounted, and the group that is visible there
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ")
        fields = mount.split(" ")
        mounted_at = fields[4]
        visible = fields[3]
        if kind == "cgroup2":
            mounts[""] = mounted_at, visible
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts["memory"] = mounted_at, visible
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        hierarchy = controllers
        if "memory" in controllers.split(","):
            hierarchy = "memory"
        if hierarchy not in mounts:
            continue
        mounted_at, visible = mounts[hierarchy]
        # In a container the group may be named by its path on the machine, which is not visible.
        below = Path()
        if path.startswith(visible):
            below = Path(path.removeprefix(visible).lstrip("/"))
        for group in (below, *below.parents):
            yield root / mounted_at.lstrip("/") / group


def _lines(path: Path) -> list[str]:
    if not path.is_file():  # not Linux
        return []
    return path.read_text(encoding="utf-8").splitlines()


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max`, and for the root group, which has no such file."""
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    fields = (line.split() for line in _lines(path))
    return next((int(value) for key, value in fields if key == name), 0)
