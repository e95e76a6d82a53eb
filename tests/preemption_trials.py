"""Trials of preemption: forked from one server process, so that each costs a second or two."""

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY

SERVER = REPOSITORY / "tests" / "workers" / "preemption_server.py"
SAVING = {"save_strategy": "steps", "save_steps": 100, "max_steps": 12, "resume_from_checkpoint": "true"}


class Trials:
    """Starts the server with the first trial; a context manager that ends it."""

    def __init__(self):
        self._server = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait(30)

    def run(self, folder, **spec):
        """One trial in `folder`: its outcome as the server tells it, and `status` beside it.

        `signals`: what is sent once rank `rank` enters `phase` for the `at`-th time.
        """
        folder.mkdir(exist_ok=True, parents=True)
        for left in folder.glob("rank-*.json"):
            left.unlink()
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, str(SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            )
            while (line := self._server.stdout.readline()) != "ready\n":
                assert line, "the server did not start"
        spec = {"folder": str(folder), "arguments": SAVING} | spec
        self._server.stdin.write(json.dumps(spec) + "\n")
        self._server.stdin.flush()
        outcome = json.loads(self._server.stdout.readline())
        return outcome | {"status": read_json(folder / "out" / "hfscale_status.json")}


def read_json(path):
    """The content of a JSON file, None where there is none."""
    return json.loads(Path(path).read_text()) if Path(path).is_file() else None


def losses(folder):
    """The loss of each step that a run has kept."""
    records = [json.loads(line) for line in (folder / "out" / "scaling.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


def logs(folder):
    """What the ranks have said, for a failed assertion."""
    return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(folder.glob("log-*")))


def assert_preempted(folder, outcome):
    """All ranks stopped at one step, saved it, exited with 75 and said so."""
    assert outcome["hung"] == [], logs(folder)
    assert set(outcome["codes"]) == {75}, (outcome, logs(folder))
    steps = {rank["step"] for rank in outcome["ranks"]}
    assert len(steps) == 1, outcome
    assert outcome["status"]["status"] == "preempted"
    assert outcome["status"]["step"] == steps.pop()
