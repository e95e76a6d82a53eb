"""The process that waits to become the next launcher of `hfscale run`: its ranks are those of a usual launch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from ports import free_port

from hfscale.core.run_memory import RunMemory
from hfscale.recovery.standby import Standby, launcher_of

SCRIPT = REPOSITORY / "tests" / "workers" / "standby_rank_script.py"
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", "0"]


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ([f"{BIN}/accelerate", "launch", "x.py"], ["accelerate", "launch", "x.py"]),
        ([f"{BIN}/torchrun", "-m", "x"], ["torchrun", "-m", "x"]),
        ([sys.executable, "-m", "accelerate.commands.launch", "x.py"], ["accelerate", "launch", "x.py"]),
        ([sys.executable, "-m", "torch.distributed.run", "x.py"], ["torchrun", "x.py"]),
        ([sys.executable, "a/exit_code.py", f"{BIN}/torchrun", "x.py"], ["exit_code.py", "torchrun", "x.py"]),
        ([f"{BIN}/accelerate", "test"], None),
        ([sys.executable, "x.py"], None),
        ([sys.executable], None),
        (["sh", "-c", "torchrun x.py"], None),
        (["no-such-program"], None),
    ],
)
def test_launchers_are_recognized(command, launcher):
    assert launcher_of(command) == launcher


def test_a_launcher_of_another_installation_is_not_replaced(tmp_path):
    other = tmp_path / "torchrun"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert launcher_of([str(other), "x.py"]) is None


def test_a_standby_process_ends_with_its_supervisor(tmp_path):
    memory = RunMemory.create(tmp_path)
    standby = Standby(TORCHRUN, memory, lambda: None)
    environ = os.environ | {"HFSCALE_RUN_MEMORY": str(memory.folder)}
    standby.start(environ)
    assert standby.pid is None  # no rank has recorded its imports
    memory.write_imports()
    standby.start(environ)
    pid = standby.pid
    standby.start(environ)
    assert standby.pid == pid
    standby.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert standby.become_launcher(environ) is None
    memory.delete()


@pytest.mark.long
def test_a_standby_process_that_was_stopped_becomes_the_launcher(tmp_path):
    memory = RunMemory.create(tmp_path)
    (memory.folder / "imports.json").write_text('{"modules": [], "environ": {}}')
    standby = Standby([*TORCHRUN, str(tmp_path / "no-such-script.py")], memory, lambda: None)
    environ = os.environ | {"HFSCALE_RUN_MEMORY": str(memory.folder)}
    standby.start(environ)
    psutil.Process(standby.pid).suspend()
    launcher = standby.become_launcher(environ)
    try:
        assert launcher.wait(timeout=200) != 0  # it has looked for the script
    finally:
        launcher.kill()
        memory.delete()


def test_a_folder_in_the_working_directory_does_not_take_the_place_of_an_installed_package(tmp_path):
    (tmp_path / "xxhash").mkdir()
    (tmp_path / "xxhash" / "__init__.py").write_text("")
    program = (
        "import sys; from hfscale.recovery.standby import _import_silently; first = sys.path[0]; "
        "_import_silently(['xxhash']); assert sys.path[0] == first; print(sys.modules['xxhash'].__file__)"
    )
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert not done.stdout.startswith(str(tmp_path))


@pytest.mark.long
def test_modules_that_open_a_cuda_context_are_left_to_the_ranks(tmp_path):
    """They are two packages, of which one imports the other; a CPU stands in for the GPU by torch's own flag."""
    for name, text in (
        ("opens_cuda", "import torch; torch.cuda._initialized = True"),
        ("imports_opens_cuda", "import opens_cuda"),
        ("harmless", ""),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    memory = RunMemory.create(tmp_path)
    modules = ["torch", "imports_opens_cuda", "opens_cuda", "harmless"]
    (memory.folder / "imports.json").write_text(json.dumps({"modules": modules, "environ": {}}))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, json, pathlib, torch\n"
        "found = {name: name in sys.modules for name in ('opens_cuda', 'imports_opens_cuda', 'harmless')}\n"
        f"pathlib.Path({str(tmp_path / 'found')!r}).write_text(json.dumps([found, torch.cuda.is_initialized()]))\n"
    )
    command = [str(BIN / "torchrun"), "--nproc-per-node", "1", "--master-port", "0", str(script)]
    standby = Standby(command, memory, lambda: None)
    environ = os.environ | {"HFSCALE_RUN_MEMORY": str(memory.folder), "PYTHONPATH": str(tmp_path)}
    standby.start(environ)
    launcher = standby.become_launcher(environ)
    try:
        assert launcher.wait(timeout=200) == 0
    finally:
        launcher.kill()
        memory.delete()
    found = {"opens_cuda": False, "imports_opens_cuda": False, "harmless": True}
    assert json.loads((tmp_path / "found").read_text()) == [found, False]


