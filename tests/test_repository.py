"""The Makefile, the jobs of the CI workflow, and the order of the test files."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import LONG_FILES, REPOSITORY

CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
MAKEFILE = REPOSITORY / "Makefile"
WORKFLOW = REPOSITORY / ".github" / "workflows" / "ci.yml"
STEPS = REPOSITORY / ".ci" / "run"
ONE_FILE = "tests/core/test_redact.py"

needs_workflow = pytest.mark.skipif(not WORKFLOW.is_file(), reason="a source distribution has no CI files")


def workflow():
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))


def targets():
    """The targets of the Makefile that are commands, not files."""
    return set(re.search(r"^\.PHONY: (.+)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)[1].split())


def steps_of(job):
    """The `make` commands of a job, without the word `make`."""
    return job["strategy"]["matrix"]["step"]


def pytest_commands(target, *variables):
    """The commands in which `make TARGET` runs pytest."""
    command = ["make", "--dry-run", target, *variables]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60).stdout
    return [line for line in printed.splitlines() if "-m pytest" in line]


def paths_in(command):
    return [word for word in shlex.split(command) if word.startswith("tests/")]


@needs_workflow
def test_the_jobs_of_the_workflow_are_the_steps_of_the_ci_script_and_the_longer_suites():
    steps = re.findall(r"^make ([^#\n]+)", STEPS.read_text(encoding="utf-8"), re.MULTILINE)
    longer = ["test-long", "test-trainers", "test-recipes", "test-finetuning", "test-versions ARGS=--short"]
    assert steps_of(workflow()["jobs"]["steps"]) == [*(step.strip() for step in steps), *longer]


@needs_workflow
def test_every_step_of_the_workflow_is_a_target():
    for job in workflow()["jobs"].values():
        assert {step.split()[0] for step in steps_of(job)} <= targets()
        assert job["steps"][-1] == {"run": "make ${{ matrix.step }}"}


@needs_workflow
def test_the_long_suites_run_at_night_and_not_at_each_change():
    jobs = workflow()["jobs"]
    assert set(steps_of(jobs["nightly"])) == {"test-faults", "test-versions"}
    assert "== 'schedule'" in jobs["nightly"]["if"]
    assert jobs["steps"]["if"] == "github.event_name != 'schedule'"


@needs_workflow
def test_the_workflow_may_only_read_and_pins_its_actions():
    assert workflow()["permissions"] == {"contents": "read"}
    for job in workflow()["jobs"].values():
        assert "permissions" not in job
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used
        assert [name for name in used if not re.fullmatch(r"actions/[\w-]+@v\d+", name)] == []


def test_the_makefile_describes_every_target():
    described = re.findall(r"^# make ([\w-]+) ", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(described) == sorted(targets())


@pytest.mark.parametrize(
    "target", ["test", "test-recipes", "test-trainers", "test-finetuning", "test-faults", "test-gpu"]
)
def test_a_path_in_args_limits_what_make_collects(target):
    commands = pytest_commands(target, f"ARGS={ONE_FILE}")
    assert commands
    assert all(paths_in(command) == [ONE_FILE] for command in commands)


def test_make_test_succeeds_where_a_folder_has_no_timing_test():
    *_, timing = pytest_commands("test", f"ARGS={ONE_FILE}", f"BIN={Path(sys.executable).parent}")
    assert "timing" in timing
    done = subprocess.run(["bash", "-c", timing], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "deselected" in done.stdout


def test_the_guide_says_which_tests_each_package_needs():
    guide = CONTRIBUTING.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| (.*`make [^|]+) \|", guide, re.MULTILINE)
    packages = {path.parent.name for path in (REPOSITORY / "hfscale").glob("*/__init__.py")}
    named = {name for changed, _ in rows for name in re.findall(r"`(\w+)`", changed)}
    assert sorted(packages - named) == []
    commands = " ".join(command for _, command in rows)
    folders = re.findall(r"tests/[\w/.]+", commands)
    assert [folder for folder in folders if not (REPOSITORY / folder).exists()] == []
    assert {target for target in targets() if target.startswith("test")} <= set(re.findall(r"make ([\w-]+)", guide))


def test_the_files_that_run_first_exist():
    names = {path.name for path in (REPOSITORY / "tests").rglob("test_*.py")}
    assert set(LONG_FILES) <= names
