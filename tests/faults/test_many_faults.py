"""A thousand random faults of a small supervised training: no lost run, no hang, the losses of an uninterrupted run.

`many_faults.py` draws and applies them. FAULTS is their number, 24 by default, and SEED selects others:

    make test-faults ARGS=tests/faults/test_many_faults.py FAULTS=1000 SEED=1

`results.py` says how to keep the counts, as in `benchmarks/results/many_faults.json`.
"""

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from many_faults import ManyRun, draw, within_limits
from results import keep_result
from test_recovery import server  # noqa: F401  a fixture

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
FAULTS, SEED = int(os.environ.get("FAULTS", "24")), os.environ.get("SEED", "0")
OF_RUN, WIDTH = 8, 3
WORLDS = (1, 2)
LIMIT_S = float(os.environ.get("FAULTS_LIMIT_S", "inf"))  # after it no further run begins
known, counts, began = {}, {}, time.monotonic()


@pytest.fixture
def runs(server, tmp_path):  # noqa: F811
    made = []

    def make(name, moments, world):
        made.append(ManyRun(server, tmp_path / name, {}, moments, world))
        return made[-1]

    yield make
    for run in made:
        run.end()


def losses_without_faults(runs, world):
    if world not in known:
        run = runs(f"whole-{world}", [], world)
        run.run()
        known[world] = {step: loss for _, event, step, *loss in run.trace() if event == "loss"}
    return known[world]


@pytest.mark.parametrize("first", range(0, max(1, round(FAULTS / OF_RUN)), WIDTH))
def test_random_faults_lose_no_run_and_change_no_loss(runs, first):
    if time.monotonic() - began > LIMIT_S:
        pytest.skip("the time of the campaign is over")
    numbers = range(first, min(first + WIDTH, max(1, round(FAULTS / OF_RUN))))
    expected = {world: losses_without_faults(runs, world) for world in {WORLDS[n % len(WORLDS)] for n in numbers}}
    made = []
    for number in numbers:
        world, seed = WORLDS[number % len(WORLDS)], f"{SEED}-many-{number}"
        moments = draw(random.Random(seed), OF_RUN, world)
        sys.stdout.write(f"seed {seed}: {[(moment.name, moment.moment) for moment in moments]}\n")
        made.append(runs(f"run-{number}", moments, world))
    with ThreadPoolExecutor(len(made)) as pool:  # most of a run is waiting
        ended = [pool.submit(run.run) for run in made]
    for future in ended:
        future.result()
    for run in made:
        count(run, run.check(expected[run.world]))


def count(run, repeated):
    """Add the faults of a run to those of the runs before it."""
    applied = [moment for moment in run.moments if moment.applied_at]
    launches = sum(1 for line in run.trace() if line[1] == "begin") // run.world
    for moment in applied:
        of_kind = counts.setdefault(moment.kind, {})
        of_kind[moment.moment] = of_kind.get(moment.moment, 0) + 1
    totals = counts.setdefault("all", {"seed": SEED, "runs": 0, "faults": 0, "launches": 0, "steps repeated": 0})
    for name, value in (("runs", 1), ("faults", len(applied)), ("launches", launches), ("steps repeated", repeated)):
        totals[name] += value
    totals["seconds"] = round(time.monotonic() - began)
    keep_result(f"seed {SEED}", counts)
    is_removed = any(fault.kind == "removed" for moment in applied for fault in moment.faults)
    assert is_removed or within_limits(repeated, launches)