def supervise(tmp_path, how, *options):
    """Run two ranks under torchrun, one of which is killed; return the process and what the ranks have recorded."""
    options = ["--memory-dir", str(tmp_path), "--log", str(tmp_path / "log"), *options]
    done = subprocess.run(
        [sys.executable, "-m", "hfscale", "run", *options, "--", *TORCHRUN, str(SCRIPT), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        | {"HFSCALE_RUN_TOKEN": "secret"},
    )
    return done, {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("seen-*.json")}


@pytest.mark.long
@pytest.mark.world(2)
def test_the_ranks_of_a_standby_launcher_are_those_of_a_usual_one(tmp_path):
    done, seen = supervise(tmp_path, "done")
    assert done.returncode == 0, done.stderr
    assert sorted(seen) == ["seen-0-0", "seen-0-1", "seen-1-0", "seen-1-1"]
    for rank in (0, 1):
        first, second = seen[f"seen-0-{rank}"], seen[f"seen-1-{rank}"]
        assert "hfscale.recovery.standby" not in first.pop("launcher")
        assert "hfscale.recovery.standby" in second.pop("launcher")
        assert (first.pop("threads"), second.pop("threads")) == (None, 1)  # the second has imported torch already
        assert first == second
        assert not first["token"]
        assert (tmp_path / f"atexit-{rank}").exists()
        assert (tmp_path / f"thread-{rank}").exists()


@pytest.mark.faults
@pytest.mark.world(2)
@pytest.mark.parametrize(("how", "code", "launches"), [("usage", 2, 2), ("raise", 0, 3), ("early", 0, 3)])
def test_a_failure_under_a_standby_launcher_is_that_of_a_usual_one(tmp_path, how, code, launches):
    done, seen = supervise(tmp_path, how)
    assert done.returncode == code, done.stderr
    assert len(seen) == 2 * launches
    reasons = [event.get("reason") for event in map(json.loads, (tmp_path / "log").read_text().splitlines())]
    if how == "raise":
        assert "RuntimeError: bad luck" in reasons
    if how == "early":  # the standby process may be the reason
        assert "hfscale.recovery.standby" not in seen["seen-2-0"]["launcher"]


@pytest.mark.faults
@pytest.mark.world(2)
def test_each_node_has_a_standby(tmp_path):
    rendezvous, master = (str(free_port()) for _ in range(2))
    running = []
    for node in ("0", "1"):
        memory = tmp_path / f"memory-{node}"
        memory.mkdir()
        torchrun = [str(BIN / "torchrun"), "--nnodes", "2", "--node-rank", node, "--nproc-per-node", "1"]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", master, str(SCRIPT), str(tmp_path), "done"]
        options = ["--memory-dir", str(memory), "--nodes", "2", "--node-rank", node]
        options += ["--rendezvous", f"127.0.0.1:{rendezvous}"]
        command = [sys.executable, "-m", "hfscale", "run", *options, "--", *torchrun]
        env = os.environ | {"HFSCALE_RUN_TOKEN": "secret"}
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=280)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], errors
    for rank in (0, 1):
        launchers = [
            json.loads((tmp_path / f"seen-{launch}-{rank}.json").read_text())["launcher"] for launch in (0, 1)
        ]
        assert ["hfscale.recovery.standby" in launcher for launcher in launchers] == [False, True]


@pytest.mark.faults
@pytest.mark.world(2)
def test_without_a_standby_process_the_command_is_started_again(tmp_path):
    done, seen = supervise(tmp_path, "none", "--no-standby")
    assert done.returncode == 0, done.stderr
    assert "hfscale.recovery.standby" not in seen["seen-1-0"]["launcher"]
