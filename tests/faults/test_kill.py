"""SIGKILL at any moment: what was committed stays usable, and the relaunched run ends as if nothing had happened.

The long suite, `make test-faults`.
"""

import json
import random
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY

from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import latest_checkpoint

pytestmark = pytest.mark.faults
WORKER = REPOSITORY / "tests" / "workers" / "saving.py"
KILLS = 12


def start(cwd):
    return subprocess.Popen(
        [sys.executable, str(WORKER), "60"], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def steps(folder):
    return [int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*") if path.name.count(".") == 0]


def test_killed_again_and_again_it_ends_as_the_uninterrupted_run(tmp_path):
    """Each launch is killed at a random time after its first save has begun; it saves at every step, keeping two."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert start(tmp_path / "whole").wait(300) == 0
    output_dir, chance, committed = tmp_path / "killed" / "out", random.Random(0), 0
    for _ in range(KILLS):
        process = start(tmp_path / "killed")
        before = max(steps(output_dir), default=0)
        while process.poll() is None and max(steps(output_dir), default=0) <= before:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.15))
        process.kill()
        process.wait(30)
        newest = latest_checkpoint(output_dir)
        if newest is not None:
            step = read_manifest(newest).step
            assert step >= committed, "a committed step was lost"
            committed = step
    assert committed > 0
    assert start(tmp_path / "killed").wait(300) == 0
    whole, killed = (
        [json.loads(line) for line in (tmp_path / name / "out" / "scaling.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert [record["step"] for record in killed] == [record["step"] for record in whole]
    assert [record["loss"] for record in killed] == [record["loss"] for record in whole]
