"""Agreement between ranks, alone and on two processes."""

import json

import pytest
from conftest import REPOSITORY

from hfscale.checkpoint.store import list_checkpoints, verify
from hfscale.utils import distributed
from hfscale.utils.distributed import StepAgreement


def test_alone_every_value_is_agreed_at_once():
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.all_max([1.0, 2.0]) == [1.0, 2.0]
    assert distributed.gather_rows([1.0, 2.0]) == [[1.0, 2.0]]
    distributed.barrier()


class FakeTime:
    """A clock that each step moves on by `step_s`."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(distributed.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("step_s", [0.03, 1.0, 60.0])
def test_exchanges_come_about_as_often_as_asked(monkeypatch, step_s):
    clock = FakeTime(monkeypatch)
    agreement = StepAgreement(every_s=5.0)
    exchanges = []
    for step in range(2000):
        clock.now += step_s
        if agreement.step(float(step)) is not None:
            exchanges.append(step)
    gaps = [later - earlier for earlier, later in zip(exchanges[-4:-1], exchanges[-3:], strict=True)]
    assert all(gap == max(1, int(5.0 / step_s)) for gap in gaps), gaps


def test_a_slow_first_step_does_not_set_the_pace(monkeypatch):
    clock = FakeTime(monkeypatch)
    agreement = StepAgreement(every_s=5.0)
    clock.now += 300.0  # compilation
    assert agreement.step(1.0) == 1.0
    seen = 0
    for _ in range(200):
        clock.now += 0.05
        seen += agreement.step(0.0) is not None
    assert seen < 12


def test_a_quick_first_step_does_not_either(monkeypatch):
    clock = FakeTime(monkeypatch)
    agreement = StepAgreement(every_s=5.0)
    clock.now += 0.001
    agreement.step(0.0)
    exchanged = []
    for _ in range(2):
        clock.now += 60.0
        exchanged.append(agreement.step(1.0) is not None)
    assert exchanged == [False, True]


@pytest.mark.world(2)
def test_two_processes_save_at_one_step_though_their_clocks_differ(launch, tmp_path):
    """Rank 1 finds the save overdue long before rank 0: both must save, at the same step, and nobody may hang."""
    done = launch(2, REPOSITORY / "tests" / "workers" / "agreement.py")
    assert done.code == 0, done.err[-3000:]
    values = json.loads((tmp_path / "values.json").read_text())
    assert values == {"max": [3.0, 7.0], "rows": [[0.0, 7.0], [3.0, 6.0]]}
    checkpoints = list_checkpoints(tmp_path / "out")
    assert len(checkpoints) >= 3
    for checkpoint in checkpoints:
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(verify(checkpoint).files)
