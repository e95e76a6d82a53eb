"""autostop: fires once, at the right time, by no shell; and never for a run that ended before it was watched."""

import json
import os
import subprocess
import sys
import time

import pytest

from hfscale.checkpoint.store import write_status
from hfscale.cli import main
from hfscale.cli.autostop import files_sign, parse_duration, process_sign, run_pid, wait_until_idle
from hfscale.errors import UsageError
from hfscale.metrics.records import append_record


class Day:
    """A clock that sleeping moves on; what is to happen at a time happens then."""

    def __init__(self, **events):
        self.now = 0.0
        self.events = sorted((float(at.removeprefix("at_")), act) for at, act in events.items())

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


def watch(day, signs, *, idle_s=900.0, output_dir=None):
    return wait_until_idle(signs, idle_s=idle_s, output_dir=output_dir, now=day.clock, sleep=day.sleep)


def status(folder, word):
    write_status(folder, word, step=1, checkpoint=None, reason=None)


def test_nothing_goes_on():
    day = Day()
    assert watch(day, [lambda: False]) == "nothing has gone on for 900 s"
    assert day.now == pytest.approx(900, abs=10)


def test_the_idle_time_begins_anew_with_each_activity():
    day = Day()
    watch(day, [lambda: day.now < 5000 and day.now % 890 < 10, lambda: False])
    assert day.now == pytest.approx(4450 + 900, abs=20)


def test_a_completed_run_ends_the_watch_at_once(tmp_path):
    status(tmp_path, "running")
    day = Day(at_3000=lambda: status(tmp_path, "completed"))
    assert watch(day, [lambda: True], output_dir=tmp_path) == "the training has completed"
    assert day.now == pytest.approx(3000, abs=10)


def test_a_run_that_had_completed_before_says_nothing(tmp_path):
    status(tmp_path, "completed")
    day = Day(at_800=lambda: status(tmp_path, "running"), at_4000=lambda: status(tmp_path, "completed"))
    assert watch(day, [files_sign(tmp_path)], output_dir=tmp_path, idle_s=3500) == "the training has completed"
    assert day.now == pytest.approx(4000, abs=10)


@pytest.mark.parametrize("word", ["failed", "preempted"])
def test_a_failed_run_may_be_relaunched_and_ends_the_watch_by_the_idle_time_only(tmp_path, word):
    status(tmp_path, "running")
    day = Day(at_100=lambda: status(tmp_path, word))
    assert watch(day, [files_sign(tmp_path)], output_dir=tmp_path) == f"nothing has gone on for 900 s, status {word}"
    assert day.now == pytest.approx(1000, abs=20)


def test_a_process_that_computes_is_active_and_one_that_sleeps_or_is_gone_is_not():
    code = "import sys, time\nif sys.argv[1] == 'busy':\n while True: pass\ntime.sleep(60)"
    for kind, expected in (("busy", True), ("idle", False)):
        process = subprocess.Popen([sys.executable, "-c", code, kind])
        try:
            time.sleep(0.3)
            sign = process_sign(process.pid)
            time.sleep(0.5)
            assert sign() is expected
        finally:
            process.kill()
            process.wait()
    assert sign() is False


def test_the_main_process_of_a_run_is_found_on_its_machine_only(tmp_path):
    import socket

    launch = {"event": "launch", "step": 0, "time": time.time(), "begun": time.time(), "pid": os.getpid()}
    append_record(tmp_path / "hfscale_timeline.jsonl", launch | {"host": socket.gethostname()})
    assert run_pid(tmp_path) == os.getpid()
    append_record(tmp_path / "hfscale_timeline.jsonl", launch | {"host": socket.gethostname(), "begun": 1000.0})
    assert run_pid(tmp_path) is None  # the number is another process's now
    append_record(tmp_path / "hfscale_timeline.jsonl", launch | {"host": "elsewhere"})
    assert run_pid(tmp_path) is None


def test_the_command_runs_once_as_it_is(tmp_path, capfd):
    mark = tmp_path / "mark"
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    words = [sys.executable, "-c", code, str(mark), "$(touch x); `id` && *"]
    assert main(["autostop", "--idle", "0.2s", "--output-dir", str(tmp_path), "--json", "--", *words]) == 0
    assert mark.read_text() == "$(touch x); `id` && *"
    answer = json.loads(capfd.readouterr().out)
    assert answer["returncode"] == 0
    assert answer["command"] == words
    assert (
        main(["autostop", "--idle", "0.2s", "--output-dir", str(tmp_path), "--", sys.executable, "-c", "exit(3)"]) == 1
    )
    assert "exit code 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--idle", "15m"], "give the command"),
        (["--idle", "soon", "--pid", "1", "--", "true"], "--idle soon"),
        (["--idle", "0s", "--pid", "1", "--", "true"], "--idle 0s"),
        (["--pid", "1", "--", "no-such-program-here"], "no-such-program-here is not found"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_watched(argv, words, capsys):
    assert main(["autostop", *argv]) == 2
    assert words in capsys.readouterr().err


def test_with_nothing_to_watch_it_does_not_wait(monkeypatch, capsys):
    monkeypatch.setattr("hfscale.cli.autostop.gpu_sign", lambda: None)
    assert main(["autostop", "--", "true"]) == 2
    assert "nothing to watch" in capsys.readouterr().err


def test_durations():
    assert [parse_duration(text) for text in ("90s", "15m", "1.5h")] == [90, 900, 5400]
    with pytest.raises(UsageError):
        parse_duration("15")
