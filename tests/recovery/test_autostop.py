"""autostop: the command runs once, at the right time, without a shell, and not for a run that had ended before."""

import json
import os
import subprocess
import sys
import time

import pytest

from hfscale.checkpoint.store import write_status
from hfscale.cli import main
from hfscale.core.records import append_record
from hfscale.errors import UsageError
from hfscale.recovery.autostop_command import file_activity, parse_duration, process_activity, run_pid, wait_until_idle


class FakeTime:
    """A clock that `sleep` advances; `at_N` is called when it reaches N seconds."""

    def __init__(self, **events):
        self.now = 0.0
        self.events = sorted((float(at.removeprefix("at_")), action) for at, action in events.items())

    def read(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


def watch(clock, checks, *, idle_s=900.0, output_dir=None):
    return wait_until_idle(checks, idle_s=idle_s, output_dir=output_dir, now=clock.read, sleep=clock.sleep)


def set_status(folder, status):
    write_status(folder, status, step=1, checkpoint=None, reason=None)


def test_the_watch_ends_without_activity():
    clock = FakeTime()
    assert watch(clock, [lambda: False]) == "no activity for 900 s"
    assert clock.now == pytest.approx(900, abs=10)


def test_the_idle_time_restarts_with_each_activity():
    clock = FakeTime()
    watch(clock, [lambda: clock.now < 5000 and clock.now % 890 < 10, lambda: False])
    assert clock.now == pytest.approx(4450 + 900, abs=20)


def test_a_completed_run_ends_the_watch_at_once(tmp_path):
    set_status(tmp_path, "running")
    clock = FakeTime(at_3000=lambda: set_status(tmp_path, "completed"))
    assert watch(clock, [lambda: True], output_dir=tmp_path) == "the training has completed"
    assert clock.now == pytest.approx(3000, abs=10)


def test_a_run_that_had_completed_before_is_ignored(tmp_path):
    set_status(tmp_path, "completed")
    clock = FakeTime(at_800=lambda: set_status(tmp_path, "running"), at_4000=lambda: set_status(tmp_path, "completed"))
    assert watch(clock, [file_activity(tmp_path)], output_dir=tmp_path, idle_s=3500) == "the training has completed"
    assert clock.now == pytest.approx(4000, abs=10)


@pytest.mark.parametrize("status", ["failed", "preempted"])
def test_a_failed_run_ends_the_watch_only_after_the_idle_time(tmp_path, status):
    set_status(tmp_path, "running")
    clock = FakeTime(at_100=lambda: set_status(tmp_path, status))
    assert watch(clock, [file_activity(tmp_path)], output_dir=tmp_path) == f"no activity for 900 s, status {status}"
    assert clock.now == pytest.approx(1000, abs=20)


def test_a_process_that_computes_is_active_and_one_that_sleeps_or_has_ended_is_not():
    code = "import sys, time\nprint(flush=True)\nif sys.argv[1] == 'busy':\n while True: pass\ntime.sleep(600)"
    for kind, expected in (("busy", True), ("idle", False)):
        process = subprocess.Popen([sys.executable, "-c", code, kind], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            is_active = process_activity(process.pid)
            found = []
            while len(found) < 120 and found[-1:] != [expected]:  # on a busy machine it may not get a core at once
                time.sleep(0.5)
                found.append(is_active())
            assert found[-1] is expected
        finally:
            process.kill()
            process.wait()
    assert is_active() is False


def test_the_main_process_of_a_run_is_found_only_on_its_machine(tmp_path):
    import socket

    launch = {"event": "launch", "step": 0, "time": time.time(), "begun": time.time(), "pid": os.getpid()}
    append_record(tmp_path / "hfscale_timeline.jsonl", launch | {"host": socket.gethostname()})
    assert run_pid(tmp_path) == os.getpid()
    append_record(tmp_path / "hfscale_timeline.jsonl", launch | {"host": socket.gethostname(), "begun": 1000.0})
    assert run_pid(tmp_path) is None  # another process has the number now
    append_record(tmp_path / "hfscale_timeline.jsonl", launch | {"host": "elsewhere"})
    assert run_pid(tmp_path) is None


def test_the_command_runs_once_without_a_shell(tmp_path, capfd):
    file = tmp_path / "file"
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    command = [sys.executable, "-c", code, str(file), "$(touch x); `id` && *"]
    assert main(["autostop", "--idle", "0.2s", "--output-dir", str(tmp_path), "--json", "--", *command]) == 0
    assert file.read_text() == "$(touch x); `id` && *"
    answer = json.loads(capfd.readouterr().out)
    assert answer["returncode"] == 0
    assert answer["command"] == command
    assert (
        main(["autostop", "--idle", "0.2s", "--output-dir", str(tmp_path), "--", sys.executable, "-c", "exit(3)"]) == 1
    )
    assert "exit code 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--idle", "15m"], "no command"),
        (["--idle", "soon", "--pid", "1", "--", "true"], "--idle is soon"),
        (["--idle", "0s", "--pid", "1", "--", "true"], "--idle is 0s"),
        (["--pid", "1", "--", "no-such-program-here"], "no-such-program-here is not found"),
    ],
)
def test_wrong_usage_is_reported_before_anything_is_watched(argv, part, capsys):
    assert main(["autostop", *argv]) == 2
    assert part in capsys.readouterr().err


def test_nothing_to_watch_is_wrong_usage(monkeypatch, capsys):
    monkeypatch.setattr("hfscale.recovery.autostop_command.gpu_activity", lambda: None)
    assert main(["autostop", "--", "true"]) == 2
    assert "nothing to watch" in capsys.readouterr().err


def test_durations():
    assert [parse_duration(text) for text in ("90s", "15m", "1.5h")] == [90, 900, 5400]
    with pytest.raises(UsageError):
        parse_duration("15")
