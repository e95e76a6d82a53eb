"""Writes and reads the files of measurements in a run's output directory; each line is one JSON object.

| file | one line per | holds |
|---|---|---|
| `scaling.jsonl` | log | `step`, `time`, metric keys, Trainer's loss, gradient norm, learning rate, epoch |
| `hfscale_timeline.jsonl` | event | `time`, `event` (`launch`, `setup`, `job`, `save`, `finding`, `end` …) |
| `hfscale_ranks.jsonl` | log, thinned for many ranks | `step`, `time` and lists with one number per rank |
| `hfscale_fingerprints.jsonl` | log | `step`, `time`, hashes of the data and of the random states |

Times are Unix seconds. Only the main process writes. A reader skips a line that a killed process left unfinished.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hfscale.core.best_effort import best_effort
from hfscale.core.durable_files import write_atomically
from hfscale.core.redaction import redact_json
from hfscale.core.run_files import (
    FINGERPRINTS_NAME,
    JSONL_NAME,
    RANKS_NAME,
    STATUS_NAME,
    TIMELINE_NAME,
)
from hfscale.core.text_files import bounded_lines, open_regular, parse_json, read_json

RANKS_PER_LINE_BUDGET = 64
"""With more ranks, only every (ranks / budget)-th log is kept, so that the file grows no faster than with 64 ranks."""
METRIC_PREFIXES = (
    "scaling/",
    "checkpoint/",
    "gpu/",
    "lr_scaling/",
    "recovery/",
    "islands/",
    "moe/",
    "health/",
)
"""The metric keys of hfscale's callbacks begin with one of these."""
_MOST_STEPS = 2**62
_PART_BYTES = 2**22
_LONGEST_LINE_BYTES = 2**25
_MOST_SKIPPED_BYTES = 2**27
"""Bytes of lines that are no records after which the rest of a file is not read."""
_COMPARED_BYTES = 256
"""Bytes before the place up to which a file was read that tell whether it is still the same file; lines have times."""
WRITING = "writing measurements"
"""Name of this work in warnings and in the report."""


def unix_time() -> float:
    """Return the Unix time in seconds, for what is written down.

    It is set and steps at any moment: waits, deadlines and durations are of `time.monotonic`, which ruff checks.
    """
    return time.time()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return every complete record of a file, or [] if the file does not exist.

    Args:
        path (`Path`): one of the files of this module. Lines that are not JSON objects with a `step` are skipped.
    """
    return list(_records(path))


def read_events(output_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run's timeline, or [] if it has none.

    Args:
        output_dir (`Path`): the output directory of the run.
    """
    return [
        record
        for record in _records(output_dir / TIMELINE_NAME)
        if isinstance(record.get("event"), str)
    ]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for part, _ in RecordTail(path).read_in_parts():
        yield from part


