"""Losses that are not finite or jump, replicas that differ, and what a run does then."""

import math
import random
import re

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from tiny import tiny_model, tiny_trainer
from transformers import TrainerCallback

from hfscale import CommHealthCallback, SpotCheckpointCallback, latest_checkpoint
from hfscale.core.distributed import rank
from hfscale.errors import HealthError, UsageError
from hfscale.health.loss import (
    SAMPLED_ELEMENTS,
    SAMPLED_PARAMETERS,
    LossGuard,
    checksum,
    compare_learning_rates,
    compare_replicas,
)

HOSTS = ["a", "a", "b", "b"]


def falling_losses(seed, steps=200):
    """Losses that fall from 6 to 3, with noise."""
    chance = random.Random(seed)
    return [3 + 3 * math.exp(-step / 40) + chance.gauss(0, 0.05) for step in range(steps)]


class TestLossGuard:
    @pytest.mark.parametrize(
        ("loss", "norm", "part"),
        [(math.nan, 1.0, "loss is nan"), (math.inf, 1.0, "loss is inf"), (1.0, math.nan, "norm is nan")],
    )
    def test_a_value_that_is_not_finite_is_an_error_at_once(self, loss, norm, part):
        found = LossGuard().check(7, loss, norm)
        assert found.level == "error"
        assert f"{part} at step 7" in found.message

    def test_a_jump_is_reported_and_ordinary_losses_are_not(self):
        for seed in range(50):
            guard = LossGuard()
            found = [guard.check(step, loss, 1.0) for step, loss in enumerate(falling_losses(seed))]
            assert not any(found)
            assert "jumps to 6" in guard.check(200, 6.0, 1.0).message

    def test_a_small_rise_of_a_flat_loss_is_not_a_spike(self):
        guard = LossGuard()
        assert not any(guard.check(step, 3.0 + 1e-4 * (step % 2), None) for step in range(20))
        assert guard.check(20, 3.05, None) is None
        assert guard.check(21, 3.6, None) is not None


class TestReplicas:
    def test_equal_weights_have_equal_checksums_and_a_changed_bit_shows_after_some_steps(self):
        one, other = tiny_model(), tiny_model()
        assert checksum(one.parameters(), 5) == checksum(other.parameters(), 5)
        with torch.no_grad():
            weight = other.model.layers[1].mlp.up_proj.weight.view(-1)
            weight[300] += 1e-6
        differ = [checksum(one.parameters(), step) != checksum(other.parameters(), step) for step in range(200)]
        assert any(differ)
        assert not all(differ)  # only a sample of the weights is summed

    def test_the_checksum_is_exact_in_a_double_also_with_nan(self):
        weights = [torch.nn.Parameter(torch.full((4096,), math.nan))]
        value = checksum(weights, 1)
        assert value == int(value) < 2**52
        assert checksum(weights, 1) == value
        assert checksum([], 1) == 0.0

    def test_one_bit_of_the_largest_sample_changes_the_checksum(self):
        """32 parameters of 1,024 elements: without a modulus the sum has more bits than a double."""
        weights = [torch.nn.Parameter(torch.ones(SAMPLED_ELEMENTS)) for _ in range(SAMPLED_PARAMETERS)]
        before = checksum(weights, 0)
        weights[0].data.view(torch.int32)[0] += 1
        assert checksum(weights, 0) != before

    def test_the_replica_that_differs_is_named_and_of_two_both(self):
        (found,) = compare_replicas([5.0, 5.0, 6.0, 5.0], [1.0] * 4, HOSTS, 9)
        assert (found.ranks, found.host) == ((2,), "b")
        assert [f.ranks for f in compare_replicas([5.0, 6.0], [1.0] * 2, HOSTS, 9)] == [(0,), (1,)]
        assert compare_replicas([5.0] * 4, [1.0] * 4, HOSTS, 9) == []
        assert compare_replicas([math.nan] * 4, [math.nan] * 4, HOSTS, 9) == []

    def test_a_replica_with_another_gradient_norm_is_named(self):
        (found,) = compare_replicas([math.nan] * 4, [1.0, 1.0, 1.0, 1.4], HOSTS, 9)
        assert found.ranks == (3,)
        assert "1.4" in found.message
        assert found.blames_host

    @pytest.mark.parametrize("norms", [[1.0, 1.4], [1.0, 1.4, 0.7, 2.0]])
    def test_gradients_that_nothing_reduces_blame_no_device(self, norms):
        """As of a loss that calls the model beside DDP: weights differ from the first step on, too."""
        found = compare_replicas(np.arange(len(norms)), norms, HOSTS, 1)
        assert len(found) >= len(norms) / 2
        assert all("gradients are not reduced" in each.message and not each.blames_host for each in found)

    def test_one_replica_with_other_weights_and_another_norm_has_a_bad_device(self):
        (found,) = compare_replicas([5.0, 5.0, 6.0, 5.0], [1.0, 1.0, 1.4, 1.0], HOSTS, 9)
        assert (found.ranks, found.blames_host) == ((2,), True)
        assert "other weights" in found.message


