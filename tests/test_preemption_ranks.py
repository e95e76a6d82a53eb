"""Several ranks, one notice: all learn of it at one step, stop there, and go on from there."""

import json
import sys

import pytest
from conftest import REPOSITORY, run_process
from preemption_trials import SAVING, Trials, assert_preempted, logs, losses

from hfscale.checkpoint.store import verify
from hfscale.preemption import agreement
from hfscale.preemption.agreement import OverlappedAgreement


class Clock:
    """Each step moves it on by `step_s`."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(agreement.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("step_s", [0.01, 0.03, 0.3, 60.0])
def test_exchanges_come_as_often_as_asked(monkeypatch, step_s):
    clock, agreed, steps = Clock(monkeypatch), OverlappedAgreement(0.5), []
    for step in range(1000):
        clock.now += step_s
        if agreed.step(lambda: 0.0) is not None:
            steps.append(step)
    gaps = {later - earlier for earlier, later in zip(steps[-6:-1], steps[-5:], strict=True)}
    assert gaps == {max(1, int(0.5 / step_s))}


def test_the_value_is_asked_for_at_exchanges_only(monkeypatch):
    """It may look at a file system."""
    clock, agreed, asked = Clock(monkeypatch), OverlappedAgreement(0.5), []
    for step in range(100):
        clock.now += 0.05
        agreed.step(lambda step=step: float(asked.append(step) or 0))
    assert len(asked) < 20


@pytest.mark.world(3)
def test_uneven_ranks_read_it_at_the_same_step(tmp_path):
    """Eight rounds: another rank, another moment, another pace."""
    environment = {"PYTHONPATH": str(REPOSITORY)}
    done = run_process([sys.executable, str(REPOSITORY / "tests" / "workers" / "overlap.py")], tmp_path, environment)
    assert done.code == 0, done.err[-3000:]
    rounds = json.loads(done.out.splitlines()[-1])
    assert len(rounds) == 8
    assert all(len(set(row["steps"])) == 1 and row["steps"][0] is not None for row in rounds), rounds
    assert max(row["wait_s"] for row in rounds) < 5.0, rounds


@pytest.fixture(scope="module")
def trials():
    with Trials() as server:
        yield server


@pytest.mark.world(2)
class TestTwoRanks:
    def test_go_on_from_where_one_of_them_was_signalled(self, trials, tmp_path):
        """In a gradient accumulation, by SIGUSR1 to rank 1 alone; then, relaunched, by the group kill of a launcher
        while four workers load data; then to the end. Losses are those of an uninterrupted run, bit by bit."""
        arguments = SAVING | {"gradient_accumulation_steps": 2}
        whole = trials.run(tmp_path / "whole", arguments=arguments)
        assert whole["codes"] == [0, 0], logs(tmp_path / "whole")
        run = tmp_path / "run"
        alone = [{"to": [1], "signal": "SIGUSR1"}]
        outcome = trials.run(run, arguments=arguments, phase="substep", at=3, rank=1, signals=alone)
        assert_preempted(run, outcome)
        first = outcome["status"]["step"]
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(verify(run / "out" / f"checkpoint-{first}").files)
        together = [{"to": [0, 1], "signal": "SIGTERM", "group": True}] * 2
        arguments = arguments | {"dataloader_num_workers": 2}
        outcome = trials.run(run, arguments=arguments, phase="step", at=2, signals=together)
        assert_preempted(run, outcome)
        assert first < outcome["status"]["step"] < 12
        assert outcome["status"]["reason"] == f"SIGTERM: checkpoint-{outcome['status']['step']} is committed"
        assert trials.run(run, arguments=arguments)["codes"] == [0, 0], logs(run)
        assert losses(run) == losses(tmp_path / "whole")
        said = (run / "log-0").read_text()
        assert said.count("(exit code 75)") == 2
        assert "relaunch" not in (run / "log-1").read_text()

    def test_leave_an_evaluation_together(self, trials, tmp_path):
        """Rank 1 alone is signalled, in an evaluation that would last for a minute."""
        arguments = SAVING | {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1}
        outcome = trials.run(
            tmp_path,
            arguments=arguments,
            phase="evaluation",
            at=2,
            rank=1,
            pauses={"evaluation": 4.0},
            signals=[{"to": [1], "signal": "SIGTERM"}],
        )
        assert_preempted(tmp_path, outcome)
        assert outcome["status"] == {
            "status": "preempted",
            "step": 3,
            "checkpoint": "checkpoint-3",
            "reason": "SIGTERM: checkpoint-3 is committed",
        }
        assert outcome["seconds_to_end"] < 30

    def test_agree_on_the_shortest_deadline(self, trials, tmp_path):
        """The last save is taken to have lasted a minute; how long is left only rank 1 knows, which is signalled."""
        outcome = trials.run(
            tmp_path,
            phase="step",
            at=3,
            write_s=60.0,
            signals=[{"to": [1], "signal": "SIGTERM"}],
            pauses={"step": 0.05},
        )
        assert_preempted(tmp_path, outcome)
        assert "the last save took 60.0 s: no other was begun" in outcome["status"]["reason"]
        assert list((tmp_path / "out").glob("checkpoint-*")) == []