def _record(line: str | bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is not a JSON object with a `step`."""
    text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
    try:
        record = parse_json(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def read_status(output_dir: Path) -> dict[str, Any] | None:
    """Return the content of `hfscale_status.json`, or None if the file is missing or not readable JSON."""
    try:
        fields = read_json(output_dir / STATUS_NAME)
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


class RecordTail:
    """Reads a file of records again and again, each time only what was appended.

    A file that was cut or replaced, as at a resume, is read from its beginning. A line that is not complete yet is
    read when its rest is there.

    Args:
        path (`Path`): one of the files of this module; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._skipped_bytes = 0
        self._read_bytes = 0
        self._last_bytes = b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the complete records that are new, and whether the file has begun anew.

        Raises:
            OSError: the file exists and cannot be read.
        """
        records: list[dict[str, Any]] = []
        has_begun_anew = False
        for part, began_anew in self.read_in_parts():
            if began_anew:
                records.clear()
            has_begun_anew |= began_anew
            records += part
        return records, has_begun_anew

    def read_in_parts(self) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Yield what `read` returns in parts of some MiB of the file, so that a long file is never all in memory.

        Raises:
            OSError: the file exists and cannot be read.
        """
        before = -1
        while before != self._read_bytes:
            before = self._read_bytes
            part = self._read_part()
            yield part
            if part[1]:
                before = -1

    def _read_part(self) -> tuple[list[dict[str, Any]], bool]:
        try:
            with open_regular(self._path) as file:
                return self._read(file)
        except (FileNotFoundError, IsADirectoryError):
            began_anew = self._read_bytes > 0
            self._begin()
            return [], began_anew

    def _begin(self) -> None:
        self._read_bytes = 0
        self._last_bytes = b""

    def _read(self, file: BinaryIO) -> tuple[list[dict[str, Any]], bool]:
        file.seek(self._read_bytes - len(self._last_bytes))
        began_anew = file.read(len(self._last_bytes)) != self._last_bytes
        if began_anew:
            self._begin()
        file.seek(self._read_bytes)
        new = file.read(_PART_BYTES)
        end = new.rfind(b"\n") + 1
        while end == 0 and len(new) < _LONGEST_LINE_BYTES and (more := file.read(_PART_BYTES)):
            new += more
            end = new.rfind(b"\n") + 1
        is_at_the_end = not file.read(1)
        if end < len(new) and is_at_the_end and _record(new[end:]) is not None:
            end = len(new)  # a whole object, whose line end is missing
        if end == 0 and len(new) >= _LONGEST_LINE_BYTES:
            end = len(new)  # a part of a line that is no record; its other parts are none either
            self._skipped_bytes += end
            if self._skipped_bytes > _MOST_SKIPPED_BYTES:  # the file has no lines, or a hole
                end = max(file.seek(0, os.SEEK_END) - self._read_bytes, end)
        self._last_bytes = (self._last_bytes + new[:end])[-_COMPARED_BYTES:]
        self._read_bytes += end
        return [
            record for line in new[:end].split(b"\n") if (record := _record(line)) is not None
        ], began_anew


def append_record(
    path: Path, record: Mapping[str, Any], *, durable: bool = False, verbatim: bool = False
) -> None:
    """Append one line to a file.

    Args:
        path (`Path`): the file.
        record (`Mapping[str, Any]`): the record; numbers that JSON cannot hold (NaN, infinity) are left out.
        durable (`bool`): whether to wait until the line is on disk.
        verbatim (`bool`): whether to keep the texts as they are; otherwise secrets in them are redacted.
    """
    known = {k: v for k, v in record.items() if not (isinstance(v, float) and not math.isfinite(v))}
    line = f"{json.dumps(known if verbatim else redact_json(known))}\n".encode()
    # One write call, so that a reader never sees half a line
    with path.open("ab", buffering=0) as file:
        while line:
            line = line[file.write(line) :]
        if durable:
            os.fsync(file.fileno())


class RankLines:
    """Writes lines of `hfscale_ranks.jsonl`. Every callback that measures ranks has its own instance.

    Args:
        output_dir (`Path`): the output directory of the run; it is created if it does not exist.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / RANKS_NAME
        self._logs = 0
        with best_effort(WRITING, output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Write the line of one log.

        Args:
            step (`int`): the optimizer step.
            numbers (`Mapping[str, Sequence[float]]`): one number per rank of each measure, (ranks,). A measure that is
                0 on every rank was not measured, and is left out.
        """
        ranks = max(map(len, numbers.values()))
        self._logs += 1
        known = {key: [round(x, 5) for x in row] for key, row in numbers.items() if any(row)}
        if ranks > 1 and known and self._logs % max(1, ranks // RANKS_PER_LINE_BUDGET) == 0:
            with best_effort(WRITING, self._path):
                append_record(self._path, {"step": step, "time": time.time(), **known})


def last_sign_of_life(output_dir: Path) -> float | None:
    """Return the Unix time of the last record that a run has written, in seconds, or None if it has written none.

    Args:
        output_dir (`Path`): the output directory of the run.
    """
    times = [
        record["time"]
        for name in (JSONL_NAME, TIMELINE_NAME)
        for record in _records(output_dir / name)
        if isinstance(record.get("time"), int | float)
    ]
    return max(times, default=None)


def begin_records(output_dir: Path, step: int) -> None:
    """Prepare the files for a training that starts or resumes.

    Measurements of later steps are removed, because those steps will be repeated; the timeline keeps all its events.
    At step 0 the files of another run are renamed, with their time in the name. A timeline without an end in a folder
    without a checkpoint is kept: it belongs to a launch that died before it saved anything, and this launch continues
    that run.

    Args:
        output_dir (`Path`): the output directory of the run.
        step (`int`): the optimizer step that the training resumes from; 0 if it starts from scratch.
    """
    for name in (JSONL_NAME, RANKS_NAME, FINGERPRINTS_NAME):
        begin_lines(output_dir / name, step)
    timeline = output_dir / TIMELINE_NAME
    if timeline.is_file() and not _is_ended(timeline):
        with timeline.open("a", encoding="utf-8") as file:
            # End the half line of a killed process, so that the next record has its own line
            file.write("\n")
    has_ended = any(record["event"] == "end" for record in read_events(output_dir))
    if step == 0 and timeline.is_file() and (has_ended or any(output_dir.glob("checkpoint-*"))):
        _set_aside(timeline)


def begin_lines(path: Path, step: int) -> None:
    """Prepare one file of lines with a `step` for a training that starts or resumes, as `begin_records` does.

    Args:
        path (`Path`): the file; it may not exist yet.
        step (`int`): the optimizer step that the training resumes from; 0 if it starts from scratch.
    """
    if not path.is_file():
        return
    if step == 0:
        _set_aside(path)
        return
    lines = bounded_lines(path, errors="replace")
    write_atomically(path, "".join(f"{line.rstrip()}\n" for line in lines if _is_up_to(line, step)))


def _is_ended(path: Path) -> bool:
    """Return whether the last line of a file has its end."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return file.read(1) == b"\n"


def _is_up_to(line: str, step: int) -> bool:
    try:
        record = parse_json(line)
    except ValueError:
        return False
    return (
        isinstance(record, dict)
        and isinstance(record.get("step"), int | float)
        and record["step"] <= step
    )


def _set_aside(path: Path) -> None:
    path.rename(path.with_name(f"{path.stem}-until-{int(path.stat().st_mtime)}{path.suffix}"))


def last_logged_step(output_dir: Path) -> int:
    """Return the last step in `scaling.jsonl`, or 0 if nothing was logged.

    Args:
        output_dir (`Path`): the output directory of the run.
    """
    steps = [record["step"] for record in _records(output_dir / JSONL_NAME)]
    return int(max(filter(_is_step, steps), default=0))


def _is_step(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < _MOST_STEPS
