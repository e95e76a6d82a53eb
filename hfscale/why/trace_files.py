"""The format of a trace: `hfscale_trace/step-N/rank-R.jsonl` in the output directory of a run.

The first line is the header, with `format`, `step`, `rank`, `world_size`, `strategy`, `setup` (of `run_setup`, rank 0
only) and `parts` (what was traced). Each further line is one event, in the order in which it happened:

    ["forward", 0, "model.layers.0.mlp", "output", [[2, 16, 32], "float32", "…hash…", 3.25, -0.5]]

that is: phase, micro-batch, name of the module or parameter, name of the value, and the digest of a tensor (shape,
format, hash of its bits, sum of squares, sum) or a plain value. The last line is `["end", 0, "", "lines", n]`; a trace
without it is not compared. A trace ends early, with `"truncated"` in place of `"lines"`, if it reaches `MAX_LINES`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfscale.core.run_files import TRACES_NAME
from hfscale.core.text_files import bounded_lines, parse_json
from hfscale.errors import UsageError

FORMAT = 2
"""2: hashes of bits on a CPU are XXH3 (`hfscale.core.bit_hash`)."""
MAX_LINES = 400_000
"""Lines of one rank and step, about 50 MB."""
PHASES = (
    *(
        "settings",
        "weights",
        "states",
        "batch",
        "rng",
        "forward",
        "loss",
        "backward",
        "local_gradient",
        "gradient",
    ),
    *("clipping", "optimizer", "updated", "end"),
)
"""The phases of a step. Within one micro-batch `forward` comes before `backward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of a trace."""

    phase: str
    """One of `PHASES`."""
    micro: int
    """The micro-batch, counted from 0."""
    name: str
    """The module or parameter."""
    value_name: str
    """What of it: `output`, `input`, `exp_avg`, or the name of an operation."""
    value: Any
    """The digest of a tensor as a list, or a plain value."""

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What identifies the event in a run of the same layout."""
        return (self.phase, self.micro, self.name, self.value_name)

    @property
    def is_tensor(self) -> bool:
        """Whether the value is the digest of a tensor."""
        return (
            isinstance(self.value, list)
            and len(self.value) == 5
            and isinstance(self.value[0], list)
        )

    @property
    def digest_hash(self) -> str:
        """The hash of the bits of the tensor."""
        return str(self.value[2])

    @property
    def square(self) -> float:
        """The sum of the squares of the elements."""
        return float(self.value[3])

    @property
    def sum(self) -> float:
        """The sum of the elements."""
        return float(self.value[4])

    @property
    def elements(self) -> int:
        """The number of the elements."""
        count = 1
        for size in self.value[0]:
            count *= size
        return count

    def to_line(self) -> str:
        """Return the line of the file."""
        return json.dumps([self.phase, self.micro, self.name, self.value_name, self.value]) + "\n"


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The trace of one step on one rank."""

    rank: int
    """The rank."""
    header: dict[str, Any]
    """The first line."""
    events: Sequence[Event]
    """The others."""


def trace_path(output_dir: Path, step: int, rank: int) -> Path:
    """Return the file of a trace.

    Args:
        output_dir (`Path`): the output directory of the run.
        step (`int`): the optimizer step, counted from 1.
        rank (`int`): the rank.
    """
    return output_dir / TRACES_NAME / f"step-{step}" / f"rank-{rank}.jsonl"


def read_trace(folder: Path) -> list[RankTrace]:
    """Read the traces of all ranks of one step.

    Args:
        folder (`Path`): `hfscale_trace/step-N`.

    Returns:
        `list[RankTrace]`: by rank.

    Raises:
        UsageError: a file is not a complete trace, has another format, or a rank is missing.
    """
    found = []
    for path in folder.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal():
            found.append(_read(path, int(number)))
    found.sort(key=lambda trace: trace.rank)
    expected = found[0].header.get("world_size") if found else None
    if not found or [trace.rank for trace in found] != list(range(expected or 0)):
        raise UsageError(
            f"{folder} lacks traces of some of its {expected} ranks: copy the files of all nodes into it"
        )
    return found


def _read(path: Path, rank: int) -> RankTrace:
    try:
        lines = bounded_lines(path)
        header = parse_json(next(lines, ""))
        events = [_event(parse_json(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read as a trace: {error}: trace the step again"
        ) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError(
            f"{path} is not a trace of format {FORMAT}, which this version of hfscale reads"
        )
    if not events or events[-1].phase != "end":
        raise UsageError(
            f"{path} is incomplete: the run ended during the traced step; trace it again"
        )
    return RankTrace(rank=rank, header=header, events=events[:-1])


def _event(line: Any) -> Event:
    phase, micro, name, value_name, value = line
    return Event(
        phase=str(phase), micro=int(micro), name=str(name), value_name=str(value_name), value=value
    )
