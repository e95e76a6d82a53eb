"""Starts processes through the fork server (`fork_server.py`): a launch takes a second instead of ten."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ports import free_port


@dataclass
class Job:
    """The processes of one job, forked by the server."""

    pids: list[int]
    ended: dict[int, int] = field(default_factory=dict)
    """Exit code by pid; a negative one is the signal that ended the process."""
    err: Path | None = None
    """The file with their standard error."""

    @property
    def codes(self) -> list[int | None]:
        """Exit code of each rank; None while it runs."""
        return [self.ended.get(pid) for pid in self.pids]

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to the given ranks, or to all, as far as they still run."""
        for rank, pid in enumerate(self.pids):
            if pid not in self.ended and (not ranks or rank in ranks):
                os.kill(pid, number)

    def output_with_stacks(self) -> str:
        """The end of their standard error, with the Python stacks of the processes that still run."""
        for pid in self.pids:
            if pid not in self.ended:
                with suppress(ProcessLookupError):  # it has ended in the meantime
                    os.killpg(pid, signal.SIGUSR2)
        time.sleep(1.0)
        return self.err.read_text(errors="replace")[-8000:] if self.err is not None and self.err.exists() else ""


class ForkServer:
    """A fork server process and the jobs that it has started.

    Args:
        preload (`Path`, *optional*): a shared library that the server and all its forks load first (LD_PRELOAD).
    """

    def __init__(self, preload: Path | None = None) -> None:
        env = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
        repository = Path(__file__).parent.parent
        layers = os.environ["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in os.environ else []  # of tests/versions
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A fork cannot use CUDA if the server has: what it imports then asks for GPUs through NVML.
            env=env
            | {"PYTHONPATH": os.pathsep.join([*layers, str(repository)]), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            cwd=repository,
        )
        self._jobs: dict[int, Job] = {}
        self._buffer = b""
        os.set_blocking(self._process.stdout.fileno(), False)
        atexit.register(self.close)

    def close(self) -> None:
        """End the server and all processes that still run."""
        if self._process.poll() is None:
            for job in self._jobs.values():
                self.kill(job)
            self._process.kill()
            self._process.wait()

    def start(
        self, kind: str, argv: list[str], *, cwd: Path, env: dict[str, str], out: Path, err: Path, ranks: int = 1
    ) -> Job:
        """Start a job.

        Args:
            kind (`str`): `script`, which runs `python argv` in each rank, or `launch`, which runs
                `accelerate launch argv` in one process.
            argv (`list[str]`): the command line.
            cwd (`Path`): the working directory.
            env (`dict[str, str]`): the complete environment.
            out (`Path`): the file for standard output.
            err (`Path`): the file for standard error.
            ranks (`int`): number of processes of a `script`.
        """
        number = len(self._jobs) + 1
        job = {"id": number, "kind": kind, "argv": argv, "ranks": ranks, "port": free_port()}
        paths = {"cwd": str(cwd), "env": env, "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(job | paths).encode() + b"\n")
        self._process.stdin.flush()
        self._wait(lambda: number in self._jobs, 300)  # it imports first, on a loaded machine too
        self._jobs[number].err = err
        return self._jobs[number]

    def wait(self, job: Job, timeout_s: float) -> list[int]:
        """Wait for all processes and return their exit codes by rank; at the limit kill them and fail the test."""
        try:
            self._wait(lambda: len(job.ended) == len(job.pids), timeout_s, job)
        except TimeoutError:
            self.kill(job)
            self._wait(lambda: len(job.ended) == len(job.pids), 30)
            raise
        return [job.ended[pid] for pid in job.pids]

    def wait_for_any(self, job: Job, timeout_s: float) -> None:
        """Wait until one of the processes has ended."""
        self._wait(lambda: job.ended, timeout_s, job)

    def wait_until(self, job: Job, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition holds or all processes have ended."""
        self._wait(lambda: condition() or len(job.ended) == len(job.pids), timeout_s, job)

    def has_ended(self, job: Job) -> bool:
        """Whether all processes of a job have ended, as far as the server has said so far."""
        self._receive()
        return len(job.ended) == len(job.pids)

    def kill(self, job: Job) -> None:
        """Kill the processes of a job that still run."""
        for pid in job.pids:
            if pid not in job.ended:
                with suppress(ProcessLookupError):  # it has ended in the meantime
                    os.killpg(pid, signal.SIGKILL)  # each leads a session, so its own forks end too

    def _wait(self, done, limit_s: float, job: Job | None = None) -> None:
        end = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"not finished after {limit_s} s\n{job.output_with_stacks() if job is not None else ''}"
                )
            if self._process.poll() is not None:
                raise RuntimeError("the fork server has ended")
            if not self._receive():
                time.sleep(0.005)

    def _receive(self) -> bool:
        received = self._process.stdout.read()
        if not received:
            return False
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for event in map(json.loads, lines):
            if "pids" in event:
                self._jobs[event["id"]] = Job(event["pids"])
            else:
                self._jobs[event["id"]].ended[event["pid"]] = event["code"]
        return True


@functools.cache
def fork_server() -> ForkServer:
    """Return the fork server of this test process, started at the first call."""
    return ForkServer()
