"""At which steps ranks exchange values (`StepAgreement`), on one process and on several."""

import json

import pytest
from conftest import REPOSITORY

from hfscale.checkpoint.store import list_checkpoints, verify
from hfscale.core import collectives
from hfscale.core.collectives import TRAINING, StepAgreement


class FakeClock:
    """A clock that the test advances."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(collectives.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(
    ("every_s", "step_s"),
    [(0.5, 0.01), (0.5, 0.03), (0.5, 0.3), (0.5, 60.0), (5.0, 0.03), (5.0, 1.0), (5.0, 60.0)],
)
def test_exchanges_keep_their_interval(monkeypatch, step_s, every_s, overlapped):
    clock = FakeClock(monkeypatch)
    agreement = StepAgreement("test", every_s, overlapped=overlapped)
    exchanges = []
    for step in range(4000):
        clock.now += step_s
        if agreement.step(lambda: {"a": 0.0}) is not None:
            exchanges.append(step)
    gaps = {later - earlier for earlier, later in zip(exchanges[-5:-1], exchanges[-4:], strict=True)}
    assert gaps == {max(1, int(every_s / step_s))}


def test_the_value_is_computed_at_exchanges_only(monkeypatch):
    """Computing it may read a file system."""
    clock, agreement, calls = FakeClock(monkeypatch), StepAgreement("test", 0.5, overlapped=True), []
    for step in range(100):
        clock.now += 0.05
        agreement.step(lambda step=step: {"a": float(calls.append(step) or 0)})
    assert len(calls) < 20


def test_a_slow_first_step_does_not_set_the_interval(monkeypatch):
    clock = FakeClock(monkeypatch)
    agreement = StepAgreement("test", every_s=5.0)
    clock.now += 300.0  # compilation
    assert agreement.step(lambda: {"a": 1.0, "b": 2.0}) == {"a": 1.0, "b": 2.0}
    exchanges = 0
    for _ in range(200):
        clock.now += 0.05
        exchanges += agreement.step(lambda: {"a": 0.0}) is not None
    assert exchanges < 12


def test_a_quick_first_step_does_not_set_the_interval(monkeypatch):
    clock = FakeClock(monkeypatch)
    agreement = StepAgreement("test", every_s=5.0)
    clock.now += 0.001
    agreement.step(lambda: {"a": 0.0})
    exchanged = []
    for _ in range(2):
        clock.now += 60.0
        exchanged.append(agreement.step(lambda: {"a": 1.0}) is not None)
    assert exchanged == [False, True]


@pytest.fixture
def exchanges(monkeypatch):
    """The names of the exchanges of a rank whose peers vote 0."""
    names = []

    def start_max(name, numbers):
        names.append(name)
        return lambda: list(numbers)

    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(TRAINING, "start_max", start_max)
    return names


def with_an_exchange_in_progress(clock, votes):
    agreement = StepAgreement("test", 100.0, overlapped=True)
    found = []
    for _ in range(3):
        clock.now += 0.05
        found.append(agreement.step(lambda: votes))
    assert found == [votes, None, None]  # the first is read at once, and that of the third step at the next one
    return agreement


def test_the_votes_of_an_exchange_in_progress_count(monkeypatch, exchanges):
    agreement = with_an_exchange_in_progress(FakeClock(monkeypatch), {"a": 1.0, "b": 2.0})
    assert agreement.now({"a": 3.0, "b": 0.0}) == {"a": 3.0, "b": 2.0}
    assert agreement.now({"a": 0.0, "b": 0.0}) == {"a": 0.0, "b": 0.0}
    assert exchanges == ["test: a, b"] * 4, "the debug check of names sees which votes a rank has"


def test_a_step_exchanges_at_once_where_it_is_asked_to(monkeypatch, exchanges):
    clock = FakeClock(monkeypatch)
    agreement = with_an_exchange_in_progress(clock, {"a": 1.0})
    for _ in range(3):
        clock.now += 0.05
        assert agreement.step(lambda: {"a": 0.5}, at_once=True) == {"a": 1.0 if len(exchanges) == 3 else 0.5}
    assert len(exchanges) == 5


@pytest.mark.world(3)
def test_ranks_with_different_step_times_read_the_value_at_the_same_step(python):
    """In eight rounds the rank, the moment and the step time vary."""
    done = python(REPOSITORY / "tests" / "workers" / "overlap.py")
    assert done.code == 0, done.err[-3000:]
    rounds = json.loads(done.out.splitlines()[-1])
    assert len(rounds) == 8
    assert all(len(set(row["steps"])) == 1 and row["steps"][0] is not None for row in rounds), rounds
    assert max(row["wait_s"] for row in rounds) < 5.0, rounds


@pytest.mark.world(2)
@pytest.mark.long
def test_two_processes_save_at_the_same_step_though_their_clocks_differ(launch, tmp_path):
    """On rank 1 the save is overdue long before it is on rank 0: both must save, at the same step, without a hang."""
    done = launch(2, REPOSITORY / "tests" / "workers" / "agreement.py")
    assert done.code == 0, done.err[-3000:]
    values = json.loads((tmp_path / "values.json").read_text())
    assert values == {"max": [3.0, 7.0], "rows": [[0.0, 7.0], [3.0, 6.0]]}
    saved = [json.loads((tmp_path / f"saved_{rank}.json").read_text()) for rank in (0, 1)]
    assert saved[0] == saved[1]
    assert len(saved[0]) >= 3
    (last,) = list_checkpoints(tmp_path / "out")  # those of a cadence in minutes are temporary
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(verify(last).files)
