"""SIGKILL at random moments: committed checkpoints stay usable, and relaunched runs equal an uninterrupted one.

A run that saves at every step and keeps two checkpoints is launched and killed repeatedly until it ends: at a random
I/O operation of one rank or at a random time, sometimes with the loss of all that was not flushed (`disk.py`). Each
launch tests the one before: it resumes from the newest verified checkpoint, and every step must have the loss and the
gradient norm of the uninterrupted run, bit by bit. Such chains of launches are repeated until the required number of
launches has been killed. In the long part this number is the environment variable HFSCALE_KILLS, 200 by default;
HFSCALE_SEED changes the random moments. `results.py` says how to keep the counts.
"""

import json
import os
import random
import sys
import time

import pytest
from crashes import CrashRunner, committed_step, crash_server  # noqa: F401  the fixture
from disk import SURVIVORS
from recipe_runs import environment_of
from results import keep_result

from hfscale import latest_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import verify

pytestmark = pytest.mark.timeout(0)
KILLS = int(os.environ.get("HFSCALE_KILLS", "200"))
SEED = os.environ.get("HFSCALE_SEED", "0")
STEPS = 24
SHARES = {"single": 0.6, "ddp": 0.2, "fsdp2": 0.1, "zero2": 0.05, "zero3": 0.05}
QUICK = {"single": 8, "ddp": 6, "fsdp2": 5}


RUN_FILES = {
    ".hfscale_lock",
    "hfscale_fingerprints.jsonl",
    "hfscale_status.json",
    "hfscale_timeline.jsonl",
    "scaling.jsonl",
}


class Chains:
    """Chains of killed launches of one strategy, and the reference with which they must agree."""

    def __init__(self, crashes: CrashRunner, strategy: str) -> None:
        self.crashes = crashes
        self.strategy = strategy
        self.random = random.Random(f"{SEED} {strategy}")
        self.settings = {"ranks": 1 if strategy == "single" else 2, "env": environment_of(strategy)}
        reference = crashes.train(crashes.folder / "reference", STEPS, **self.settings)
        assert not any(reference.codes), reference.err[-4000:]
        self.expected = crashes.records(crashes.folder / "reference")
        self.operations_per_step = len(reference.operations_of(0)) / STEPS
        self.killed = self.launches = self.chains = self.lost_steps = self.machines_lost = 0

    def run(self, kills: int) -> dict[str, float]:
        """Run chains until `kills` launches have been killed; return a summary."""
        started_at = time.monotonic()
        summary = {}
        while self.killed < kills:
            self.chains += 1
            self._chain(self.crashes.folder / f"chain-{self.chains}")
            summary = {
                "kills": self.killed,
                "machines_lost": self.machines_lost,
                "chains": self.chains,
                "launches": self.launches,
                "steps_lost_at_most": self.lost_steps,
                "seconds_per_launch": round((time.monotonic() - started_at) / self.launches, 2),
            }
            keep_result(self.strategy, summary)
        return summary

    def _chain(self, cwd) -> None:
        committed = 0
        while True:
            self.launches += 1
            outcome = self.crashes.train(cwd, STEPS, **self.settings, **self._kill_point())
            if not any(outcome.codes):
                break
            assert -9 in outcome.codes, outcome.err[-4000:]
            self.killed += 1
            promised = max(committed, committed_step(outcome.operations))
            committed = max(committed, committed_step(outcome.operations, needs_flush=False))
            self._check(cwd, committed)
            if self.random.random() < 0.3:
                self.machines_lost += 1
                self.crashes.lose_machine(outcome, self.random.choice(list(SURVIVORS.values())))
                self._check(cwd, promised)
                committed = promised
        assert read_manifest(latest_checkpoint(cwd / "out")).step == STEPS
        names = {path.name for path in (cwd / "out").iterdir() if "-until-" not in path.name}
        expected = RUN_FILES | {f"checkpoint-{step}" for step in (STEPS - 1, STEPS)}
        assert names - {"hfscale_ranks.jsonl", ".unfinished"} == expected, "a killed launch has left files"
        assert [record[0] for record in self.crashes.records(cwd)] == list(range(1, STEPS + 1))

    def _kill_point(self) -> dict[str, float]:
        """Return when to kill the launch: within its first steps. A resume takes fewer operations than a step."""
        if self.random.random() < 0.5:
            return {"at": self.random.randint(1, round(4 * self.operations_per_step)), "rank": self._rank()}
        return {"after_s": self.random.uniform(0, 0.3)}

    def _rank(self) -> int:
        return self.random.randrange(self.settings["ranks"])

    def _check(self, cwd, committed: int) -> None:
        """Assert that the newest committed checkpoint is good and that every logged step equals the reference."""
        newest = latest_checkpoint(cwd / "out")
        step = 0 if newest is None else read_manifest(newest).step
        assert step >= committed, f"step {committed} was committed, but step {step} is the newest usable one"
        if newest is not None:
            assert verify(newest).step == step
        logged = self.crashes.records(cwd)
        for record in logged:
            assert record == self.expected[record[0] - 1]
        if logged:  # one save may be in flight during the next step
            self.lost_steps = max(self.lost_steps, logged[-1][0] - step)
            assert self.lost_steps <= 2


@pytest.fixture
def chains(crash_server, tmp_path):  # noqa: F811
    return lambda strategy: Chains(CrashRunner(crash_server, tmp_path), strategy)


@pytest.mark.world(2)
@pytest.mark.recipes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_repeatedly_killed_runs(chains, strategy):
    """On one process: in test_crash_points.py, which has the same server."""
    chains(strategy).run(QUICK[strategy])


@pytest.mark.faults
@pytest.mark.parametrize("strategy", SHARES)
def test_runs_killed_hundreds_of_times(chains, strategy, record_property):
    summary = {"strategy": strategy} | chains(strategy).run(round(KILLS * SHARES[strategy]))
    record_property("kills", summary)
    sys.stdout.write(f"{json.dumps(summary)}\n")
