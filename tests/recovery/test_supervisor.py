"""`hfscale run`: it starts a command again where that can help, and leaves nothing in host memory."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch
from conftest import REPOSITORY
from ports import free_port

from hfscale.cli import main
from hfscale.core.final_errors import is_final, is_of_user, recurring_error
from hfscale.core.run_memory import AGREED_VARIABLES, OWN_VARIABLES, Progress, RunMemory
from hfscale.errors import HealthError, UsageError
from hfscale.islands.rendezvous import TOKEN_VARIABLE
from hfscale.recovery.abandoned import remove_abandoned
from hfscale.recovery.children import catches
from hfscale.recovery.event_log import EventLog
from hfscale.recovery.nodes import NodeSettings, Start
from hfscale.recovery.rank_start import IN_RANK, with_folder
from hfscale.recovery.restarts import Failure, RestartPolicy
from hfscale.recovery.supervisor import RunSettings, Supervisor

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


def wait_for(condition, supervisor):
    until = time.monotonic() + 200
    while not condition():
        assert supervisor.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


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


@pytest.mark.parametrize(
    "how", ["kill", pytest.param("crash", marks=pytest.mark.faults), pytest.param("raise", marks=pytest.mark.long)]
)
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
        assert events[1]["reason"] == "TimeoutError: bad luck"
    check_times({event["event"]: event for event in events})


def check_times(events):
    """The time of a recovery is the sum of its parts."""
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


@pytest.mark.long
def test_a_file_of_hosts_that_cannot_be_written_is_reported_and_ends_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    done, _ = supervise(tmp_path, "health", "--exclude-bad-hosts", str(tmp_path / "folder"))
    assert done.returncode == 0
    assert "node-b" in done.stderr


@pytest.mark.long
def test_neither_a_full_disk_nor_a_full_memory_nor_garbage_ends_it(tmp_path):
    done, launches = supervise(tmp_path, "garbage", "--log", "/dev/full")
    assert (done.returncode, len(launches)) == (0, 3), done.stderr
    assert done.stderr.count("/dev/full") == 1  # one warning for all lines
    assert "recording a failure" in done.stderr
    assert done.stderr.count("is ignored") == 6
    assert "Traceback" not in done.stderr


def test_the_end_of_the_reader_of_standard_error_ends_nothing(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    EventLog(None).say("restart", "one launch has failed")
    monkeypatch.setattr(sys, "stderr", None)  # it was closed before Python started
    EventLog(None).say("restart", "one launch has failed")
    with suppress(BrokenPipeError):
        stream.close()


def test_the_memory_of_a_progress_is_reserved_before_it_is_used(tmp_path):
    Progress(tmp_path / "progress-0")
    assert (tmp_path / "progress-0").stat().st_blocks > 0  # a page that cannot be had would end its process by SIGBUS
    (tmp_path / "progress-1").touch()  # of a rank that was killed while it made the file
    assert Progress.read(tmp_path / "progress-1") == (0, 0)


@pytest.mark.long
def test_a_process_that_sigkill_does_not_end_is_named_and_left(tmp_path):
    supervise_it = (  # a process that waits in the kernel cannot be made here: this one is not sent the signal
        "import sys, psutil; from hfscale.cli import main; from hfscale.recovery import supervisor; "
        "supervisor._KILLED_S = 0.5; kill = psutil.Process.kill; "
        "psutil.Process.kill = lambda process: 'left-behind' in process.cmdline() or kill(process); "
        "sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", supervise_it, *command(tmp_path, "leave", "--max-restarts", "0")[3:]]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    named = [int(pid) for pid in re.findall(r"process (\d+) \(.*\) did not end .* after SIGKILL", done.stderr)]
    for pid in named:
        psutil.Process(pid).kill()
    assert (done.returncode, len(named)) == (1, 1), done.stderr


def test_the_rendezvous_of_islands_outlives_the_launches_and_their_supervisor(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of the tests")
    port = free_port()
    (tmp_path / "port").write_text(str(port))
    argv = command(tmp_path, "rendezvous", "--max-restarts", "0")
    done = subprocess.run(argv, stderr=subprocess.DEVNULL, timeout=280, check=False)
    of_rendezvous = [one for one in psutil.process_iter(["cmdline"]) if is_rendezvous(one, port)]
    for process in of_rendezvous:
        process.kill()
    assert done.returncode == 1
    assert len(of_rendezvous) == 1


def is_rendezvous(process, port):
    with suppress(psutil.Error):
        if "hfscale.islands.rendezvous" in (process.info["cmdline"] or []):
            return any(one.laddr.port == port for one in process.net_connections())
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_before_there_is_a_rank_ends_it_with_the_code_of_a_preemption(tmp_path, number, code):
    launcher = [sys.executable, "-c", f"open({str(tmp_path / 'up')!r}, 'w'); import time; time.sleep(600)"]
    argv = [*command(tmp_path, "")[:6], "--", *launcher]
    supervisor = subprocess.Popen(argv)
    wait_for((tmp_path / "up").exists, supervisor)
    supervisor.send_signal(number)
    if number == signal.SIGUSR1:  # it is for the ranks; the launcher of this test has none and goes on
        (launched,) = psutil.Process(supervisor.pid).children()
        launched.terminate()
    assert supervisor.wait(timeout=200) == code


def test_a_signal_between_two_launches_ends_it_with_the_code_of_a_preemption(tmp_path):
    log = tmp_path / "run.jsonl"
    argv = [*command(tmp_path, "")[:6], "--log", str(log), "--", sys.executable, "-c", "import sys; sys.exit(9)"]
    supervisor = subprocess.Popen(argv)
    wait_for(lambda: log.exists() and log.read_text().count('"restart"') == 1, supervisor)  # now it waits 1 s
    supervisor.terminate()
    assert supervisor.wait(timeout=200) == 75


@pytest.mark.long
def test_a_command_that_is_away_at_a_restart_is_tried_again(tmp_path):
    program, log = tmp_path / "program", tmp_path / "run.jsonl"

    def write(text):
        (tmp_path / "new").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "new").chmod(0o755)
        (tmp_path / "new").rename(program)

    write('rm "$0"; exit 9')
    supervisor = subprocess.Popen([*command(tmp_path, "")[:6], "--log", str(log), "--", str(program)])
    wait_for(lambda: log.exists() and "not_started" in log.read_text(), supervisor)
    write("exit 0")
    assert supervisor.wait(timeout=200) == 0


def test_starts_that_fail_are_tried_again_less_and_less_often_up_to_the_limit():
    policy = RestartPolicy(9)
    at = {"failed_at": 0.0, "ended_at": 0.0, "rank": None, "reason": "the disk is away"}
    failure = Failure(**at, begun_step=0, completed_step=0)
    waits = []
    while (why := policy.why_give_up(failure)) is None:
        waits.append(policy.next_restart(failure)[0])
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert "--max-restarts" in why
    late = RestartPolicy(9)
    same_step = Failure(**at, begun_step=7, completed_step=6)
    assert [late.why_give_up(same_step) is None for _ in range(3)] == [True, True, False]


def test_an_error_that_would_come_back_is_not_tried_again(tmp_path):
    done, launches = supervise(tmp_path, "usage")
    assert (done.returncode, len(launches)) == (2, 1)
    assert "UsageError: no such file" in done.stderr


def test_an_own_error_before_the_first_step_is_not_tried_again_and_blames_no_host(tmp_path):
    done, launches = supervise(tmp_path, "own", "--exclude-bad-hosts", str(tmp_path / "excluded"))
    assert (done.returncode, len(launches)) == (1, 1)
    assert done.stderr.count("not started again, since the error would come back: RuntimeError: bad batch") == 1
    assert not (tmp_path / "excluded").exists()


def test_the_same_error_of_a_library_before_the_first_step_is_tried_once_again_and_blames_no_host(tmp_path):
    done, launches = supervise(tmp_path, "library", "--exclude-bad-hosts", str(tmp_path / "excluded"))
    assert (done.returncode, len(launches)) == (1, 2), done.stderr
    assert "RuntimeError: generator didn't stop" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "excluded").exists()


@pytest.mark.parametrize("code", [2, 75])
def test_an_exit_code_that_the_launcher_hides_counts(tmp_path, code):
    done, launches = supervise(tmp_path, f"{code} as a rank", "--max-restarts", "1")
    assert (done.returncode, len(launches)) == (code, 1), done.stderr


BEFORE_HFSCALE = {"import sys; sys.exit(2)": 2, "import no_such_package": 1, "int('big')": 1}


@pytest.mark.parametrize("line", BEFORE_HFSCALE)
def test_an_error_before_the_script_imports_hfscale_is_not_tried_again(tmp_path, line):
    """Most scripts parse their flags and import their own packages first."""
    (tmp_path / "train.py").write_text(f"open('launches', 'a').write('x')\n{line}\nimport hfscale\n")
    rank = ["env", "RANK=0", sys.executable, "train.py"]
    argv = [*command(tmp_path, "")[:6], "--max-restarts", "1", "--", sys.executable, "-c", LAUNCHER, *rank]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    launches = (tmp_path / "launches").read_text()
    assert (done.returncode, launches) == (BEFORE_HFSCALE[line], "x"), done.stderr


def test_the_hidden_sitecustomize_of_the_user_is_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.is_customized = True\n")
    probe = "import os, sys; print(sys.is_customized, any('rank_start' in path for path in sys.path))"
    environ = os.environ | {"PYTHONPATH": with_folder(with_folder(str(tmp_path)))}
    done = subprocess.run([sys.executable, "-c", probe], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_what_a_rank_starts_does_not_report_for_it(tmp_path):
    """Compile workers of torch outlive a rank that was killed, and have its RANK."""
    count = "import atexit, sys, subprocess; print(atexit._ncallbacks(), flush=True)"
    probe = f"{count}; subprocess.run([sys.executable, '-c', {count!r}])"
    environ = {name: value for name, value in os.environ.items() if name != IN_RANK}
    environ |= {"PYTHONPATH": with_folder(""), "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", probe], env=environ, capture_output=True, text=True, check=True)
    of_rank, of_helper = map(int, done.stdout.split())
    assert of_rank == of_helper + 1


@pytest.mark.long
def test_a_wrong_flag_of_a_script_under_torchrun_is_not_tried_again(tmp_path):
    """The script ends before any callback has connected it to its supervisor."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nopen('launches', 'a').write('x')\nsys.exit(2)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    argv = [*command(tmp_path, "")[:6], "--max-restarts", "1", "--", *torchrun, str(script)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, (tmp_path / "launches").read_text()) == (2, "xx"), done.stderr


