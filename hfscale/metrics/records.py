"""Writes and reads the files of measurements in a run's output directory; each line is one JSON object.

| file | one line per | holds |
|---|---|---|
| `scaling.jsonl` | log | `step`, `time`, metric keys, Trainer's loss, gradient norm, learning rate, epoch |
| `hfscale_timeline.jsonl` | event | `time`, `event` (`launch`, `workload`, `job`, `save`, `finding`, `end` …) |
| `hfscale_ranks.jsonl` | log, thinned for many ranks | `step`, `time` and lists with one number per rank |

Times are Unix seconds. Only the main process writes. A reader skips a line that a killed process left unfinished.
"""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hfscale.metrics.goodput import GoodputTracker, Rate
from hfscale.utils.durable_files import write_atomically
from hfscale.utils.findings import Finding
from hfscale.utils.secondary import return_counts, secondary, take_counts

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

JSONL_NAME = "scaling.jsonl"
TIMELINE_NAME = "hfscale_timeline.jsonl"
RANKS_NAME = "hfscale_ranks.jsonl"
RANKS_PER_LINE_BUDGET = 64
"""With more ranks, only every (ranks / budget)-th log is kept, so that the file grows no faster than with 64 ranks."""
METRIC_PREFIXES = ("scaling/", "checkpoint/", "gpu/", "lr_scaling/", "recovery/", "islands/")
"""The metric keys of hfscale's callbacks begin with one of these."""
RECOVERY_PARTS = ("ending_s", "waiting_s", "starting_s", "loading_s", "first_step_s")
"""Parts of the time from a failure to the next completed step, in seconds, in their order (docs/recovery.md)."""
WRITING = "writing measurements"
"""Name of this work in warnings and in the report."""
_TRAINER_KEYS = ("loss", "grad_norm", "learning_rate", "epoch")

_process_start_is_taken = False


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return every complete record of a file, or [] if the file does not exist.

    Args:
        path (`Path`): One of the files of this module. Lines that are not JSON objects with a `step` are skipped.
    """
    return list(_records(path))


def read_events(output_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run's timeline, or [] if it has none.

    Args:
        output_dir (`Path`): The output directory of the run.
    """
    return [record for record in _records(output_dir / TIMELINE_NAME) if isinstance(record.get("event"), str)]


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
    """Append one line to a file.

    Args:
        path (`Path`): The file.
        record (`Mapping[str, Any]`): The record; numbers that JSON cannot hold (NaN, infinity) are left out.
        durable (`bool`): Whether to wait until the line is on disk.
    """
    known = {k: v for k, v in record.items() if not (isinstance(v, float) and not math.isfinite(v))}
    line = f"{json.dumps(known)}\n".encode()
    with path.open("ab", buffering=0) as file:  # one write call, so that a reader never sees half a line
        while line:
            line = line[file.write(line) :]
        if durable:
            os.fsync(file.fileno())


