"""The arithmetic of learning rate scaling."""

import math

import pytest

from hfscale.errors import UsageError
from hfscale.facts.lr_rules import RUBRIC_TOKENS_PER_STEP, RULES, scale_learning_rate


def decide(**overrides):
    settings = {"rule": "auto", "optimizer": "adamw_torch", "global_batch_size": 64, "base_global_batch_size": 16}
    return scale_learning_rate(**(settings | overrides))


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        ("adamw_torch_fused", 2),
        ("adamw_bnb_8bit", 2),
        ("adafactor", 2),
        ("OneBitAdam", 2),
        ("Lamb", 2),
        ("sgd", 4),
        ("SGD", 4),
    ],
)
def test_auto_is_square_root_for_adaptive_optimizers_and_linear_for_sgd(optimizer, factor):
    assert decide(optimizer=optimizer).factor == factor


def test_auto_knows_every_optimizer_of_transformers():
    from transformers.training_args import OptimizerNames

    for name in OptimizerNames:
        assert decide(optimizer=name.value).rule == ("linear" if name.value in ("sgd", "lomo") else "sqrt") or (
            name.value == "schedule_free_sgd"
        )


def test_auto_refuses_an_unknown_optimizer():
    with pytest.raises(UsageError, match=r"'mystery'.*use linear, sqrt"):
        decide(optimizer="mystery")


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("sqrt", 2), ("none", 1)])
def test_an_explicit_rule_takes_precedence_over_the_optimizer(rule, factor):
    assert decide(rule=rule).factor == factor


def test_a_smaller_batch_scales_down():
    assert decide(global_batch_size=4).factor == 0.5


def test_without_a_base_nothing_is_scaled_and_the_reason_says_so():
    scaling = decide(base_global_batch_size=None)
    assert scaling.factor == 1
    assert "no base_global_batch_size" in scaling.reason


def test_kappa_counts_tokens_when_lengths_differ():
    assert decide(block_size=4096, base_block_size=1024).kappa == 16


def test_a_base_length_needs_the_current_length():
    with pytest.raises(UsageError, match="base_block_size is 1024"):
        decide(base_block_size=1024)


@pytest.mark.parametrize(("critical", "factor"), [(32, math.sqrt(2)), (64, 2), (1000, 2)])
def test_kappa_stops_growing_at_the_critical_batch(critical, factor):
    assert decide(critical_batch_size=critical).factor == pytest.approx(factor)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_batch_beyond_the_critical_batch_changes_nothing(rule):
    """The base was tuned beyond the critical batch too, so that the factor is 1."""
    assert decide(rule=rule, global_batch_size=256, base_global_batch_size=128, critical_batch_size=64).factor == 1
    lengths = {"block_size": 2048, "base_block_size": 1024}
    assert (
        decide(rule=rule, global_batch_size=64, base_global_batch_size=64, critical_batch_size=32, **lengths).factor
        == 1
    )


@pytest.mark.parametrize("name", ["global_batch_size", "base_global_batch_size", "block_size", "warmup_scale"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_must_be_positive(name, value):
    with pytest.raises(UsageError, match=f"{name} is {value}"):
        decide(**{name: value})


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=", ".join(RULES)):
        decide(rule="cubic")


class TestRubric:
    def test_is_linear_below_its_threshold(self):
        assert decide(rule="rubric", block_size=256).factor == pytest.approx(4)

    def test_is_square_root_above_it(self):
        assert decide(rule="rubric", block_size=8192).factor == pytest.approx(2)

    def test_is_continuous_across_it(self):
        base_tokens = RUBRIC_TOKENS_PER_STEP // 2
        scaling = decide(rule="rubric", base_global_batch_size=1, global_batch_size=8, block_size=base_tokens)
        assert scaling.factor == pytest.approx(2 * math.sqrt(4))

    def test_warms_up_five_times_as_long_when_the_batch_grows(self):
        assert decide(rule="rubric", block_size=256).warmup_factor == 5
        assert decide(rule="rubric", block_size=256, global_batch_size=16).warmup_factor == 1

    def test_needs_the_length(self):
        with pytest.raises(UsageError, match="block_size"):
            decide(rule="rubric")


def test_warmup_steps_are_unchanged_by_default():
    assert decide().warmup_factor == 1
    assert decide(warmup_scale=3).warmup_factor == 3
