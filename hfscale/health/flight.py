"""Where this rank is in its collectives, read from torch's Flight Recorder.

The recorder keeps the last 2,000 collectives of NCCL and of gloo unless `TORCH_FR_BUFFER_SIZE` is 0. torch 2.13 has no
public way to read it from inside the process (`torch.distributed.flight_recorder` analyses files that NCCL's own
watchdog wrote after its timeout), so the two functions with a leading underscore are called here and nowhere else.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch._C import _distributed_c10d

POINT_TO_POINT = "/p2p"
"""Behind a group's name: its sends and receives, which have numbers of their own."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A rank's place in the collectives of one process group."""

    group: str
    """The group's name, the same on all its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group; empty where the recorder does not tell (gloo)."""
    entered: int
    """Number of the last collective this rank entered."""
    waiting: int | None = None
    """Number of the first one it entered that is not finished; None: it waits for none."""
    operation: str | None = None
    """That one's name: `all_reduce`."""
    sizes: str | None = None
    """The shapes of its inputs."""
    started: bool | None = None
    """NCCL: whether its kernel runs on the GPU; None where that is not known (gloo)."""

    def __str__(self) -> str:
        if self.waiting is None:
            return f"past {self.entered} of group {self.group}"
        return f"in {self.operation} {self.sizes} ({self.waiting} of group {self.group})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ranks": list(self.ranks)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Position":
        """The reverse of `to_dict`."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


def positions() -> list[Position]:
    """This rank's place in each process group; empty where the recorder is off or has seen nothing."""
    return positions_of([json.loads(dump) for dump in _dumps()])


def positions_of(dumps: list[dict[str, Any]]) -> list[Position]:
    """The places that one rank's recorder dumps (JSON of torch, version 2.x) tell."""
    found = []
    for dump in dumps:
        members = {
            config["name"] or name: tuple(json.loads(config["ranks"] or "[]"))
            for name, config in dump.get("pg_config", {}).items()
        }
        entries: dict[str, list[dict[str, Any]]] = {}
        for entry in dump.get("entries", []):
            group = entry["process_group"][0] + (POINT_TO_POINT if entry["is_p2p"] else "")
            entries.setdefault(group, []).append(entry)
        found += [_position(name, members.get(name, ()), mine) for name, mine in entries.items()]
    return found


def _position(name: str, ranks: tuple[int, ...], entries: list[dict[str, Any]]) -> Position:
    number = "p2p_seq_id" if name.endswith(POINT_TO_POINT) else "collective_seq_id"
    active = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    entered = max(entry[number] for entry in entries)
    if not active:
        return Position(group=name, ranks=ranks, entered=entered)
    first = min(active, key=lambda entry: entry[number])
    is_nccl = first["profiling_name"].startswith("nccl:")
    return Position(
        group=name,
        ranks=ranks,
        entered=entered,
        waiting=first[number],
        operation=first["profiling_name"].partition(":")[2],
        sizes=str(first["input_sizes"]),
        started=first["state"] == "started" if is_nccl else None,
    )


def _dumps() -> list[str]:
    """The recorder's JSON: gloo's, and NCCL's where torch is built with it."""
    found = [_distributed_c10d._dump_fr_trace_json(True, False)]
    if hasattr(_distributed_c10d, "_dump_nccl_trace_json"):
        found.append(_distributed_c10d._dump_nccl_trace_json(True, False))
    return [dump.decode() if isinstance(dump, bytes) else dump for dump in found]
