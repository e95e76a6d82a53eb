"""A training under `hfscale run` whose process is killed, and which `hfscale watch` shows while it trains."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT_S = 900
"""How long one event may take: on a busy machine these programs need minutes to start."""
KILLED = "rank 0: its process was killed or crashed"
Training = subprocess.Popen[bytes]
Losses = Mapping[int, float]
"""The loss of each logged step."""


def records(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines, which another process may be writing."""
    if not path.is_file():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def events(output_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a name in the timeline of a run."""
    return [event for event in records(output_dir / "hfscale_timeline.jsonl") if event["event"] == name]


def logged_losses(output_dir: Path) -> dict[int, float]:
    """Return the losses of `scaling.jsonl`, by step."""
    return {record["step"]: record["loss"] for record in records(output_dir / "scaling.jsonl") if "loss" in record}


def wait_for(condition: Callable[[], bool], training: Training, what: str) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: the training has ended before, or the condition does not hold in time.
    """
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert training.poll() is None, f"the training ended with code {training.returncode} before {what}"
        assert time.monotonic() < until, f"not in {TIMEOUT_S} s: {what}"
        time.sleep(0.05)


class Watch:
    """`hfscale watch` on one run, asked as its page and as Prometheus ask it.

    Args:
        output_dir (`Path`): the output directory of the run.
    """

    def __init__(self, output_dir: Path) -> None:
        argv = [sys.executable, "-m", "hfscale", "watch", str(output_dir), "--port", "0"]
        self._server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found is not None, line
        self._port = int(found.group(1))

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.terminate()  # SIGINT is ignored by what a shell has started in the background
        with self._server:
            self._server.wait(TIMEOUT_S)

    def ask(self, path: str) -> str:
        """Return the body of an answer, which must be a successful one."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        assert answer.status == 200, (path, answer.status, body)
        return body

    def metrics(self) -> dict[str, float]:
        """Return the samples of `/metrics` by name, such as `loss`, or `status running` for a label of the status."""
        samples = {}
        lines = re.findall(r"^hfscale_(\w+)\{(.*)\} (\S+)$", self.ask("/metrics"), re.MULTILINE)
        for name, labels, value in lines:
            status = re.search(r'status="(\w+)"', labels)
            samples[f"{name} {status.group(1)}" if status else name] = float(value)
        return samples

    def run(self) -> dict[str, Any]:
        """Return what the page shows of the run."""
        answer: dict[str, Any] = json.loads(self.ask("/api/run.json"))
        return answer


def kill_and_watch(training: Training, output_dir: Path, expected: Losses, *, after: int) -> tuple[int, int]:
    """Kill the process of a training, check that it resumes and what `hfscale watch` shows, and send SIGTERM.

    Args:
        training (`Popen`): the command, which has just been started.
        output_dir (`Path`): its output directory, which exists.
        expected (`Mapping`): the losses of the run without a failure.
        after (`int`): the step after which the process is killed.

    Returns:
        `tuple[int, int]`: the last step logged before the process was killed, and the step at which it resumed.
    """
    with Watch(output_dir) as watch:
        assert "<title>" in watch.ask("/")
        first = _metrics_of(watch, training, expected, launches=1, after=after)
        saved = max(int(path.name.partition("-")[2]) for path in output_dir.glob("checkpoint-*"))
        (launch,) = events(output_dir, "launch")
        os.kill(launch["pid"], signal.SIGKILL)
        wait_for(lambda: len(events(output_dir, "recovery")) == 1, training, "the recovery")
        (recovery,) = events(output_dir, "recovery")
        _, relaunch = events(output_dir, "launch")
        resumed_at = relaunch["step"]
        assert saved <= resumed_at, (saved, resumed_at)
        assert resumed_at + recovery["steps_lost"] >= first["step"], (recovery, resumed_at, first)
        second = _metrics_of(watch, training, expected, launches=2, after=resumed_at)
        answer = watch.run()
        shown = answer["summary"]
        assert training.poll() is None, "the training ended before the page was read"
        training.terminate()
    assert (shown["status"], shown["marks"]) == ("running", [resumed_at]), shown
    assert [row[1] for row in shown["recoveries"]] == [KILLED], shown
    assert [alarm["kind"] for alarm in shown["alarms"]] == ["restart"], shown
    losses = dict(zip(answer["points"]["step"], answer["points"]["loss"], strict=True))
    assert losses == {step: expected[step] for step in losses}, (losses, expected)
    print(f"hfscale watch before and after SIGKILL: {first}, {second}")
    return int(first["step"]), resumed_at


def _metrics_of(watch: Watch, training: Training, expected: Losses, *, launches: int, after: int) -> dict[str, float]:
    """Wait until `/metrics` has a step of a launch, and return what it says then of the run, which must be right."""
    samples: dict[str, float] = {}

    def is_reached() -> bool:
        samples.clear()
        samples.update(watch.metrics())
        has_checkpoint = "checkpoint_step" in samples  # it is written while the next steps run
        return has_checkpoint and samples.get("launches") == launches and samples.get("step", 0) > after

    wait_for(is_reached, training, f"launch {launches} after step {after} in /metrics")
    names = ("status running", "launches", "step", "max_steps", "loss", "learning_rate", "alarms", "checkpoint_step")
    seen = {name: samples[name] for name in names}
    assert seen["status running"] == 1, seen
    assert seen["alarms"] == launches - 1, (seen, watch.run()["summary"]["alarms"])
    assert seen["loss"] == expected[int(seen["step"])], seen
    assert seen["step"] < seen["max_steps"] == max(expected), seen
    return seen
