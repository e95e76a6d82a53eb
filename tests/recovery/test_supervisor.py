"""`hfscale run`: it starts a command again where that can help, and leaves nothing in host memory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from conftest import REPOSITORY

from hfscale.cli import main
from hfscale.core.run_memory import Progress, RunMemory, remove_abandoned

RANK = REPOSITORY / "tests" / "workers" / "supervised.py"
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]) != 0)"  # ends with 1, as launchers do


def command(tmp_path, how, *options):
    rank = [sys.executable, str(RANK), how, str(tmp_path)]
    launcher = [sys.executable, "-c", LAUNCHER, *rank]
    return [sys.executable, "-m", "hfscale", "run", "--memory-dir", str(tmp_path), *options, "--", *launcher]


def supervise(tmp_path, how, *options):
    done = subprocess.run(command(tmp_path, how, *options), capture_output=True, text=True, timeout=280, check=False)
    launches = (tmp_path / "launches").read_text().splitlines() if (tmp_path / "launches").exists() else []
    return done, launches


def memory_folders(tmp_path):
    return list(tmp_path.glob("hfscale-run-*"))


@pytest.fixture
def waiting(tmp_path):
    """A supervised rank that waits for a signal."""
    supervisor = subprocess.Popen(command(tmp_path, "wait"), stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 200
    while not (tmp_path / "launches").exists() or not (tmp_path / "launches").read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.02)
    rank = psutil.Process(int((tmp_path / "launches").read_text().split()[1]))
    yield supervisor, rank
    if supervisor.poll() is None:
        supervisor.kill()
        supervisor.wait()
    supervisor.stderr.close()
    with suppress(psutil.NoSuchProcess):
        rank.kill()  # the launcher of this test leaves it


@pytest.mark.parametrize("how", ["kill", "crash", "raise"])
def test_a_failed_rank_is_started_again_until_the_command_is_done(tmp_path, how):
    log = tmp_path / "run.jsonl"
    done, launches = supervise(tmp_path, how, "--log", str(log))
    assert done.returncode == 0, done.stderr
    assert len(launches) == 3
    assert memory_folders(tmp_path) == []
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["restart", "restart", "recovered", "done"]
    assert [event["begun_step"] for event in events[:2]] == [1, 2]
    assert events[1]["rank"] == 0
    if how == "raise":
        assert events[1]["reason"] == "RuntimeError: bad luck"


def test_the_time_of_a_recovery_is_the_sum_of_its_parts(tmp_path):
    log = tmp_path / "run.jsonl"
    supervise(tmp_path, "kill", "--log", str(log))
    events = {event["event"]: event for event in map(json.loads, log.read_text().splitlines())}
    parts = [events["recovered"][name] for name in ("ending", "waiting", "starting", "loading", "first step")]
    (total,) = re.findall(r"^recovered in (\S+) s", events["recovered"]["text"])
    assert sum(parts) == pytest.approx(float(total), abs=0.051)
    assert 0 < sum(parts) <= events["recovered"]["time"] - events["restart"]["failed_at"]
    assert events["recovered"]["steps_lost"] == 0


def test_hosts_that_the_health_checks_blame_are_added_to_the_file_once(tmp_path):
    excluded = tmp_path / "excluded"
    excluded.write_text("node-a")  # without an end of the line
    done, launches = supervise(tmp_path, "health", "--exclude-bad-hosts", str(excluded))
    assert (done.returncode, len(launches)) == (0, 3)
    assert excluded.read_text() == "node-a\nnode-b\nnode-c\n"


def test_a_file_of_hosts_that_cannot_be_written_is_reported_and_ends_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    done, _ = supervise(tmp_path, "health", "--exclude-bad-hosts", str(tmp_path / "folder"))
    assert done.returncode == 0
    assert "node-b" in done.stderr


def test_an_error_that_would_come_back_is_not_tried_again(tmp_path):
    done, launches = supervise(tmp_path, "usage")
    assert (done.returncode, len(launches)) == (2, 1)
    assert "UsageError: no such file" in done.stderr


def test_a_preempted_command_keeps_its_exit_code(tmp_path):
    rank = [sys.executable, str(RANK), "preempted", str(tmp_path)]
    supervised = [sys.executable, "-m", "hfscale", "run", "--memory-dir", str(tmp_path), "--", *rank]
    assert subprocess.run(supervised, capture_output=True, timeout=280, check=False).returncode == 75


def test_a_rank_that_is_preempted_first_does_not_end_the_others(tmp_path):
    done, launches = supervise(tmp_path, "late")
    assert (done.returncode, len(launches)) == (75, 1)
    assert (tmp_path / "finished").exists()


def test_it_gives_up_at_the_third_failure_in_the_same_step(tmp_path):
    log = tmp_path / "run.jsonl"
    done, launches = supervise(tmp_path, "same-step", "--log", str(log))
    assert (done.returncode, len(launches)) == (1, 3)
    assert "step 5" in done.stderr.splitlines()[-1]
    assert "rank 0: 7, 8, 9" in done.stderr.splitlines()[-1]  # the samples of the step
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["samples"]) == ("gave_up", {"0": [*range(7, 50), "a"]})


def test_it_gives_up_after_max_restarts(tmp_path):
    done, launches = supervise(tmp_path, "kill", "--max-restarts", "1")
    assert (done.returncode, len(launches)) == (1, 2)
    assert "--max-restarts" in done.stderr.splitlines()[-1]


def test_sigterm_reaches_the_launcher_and_nothing_is_started_again(tmp_path, waiting):
    supervisor, rank = waiting
    supervisor.terminate()
    assert supervisor.wait(timeout=200) == 128 + signal.SIGTERM
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert memory_folders(tmp_path) == []


def test_sigusr1_reaches_the_ranks_which_end_with_75(tmp_path, waiting):
    supervisor, _ = waiting
    supervisor.send_signal(signal.SIGUSR1)
    assert supervisor.wait(timeout=200) == 75


def test_a_killed_supervisor_leaves_no_launcher_and_the_next_one_reclaims_its_memory(tmp_path, waiting):
    supervisor, rank = waiting
    launcher = rank.parent()
    supervisor.kill()
    supervisor.wait()
    launcher.wait(timeout=200)
    rank.kill()  # a real launcher ends its ranks at SIGTERM
    assert len(memory_folders(tmp_path)) == 1
    (tmp_path / "launches").unlink()
    done, _ = supervise(tmp_path, "kill")
    assert done.returncode == 0
    assert "deleted the memory" in done.stderr
    assert memory_folders(tmp_path) == []


def test_a_sleeping_supervisor_uses_no_cpu(waiting):
    supervisor, _ = waiting
    process = psutil.Process(supervisor.pid)

    def sleeps_for_a_second():
        before = process.num_ctx_switches().voluntary
        time.sleep(1)
        return process.num_ctx_switches().voluntary == before

    assert any(sleeps_for_a_second() for _ in range(60)), "at first it still handles the messages of the rank"


def test_the_memory_of_a_living_supervisor_is_left_alone(tmp_path):
    memory = RunMemory.create(tmp_path)
    probe = (
        "import sys, pathlib; from hfscale.core.run_memory import remove_abandoned; "
        "print(remove_abandoned(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", probe, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert memory.folder.stat().st_mode & 0o777 == 0o700
    memory.delete()
    assert remove_abandoned(tmp_path) == []


def test_progress_survives_the_process_that_wrote_it(tmp_path):
    child = os.fork()
    if child == 0:
        Progress(tmp_path / "progress-3").write(8, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert Progress(tmp_path / "progress-3").read() == (8, 7)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "command"),
        (["--max-restarts", "-1", "--", "true"], "--max-restarts"),
        (["--", "no-such-program"], "no-such-program"),
        (["--exclude-bad-hosts", "/nowhere/at-all", "--", "true"], "--exclude-bad-hosts"),
        (["--memory-dir", "/nowhere/at-all", "--", "true"], "/nowhere/at-all"),
    ],
)
def test_wrong_use_is_one_line(capsys, arguments, named):
    assert main(["run", *arguments]) == 2
    assert named in capsys.readouterr().err