class RankLines:
    """Writes lines of `hfscale_ranks.jsonl`. Every callback that measures ranks has its own instance.

    Args:
        output_dir (`Path`): The output directory of the run; it is created if it does not exist.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / RANKS_NAME
        self._logs = 0

    def add(self, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        """Write the line of one log.

        Args:
            step (`int`): The optimizer step.
            numbers (`Mapping[str, Sequence[float]]`): One number per rank of each measure, (ranks,). A measure that is
                0 on every rank was not measured, and is left out.
        """
        ranks = max(map(len, numbers.values()))
        self._logs += 1
        known = {key: [round(x, 5) for x in row] for key, row in numbers.items() if any(row)}
        if ranks > 1 and known and self._logs % max(1, ranks // RANKS_PER_LINE_BUDGET) == 0:
            with secondary(WRITING, self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                append_record(self._path, {"step": step, "time": time.time(), **known})


def last_sign_of_life(output_dir: Path) -> float | None:
    """Return the Unix time of the last record that a run has written, in seconds, or None if it has written none.

    Args:
        output_dir (`Path`): The output directory of the run.
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
        output_dir (`Path`): The output directory of the run.
        step (`int`): The optimizer step that the training resumes from; 0 if it starts from scratch.
    """
    for name in (JSONL_NAME, RANKS_NAME):
        begin_lines(output_dir / name, step)
    timeline = output_dir / TIMELINE_NAME
    if timeline.is_file() and not timeline.read_bytes().endswith(b"\n"):
        with timeline.open("a", encoding="utf-8") as file:
            file.write("\n")  # end the half line of a killed process, so that the next record has its own line
    has_ended = any(record["event"] == "end" for record in read_events(output_dir))
    if step == 0 and timeline.is_file() and (has_ended or any(output_dir.glob("checkpoint-*"))):
        _set_aside(timeline)


def begin_lines(path: Path, step: int) -> None:
    """Prepare one file of lines with a `step` for a training that starts or resumes, as `begin_records` does.

    Args:
        path (`Path`): the file; it may not exist yet.
        step (`int`): The optimizer step that the training resumes from; 0 if it starts from scratch.
    """
    if not path.is_file():
        return
    if step == 0:
        _set_aside(path)
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    write_atomically(path, "".join(f"{line}\n" for line in lines if _is_up_to(line, step)))


def _is_up_to(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int | float) and record["step"] <= step


def _set_aside(path: Path) -> None:
    path.rename(path.with_name(f"{path.stem}-until-{int(path.stat().st_mtime)}{path.suffix}"))


def last_logged_step(output_dir: Path) -> int:
    """Return the last step in `scaling.jsonl`, or 0 if nothing was logged.

    Args:
        output_dir (`Path`): The output directory of the run.
    """
    return int(max((record["step"] for record in _records(output_dir / JSONL_NAME)), default=0))


def launched_at() -> float:
    """Return the Unix time at which this training was launched, in seconds.

    For the first training of a script this is the start of the process. For a second training in one process, and for
    one in a notebook, it is the time of the call.
    """
    global _process_start_is_taken
    if _process_start_is_taken or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return time.time()
    _process_start_is_taken = True
    return float(psutil.Process().create_time())


class RunRecorder:
    """Writes `scaling.jsonl` and the timeline on the main process. On other ranks its methods write nothing."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._ranks: RankLines | None = None
        self._workload_is_written = False

    def begin(
        self,
        folder: Path,
        args: "TrainingArguments",
        state: "TrainerState",
        *,
        saved_goodput: dict[str, Any],
        facts: Mapping[str, Any],
    ) -> GoodputTracker:
        """Prepare the files, record the launch, and start to account for its time.

        Args:
            folder (`Path`): Output directory of the run, or of one trial of a hyperparameter search.
            args (`TrainingArguments`): Arguments of the training.
            state (`TrainerState`): State of the Trainer at the beginning of the training.
            saved_goodput (`dict[str, Any]`): The dictionary that `GoodputTracker` keeps its times in.
            facts (`Mapping[str, Any]`): What is known of the run; `world_size` and `strategy` are recorded.

        Returns:
            `GoodputTracker`: The tracker of this run, on every rank.
        """
        goodput_tracker = GoodputTracker(saved_goodput)
        launched = launched_at()
        self._workload_is_written = False
        if not state.is_world_process_zero:
            self._folder = None
            self._ranks = None
            goodput_tracker.begin(launched_at=launched, world_size=args.world_size)
            return goodput_tracker
        self._folder = folder
        self._ranks = RankLines(folder)
        last_alive: float | None = None
        events: list[dict[str, Any]] = []
        with secondary(WRITING, folder):
            folder.mkdir(parents=True, exist_ok=True)
            last_alive = last_sign_of_life(folder)
            begin_records(folder, state.global_step)
            events = read_events(folder)
        saves = [(e["time"], e["seconds"]) for e in events if e["event"] == "save" and e["step"] == state.global_step]
        is_relaunch = bool(events) or state.global_step > 0
        self._write(
            "launch",
            state,
            time=launched,
            begun=time.time(),
            max_steps=state.max_steps,
            host=socket.gethostname(),
            pid=os.getpid(),
            previous_alive=last_alive if is_relaunch else None,
            **{key: facts[key] for key in ("world_size", "strategy") if key in facts},
        )
        goodput_tracker.begin(
            launched_at=launched,
            world_size=args.world_size,
            last_alive=last_alive if is_relaunch else None,
            first_launch=events[0]["time"] if events else None,
            save=saves[-1] if saves and state.global_step > 0 else None,
        )
        return goodput_tracker

    @property
    def needs_workload(self) -> bool:
        """Whether this process records the workload and has not done so yet."""
        return self._folder is not None and not self._workload_is_written

    def workload(self, state: "TrainerState", facts: Mapping[str, Any], rate: Rate | None) -> None:
        """Record once what the run does, and the price of a GPU.

        Args:
            state (`TrainerState`): State of the Trainer, for its step.
            facts (`Mapping[str, Any]`): What the run does, such as its model, strategy and batch.
            rate (`Rate`, *optional*): The price of a GPU; None if it is unknown.
        """
        self._workload_is_written = True
        price = {"usd_per_gpu_hour": rate.usd_per_gpu_hour, "price_source": rate.source} if rate is not None else {}
        self._write("workload", state, **facts, **price)

    def job(self, state: "TrainerState", facts: Mapping[str, Any]) -> None:
        """Record once how the planner describes the run, for the comparison with its estimate in the report.

        Args:
            state (`TrainerState`): State of the Trainer, for its step.
            facts (`Mapping[str, Any]`): Model config, layout and options; values that JSON does not have become text.
        """
        self._write("job", state, **json.loads(json.dumps(facts, default=str)))

    def ranks(self, state: "TrainerState", numbers: Mapping[str, Sequence[float]]) -> None:
        """Write a line of `hfscale_ranks.jsonl`.

        Args:
            state (`TrainerState`): State of the Trainer, for its step.
            numbers (`Mapping[str, Sequence[float]]`): One number per rank of each measure, as in `RankLines.add`.
        """
        if self._ranks is not None:
            self._ranks.add(state.global_step, numbers)

    def logged(self, state: "TrainerState", logs: Mapping[str, float], *, durable: bool) -> None:
        """Write a line of `scaling.jsonl`.

        Args:
            state (`TrainerState`): State of the Trainer, for its step.
            logs (`Mapping[str, float]`): The values of the log. hfscale's metric keys and Trainer's loss, gradient
                norm, learning rate and epoch are kept.
            durable (`bool`): Whether to wait until the line is on disk, which a log before a checkpoint needs.
        """
        if self._folder is None:
            return
        kept = {key: value for key, value in logs.items() if key in _TRAINER_KEYS or key.startswith(METRIC_PREFIXES)}
        line = {"step": state.global_step, "time": time.time(), **kept}
        with secondary(WRITING, self._folder / JSONL_NAME):
            append_record(self._folder / JSONL_NAME, line, durable=durable)
        self._record_failures(state)

    def saved(self, state: "TrainerState", *, seconds: float) -> None:
        """Record that a checkpoint was saved.

        Args:
            state (`TrainerState`): State of the Trainer, for its step.
            seconds (`float`): The seconds for which the training waited.
        """
        self._write("save", state, seconds=round(seconds, 4))

    def found(self, state: "TrainerState", finding: Finding) -> None:
        """Record a bottleneck that the triage has named.

        Args:
            state (`TrainerState`): State of the Trainer, for its step.
            finding (`Finding`): The bottleneck.
        """
        self._write("finding", state, **finding.to_cause())

    def ended(self, state: "TrainerState", *, split: Mapping[str, float], advice: str | None) -> None:
        """Record the end of the training.

        Args:
            state (`TrainerState`): State of the Trainer, for its step.
            split (`Mapping[str, float]`): Seconds of each phase since the first launch.
            advice (`str`, *optional*): The advice on the batch size; None if there is none.
        """
        self._record_failures(state)
        extra = {"advice": advice} if advice is not None else {}
        self._write("end", state, seconds={phase: round(s, 3) for phase, s in split.items()}, **extra)

    def _write(self, event: str, state: "TrainerState", **fields: Any) -> None:
        if self._folder is None:
            return
        line = {"event": event, "step": state.global_step, "time": time.time(), **fields}
        with secondary(WRITING, self._folder / TIMELINE_NAME):
            append_record(self._folder / TIMELINE_NAME, line)

    def _record_failures(self, state: "TrainerState") -> None:
        """Record how often secondary work has failed since the last record, for the report."""
        counts = take_counts() if self._folder is not None else {}
        if counts and self._folder is not None:
            try:
                line = {"event": "failures", "step": state.global_step, "time": time.time(), "counts": counts}
                append_record(self._folder / TIMELINE_NAME, line)
            except OSError:  # the next log tries again
                return_counts(counts)
