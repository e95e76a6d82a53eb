"""`kill -9` of any rank at any moment under `hfscale run`: the run goes on from memory, with the same losses.

Part of the long suite, `make test-faults`. The environment variable HFSCALE_RECOVERY_RUNS is the number of supervised
runs, each with several kills, 18 by default, and HFSCALE_SEED selects other random kills. HFSCALE_RECOVERY_DISK=1
repeats each run with checkpoints on the disk every fifth step and no snapshots. A file that HFSCALE_RECOVERY_RESULTS
names receives one JSON line per run.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import REPOSITORY
from native_runs import make_model
from preemption_trials import losses

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
SERVER = REPOSITORY / "tests" / "workers" / "recovery_server.py"
RUNS, SEED = int(os.environ.get("HFSCALE_RECOVERY_RUNS", "18")), os.environ.get("HFSCALE_SEED", "0")
IN_MEMORY = [True, False] if os.environ.get("HFSCALE_RECOVERY_DISK") else [True]
STRATEGIES = ("ddp", "fsdp2", "zero3", "fsdp2_hsdp", "tp_pp", "native")
PARALLEL = {"tp_pp": {"tp_size": 2, "pp_size": 2}}  # of `ParallelTrainer`
EXPERTS = {"fsdp_size": 2, "ep_size": 2}  # of a model that transformers distributes
FOUR_PROCESSES = ("fsdp2_hsdp", "tp_pp")
NO_SNAPSHOT = 1000  # steps, more than a run has
DISK_INTERVAL = 5
STEPS, KILLS = 24, 4
PHASES = ("step", "substep", "optimizer", "data")
ARGUMENTS = {
    "save_strategy": "steps",
    "max_steps": STEPS,
    "resume_from_checkpoint": "true",
    "lr_scheduler_type": "linear",
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(scope="module")
def server():
    """The address of a server that forks ranks."""
    folder = Path(tempfile.mkdtemp(prefix="hfscale-test-"))  # the path of a socket has at most 107 characters
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "serve", str(folder / "s")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    while (line := process.stdout.readline()) != "ready\n":
        assert line, "the server did not start"
    yield folder / "s"
    process.stdin.close()
    process.wait(30)


def supervise(server, folder, env, kills, *, interval=1, save_steps=1000, steps=STEPS, options=(), **more):
    """Run a supervised training in `folder`; return its exit code, its standard error and its log."""
    folder.mkdir()
    arguments = ARGUMENTS | {"save_steps": save_steps, "save_only_model": "native" in more, "max_steps": steps}
    spec = {"folder": str(folder), "arguments": arguments, "world": 2, "kills": kills, "env": env, **more}
    (folder / "spec.json").write_text(json.dumps(spec))
    launcher = [sys.executable, str(SERVER), "launch", str(server), str(folder / "spec.json")]
    options = [
        *options,
        "--memory-interval-steps",
        str(interval),
        "--max-restarts",
        "50",
        "--log",
        str(folder / "run.jsonl"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hfscale", "run", *options, "--", *launcher],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    return done, [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def settings(launch_environment, tmp_path_factory):
    """Return a function: the environment of the ranks of a strategy, and what its trials name besides."""
    moe = make_model(tmp_path_factory.mktemp("moe"), attention_dropout=0.1)

    def of(strategy):
        if strategy == "native":
            return {}, {"native": EXPERTS, "moe": str(moe)}
        return launch_environment(strategy), {"parallel": PARALLEL.get(strategy)}

    return of


@pytest.fixture(scope="module")
def uninterrupted(server, settings, tmp_path_factory):
    """The losses of a run without a kill, by strategy and number of processes."""
    known = {}

    def of(strategy, world=2):
        if (strategy, world) not in known:
            folder = tmp_path_factory.mktemp("whole") / f"{strategy}-{world}"
            env, more = settings(strategy)
            done, _ = supervise(server, folder, env, [], interval=NO_SNAPSHOT, world=world, **more)
            assert done.returncode == 0, done.stderr
            known[strategy, world] = losses(folder)
        return known[strategy, world]

    return of


@pytest.mark.parametrize("in_memory", IN_MEMORY)
@pytest.mark.parametrize("number", range(RUNS))
def test_a_killed_rank_costs_a_step_at_most_and_changes_no_loss(
    server, settings, uninterrupted, tmp_path, number, in_memory
):
    chance = random.Random(f"{SEED}-{number}")
    strategy = STRATEGIES[number % len(STRATEGIES)]
    world = 4 if strategy in FOUR_PROCESSES else chance.choice((2, 2, 3, 4))
    world = 2 if strategy == "native" else world
    kills = [
        {
            "restart": restart,
            "rank": chance.randrange(world),
            "phase": (phase := chance.choice(PHASES)),
            "at": chance.randint(16, 64) if phase == "data" else chance.randint(3, 10),  # three in one step end it
            "after_s": chance.uniform(0, 0.1),
        }
        for restart in range(KILLS)
    ]
    tier = {"interval": 1} if in_memory else {"interval": NO_SNAPSHOT, "save_steps": DISK_INTERVAL}
    env, more = settings(strategy)
    done, events = supervise(server, tmp_path / "run", env, kills, world=world, **tier, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == uninterrupted(strategy, world)
    restarts = [event for event in events if event["event"] == "restart"]
    recovered = [event for event in events if event["event"] == "recovered"]
    result = {
        "strategy": strategy,
        "processes": world,
        "from": "memory" if in_memory else "disk",
        "kills": len(restarts),
        "steps_lost": [event["steps_lost"] for event in recovered],
        "seconds": [
            sum(event[p] for p in ("ending", "waiting", "starting", "loading", "first step")) for event in recovered
        ],
    }
    if "HFSCALE_RECOVERY_RESULTS" in os.environ:
        with Path(os.environ["HFSCALE_RECOVERY_RESULTS"]).open("a") as file:
            file.write(json.dumps(result) + "\n")
    assert restarts
    if in_memory:
        assert max(result["steps_lost"]) <= 2  # the last step, and the one whose snapshot was being written


def test_a_rank_that_hangs_is_found_and_the_run_goes_on(server, launch_environment, uninterrupted, tmp_path):
    stop = {"restart": 0, "rank": 1, "phase": "step", "at": 8, "after_s": 0.0, "signal": "SIGSTOP"}
    done, events = supervise(server, tmp_path / "run", launch_environment("ddp"), [stop], hang_after_s=5)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == uninterrupted("ddp")
    restart = next(event for event in events if event["event"] == "restart")
    assert restart["reason"].startswith("hang: rank 1")