class TestLearningRates:
    def test_the_rank_that_differs_is_named_and_no_host_is_blamed(self):
        (found,) = compare_learning_rates([0.1, 0.1, 0.05], 9)
        assert (found.ranks, found.level, found.blames_host) == ((2,), "error", False)
        assert "learning rate 0.05 at step 9, others 0.1" in found.message
        assert [each.ranks for each in compare_learning_rates([0.1, 0.2], 9)] == [(0,), (1,)]

    @pytest.mark.parametrize("rates", [[0.1, 0.1], [math.nan, 0.1], [0.0, 0.0], [math.inf, 0.1]])
    def test_equal_and_unknown_ones_are_no_finding(self, rates):
        assert compare_learning_rates(rates, 9) == []

    def test_they_come_before_the_weights_which_follow_from_them(self, tmp_path):
        """A schedule that only one rank has followed is no broken device."""
        folder = tmp_path / "log"
        codes = run_ranks(2, train_with_own_rate, tmp_path, log=folder)
        logs = "".join(path.read_text() for path in sorted(folder.glob("rank-*.log")))
        assert all(codes), logs
        assert "HealthError: " in logs
        assert re.search(r"rank 1.* has the learning rate 0.002 at step \d, others 0.01", logs), logs
        assert "other weights" not in logs


def train_with_own_rate(folder):
    class Lower(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
            if rank() == 1:
                lr_scheduler.base_lrs = [0.002 for _ in lr_scheduler.base_lrs]

    health = CommHealthCallback(on_bad_training="stop")
    tiny_trainer(folder / "out", health, Lower(), max_steps=6, logging_steps=1).train()


class MakeWeightsNan(TrainerCallback):
    """Sets weights to NaN at the end of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                model.lm_head.weight.fill_(math.nan)


SAVING = {
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 8,
    "logging_steps": 2,
    "logging_nan_inf_filter": False,
}


def test_stop_keeps_the_last_checkpoint_of_a_good_log(tmp_path):
    """NaN from the end of step 4 on: the log of step 4 is the last good one, that of step 6 is not."""
    health = CommHealthCallback(on_bad_training="stop")
    trainer = tiny_trainer(tmp_path, health, MakeWeightsNan(5), SpotCheckpointCallback(), **SAVING)
    with pytest.raises(HealthError, match=r"nan at step 6.* checkpoint-4"):
        trainer.train()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    assert (tmp_path / "checkpoint-5.superseded").is_dir()


def test_warn_continues_and_logs_the_finding(tmp_path, log):
    trainer = tiny_trainer(tmp_path, CommHealthCallback(), MakeWeightsNan(5), **(SAVING | {"save_strategy": "no"}))
    trainer.train()
    assert trainer.state.global_step == 8
    assert "the loss is nan at step 6" in log.text


@pytest.mark.parametrize(
    ("argument", "part"),
    [({"hang_after_s": 0}, "hang_after_s is 0"), ({"on_hang": "x"}, "'x'"), ({"on_bad_training": "y"}, "'y'")],
)
def test_a_wrong_argument_is_a_usage_error(argument, part):
    with pytest.raises(UsageError, match=part):
        CommHealthCallback(**argument)