def test_only_an_error_that_ends_all_launches_before_their_first_step_gives_up():
    at = {"failed_at": 0.0, "ended_at": 0.0, "rank": 0, "reason": "x", "completed_step": 0}

    def gives_up(*launches):
        policy = RestartPolicy(9)
        for errors in launches:
            failure = Failure(**at, begun_step=0, errors=errors)
            why = policy.why_give_up(failure)
            if why is None:
                policy.next_restart(failure)
        return why is not None

    assert gives_up(["a", "b"], ["b"])
    assert not gives_up(["a"], ["b"])
    assert not gives_up(["a"])
    assert not gives_up([], [])
    assert not gives_up([], ["a"], ["a"])  # the first launch had come further, or another error
    failures = [Failure(**at, begun_step=0, errors=[name]) for name in "ba"]
    assert Failure.merged([vars(one) for one in failures]).errors == ["a", "b"]


def raised_by(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


def raise_from(error, cause):
    raise error from cause


@pytest.mark.parametrize(
    ("error", "whenever", "before_the_first_step"),
    [
        (lambda: raise_from(RuntimeError("x"), UsageError("no such flag")), True, False),
        (lambda: raise_from(RuntimeError("x"), HealthError("bad link")), False, False),
        (lambda: raise_from(OSError(errno.ENOSPC, "No space left on device", "f"), None), True, False),
        (lambda: raise_from(RuntimeError("my own"), None), False, True),
        (lambda: {}["text"], False, True),
        (lambda: raise_from(ValueError("no answer"), ConnectionError("the hub is away")), False, False),
        (lambda: json.loads("{"), False, True),
        (lambda: torch.zeros(2) @ torch.zeros(3), False, False),  # a type that a device and a collective raise too
        (lambda: raise_from(torch.OutOfMemoryError("out of memory"), None), False, False),
        (lambda: raise_from(TimeoutError("the store is away"), None), False, False),
        (lambda: raise_from(KeyboardInterrupt(), None), False, False),
    ],
)
def test_which_errors_come_back(error, whenever, before_the_first_step):
    raised = raised_by(error)
    assert (is_final(raised), is_of_user(raised)) == (whenever, before_the_first_step)


@pytest.mark.parametrize(
    ("error", "recurs"),
    [
        (lambda: torch.zeros(2) @ torch.zeros(3), True),
        (lambda: json.loads("{"), True),
        (lambda: raise_from(RuntimeError("x"), ConnectionError("the hub is away")), False),
        (lambda: raise_from(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), None), False),
        (lambda: raise_from(RuntimeError("CUDA error: an illegal memory access was encountered"), None), False),
        (lambda: raise_from(torch.OutOfMemoryError("out of memory"), None), False),
        (lambda: raise_from(torch.distributed.DistBackendError("NCCL"), None), False),
        (lambda: torch.distributed.init_process_group("gloo", init_method="nowhere://"), False),
        (lambda: raise_from(HealthError("bad link"), None), False),
        (lambda: raise_from(KeyboardInterrupt(), None), False),
    ],
)
def test_which_errors_are_known_again(error, recurs):
    known = [recurring_error(raised_by(error)) for _ in range(2)]
    assert (bool(known[0]), known[0] == known[1]) == (recurs, True)


