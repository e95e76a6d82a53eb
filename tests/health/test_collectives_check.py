"""`hfscale check --collectives`: plain scripts under real launchers, with a collective that depends on the rank."""

import json
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from ports import free_port

from hfscale.cli import main

SCRIPTS = REPOSITORY / "tests" / "workers" / "collectives"


def torchrun(*argv):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    return [*launcher, str(free_port()), *map(str, argv)]


@pytest.fixture
def check(capsys, tmp_path, monkeypatch):
    """Return a function that checks a command in an empty folder, and returns the report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def run(*command, code, flags=()):
        found = main(["check", "--collectives", "--json", *flags, "--", *map(str, command)])
        report = json.loads(capsys.readouterr().out)
        assert found == code, report
        return report

    return run


def sides(report):
    found = report["difference"]
    return found["kind"], *((side["rank"], side["entry"]["name"]) for side in (found["a"], found["b"]))


@pytest.mark.recipes
@pytest.mark.world(2)
def test_a_plain_script_passes_and_leaves_nothing_behind(check, tmp_path):
    report = check(*torchrun(SCRIPTS / "trainer_script.py"), code=0)
    assert report["ok"] is True
    assert report["world_size"] == 2
    assert report["events"] == {"step": 6, "log": 8, "evaluation": 1, "save": 1, "end of data": 1}
    assert {"forward", "backward", "evaluation"} <= report["phases"].keys()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("fault", "found", "phase"),
    [
        ("barrier", ("entry", (0, "barrier"), (1, "allreduce")), "script"),
        ("save", ("missing", (0, "allreduce"), (1, "barrier")), "save"),
        ("error", ("missing", (0, "allreduce"), (1, "allreduce")), "backward"),
        ("group", ("missing", (0, "new_group"), (1, "barrier")), "evaluation"),
    ],
)
def test_a_collective_of_one_rank_is_found_with_both_stacks(check, fault, found, phase):
    report = check(*torchrun(SCRIPTS / "trainer_script.py", "--fault", fault), code=1)
    assert sides(report)[0] == found[0]
    assert sides(report)[1] == found[1]
    first = report["difference"]["a"]["entry"]
    assert first["phase"] == phase
    assert any("trainer_script.py" in frame for frame in first["stack"])


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--collectives"], "give the launch command after --"),
        (["--collectives", "--", "/no/such/program"], "'/no/such/program' is not a program"),
        (["--collectives", "--steps", "0", "--", "true"], "--steps is 0"),
        (["--collectives", "--", "true"], "true has started no rank"),
        (["--", "true"], "'true' is not an option"),
    ],
)
def test_wrong_usage_is_one_line(capsys, argv, part):
    assert main(["check", *argv]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert len(error.splitlines()) == 1


def test_a_command_that_fails_by_itself_is_not_called_a_wait(capsys, tmp_path):
    script = Path(tmp_path, "fails.py")
    script.write_text("raise SystemExit('no data')\n")
    assert main(["check", "--collectives", "--", sys.executable, str(script)]) == 1
    assert "The command failed by itself:\n\nno data" in capsys.readouterr().out
