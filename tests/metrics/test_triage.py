"""The triage names the one right bottleneck with its numbers, and none for a healthy run."""

import pytest

from hfscale.metrics.triage import TriageInput, TriageWatch, triage

HEALTHY = {
    "efficiency": 0.9,
    "data_wait_fraction": 0.02,
    "straggler_skew": 1.04,
    "comm_fraction": 0.06,
    "mfu": 0.4,
    "hfu": 0.4,
    "tokens_per_gpu": 8192,
}


def test_a_healthy_and_an_unmeasured_run_have_no_bottleneck():
    assert triage(TriageInput(**HEALTHY)) is None
    assert triage(TriageInput()) is None


@pytest.mark.parametrize(
    ("changed", "cause", "number"),
    [
        ({"data_wait_fraction": 0.31}, "data wait", "31%"),
        ({"straggler_skew": 1.5}, "straggler", "1.50 times"),
        ({"straggler_skew": 1.5, "straggler_ratio": 1.0}, "uneven batches", "no rank is slower"),
        ({"straggler_skew": 1.5, "straggler_ratio": 1.3}, "straggler", "1.30 times"),
        ({"comm_fraction": 0.4}, "exposed communication", "40%"),
        ({"comm_fraction": 0.4, "comm_over_backward": 0.8}, "exposed communication", "40%"),
        ({"comm_fraction": 0.4, "comm_over_backward": 3.0}, "tokens per GPU too small", "8,192 tokens"),
        ({"bubble_fraction": 0.3}, "bubble", "30%"),
        ({"mfu": 0.3, "hfu": 0.45}, "recompute", "33%"),
        ({"throttled": 1.0}, "thermal", "clock"),
        ({"efficiency": 0.6, "mfu": 0.3, "hfu": 0.4}, "recompute", "25%"),
        ({"efficiency": 0.5, "data_wait_fraction": 0.07}, "not measured", "data wait, is 7%"),
        (
            {"efficiency": 0.5, "data_wait_fraction": 0.0, "straggler_skew": 1.0, "comm_fraction": 0.0},
            "not measured",
            "50%",
        ),
    ],
)
def test_each_bottleneck_is_named_with_its_numbers(changed, cause, number):
    finding = triage(TriageInput(**(HEALTHY | changed)))
    assert finding.check == cause
    assert number in finding.problem
    assert finding.fix


def test_advice_names_flags_of_recipes_as_such():
    """Arguments of TrainingArguments are named without dashes, as in a script."""
    for changed in (
        {"data_wait_fraction": 0.5},
        {"comm_fraction": 0.5},
        {"bubble_fraction": 0.5},
        {"efficiency": 0.5},
    ):
        fix = triage(TriageInput(**changed)).fix
        assert fix.count("--") == fix.count("of a recipe")


def test_a_host_is_to_be_replaced_only_where_a_rank_is_slow():
    advice = {
        ratio: triage(TriageInput(**HEALTHY | {"straggler_skew": 1.5, "straggler_ratio": ratio})).fix
        for ratio in (1.0, 1.4)
    }
    assert "pack" in advice[1.0]
    assert "host" not in advice[1.0]
    assert "replace the host" in advice[1.4]


def test_the_newest_judgement_about_stragglers_holds():
    watch = TriageWatch(after_s=0)
    logs = [{"scaling/straggler_skew": 1.5, "scaling/straggler_ratio": ratio} for ratio in (1.0, 1.6, 1.6, 1.0)]
    found = [watch.check(one, comm_over_backward=None, tokens_per_gpu=None) for one in logs]
    assert found[-1].check == "uneven batches"


def test_the_largest_of_several_bottlenecks_is_named():
    both = HEALTHY | {"data_wait_fraction": 0.2, "straggler_skew": 1.2, "comm_fraction": 0.3, "throttled": 1.0}
    assert triage(TriageInput(**both)).check == "exposed communication"
    assert triage(TriageInput(**(both | {"straggler_skew": 3.0}))).check == "straggler"


def test_the_fix_names_the_tokens_that_would_hide_the_communication():
    finding = triage(TriageInput(**(HEALTHY | {"comm_fraction": 0.4, "comm_over_backward": 3.0})))
    assert "24,576 tokens" in finding.fix


SLOW = {"scaling/data_wait_fraction": 0.5, "loss": 1.0}


class TestWatch:
    def check(self, watch, logs):
        return watch.check(logs, comm_over_backward=None, tokens_per_gpu=None)

    def test_reports_a_bottleneck_once_after_several_logs(self):
        watch = TriageWatch(after_s=0)
        found = [self.check(watch, SLOW) for _ in range(8)]
        assert [finding is not None for finding in found] == [False, False, False, True, False, False, False, False]
        assert found[3].check == "data wait"
        changed = [self.check(watch, {"scaling/comm_fraction": 0.6}) for _ in range(3)]
        assert changed[-1].check == "exposed communication"

    def test_a_run_of_seconds_gets_no_advice(self):
        watch = TriageWatch()
        assert [self.check(watch, SLOW) for _ in range(8)] == [None] * 8

    def test_one_slow_log_is_not_reported(self):
        watch = TriageWatch(after_s=0)
        fine = {"scaling/data_wait_fraction": 0.0}
        assert [self.check(watch, logs) for logs in (fine, fine, {"scaling/data_wait_fraction": 0.2}, fine, fine)] == (
            [None] * 5
        )
