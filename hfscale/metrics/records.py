"""The files of measurements in a run's output directory, each a JSON object per line.

| file | one line per | holds |
|---|---|---|
| `scaling.jsonl` | log | `step`, `time`, metric keys, Trainer's loss, gradient norm, learning rate, epoch |
| `hfscale_timeline.jsonl` | event | `event` (`launch`, `workload`, `save`, `finding`, `end`), `time`, `step` … |
| `hfscale_ranks.jsonl` | log, thinned for many ranks | `step`, `time` and lists with a number per rank |

Times are Unix seconds. One process writes; a reader skips a line that a killed process left unfinished.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hfscale.checkpoint.store import write_atomically

JSONL_NAME = "scaling.jsonl"
TIMELINE_NAME = "hfscale_timeline.jsonl"
RANKS_NAME = "hfscale_ranks.jsonl"
RANKS_PER_LINE_BUDGET = 64
"""Of more ranks than these only every (ranks / budget)-th log is kept, so that the file grows as that of 64 ranks."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole record of a file; [] where there is none."""
    return list(_records(path))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield record


def append_record(path: Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Add one line; a number that JSON does not know (NaN, infinity) is left out. `durable` waits for the disk."""
    known = {k: v for k, v in record.items() if not (isinstance(v, float) and not math.isfinite(v))}
    line = f"{json.dumps(known)}\n".encode()
    with path.open("ab", buffering=0) as file:  # in one piece, so that nobody reads half a line
        while line:
            line = line[file.write(line) :]
        if durable:
            os.fsync(file.fileno())


class RankLines:
    """Writes `hfscale_ranks.jsonl`; every callback that measures ranks has its own, with its own lines.

    Args:
        output_dir (`Path`): the run's; made where nothing has made it yet.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path, self._logs = output_dir / RANKS_NAME, 0

    def add(self, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """A number per rank of each measure, one line per log; zeros everywhere mean that nothing was measured."""
        ranks = max(map(len, numbers.values()))
        self._logs += 1
        known = {key: [round(x, 5) for x in row] for key, row in numbers.items() if any(row)}
        if ranks > 1 and known and self._logs % max(1, ranks // RANKS_PER_LINE_BUDGET) == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_record(self._path, {"step": step, "time": time.time(), **known})


def last_sign_of_life(output_dir: Path) -> float | None:
    """When the run in this folder last wrote a measurement; None where it never did."""
    times = [
        record["time"]
        for name in (JSONL_NAME, TIMELINE_NAME)
        for record in _records(output_dir / name)
        if isinstance(record.get("time"), int | float)
    ]
    return max(times, default=None)


def begin_records(output_dir: Path, step: int) -> None:
    """Prepare the files for a training that goes on from `step`.

    Measurements of later steps are dropped, as those steps will be taken again; the timeline keeps all. At step 0 what
    another run left is put beside, under a name with its time; but a timeline without an end, where there is no
    checkpoint, is of a launch that died before it had anything to go on from: this one goes on in its place.
    """
    timeline = output_dir / TIMELINE_NAME
    for name in (JSONL_NAME, RANKS_NAME):
        path = output_dir / name
        if not path.is_file():
            continue
        if step == 0:
            _put_beside(path)
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        write_atomically(path, "".join(f"{line}\n" for line in lines if _is_up_to(line, step)))
    if timeline.is_file() and not timeline.read_bytes().endswith(b"\n"):
        with timeline.open("a", encoding="utf-8") as file:
            file.write("\n")  # a killed process left half a line: the next is not to be its other half
    has_ended = any(record["event"] == "end" for record in read_events(output_dir))
    if step == 0 and timeline.is_file() and (has_ended or any(output_dir.glob("checkpoint-*"))):
        _put_beside(timeline)


def read_events(output_dir: Path) -> list[dict[str, Any]]:
    """The run's timeline; [] where there is none."""
    return [record for record in _records(output_dir / TIMELINE_NAME) if isinstance(record.get("event"), str)]


def _is_up_to(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int | float) and record["step"] <= step


def _put_beside(path: Path) -> None:
    path.rename(path.with_name(f"{path.stem}-until-{int(path.stat().st_mtime)}{path.suffix}"))
