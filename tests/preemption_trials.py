"""Trials of preemption, forked from one server process, so that each takes only a second or two."""

import json
import os
import socket
import tempfile
from pathlib import Path

from conftest import REPOSITORY
from fork_client import fork_server

SERVER = REPOSITORY / "tests" / "workers" / "preemption_server.py"
SAVING = {"save_strategy": "steps", "save_steps": 100, "max_steps": 12, "resume_from_checkpoint": "true"}


START_S = 200


class Trials:
    """A context manager that starts the server at the first trial, through the fork server, and ends it."""

    def __init__(self):
        self._connection = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._connection is not None:
            self._stream.close()
            self._connection.close()
            fork_server().wait(self._job, 30)
            self._folder.cleanup()

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen()
            listener.settimeout(START_S)
            argv, files = [str(SERVER), str(folder / "socket")], {"out": folder / "out", "err": folder / "err"}
            self._job = fork_server().start("script", argv, cwd=folder, env=dict(os.environ), **files)
            self._connection, _ = listener.accept()
        self._connection.settimeout(None)
        self._stream = self._connection.makefile("rw")

    def run(self, folder, **spec):
        """Run a trial in `folder`.

        Args:
            folder: the working directory of the ranks.
            spec: the trial; `signals` are sent when rank `rank` enters `phase` for the `at`-th time.

        Returns:
            The outcome that the server reports, and the run's status file as `status`.
        """
        folder.mkdir(exist_ok=True, parents=True)
        for left in folder.glob("rank-*.json"):
            left.unlink()
        if self._connection is None:
            self._start()
        spec = {"folder": str(folder), "arguments": SAVING} | spec
        self._stream.write(json.dumps(spec) + "\n")
        self._stream.flush()
        outcome = json.loads(self._stream.readline())
        return outcome | {"status": read_json(folder / "out" / "hfscale_status.json")}


def read_json(path):
    """The content of a JSON file, None where there is none."""
    return json.loads(Path(path).read_text()) if Path(path).is_file() else None


def losses(folder):
    """The loss of each step in a run's records."""
    records = [json.loads(line) for line in (folder / "out" / "scaling.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


def logs(folder):
    """The logs of the ranks, for a failed assertion."""
    return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(folder.glob("log-*")))


def assert_preempted(folder, outcome):
    """Assert that all ranks stopped at the same step and exited with 75, and that the status says so."""
    assert outcome["hung"] == [], logs(folder)
    assert set(outcome["codes"]) == {75}, (outcome, logs(folder))
    steps = {rank["step"] for rank in outcome["ranks"]}
    assert len(steps) == 1, outcome
    assert outcome["status"]["status"] == "preempted"
    assert outcome["status"]["step"] == steps.pop()
