"""Random faults of every process of a supervised run: no lost step beyond the interval, nothing left, no hang.

Part of the long suite, `make test-faults`. HFSCALE_FAULTS is the number of faults, 24 by default, several in each run;
HFSCALE_SEED selects others. `results.py` says how to keep the counts. The campaign of
`benchmarks/results/random_faults.json`:

    HFSCALE_RESULTS=benchmarks/results/random_faults.json HFSCALE_FAULTS=500 HFSCALE_SEED=… \\
        python -m pytest -m faults tests/faults/test_random_faults.py
"""

import os
import random
import statistics
import sys
import time

import pytest
from random_faults import Run, one_node, two_nodes
from results import keep_result
from test_recovery import server  # noqa: F401  a fixture

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
FAULTS, SEED = int(os.environ.get("HFSCALE_FAULTS", "24")), os.environ.get("HFSCALE_SEED", "0")
OF_RUN = 8
KINDS = {"one node": (1, one_node, 2 / 3), "two nodes": (2, two_nodes, 1 / 3)}
RUNS = [
    (name, number) for name, (_, _, part) in KINDS.items() for number in range(max(1, round(FAULTS * part / OF_RUN)))
]
known, costs, began = {}, {}, {}


@pytest.fixture
def runs(server, launch_environment, tmp_path):  # noqa: F811
    made = []

    def make(name, faults, nodes):
        made.append(Run(server, tmp_path / name, launch_environment("ddp"), faults, nodes))
        return made[-1]

    yield make
    for run in made:
        run.end()


def losses_without_faults(runs, nodes):
    if nodes not in known:
        run = runs("whole", [], nodes)
        run.run()
        known[nodes] = {step: loss for _, event, step, *loss in run.trace() if event == "loss"}
    return known[nodes]


@pytest.mark.parametrize(("name", "number"), RUNS)
def test_random_faults_cost_no_more_than_the_interval_and_leave_nothing(runs, name, number):
    nodes, choose, _ = KINDS[name]
    expected = losses_without_faults(runs, nodes)
    seed = f"{SEED}-{name}-{number}"
    faults = choose(random.Random(seed), OF_RUN)
    began.setdefault(name, time.monotonic())
    sys.stdout.write(f"seed {seed}: {[fault.name for fault in faults]}\n")
    run = runs("run", faults, nodes)
    run.run()
    costs.setdefault(name, []).extend(run.check(expected))
    keep_result(name, summarize(costs[name], time.monotonic() - began[name], number + 1))


def summarize(found, seconds, runs):
    summary = {"seed": SEED, "runs": runs, "faults": len(found), "seconds_per_fault": round(seconds / len(found), 2)}
    for fault in sorted({one["fault"] for one in found}):
        of_fault = [one for one in found if one["fault"] == fault]
        lost = [one["lost"] for one in of_fault if one["launches"]]
        back = [one["seconds"] for one in of_fault if one["seconds"] is not None]
        summary[fault] = {"faults": len(of_fault), "started_again": len(lost)}
        if lost:
            summary[fault] |= {"steps_lost": {str(n): lost.count(n) for n in sorted(set(lost))}}
            summary[fault] |= {"seconds_median": statistics.median(back), "seconds_max": max(back)}
    return summary
