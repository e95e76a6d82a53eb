"""transformers' own tests of its Trainer: none that passes without our callback fails with it in every Trainer.

They are no part of the installed package. Where the environment variable HFSCALE_TRANSFORMERS_TESTS names the folder
`tests` of a checkout of the installed version, they run twice, offline, in processes of their own:

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
    HFSCALE_TRANSFORMERS_TESTS=$PWD/transformers/tests make test-trainers ARGS=tests/trainers/test_transformers_own.py

What needs the hub fails both times and does not count. Tests that compare the whole list of callbacks, or look into
the callback of `enable_jit_checkpoint`, which ours replaces, cannot pass: `test_jit_checkpoint.py` has others instead.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import REPOSITORY

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(0)]
SOURCES = os.environ.get("HFSCALE_TRANSFORMERS_TESTS")
REPLACED = (
    "test_default_callbacks_are_present",
    "test_custom_callback_added_at_init",
    "test_printer_callback_when_tqdm_disabled",
    "test_trainer_jit_checkpoint",
)
"""Parts of the names of tests, or of their modules, that have another test here in their place."""
EXAMPLES = """
import pytest
from tiny import tiny_trainer
from transformers import Trainer

def test_trains(tmp_path):
    assert tiny_trainer(tmp_path).train().global_step == 4

def test_default_callbacks_are_present(tmp_path):
    assert "ScalingCallback" not in str(tiny_trainer(tmp_path).callback_handler.callbacks)

def test_saves_at_once(tmp_path):
    names = [type(one).__name__ for one in tiny_trainer(tmp_path).callback_handler.callbacks]
    assert len(names) == 2

def test_needs_the_hub():
    raise OSError("offline")

@pytest.mark.skip(reason="needs a GPU")
def test_on_a_gpu():
    pass
"""


def outcomes(folder: Path, report: Path, *options: str) -> dict[str, str]:
    """Run the tests of a folder; return `passed`, `skipped` or `failed` by the name of each."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    argv += [*options, "--ignore", str(folder / "distributed"), "--junitxml", str(report), str(folder)]
    path = [REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests" / "trainers", folder.parent.parent]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert report.is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  this pytest has written it
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def newly_failing(folder: Path, reports: Path) -> tuple[int, list[str]]:
    """Return how many tests pass without the callback, and which of these do not with it."""
    plain = outcomes(folder, reports / "plain.xml")
    ours = outcomes(folder, reports / "ours.xml", "-p", "callback_everywhere")
    passed = [name for name, outcome in plain.items() if outcome == "passed"]
    failing = [name for name in passed if ours.get(name) != "passed"]
    return len(passed), [name for name in failing if not any(part in name for part in REPLACED)]


def test_what_fails_with_the_callback_alone_is_found(tmp_path):
    folder = tmp_path / "tests" / "trainer"
    folder.mkdir(parents=True)
    (folder / "test_examples.py").write_text(EXAMPLES)
    passed, failing = newly_failing(folder, tmp_path)
    assert (passed, [name.rpartition(".")[2] for name in failing]) == (3, ["test_saves_at_once"])


@pytest.mark.skipif(SOURCES is None, reason="HFSCALE_TRANSFORMERS_TESTS names no tests of transformers")
def test_no_test_of_transformers_fails_with_the_callback_alone(tmp_path):
    passed, failing = newly_failing(Path(SOURCES) / "trainer", tmp_path)
    assert passed > 100, "few of the tests ran: is it a checkout of the installed version?"
    assert failing == []
