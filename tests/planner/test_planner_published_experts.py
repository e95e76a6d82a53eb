"""Published runs of mixtures of experts, which the planner is compared with and not fitted to."""

import json

import pytest
from conftest import REPOSITORY

from benchmarks import planner_experts
from hfscale.planner.estimate import estimate_job

COMMITTED = json.loads((REPOSITORY / "benchmarks" / "results" / "planner_experts.json").read_text())


@pytest.fixture(scope="module")
def compared():
    return [planner_experts.compare(row, estimate_job(job)) for row, job in planner_experts.jobs()]


def test_every_published_layout_is_found_to_fit_where_it_ran(compared):
    assert {(row.source, row.model, row.run) for row in compared if row.fits == "no"} == set()


@pytest.mark.long
def test_a_plan_is_found_for_the_largest_models_on_the_gpus_of_others():
    plans = planner_experts.searched()
    assert {plan["fits"] for plan in plans} == {"yes"}
    assert plans == COMMITTED["plans"], "python -m benchmarks planner_experts"


def test_the_published_peak_is_within_5_percent(compared):
    (error,) = [row.peak_error for row in compared if row.peak_error is not None]
    assert abs(error) < 0.05


def test_the_committed_figures_match_this_code(compared):
    assert planner_experts.figures(compared) == COMMITTED["summary"], "python -m benchmarks planner_experts"
    assert [(row.predicted, row.fits) for row in compared] == [
        (row["predicted"], row["fits"]) for row in COMMITTED["rows"]
    ]
