"""autostop: the command runs once, at the right time, without a shell, and not for a run that had ended before."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_client import fork_server

from hfscale.checkpoint.store import read_status, write_status
from hfscale.cli import main
from hfscale.core.records import append_record
from hfscale.errors import UsageError
from hfscale.recovery.autostop_command import (
    MainProcess,
    file_activity,
    parse_duration,
    process_activity,
    wait_until_idle,
)


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


def watch(clock, checks, *, idle_s=900.0, output_dir=None, is_running=lambda: False):
    return wait_until_idle(
        checks, idle_s=idle_s, output_dir=output_dir, is_running=is_running, now=clock.read, sleep=clock.sleep
    )


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


def test_the_export_of_a_completed_run_is_not_cut_off(tmp_path):
    set_status(tmp_path, "running")
    clock = FakeTime(at_3000=lambda: set_status(tmp_path, "completed"))
    found = watch(clock, [lambda: True], output_dir=tmp_path, is_running=lambda: clock.now < 5000)
    assert found == "the training has completed"
    assert clock.now == pytest.approx(5000, abs=10)


def test_a_process_that_stays_after_a_completed_run_is_idle(tmp_path):
    """Such as the kernel of a notebook."""
    set_status(tmp_path, "running")
    clock = FakeTime(at_3000=lambda: set_status(tmp_path, "completed"))
    found = watch(clock, [lambda: clock.now < 4000], output_dir=tmp_path, is_running=lambda: True)
    assert found == "no activity for 900 s, status completed"
    assert clock.now == pytest.approx(4900, abs=10)


def test_a_status_file_that_cannot_be_read_for_a_while_is_not_another_run(tmp_path):
    set_status(tmp_path, "completed")
    file = tmp_path / "hfscale_status.json"
    text = file.read_text()
    clock = FakeTime(at_100=lambda: file.write_text("{"), at_300=lambda: file.write_text(text))
    assert watch(clock, [lambda: False], output_dir=tmp_path) == "no activity for 900 s, status completed"


def test_a_file_system_that_fails_shows_no_activity(tmp_path, monkeypatch):
    is_active = file_activity(tmp_path)
    set_status(tmp_path, "running")
    stat = Path.stat

    def fails(path, **options):
        if path.parent == tmp_path:
            raise OSError(116, "Stale file handle")
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fails)
        assert is_active() is False
    assert is_active() is True


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


def record_launch(folder, pid, *, host=None, begun=None):
    now = time.time()
    launch = {"event": "launch", "step": 0, "time": now, "begun": begun or now, "pid": pid}
    append_record(folder / "hfscale_timeline.jsonl", launch | {"host": host or socket.gethostname()})


def test_the_main_process_of_a_run_is_found_only_on_its_machine(tmp_path):
    main_process = MainProcess(tmp_path)
    assert main_process.pid() is None
    record_launch(tmp_path, os.getpid())
    assert main_process.pid() == os.getpid()
    record_launch(tmp_path, os.getpid(), begun=1000.0)
    assert main_process.pid() is None  # another process has the number now
    record_launch(tmp_path, os.getpid(), host="elsewhere")
    assert main_process.pid() is None


def test_the_process_of_a_later_launch_is_watched(tmp_path):
    """The run starts, or starts again, after the watch has begun, and works without changing a file."""
    main_process = MainProcess(tmp_path)
    assert not main_process.is_active()
    code = "print(flush=True)\nwhile True: pass"
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            record_launch(tmp_path, process.pid)
            assert main_process.is_active()  # it is new
            found = []
            while not any(found) and len(found) < 120:  # on a busy machine it may not get a core at once
                time.sleep(0.5)
                found.append(main_process.is_active())
            assert found[-1]
            assert main_process.is_running()
        finally:
            process.kill()
            process.wait()
        assert not main_process.is_active()
        assert not main_process.is_running()


def test_the_end_of_a_real_run(tmp_path):
    """A run that completes while it is watched saves its model before the watch ends."""
    main_process = MainProcess(tmp_path / "run")
    looks = []

    def sleep(_):
        time.sleep(0.1)
        if (read_status(tmp_path / "run") or {}).get("status") == "completed":
            looks.append(main_process.is_running())
        if len(looks) == 3:
            (tmp_path / "go").touch()

    script = Path(__file__).parent.parent / "workers" / "export_after_training.py"
    argv = [str(script), str(tmp_path / "run"), str(tmp_path / "go")]
    files = {"out": tmp_path / "stdout", "err": tmp_path / "stderr"}
    training = fork_server().start("script", argv, cwd=tmp_path, env=dict(os.environ), **files)
    checks = [file_activity(tmp_path / "run"), main_process.is_active]
    found = wait_until_idle(
        checks, idle_s=240, output_dir=tmp_path / "run", is_running=main_process.is_running, sleep=sleep
    )
    (tmp_path / "go").touch()  # if the watch has ended too early
    assert (found, fork_server().wait(training, 240)) == ("the training has completed", [0])
    assert looks[:3] == [True] * 3
    assert (tmp_path / "run" / "exported" / "model.safetensors").is_file()


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
        (["--pid", "99999999", "--", "true"], "--pid is 99999999: no such process"),
        (["--output-dir", __file__, "--", "true"], "is a file"),
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