def test_an_error_is_known_again_although_its_text_has_an_address():
    raised = [raised_by(lambda at=at: raise_from(ValueError(f"<Rows at {at}>"), None)) for at in ("0x1f", "0x2e")]
    assert recurring_error(raised[0]) == recurring_error(raised[1])


@pytest.mark.recipes
def test_a_trainer_that_cannot_be_made_is_not_tried_again(tmp_path):
    """A real launch: with this config accelerate starts one process, which would train alone."""
    config, script = tmp_path / "config.yaml", tmp_path / "train.py"
    config.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\n")
    script.write_text(
        "from hfscale import ScalingCallback\n"
        "from tiny import tiny_trainer\n"
        f"tiny_trainer({str(tmp_path / 'out')!r}, ScalingCallback())\n"
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    argv = [*command(tmp_path, "")[:6], "--max-restarts", "1", "--", *launcher, "--num_processes", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1, done.stderr
    assert "its launcher started one" in done.stderr.splitlines()[-1]
    assert "restart 1 of" not in done.stderr


@pytest.mark.long
def test_a_callback_that_cannot_be_made_is_not_tried_again(tmp_path):
    """The error comes before any callback has connected the process to its supervisor."""
    script = "from hfscale import SpotCheckpointCallback; SpotCheckpointCallback(remote='nowhere://bucket/run')"
    launcher = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", script]
    argv = [*command(tmp_path, "")[:6], "--max-restarts", "1", "--", *launcher]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2, done.stderr
    assert "not started again, since the error would come back: " in done.stderr.splitlines()[-1]
    assert "nowhere" in done.stderr.splitlines()[-1]
    assert "restart 1 of" not in done.stderr


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


@pytest.mark.long
def test_it_gives_up_after_max_restarts(tmp_path):
    done, launches = supervise(tmp_path, "kill", "--max-restarts", "1")
    assert (done.returncode, len(launches)) == (1, 2)
    assert "--max-restarts" in done.stderr.splitlines()[-1]


def test_sigterm_reaches_the_rank_of_a_launcher_without_a_handler_and_nothing_is_started_again(tmp_path, waiting):
    supervisor, rank = waiting
    supervisor.terminate()
    assert supervisor.wait(timeout=200) == 75
    assert (tmp_path / "saved").exists(), "it ended before it could save"
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert memory_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("handler", "caught"), [("signal.SIG_DFL", False), ("signal.SIG_IGN", False), ("lambda *_: None", True)]
)
def test_a_process_is_known_to_catch_a_signal(handler, caught):
    program = f"import signal; signal.signal(signal.SIGTERM, {handler}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert catches(process.pid, signal.SIGTERM) is caught
        process.communicate(b"\n")


def test_a_launcher_that_was_stopped_takes_a_signal(waiting):
    supervisor, rank = waiting
    rank.parent().suspend()
    supervisor.terminate()
    assert supervisor.wait(timeout=200) == 75


def test_a_launcher_that_was_stopped_takes_a_signal_before_it_has_a_rank(tmp_path):
    up, ended = tmp_path / "up", tmp_path / "ended"
    handler = f"signal.signal(signal.SIGTERM, lambda *_: (open({str(ended)!r}, 'w'), os._exit(1)))"
    program = f"import os, signal, time; {handler}; open({str(up)!r}, 'w'); time.sleep(600)"
    supervisor = subprocess.Popen([*command(tmp_path, "")[:6], "--", sys.executable, "-c", program])
    wait_for(up.exists, supervisor)
    (launched,) = psutil.Process(supervisor.pid).children()
    launched.suspend()
    supervisor.terminate()
    assert supervisor.wait(timeout=200) == 75
    assert ended.exists(), "it was killed while it was stopped"


def test_a_launcher_that_was_stopped_ends_after_its_ranks(waiting):
    supervisor, rank = waiting
    rank.parent().suspend()
    rank.send_signal(signal.SIGUSR1)  # this rank ends as a preempted one
    assert supervisor.wait(timeout=200) == 75


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
        "import sys, pathlib; from hfscale.recovery.abandoned import remove_abandoned; "
        "print(remove_abandoned(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", probe, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert memory.folder.stat().st_mode & 0o777 == 0o700
    memory.delete()
    assert remove_abandoned(tmp_path) == []


def test_a_folder_that_is_being_made_is_left_alone(tmp_path, monkeypatch):
    removed = []
    lock = fcntl.flock

    def reclaim_first(file, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        removed.extend(remove_abandoned(tmp_path))  # as another supervisor does, in the worst moment
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", reclaim_first)
    memory = RunMemory.create(tmp_path)
    assert (removed, memory.folder.is_dir()) == ([], True)
    memory.delete()


def test_a_folder_in_memory_that_is_removed_is_made_again_with_its_permissions_and_its_socket(tmp_path):
    log = tmp_path / "run.jsonl"
    done, launches = supervise(tmp_path, "removed", "--log", str(log))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found").read_text() == "True 700 1"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events][:2] == ["memory_removed", "restart"]
    assert (events[1]["begun_step"], events[1]["completed_step"]) == (7, 6)  # it is known again which step failed
    assert len(launches) == 3
    assert memory_folders(tmp_path) == []


def test_only_the_supervisor_makes_the_folder_and_only_its_own(tmp_path, monkeypatch):
    memory = RunMemory.create(tmp_path)
    memory.make_folder(memory.folder / "a" / "parts")
    assert memory.is_intact()
    shutil.rmtree(memory.folder)
    with pytest.raises(FileNotFoundError):
        memory.make_folder(memory.folder / "a" / "parts")
    assert (memory.folder.exists(), memory.is_intact()) == (False, False)
    memory.folder.mkdir()
    with pytest.raises(PermissionError):  # all users can read it
        memory.make_folder(memory.folder / "a")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError):
        memory.make_again()
    monkeypatch.undo()
    memory.make_again()
    assert (memory.is_intact(), memory.folder.stat().st_mode & 0o777) == (True, 0o700)
    memory.delete()


def test_nothing_that_writes_into_the_folder_makes_it_with_its_parents():
    package = REPOSITORY / "hfscale"
    writers = [*(package / "recovery").glob("*.py"), package / "core" / "run_memory.py"]
    for path in [*writers, package / "checkpoint" / "memory_snapshots.py"]:
        assert "parents=True" not in path.read_text(), path


def test_links_and_folders_of_other_users_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner").touch()
    (tmp_path / "hfscale-run-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "hfscale-run-other").mkdir()
    (tmp_path / "hfscale-run-other" / "owner").touch()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert remove_abandoned(tmp_path) == []
    monkeypatch.undo()
    assert remove_abandoned(tmp_path) == [tmp_path / "hfscale-run-other"]
    assert (tmp_path / "elsewhere" / "owner").exists()


def test_progress_survives_the_process_that_wrote_it(tmp_path):
    child = os.fork()
    if child == 0:
        Progress(tmp_path / "progress-3").write(8, 7)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert Progress.read(tmp_path / "progress-3") == (8, 7)


def test_every_variable_that_ranks_are_given_is_agreed_or_known_to_be_of_one_node(tmp_path):
    about = {"nodes": 2, "node_rank": 0, "rendezvous": ("127.0.0.1", 1), "token": b"", "min_nodes": 1, "wait_s": 1.0}
    settings = RunSettings(command=["true"], root=tmp_path, memory_interval_steps=7, nodes=NodeSettings(**about))
    supervisor = Supervisor(settings)
    supervisor._memory = RunMemory(tmp_path)
    start = Start(launch=1, index=0, addresses=[("127.0.0.1", 1)] * 2, restarts=0, failure=None)
    given = {name for name, value in supervisor._environ(start).items() if os.environ.get(name) != value}
    assert given - {"PYTHONPATH"} == {*AGREED_VARIABLES, *OWN_VARIABLES}
    assert not set(AGREED_VARIABLES) & set(OWN_VARIABLES)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "command"),
        (["--max-restarts", "-1", "--", "true"], "--max-restarts"),
        (["--", "no-such-program"], "no-such-program"),
        (["--", sys.executable, "-u", "no_such_script.py"], "no_such_script.py does not exist"),
        (["--exclude-bad-hosts", "/nowhere/at-all", "--", "true"], "--exclude-bad-hosts"),
        (["--memory-dir", "/nowhere/at-all", "--", "true"], "/nowhere/at-all"),
        (["--memory-dir", f"/dev/shm/{'x' * 80}", "--", "true"], "has 116 bytes, and at most 107 are allowed"),
        (["--log", "/nowhere/at-all", "--", "true"], "--log"),
    ],
)
def test_wrong_use_is_one_line(capsys, arguments, named):
    assert main(["run", *arguments]) == 2
    assert named in capsys.readouterr().err
