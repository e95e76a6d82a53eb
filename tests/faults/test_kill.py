"""SIGKILL at any moment: what was committed stays usable, and the relaunched run is the run that was never killed.

A run that saves at every step and keeps two checkpoints is launched and killed again and again, at a random deed of
its first rank or at a random time, one rank or all, now and then with the loss of what was not flushed, until it ends.
Each launch judges the one before: it goes on from the newest verified checkpoint, and every step it takes must have
the loss and the gradient norm of the uninterrupted run, bit by bit. Chains of launches follow each other until so many
have been killed. In the environment HFSCALE_KILLS is their number in the long part, 3000 by default, and HFSCALE_SEED
draws others.
"""

import json
import os
import random
import sys
import time

import pytest
from crashes import Crashes, crash_server  # noqa: F401  the fixture
from recipe_runs import environment_of

from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import latest_checkpoint, verify

pytestmark = pytest.mark.timeout(0)
KILLS, SEED = int(os.environ.get("HFSCALE_KILLS", "3000")), os.environ.get("HFSCALE_SEED", "0")
STEPS = 24
SHARES = {"single": 0.6, "ddp": 0.2, "fsdp2": 0.1, "zero2": 0.05, "zero3": 0.05}
QUICK = {"single": 150, "ddp": 30, "fsdp2": 20}


LEFT = {".hfscale_lock", "hfscale_status.json", "hfscale_timeline.jsonl", "scaling.jsonl"}


class Chains:
    """Launches of one strategy, each killed, and what they must agree with."""

    def __init__(self, crashes: Crashes, strategy: str) -> None:
        self.crashes, self.chance = crashes, random.Random(f"{SEED} {strategy}")
        self.settings = {"ranks": 1 if strategy == "single" else 2, "env": environment_of(strategy)}
        whole = crashes.train(crashes.folder / "whole", STEPS, **self.settings)
        assert not any(whole.codes), whole.err[-4000:]
        self.expected = crashes.records(crashes.folder / "whole")
        self.deeds_per_step = len(whole.deeds) / STEPS
        self.killed = self.launches = self.chains = self.lost = 0

    def run(self, kills: int) -> dict[str, float]:
        """Until so many launches were killed; what was seen."""
        begun = time.monotonic()
        while self.killed < kills:
            self.chains += 1
            self._chain(self.crashes.folder / f"chain-{self.chains}")
        return {
            "kills": self.killed,
            "chains": self.chains,
            "launches": self.launches,
            "steps_lost_at_most": self.lost,
            "seconds_per_launch": round((time.monotonic() - begun) / self.launches, 2),
        }

    def _chain(self, cwd) -> None:
        committed = 0
        while True:
            self.launches += 1
            ended = self.crashes.train(cwd, STEPS, **self.settings, **self._death())
            if not any(ended.codes):
                break
            assert -9 in ended.codes, ended.err[-4000:]
            if ended.deeds:  # the last ones were logged and perhaps not done: there are two threads
                committed = max(committed, ended.committed_step(ended.deeds[-1].number - 8))
            self.killed += 1
            self._judge(cwd, committed)
            if self.chance.random() < 0.3:
                self.crashes.lose_unflushed(ended)
                self._judge(cwd, committed)
        assert read_manifest(latest_checkpoint(cwd / "out")).step == STEPS
        left = {path.name for path in (cwd / "out").iterdir() if "-until-" not in path.name}
        expected = LEFT | {f"checkpoint-{step}" for step in (STEPS - 1, STEPS)}
        assert left - {"hfscale_ranks.jsonl", ".unfinished"} == expected, (
            "a launch that was killed has left something behind"
        )
        assert [record[0] for record in self.crashes.records(cwd)] == list(range(1, STEPS + 1))

    def _death(self) -> dict[str, float]:
        """When the launch is killed: it resumes in less than a step's deeds, and takes a few steps."""
        if self.chance.random() < 0.5:
            return {"at": self.chance.randint(1, round(4 * self.deeds_per_step)), "rank": self._rank()}
        return {"after_s": self.chance.uniform(0, 0.3)}

    def _rank(self) -> int:
        return self.chance.randrange(self.settings["ranks"])

    def _judge(self, cwd, committed: int) -> None:
        """A checkpoint that was committed is there and whole, and no step has gone another way."""
        newest = latest_checkpoint(cwd / "out")
        step = 0 if newest is None else read_manifest(newest).step
        assert step >= committed, f"step {committed} was committed, and step {step} is the newest that can be used"
        if newest is not None:
            assert verify(newest).step == step
        logged = self.crashes.records(cwd)
        for record in logged:
            assert record == self.expected[record[0] - 1]
        if logged:  # one save may be under way while the next step is taken
            self.lost = max(self.lost, logged[-1][0] - step)
            assert self.lost <= 2


@pytest.fixture
def chains(crash_server, tmp_path):  # noqa: F811
    return lambda strategy: Chains(Crashes(crash_server, tmp_path), strategy)


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", QUICK)
def test_killed_again_and_again(chains, strategy):
    chains(strategy).run(QUICK[strategy])


@pytest.mark.faults
@pytest.mark.parametrize("strategy", SHARES)
def test_killed_thousands_of_times(chains, strategy, record_property):
    summary = {"strategy": strategy} | chains(strategy).run(round(KILLS * SHARES[strategy]))
    record_property("kills", summary)
    sys.stdout.write(f"{json.dumps(summary)}\n")
