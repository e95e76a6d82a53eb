"""What `hfscale plan --emit` writes for random requests is read by every library, starts on a CPU, saves on SIGTERM,
and keeps what the user changed.

The name of a test is the seed of its plan, so that one plan or the rest of a campaign can be run again:

    python -m pytest -m faults tests/faults/test_plans.py -k "seed-0.17-"

HFSCALE_PLANS is the number of plans (200), HFSCALE_PLANS_SEED the first part of their seeds (0). launch.sh starts the
launcher and the ranks of every tenth plan as users do; those of the others are forks that have imported everything.
"""

import os

import pytest
from emitted_plans import assert_edits_are_kept, check_files, emit_random_plan, launched_plan, preempt, start

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
PLANS = int(os.environ.get("HFSCALE_PLANS", "200"))
SEED = os.environ.get("HFSCALE_PLANS_SEED", "0")


@pytest.mark.parametrize("seed", [f"{SEED}.{number}" for number in range(PLANS)], ids=lambda seed: f"seed-{seed}-")
def test_an_emitted_plan_starts_and_saves(tmp_path, seed):
    plan = emit_random_plan(seed, tmp_path)
    check_files(plan, tmp_path)
    start(plan, tmp_path)
    is_forked = not seed.endswith("0")
    preempt(launched_plan(plan, tmp_path / "launched", is_forked=is_forked), plan.title)
    assert_edits_are_kept(plan)
