"""Outliers among the losses and gradient norms of steps: simulated trainings have none, and spikes are found."""

import math
import random

import pytest

from hfscale.replays import outliers
from hfscale.replays.outliers import Outliers


def noise(chance, spread):
    return math.exp(chance.gauss(0, spread))


KINDS = {
    "loss of a pretraining": lambda c, s: (2.5 + 8 * math.exp(-s / 150)) * noise(c, 0.03),
    "norm of a pretraining, with a peak in the warm-up": lambda c, s: (
        (0.3 + 3 * math.exp(-s / 200)) * (1 + 4 * math.exp(-(((s - 30) / 20) ** 2))) * noise(c, 0.15)
    ),
    "norm of small batches": lambda c, s: noise(c, 0.5),
    "norm of single samples": lambda c, s: noise(c, 1),
    "loss near 0": lambda c, s: 1e-3 * noise(c, 1.5),
    "loss near 0, very uneven": lambda c, s: 1e-3 * noise(c, 2),
    "loss that drops with each epoch": lambda c, s: max(0.05, 2 - 0.4 * (s // 1000)) * noise(c, 0.1),
    "norm that grows": lambda c, s: math.exp(min(s, 3000) / 500) * noise(c, 0.2),
    "loss of preferences": lambda c, s: math.log1p(math.exp(-c.gauss(min(s / 800, 8), 3))),
    "loss of single texts": lambda c, s: max(0.01, c.gauss(2, 0.6)),
    "negative loss": lambda c, s: c.gauss(-1, 1),
}


def count(kind, seed, steps):
    judge, chance, found = Outliers([]), random.Random(seed), 0
    for step in range(steps):
        number = KINDS[kind](chance, step)
        limit = judge.limit_below(number)
        found += limit is not None
        judge.add(number if limit is None else limit)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_simulated_training_has_no_outliers(kind):
    assert count(kind, 0, 2000) == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ten_simulated_trainings_of_ten_thousand_steps_have_no_outliers(kind):
    assert [count(kind, seed, 10_000) for seed in range(10)] == [0] * 10


def judge_after(kind, steps=3000):
    judge, chance = Outliers([]), random.Random(1)
    for step in range(steps):
        judge.add(KINDS[kind](chance, step))
    return judge


def test_spikes_are_found():
    loss, norm = judge_after("loss of a pretraining"), judge_after("norm of a pretraining, with a peak in the warm-up")
    assert loss.limit_below(4.5) is not None
    assert loss.limit_below(2.7) is None
    assert norm.limit_below(3.0) is not None
    assert norm.limit_below(0.5) is None
    assert judge_after("norm of small batches").limit_below(60.0) is not None


def test_too_few_or_equal_numbers_say_nothing():
    judge = Outliers([])
    for _ in range(outliers.MIN_STEPS - 1):
        judge.add(1.0 + random.Random(0).random())
    assert judge.limit_below(1e9) is None
    equal = Outliers([2.0] * 500)
    assert equal.limit_below(3.0) is None


def test_an_outlier_that_recurs_is_none_any_more_and_a_far_one_hides_no_other():
    judge = judge_after("loss of a pretraining")
    found = 0
    for _ in range(5):
        limit = judge.limit_below(7.5)
        found += limit is not None
        judge.add(7.5 if limit is None else limit)
    assert found == 1
    other = judge_after("loss of a pretraining")
    limit = other.limit_below(1e9)
    other.add(limit)
    assert other.limit_below(1e5) is not None
    assert len(other._seen) == outliers.WINDOW
