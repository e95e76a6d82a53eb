"""The parts of a recovery: each is measured between its two moments, and the rank and its supervisor have the same."""

import json
import socket
import time

import pytest

from hfscale.core import rank_link
from hfscale.core.rank_link import RankLink
from hfscale.core.recovery_times import RECOVERY_PARTS, RecoveryTimes, shown_name
from hfscale.core.run_memory import LAUNCHED_VARIABLE, RunMemory

FAILURE = {
    "failed_at": 5.0,  # Unix times, which are of no use for durations
    "ended_at": 4.0,
    "failed_monotonic": 1001.0,
    "ended_monotonic": 1003.0,
    "completed_step": 7,
    "rank": 1,
    "reason": "a bad day",
}


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """A link to a supervisor after a failure, that supervisor's end of it, and a clock which the test sets."""
    memory = RunMemory.create(tmp_path)
    memory.write_failure(FAILURE)
    clock = [1015.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setenv(LAUNCHED_VARIABLE, "1007.0")
    monkeypatch.setattr(rank_link.atexit, "register", lambda call: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(memory.socket))
        listener.listen()
        link = RankLink(memory, 0)
        with listener.accept()[0] as connection:
            yield link, connection, clock
    memory.delete()


def test_each_part_is_the_time_between_its_two_moments():
    times = RecoveryTimes(
        failed_at=1001.0, ended_at=1003.0, launched_at=1007.0, connected_at=1015.0, began_at=1031.0, stepped_at=1063.0
    )
    parts = {"ending_s": 2.0, "waiting_s": 4.0, "starting_s": 8.0, "loading_s": 16.0, "first_step_s": 32.0}
    assert times.parts() == parts
    assert tuple(times.parts()) == RECOVERY_PARTS
    assert [*map(shown_name, RECOVERY_PARTS)] == ["ending", "waiting", "starting", "loading", "first step"]


def test_a_rank_measures_the_recovery_and_tells_its_supervisor(supervised):
    link, connection, clock = supervised
    clock[0] = 1031.0
    link.training(5)
    clock[0] = 1063.0
    recovery = link.stepped(6)
    parts = {"ending_s": 2.0, "waiting_s": 4.0, "starting_s": 8.0, "loading_s": 16.0, "first_step_s": 32.0}
    assert recovery == {"steps_lost": 2, **parts, "rank": 1, "reason": "a bad day"}
    messages = [json.loads(connection.recv(65536)) for _ in range(3)]
    assert messages[1:] == [
        {"event": "training", "step": 5},
        {"event": "stepped", "step": 6, "recovery": recovery},
    ]


def test_the_next_training_of_a_process_does_not_report_the_recovery_again(supervised):
    link, connection, _ = supervised
    for _ in range(2):
        link.training(0)
        last = link.stepped(1)
    assert last is None
    messages = [json.loads(connection.recv(65536)) for _ in range(5)]
    assert messages[-1] == {"event": "stepped", "step": 1, "recovery": None}


def test_without_a_failure_there_is_no_recovery(supervised):
    link, _, _ = supervised
    (link.memory.folder / "failure.json").unlink()
    link.training(0)
    assert link.stepped(1) is None
