"""Several ranks and one notice: all ranks stop at the same step, and the resumed run continues from there."""

import pytest
from preemption_trials import SAVING, Trials, assert_preempted, logs, losses

from hfscale.checkpoint.store import verify


@pytest.fixture(scope="module")
def trials():
    with Trials() as server:
        yield server


@pytest.mark.world(2)
class TestTwoRanks:
    @pytest.mark.long
    def test_the_run_resumes_where_one_rank_was_signalled(self, trials, tmp_path):
        """A run is interrupted twice and completes; its losses are bit-identical to those of an uninterrupted run.

        First rank 1 alone gets SIGUSR1 within a gradient accumulation. Then all processes get a SIGTERM, as from a
        launcher, while four workers load data.
        """
        arguments = SAVING | {"gradient_accumulation_steps": 2}
        uninterrupted = trials.run(tmp_path / "uninterrupted", arguments=arguments)
        assert uninterrupted["codes"] == [0, 0], logs(tmp_path / "uninterrupted")
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
        assert losses(run) == losses(tmp_path / "uninterrupted")
        log = (run / "log-0").read_text()
        assert log.count("(exit code 75)") == 2
        assert "relaunch" not in (run / "log-1").read_text()

    @pytest.mark.long
    def test_both_ranks_cut_an_evaluation_short(self, trials, tmp_path):
        """Rank 1 alone is signalled during an evaluation that would take a minute."""
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
        assert outcome["seconds_to_end"] < 60

    def test_both_ranks_use_the_shortest_deadline(self, trials, tmp_path):
        """The last save is assumed to have taken a minute; only rank 1, which is signalled, knows the time left."""
        outcome = trials.run(
            tmp_path,
            phase="step",
            at=3,
            write_s=60.0,
            signals=[{"to": [1], "signal": "SIGTERM"}],
            pauses={"step": 0.05},
        )
        assert_preempted(tmp_path, outcome)
        assert "60.0 s" in outcome["status"]["reason"]
        assert list((tmp_path / "out").glob("checkpoint-*")) == []

    @pytest.mark.long
    def test_a_rank_that_is_blocked_in_c_ends_when_its_peer_is_dead(self, trials, tmp_path):
        """Rank 1 is killed, and the launcher signals rank 0, whose main thread cannot run the signal's handler."""
        kill = [{"to": [1], "signal": "SIGKILL"}]
        outcome = trials.run(tmp_path, phase="step", at=3, rank=0, blocks=["step", 3, 0], signals=kill, timeout_s=200)
        assert outcome["codes"] == [143, -9], (outcome, logs(tmp_path))
        assert "rank 1 has died" in (tmp_path / "log-0").read_text()
