"""`hfscale autostop`: run a command once when training has ended or nothing is active any more.

Activity is: a GPU that computes, a file of the run that changes, a process (with its children) that uses the CPU. A
status file that changes to `completed` ends the watch at once; any other end is detected by the idle time, since a
supervisor may relaunch a failed run.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from hfscale.checkpoint.store import STATUS_NAME, read_status
from hfscale.core.best_effort import count_failure
from hfscale.core.records import read_events
from hfscale.core.redaction import redact_argv
from hfscale.core.run_files import JSONL_NAME, TIMELINE_NAME
from hfscale.errors import HfScaleError, UsageError

BUSY_PERCENT = 5
"""Use of a GPU, or of one core by a process, below which it is idle: monitoring alone uses less."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

ActivityCheck = Callable[[], bool]
"""Tells whether there was activity since its last call."""


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `90s`, `15m` or `2h`.

    Args:
        text (`str`): the value of `--idle`.

    Raises:
        UsageError: the text is not a duration greater than 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"--idle is {text}: give a duration such as 90s, 15m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def gpu_activity() -> ActivityCheck | None:
    """Make a check of whether a GPU of this machine computes.

    A GPU that does not tell its use (in MIG mode) is not watched. One that fails later, because it is lost, counts as
    idle.

    Returns:
        `Callable` or `None`: the check; None without nvidia-ml-py or without a GPU that tells its use.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # the package, the driver or the devices are missing: each raises its own errors
        return None

    def use(handle: Any) -> int | None:
        try:
            return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except pynvml.NVMLError as error:
            count_failure("reading the use of a GPU", "NVML", error)
            return None

    watched = [handle for handle in handles if use(handle) is not None]
    return (lambda: any((use(handle) or 0) >= BUSY_PERCENT for handle in watched)) if watched else None


def file_activity(output_dir: Path) -> ActivityCheck:
    """Make a check of whether the metrics, the timeline or the status file of a run has changed.

    Args:
        output_dir (`Path`): the run's output directory.
    """
    names = (JSONL_NAME, TIMELINE_NAME, STATUS_NAME)

    def state() -> tuple[tuple[int, int], ...]:
        found = [output_dir / name for name in names]
        return tuple((p.stat().st_mtime_ns, p.stat().st_size) if p.is_file() else (0, 0) for p in found)

    last = state()

    def changed() -> bool:
        nonlocal last
        before = last
        last = state()
        return last != before

    return changed


def process_activity(pid: int) -> ActivityCheck:
    """Make a check of whether a process and its children have used a core for 5% of the time; False once it has ended.

    Args:
        pid (`int`): the id of the process.
    """
    last_cpu_s = _cpu_seconds(pid)
    last_time = time.monotonic()

    def used() -> bool:
        nonlocal last_cpu_s, last_time
        cpu_s = _cpu_seconds(pid)
        time_now = time.monotonic()
        percent = (cpu_s - last_cpu_s) / max(time_now - last_time, 1e-3) * 100
        last_cpu_s = cpu_s
        last_time = time_now
        return percent >= BUSY_PERCENT

    return used


def _cpu_seconds(pid: int) -> float:
    total = 0.0
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return total
    for member in family:
        try:
            times = member.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def run_pid(output_dir: Path) -> int | None:
    """Return the id of the main process of a run's last launch; None if it is not running on this machine.

    Args:
        output_dir (`Path`): the run's output directory.
    """
    launches = [event for event in read_events(output_dir) if event["event"] == "launch"]
    if not launches or launches[-1].get("host") != socket.gethostname():
        return None
    pid = launches[-1].get("pid")
    try:
        # A process that started after the launch was recorded is another one with the same id.
        alive = isinstance(pid, int) and psutil.Process(pid).create_time() <= launches[-1].get("begun", 0.0)
    except psutil.Error:
        return None
    return pid if alive else None


def wait_until_idle(
    checks: Sequence[ActivityCheck],
    *,
    idle_s: float,
    output_dir: Path | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until there was no activity for `idle_s` seconds or the run has completed.

    Args:
        checks (`Sequence[ActivityCheck]`): called at every poll.
        idle_s (`float`): seconds without activity.
        output_dir (`Path`, *optional*): a run whose status file is watched.
        now (`Callable`): the clock, in seconds.
        sleep (`Callable`): waits for a number of seconds.

    Returns:
        The reason why the wait has ended, as text for a log line.
    """
    poll_s = min(10.0, idle_s / 10)
    idle_since = now()
    # A run that had ended before the watch began is not the one that is waited for.
    had_completed = _has_completed(output_dir)
    while True:
        sleep(poll_s)
        active = [check() for check in checks]  # all are called, since each compares with its last call
        has_completed = _has_completed(output_dir)
        if has_completed and not had_completed:
            return "the training has completed"
        had_completed = has_completed
        if any(active):
            idle_since = now()
        elif now() - idle_since >= idle_s:
            status = (read_status(output_dir) or {}).get("status") if output_dir is not None else None
            return f"no activity for {idle_s:.0f} s" + (f", status {status}" if status else "")


def _has_completed(output_dir: Path | None) -> bool:
    return output_dir is not None and (read_status(output_dir) or {}).get("status") == "completed"


def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND …", help="Run without a shell.")] = None,
    idle: Annotated[str, typer.Option(help="Time without activity: 90s, 15m, 2h.")] = "15m",
    output_dir: Annotated[Path | None, typer.Option(help="Output directory of a run to watch.")] = None,
    pid: Annotated[int | None, typer.Option(help="A process to watch, with its children.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Watch the status file, the GPUs and the processes of a training; when it has ended, run COMMAND once."""
    if not command:
        raise UsageError("there is no command: give it after --, such as hfscale autostop --idle 15m -- sudo poweroff")
    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]} is not found: give a program in PATH, or its path")
    idle_s = parse_duration(idle)
    names: list[str] = []
    checks: list[ActivityCheck] = []
    gpu = gpu_activity()
    if gpu is not None:
        names.append("GPUs")
        checks.append(gpu)
    if output_dir is not None:
        names.append(str(output_dir))
        checks.append(file_activity(output_dir))
        pid = pid if pid is not None else run_pid(output_dir)
    if pid is not None:
        names.append(f"process {pid}")
        checks.append(process_activity(pid))
    if not checks:
        raise UsageError("there is nothing to watch on a machine without GPUs: give --output-dir or --pid")
    print(f"hfscale: watching {', '.join(names)}; idle after {idle_s:.0f} s", file=sys.stderr)
    reason = wait_until_idle(checks, idle_s=idle_s, output_dir=output_dir)
    shown = redact_argv(command)
    print(f"hfscale: {reason}: running {shown[0]}", file=sys.stderr)
    try:
        # With --json standard output is for the JSON object, so the output of the command goes to standard error.
        done = subprocess.run(command, check=False, stdout=sys.stderr if as_json else None)  # noqa: S603
    except OSError as error:
        raise HfScaleError(f"command {command[0]} cannot be run: {error.strerror}") from None
    if as_json:
        print(json.dumps({"reason": reason, "command": shown, "returncode": done.returncode}))
    if done.returncode:
        print(f"hfscale: error: {command[0]} ended with exit code {done.returncode}", file=sys.stderr)
    return 1 if done.returncode else 0


COMMAND = run
