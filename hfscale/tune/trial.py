"""Runs a launch command for some optimizer steps, and measures its speed and memory from the files that it writes."""

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hfscale.core.records import read_records
from hfscale.core.redaction import redact
from hfscale.core.run_files import JSONL_NAME
from hfscale.report.sweep import failure_reason

WARM_UP_STEPS = 2
"""First steps of a run, which are not measured: they allocate memory, choose kernels and open connections."""
LOG_NAME = "output.txt"
_POLL_S = 0.2
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|MemoryError"
)
_KILLED = re.compile(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)|died with <Signals\.SIGKILL")
"""How torch's agent and accelerate report a worker that was killed, as the kernel does where host memory is short."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a run."""

    tokens_per_s: float | None = None
    """Median of all processes together after the warm-up; None if it failed."""
    memory_gib: float | None = None
    """Largest GPU memory that torch allocated on any rank; None on a CPU and if it failed."""
    error: str | None = None
    """Why it failed: `out of memory`, or the error line of the run."""
    seconds: float
    """Duration with start-up."""


def run_trial(
    command: Sequence[str],
    folder: Path,
    *,
    steps: int,
    timeout_s: float,
    environment: Mapping[str, str],
    on_step: Callable[[int], None] = lambda step: None,
) -> Trial:
    """Run a command until it has trained some steps, then end it at once: nothing is saved or evaluated.

    Args:
        command (`Sequence[str]`): the launch command. It logs every step.
        folder (`Path`): the `output_dir` of the run, where its measurements and its output are written.
        steps (`int`): optimizer steps to measure, after `WARM_UP_STEPS`.
        timeout_s (`float`): seconds after which it is ended; the steps until then count if any were measured.
        environment (`Mapping[str, str]`): its environment.
        on_step (`Callable[[int], None]`): called with the number of steps done whenever it has risen.
    """
    begun = time.monotonic()
    log = folder / LOG_NAME
    with log.open("w", encoding="utf-8") as file:
        process = psutil.Popen(  # a list of arguments, without a shell
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
        )
        try:
            code = _wait(process, folder, steps=steps, until=begun + timeout_s, on_step=on_step)
        finally:
            _kill(process)
    # The output of a recipe may contain secrets from its command line.
    log.write_text(redact(log.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
    seconds = time.monotonic() - begun
    records = _measured(folder)
    if code or not records:
        return Trial(error=_error(code, log, timeout_s), seconds=seconds)
    memory = [
        record["gpu/memory_peak_gib"] for record in records if "gpu/memory_peak_gib" in record
    ]
    return Trial(
        tokens_per_s=statistics.median(record["scaling/tokens_per_s"] for record in records),
        memory_gib=max(memory, default=None),
        seconds=seconds,
    )


def _wait(
    process: psutil.Popen, folder: Path, *, steps: int, until: float, on_step: Callable[[int], None]
) -> int | None:
    """Wait until the run has ended, has done its steps or has no time left.

    Returns:
        `int`, *optional*: its exit code; None if it is still running.
    """
    done = 0
    while time.monotonic() < until:
        ended: int | None = process.poll()
        step = max((int(record["step"]) for record in read_records(folder / JSONL_NAME)), default=0)
        if step > done:
            done = step
            on_step(min(done, steps + WARM_UP_STEPS))
        if ended is not None or done >= steps + WARM_UP_STEPS:
            return ended
        time.sleep(_POLL_S)
    return None


def _kill(process: psutil.Popen) -> None:
    """Kill the launcher and all processes that it has started: SIGTERM would make a recipe save a checkpoint."""
    try:
        processes = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = [process]
    for one in processes:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes)


def _measured(folder: Path) -> list[dict[str, float]]:
    """The logs after the warm-up."""
    records = [
        record for record in read_records(folder / JSONL_NAME) if record["step"] > WARM_UP_STEPS
    ]
    return [record for record in records if "scaling/tokens_per_s" in record]


def _error(code: int | None, log: Path, timeout_s: float) -> str:
    text = log.read_text(encoding="utf-8")
    if _OUT_OF_MEMORY.search(text):
        return "out of memory"
    if _KILLED.search(text):
        return "out of host memory: a process was killed"
    if code is None:
        return f"no step was measured within {timeout_s:.0f} s (see {log})"
    if code == 0:
        return f"it ended before {WARM_UP_STEPS + 1} steps: give more data or epochs (see {log})"
    return f"{failure_reason(log)} (see {log})"
