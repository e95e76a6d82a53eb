"""How much host memory a process can still allocate, also in a container with a limit."""

from collections.abc import Iterator
from pathlib import Path

import psutil


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
        is_v2 = (group / "memory.current").is_file()
        limit = _number(group / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _number(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is None or used is None:
            continue
        cache = _statistic(
            group / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file"
        )
        available = min(available, max(limit - used + cache, 0))
    return available


def _memory_groups(root: Path) -> Iterator[Path]:
    """Yield the folder of this process's memory control group and those above it, of both versions."""
    mounts = {}  # hierarchy -> folder where it is mounted, and the group that is visible there
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounts["" if kind == "cgroup2" else "memory"] = (
                fields.split(" ")[4],
                fields.split(" ")[3],
            )
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        hierarchy = "memory" if "memory" in controllers.split(",") else controllers
        if hierarchy not in mounts:
            continue
        mounted_at, visible = mounts[hierarchy]
        below = Path(path.removeprefix(visible).lstrip("/") if path.startswith(visible) else "")
        for group in (below, *below.parents):
            yield root / mounted_at.lstrip("/") / group


def _lines(path: Path) -> list[str]:
    # Not Linux: no such file
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max`, and for the root group, which has no such file."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    fields = (line.split() for line in _lines(path))
    return next((int(value) for key, value in fields if key == name), 0)
