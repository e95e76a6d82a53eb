"""`hfscale autostop`: run a command once when training has ended or nothing is active any more.

Activity is: a GPU that computes, a file of the run that changes, a process (with its children) that uses the CPU. A
status file that changes to `completed` ends the watch as soon as the run's main process has ended, which may still
evaluate, export and upload the model; any other end is detected by the idle time, since a supervisor may relaunch a
failed run.
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
from hfscale.core.best_effort import best_effort, count_failure
from hfscale.core.logging import print_line
from hfscale.core.records import RecordTail
from hfscale.core.redaction import redact_argv
from hfscale.core.run_files import JSONL_NAME, TIMELINE_NAME
from hfscale.core.spelling import spelled
from hfscale.errors import HfScaleError, ParameterError, UsageError

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
        raise ParameterError("idle", text, "give a duration such as 90s, 15m or 2h")
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
    except (
        Exception
    ):  # the package, the driver or the devices are missing: each raises its own errors
        return None

    def use(handle: Any) -> int | None:
        try:
            return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except pynvml.NVMLError as error:
            count_failure("reading the use of a GPU", "NVML", error)
            return None

    watched = [handle for handle in handles if use(handle) is not None]
    return (
        (lambda: any((use(handle) or 0) >= BUSY_PERCENT for handle in watched)) if watched else None
    )


def file_activity(output_dir: Path) -> ActivityCheck:
    """Make a check of whether the metrics, the timeline or the status file of a run has changed.

    A file system that fails shows no change.

    Args:
        output_dir (`Path`): the run's output directory.
    """
    names = (JSONL_NAME, TIMELINE_NAME, STATUS_NAME)

    def state() -> tuple[tuple[int, int], ...]:
        found = [output_dir / name for name in names]
        return tuple(
            (p.stat().st_mtime_ns, p.stat().st_size) if p.is_file() else (0, 0) for p in found
        )

    last = state()

    def changed() -> bool:
        nonlocal last
        before = last
        with best_effort("reading the files of the run", output_dir):
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


class MainProcess:
    """The main process of a run's newest launch, which is another one after each restart.

    Args:
        output_dir (`Path`): the run's output directory; it may not exist yet.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._timeline = RecordTail(output_dir / TIMELINE_NAME)
        self._launch: dict[str, Any] = {}
        self._watched: int | None = None
        self._used: ActivityCheck = lambda: False
        self.is_active()

    def pid(self) -> int | None:
        """Return its id; None if it is not running on this machine."""
        with best_effort("reading the timeline", self._output_dir):
            records, _ = self._timeline.read()
            self._launch = next(
                (one for one in reversed(records) if one.get("event") == "launch"), self._launch
            )
        pid = self._launch.get("pid")
        if self._launch.get("host") != socket.gethostname() or not isinstance(pid, int):
            return None
        try:
            process = psutil.Process(pid)
            # A process that started after the launch was recorded is another one with the same id.
            is_alive = process.create_time() <= self._launch.get("begun", 0.0) and _runs(process)
        except psutil.Error:
            return None
        return pid if is_alive else None

    def is_running(self) -> bool:
        """Tell whether it is running on this machine."""
        return self.pid() is not None

    def is_active(self) -> bool:
        """Tell whether it has used the CPU since the last call, as `process_activity` does, or is another one."""
        pid = self.pid()
        if pid is None:
            self._watched = None
            return False
        if pid == self._watched:
            return self._used()
        self._watched = pid
        self._used = process_activity(pid)
        return True


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def wait_until_idle(
    checks: Sequence[ActivityCheck],
    *,
    idle_s: float,
    output_dir: Path | None = None,
    is_running: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until there was no activity for `idle_s` seconds, or the run has completed and its process has ended.

    Args:
        checks (`Sequence[ActivityCheck]`): called at every poll.
        idle_s (`float`): seconds without activity.
        output_dir (`Path`, *optional*): a run whose status file is watched.
        is_running (`Callable`): tells whether a process of a completed run still works, as on the export of the model.
        now (`Callable`): the clock, in seconds.
        sleep (`Callable`): waits for a number of seconds.

    Returns:
        The reason why the wait has ended, as text for a log line.
    """
    poll_s = min(10.0, idle_s / 10)
    idle_since = now()
    status = _status(output_dir)
    # A run that had ended before the watch began is not the one that is waited for.
    was_other = status != "completed"
    while True:
        sleep(poll_s)
        # All are called, since each compares with its last call
        active = [check() for check in checks]
        status = _status(output_dir) or status
        was_other = was_other or status != "completed"
        if status == "completed" and was_other and not is_running():
            return "the training has completed"
        if any(active):
            idle_since = now()
        elif now() - idle_since >= idle_s:
            return f"no activity for {idle_s:.0f} s" + (f", status {status}" if status else "")


def _status(output_dir: Path | None) -> str | None:
    """Return the status of a run; None if it has none, or while its file cannot be read."""
    return (read_status(output_dir) or {}).get("status") if output_dir is not None else None


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND …", help="Run without a shell.")
    ] = None,
    idle: Annotated[str, typer.Option(help="Time without activity: 90s, 15m, 2h.")] = "15m",
    output_dir: Annotated[
        Path | None, typer.Option(help="Output directory of a run to watch.")
    ] = None,
    pid: Annotated[int | None, typer.Option(help="A process to watch, with its children.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Watch the status file, the GPUs and the processes of a training; when it has ended, run COMMAND once."""
    if not command:
        raise UsageError(
            "there is no command: give it after --, such as hfscale autostop --idle 15m -- sudo poweroff"
        )
    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]} is not found: give a program in PATH, or its path")
    idle_s = parse_duration(idle)
    if pid is not None and not psutil.pid_exists(pid):
        raise ParameterError("pid", pid, "no such process runs on this machine")
    if output_dir is not None and output_dir.is_file():
        named = spelled("output_dir", str(output_dir))
        raise UsageError(f"{named} is a file: give the output directory of a run")
    names: list[str] = []
    checks: list[ActivityCheck] = []
    main_process = None
    gpu = gpu_activity()
    if gpu is not None:
        names.append("GPUs")
        checks.append(gpu)
    if output_dir is not None:
        main_process = MainProcess(output_dir)
        names.append(str(output_dir))
        checks += [file_activity(output_dir), main_process.is_active]
        found = main_process.pid()
        if found is not None:
            names.append(f"its process {found}")
        if not output_dir.is_dir():
            print_line(
                f"hfscale: {output_dir} does not exist yet: until a run makes it, it counts as idle"
            )
    if pid is not None:
        names.append(f"process {pid}")
        checks.append(process_activity(pid))
    if not checks:
        raise UsageError(
            "there is nothing to watch on a machine without GPUs: give --output-dir or --pid"
        )
    print(f"hfscale: watching {', '.join(names)}; idle after {idle_s:.0f} s", file=sys.stderr)
    is_running = main_process.is_running if main_process is not None else lambda: False
    reason = wait_until_idle(checks, idle_s=idle_s, output_dir=output_dir, is_running=is_running)
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
        print(
            f"hfscale: error: {command[0]} ended with exit code {done.returncode}", file=sys.stderr
        )
    return 1 if done.returncode else 0


COMMAND = run
