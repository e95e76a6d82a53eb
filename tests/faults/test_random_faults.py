"""Random faults of every process of a supervised run: no lost step beyond the interval, nothing left, no hang.

Part of the long suite, `make test-faults`. HFSCALE_FAULTS is the number of faults, 24 by default, several in each run;
HFSCALE_SEED selects others. Runs on one and on two nodes have the faults of `random_faults.py`; the standby process
and the rendezvous of islands have tests of their own here. `results.py` says how to keep the counts. The campaign of
`benchmarks/results/random_faults.json`:

    HFSCALE_RESULTS=benchmarks/results/random_faults.json HFSCALE_FAULTS=500 HFSCALE_SEED=20261126 \\
        python -m pytest -m faults tests/faults/test_random_faults.py
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from random_faults import Run, one_node, two_nodes
from results import keep_result
from test_islands import largest_difference, parameters_of, run_islands, trained
from test_recovery import server  # noqa: F401  a fixture
from transformers import TrainerCallback

from hfscale import DiLoCoCallback
from hfscale.islands.rendezvous import TOKEN_VARIABLE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
FAULTS, SEED = int(os.environ.get("HFSCALE_FAULTS", "24")), os.environ.get("HFSCALE_SEED", "0")
OF_RUN = 8
KINDS = {"one node": (1, one_node, 0.6), "two nodes": (2, two_nodes, 0.3)}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP", "pause")
SMALL = range(max(1, round(FAULTS * 0.05 / OF_RUN)))  # runs of the standby process, and as many of the rendezvous
LIMIT_S = 240.0


def runs_of(part):
    return range(max(1, round(FAULTS * part / OF_RUN)))


RUNS = [(name, number) for name, (_, _, part) in KINDS.items() for number in runs_of(part)]
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


def count(name, kinds):
    """Add faults of one run to those of the runs before it."""
    found = costs.setdefault(name, [])
    found += kinds
    keep_result(name, {"seed": SEED, "faults": len(found), **{kind: found.count(kind) for kind in sorted(set(found))}})


def resume(process):
    with suppress(psutil.NoSuchProcess):
        process.resume()


def apply(process, kind, seconds):
    """Send a signal to a process; a pause ends after some seconds, in the background."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP if kind == "pause" else signal.Signals[kind])
    if kind == "pause":
        threading.Timer(seconds, resume, [process]).start()


# --- the standby process ---------------------------------------------------------------------------------------------


def wait_for(condition, supervisor, errors):
    until = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert supervisor.poll() is None, errors.read_text()
        assert time.monotonic() < until, errors.read_text()
        time.sleep(0.05)
    return found


def standby_of(supervisor):
    """The process that waits: unlike the launcher, which it becomes, it has no children."""
    for child in psutil.Process(supervisor.pid).children():
        with suppress(psutil.Error):
            if "hfscale.recovery.standby" in child.cmdline() and not child.children():
                return child
    return None


@pytest.mark.parametrize("number", SMALL)
def test_random_faults_of_the_standby_process_cost_no_restart(tmp_path, number):
    chance = random.Random(f"{SEED}-standby-{number}")
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--master-port", "0"]
    script = [str(REPOSITORY / "tests" / "workers" / "standby_faults.py"), str(tmp_path), str(OF_RUN)]
    options = ["--memory-dir", str(tmp_path), "--max-restarts", "50"]
    argv = [sys.executable, "-m", "hfscale", "run", *options, "--", *torchrun, *script]
    errors, kinds = tmp_path / "errors", []
    with errors.open("w") as stderr:
        supervisor = subprocess.Popen(argv, stderr=stderr, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    try:
        for launch in range(OF_RUN):
            ranks = [tmp_path / f"rank-{launch}-{rank}" for rank in range(2)]
            wait_for(lambda ranks=ranks: all(map(Path.exists, ranks)), supervisor, errors)
            process = wait_for(lambda: standby_of(supervisor), supervisor, errors)
            time.sleep(chance.uniform(0, 4))  # during its imports, and after them
            kinds.append(chance.choice(SIGNALS))
            apply(process, kinds[-1], chance.uniform(0.1, 1.5))
            time.sleep(chance.uniform(0, 0.5))
            psutil.Process(int(chance.choice(ranks).read_text())).kill()
        assert supervisor.wait(LIMIT_S) == 0, errors.read_text()
    finally:
        supervisor.kill()
        supervisor.wait()
    assert not list(tmp_path.glob("hfscale-run-*"))
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in (one.info["cmdline"] or [])]
    assert left == []
    count("standby process", kinds)


# --- the rendezvous of islands ---------------------------------------------------------------------------------------


class FaultsOfRendezvous(TrainerCallback):
    """Applies faults to the rendezvous that this process has started, and writes which; each step takes some time."""

    def __init__(self, path, faults):
        self.path, self.faults = path, faults

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(0.05)
        kind, seconds = self.faults.get(state.global_step, (None, 0.0))
        children = psutil.Process().children() if kind is not None else []
        for child in children:
            with suppress(psutil.Error):
                if "hfscale.islands.rendezvous" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    apply(child, kind, seconds)
                    with self.path.open("a") as file:
                        file.write(f"{kind}\n")


@pytest.mark.parametrize("number", SMALL)
def test_random_faults_of_the_rendezvous_leave_islands_equal(tmp_path, number, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of the tests")
    chance, steps = random.Random(f"{SEED}-rendezvous-{number}"), 120
    kinds = [kind for kind in SIGNALS if kind != "SIGSTOP"]  # one that is stopped for ever has a deadline of its own
    at = chance.sample(range(6, steps - 24, 6), OF_RUN)
    faults = {step: (chance.choice(kinds), chance.uniform(0.1, 1.5)) for step in at}

    def train(island, rendezvous):
        flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "every_steps": 2, "deadline_s": 60.0}
        ours = FaultsOfRendezvous(tmp_path / "applied", faults if island == 0 else {})
        trained(tmp_path / str(island), DiLoCoCallback(**flags), ours, max_steps=steps, logging_steps=1)

    codes, logs = run_islands(tmp_path, train)
    assert codes == [0, 0], "\n".join(logs)
    assert largest_difference(parameters_of(tmp_path / "0"), parameters_of(tmp_path / "1")) == 0.0
    count("rendezvous of islands", (tmp_path / "applied").read_text().split())
