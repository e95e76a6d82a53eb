"""An island that is killed in each phase of a round: the others neither hang nor lose a round, and it comes back."""

import pytest

from benchmarks.islands_kills import OUTCOMES, PHASES, STEPS, run_trial
from hfscale.islands.rendezvous import TOKEN_VARIABLE

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(("victim", "phase"), [(number % 3, phase) for number, phase in enumerate(PHASES)])
def test_an_island_is_killed_and_comes_back(victim, phase, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of the tests")
    found = run_trial(phase, in_round=3 * STEPS, victim=victim)
    assert set(found["outcome"]) == set(OUTCOMES), found
