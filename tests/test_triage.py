"""The triage: one cause, the right one, with its numbers; and silence where all is well."""

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


def test_a_healthy_run_and_an_unknown_one_have_no_finding():
    assert triage(TriageInput(**HEALTHY)) is None
    assert triage(TriageInput()) is None


@pytest.mark.parametrize(
    ("changed", "cause", "number"),
    [
        ({"data_wait_fraction": 0.31}, "data wait", "31%"),
        ({"straggler_skew": 1.5}, "straggler", "1.50 times"),
        ({"comm_fraction": 0.4}, "exposed communication", "40%"),
        ({"comm_fraction": 0.4, "comm_over_backward": 0.8}, "exposed communication", "40%"),
        ({"comm_fraction": 0.4, "comm_over_backward": 3.0}, "tokens per GPU too small", "8,192 tokens"),
        ({"bubble_fraction": 0.3}, "bubble", "30%"),
        ({"mfu": 0.3, "hfu": 0.45}, "recompute", "33%"),
        ({"throttled": 1.0}, "thermal", "clock"),
        ({"efficiency": 0.6, "mfu": 0.3, "hfu": 0.4}, "recompute", "25%"),
        ({"efficiency": 0.5, "data_wait_fraction": 0.07}, "not measured", "the largest, data wait, is 7%"),
        (
            {"efficiency": 0.5, "data_wait_fraction": 0.0, "straggler_skew": 1.0, "comm_fraction": 0.0},
            "not measured",
            "50%",
        ),
    ],
)
def test_each_cause_is_named_with_its_numbers(changed, cause, number):
    finding = triage(TriageInput(**(HEALTHY | changed)))
    assert finding.check == cause
    assert number in finding.problem
    assert finding.fix


def test_of_several_causes_the_largest_is_named():
    both = HEALTHY | {"data_wait_fraction": 0.2, "straggler_skew": 1.2, "comm_fraction": 0.3, "throttled": 1.0}
    assert triage(TriageInput(**both)).check == "exposed communication"
    assert triage(TriageInput(**(both | {"straggler_skew": 3.0}))).check == "straggler"


def test_the_tokens_that_would_hide_the_exchange_are_computed():
    finding = triage(TriageInput(**(HEALTHY | {"comm_fraction": 0.4, "comm_over_backward": 3.0})))
    assert "24,576 tokens" in finding.fix


SLOW = {"scaling/data_wait_fraction": 0.5, "loss": 1.0}


class TestWatch:
    def look(self, watch, logs):
        return watch.check(logs, comm_over_backward=None, tokens_per_gpu=None)

    def test_says_a_cause_once_after_it_has_held(self):
        watch = TriageWatch()
        watch.begin()
        found = [self.look(watch, SLOW) for _ in range(8)]
        assert [finding is not None for finding in found] == [False, False, False, True, False, False, False, False]
        assert found[3].check == "data wait"
        changed = [self.look(watch, {"scaling/comm_fraction": 0.6}) for _ in range(3)]
        assert changed[-1].check == "exposed communication"

    def test_one_slow_log_is_no_diagnosis(self):
        watch = TriageWatch()
        watch.begin()
        fine = {"scaling/data_wait_fraction": 0.0}
        assert [self.look(watch, logs) for logs in (fine, fine, {"scaling/data_wait_fraction": 0.2}, fine, fine)] == (
            [None] * 5
        )
