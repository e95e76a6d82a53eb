"""Signals at any moment, to any rank, in any number: all ranks end at the same step, and the run resumes from there.

Part of the long suite, `make test-faults`. The environment variable HFSCALE_TRIALS is the number of trials, 100 by
default, HFSCALE_RESUME_EVERY is 4 if every fourth trial is resumed to its end, and HFSCALE_SEED selects other random
trials. `results.py` says how to keep the counts.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time

import pytest
from conftest import RECIPE, REPOSITORY
from preemption_trials import SAVING, Trials, assert_preempted, logs, losses, read_json
from results import keep_result
from test_recipe_ddp import QUICK

from hfscale.checkpoint.store import verify

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
TRIALS, SEED = int(os.environ.get("HFSCALE_TRIALS", "100")), os.environ.get("HFSCALE_SEED", "0")
SHARES = {"ddp": 0.7, "fsdp2": 0.1, "zero2": 0.1, "zero3": 0.1}
RESUME_EVERY = int(os.environ.get("HFSCALE_RESUME_EVERY", "4"))
PHASES = {
    "begin": 1,
    "epoch": 2,
    "step": 11,
    "substep": 11,
    "optimizer": 11,
    "data": 30,
    "save": 3,
    "evaluation": 8,
    "eval_data": 20,
}


@pytest.fixture(scope="module")
def trials():
    with Trials() as server:
        yield server


def random_arguments(chance):
    """The arguments of one of a few runs, so that few uninterrupted runs are needed for comparison."""
    accumulation, workers, evaluates = chance.choice([1, 2]), chance.choice([1, 2]), chance.choice([False, True])
    return SAVING | {
        "gradient_accumulation_steps": accumulation,
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": workers == 1,
        "save_steps": 4,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "linear",
    }


def random_trial(chance):
    """A random trial: the signals, their ranks and their moment."""
    arguments = random_arguments(chance)
    possible = dict(PHASES)
    if arguments["gradient_accumulation_steps"] == 1:
        del possible["substep"]
    if arguments["eval_strategy"] == "no":
        del possible["evaluation"], possible["eval_data"]
    phase = chance.choice(list(possible))
    ranks = chance.choice([[0], [1], [0, 1], [1, 0]])
    skew = chance.choice([0.0, 0.0, chance.uniform(0, 0.3)])
    number = chance.choice(["SIGTERM"] * 6 + ["SIGUSR1", "SIGINT"])
    if phase in ("begin", "epoch") and number == "SIGINT":
        number = "SIGTERM"  # before the training Ctrl-C ends the process at once
    is_group = len(ranks) == 2 and chance.random() < 0.5  # a launcher signals the groups of all ranks
    signals = [
        {"to": [rank], "signal": number, "group": is_group, "after_s": index * skew}
        for index, rank in enumerate(ranks)
    ]
    if number != "SIGINT" and chance.random() < 0.3:
        signals += [entry | {"after_s": entry["after_s"] + chance.uniform(0, 0.1)} for entry in signals]
    pauses = {name: chance.uniform(0, 0.04) for name in ("step", "evaluation", "save", "optimizer")}
    spec = {
        "arguments": arguments,
        "phase": phase,
        "at": chance.randint(1, possible[phase]),
        "rank": chance.randrange(2),
        "signals": signals,
        "pauses": pauses,
        "timeout_s": 600,
    }
    if chance.random() < 0.1:
        spec["write_s"] = 60.0  # longer than the time that a signal leaves
    return spec


def check_outcome(folder, spec, outcome):
    """Check the outcome and return whether the run was preempted; a signal at the very end may come too late."""
    assert outcome["hung"] == [], (spec, logs(folder))
    if set(outcome["codes"]) == {0}:
        assert {rank["step"] for rank in outcome["ranks"]} == {12}, (spec, outcome)
        assert outcome["status"]["status"] == "completed", (spec, outcome)
        return False
    assert_preempted(folder, outcome)
    last = outcome["status"]["checkpoint"]
    if last is not None:
        verify(folder / "out" / last)
    if "write_s" not in spec:
        assert last == f"checkpoint-{outcome['status']['step']}", (spec, outcome, logs(folder))
    return True


@pytest.mark.parametrize("strategy", list(SHARES))
def test_ranks_stop_together_after_signals_at_any_moment(
    strategy, trials, launch_environment, tmp_path, record_property
):
    chance, env, uninterrupted = random.Random(f"{SEED} {strategy}"), launch_environment(strategy), {}
    seconds, resumed = [], 0
    for number in range(max(1, round(TRIALS * SHARES[strategy]))):
        folder, spec = tmp_path / str(number), random_trial(chance) | {"env": env}
        outcome = trials.run(folder, **spec)
        was_preempted = check_outcome(folder, spec, outcome)
        if was_preempted:
            seconds.append(outcome["seconds_to_end"])
        if was_preempted and number % RESUME_EVERY == 0:  # recipes only report that a completed run is complete
            key = json.dumps(spec["arguments"])
            plain = {"arguments": spec["arguments"], "env": env, "timeout_s": 600}
            if key not in uninterrupted:
                reference = tmp_path / f"uninterrupted-{len(uninterrupted)}"
                assert trials.run(reference, **plain)["codes"] == [0, 0], logs(reference)
                uninterrupted[key] = losses(reference)
            assert trials.run(folder, **plain)["codes"] == [0, 0], (spec, logs(folder))
            assert losses(folder) == uninterrupted[key], (spec, outcome)
            resumed += 1
        shutil.rmtree(folder)
        median, longest = (statistics.median(seconds), max(seconds)) if seconds else (0.0, 0.0)
        summary = {
            "trials": number + 1,
            "preempted": len(seconds),
            "hung": 0,
            "resumed_with_equal_losses": resumed,
            "seconds_from_signal_to_exit": {"median": round(median, 2), "longest": round(longest, 2)},
        }
        keep_result(strategy, summary)
    record_property("preemption", summary)
    sys.stdout.write(f"{strategy}: {json.dumps(summary)}\n")


def test_a_signal_before_the_training_is_served_by_its_first_step(trials, tmp_path):
    outcome = trials.run(tmp_path, phase="begin", pauses={"begin": 0.5}, signals=[{"to": [0], "signal": "SIGTERM"}])
    assert_preempted(tmp_path, outcome)
    assert outcome["status"]["checkpoint"] == "checkpoint-1"
    assert "SIGTERM: the run stops after its first step" in (tmp_path / "log-0").read_text()


def test_a_second_ctrl_c_interrupts_the_step(trials, tmp_path):
    """Rank 0 sleeps in its step when it is interrupted twice."""
    twice = [{"to": [0], "signal": "SIGINT"}, {"to": [0], "signal": "SIGINT", "after_s": 0.5}]
    outcome = trials.run(tmp_path, phase="step", at=2, pauses={"step": 5.0}, signals=twice)
    assert outcome["hung"] == []
    assert outcome["codes"][0] == 1  # the code of an uncaught exception in the server
    assert "KeyboardInterrupt" in (tmp_path / "log-0").read_text()


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_signal_to_the_launcher_stops_and_saves_the_run(launcher, tmp_path):
    """The launcher signals the group of each rank, with its workers, waits for the save and exits with code 75."""
    flags = [*QUICK, "--output_dir", "out", "--save_steps", "1", "--dataloader_num_workers", "2"]
    start = {
        "accelerate": ["accelerate", "launch", "--config_file", str(REPOSITORY / "accelerate_configs" / "ddp.yaml")],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
    }
    script = REPOSITORY / "launch" / "multinode" / "exit_code.py"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), *start[launcher], str(RECIPE), *flags], cwd=tmp_path, stdout=log, stderr=log
        )
        deadline = time.monotonic() + 240
        while read_json(tmp_path / "out" / "hfscale_status.json") is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.terminate()
        assert process.wait(240) == 75, (tmp_path / "log").read_text()[-4000:]
    found = read_json(tmp_path / "out" / "hfscale_status.json")
    assert (found["status"], found["reason"]) == ("preempted", f"SIGTERM: {found['checkpoint']} is committed")
    verify(tmp_path / "out" / found["checkpoint"])


def test_without_agreement_the_ranks_hang_or_differ(trials, tmp_path):
    """With transformers' own just-in-time checkpoint a rank acts alone, and the other waits forever.

    This shows that the trials above can fail.
    """
    arguments = SAVING | {"enable_jit_checkpoint": True, "max_steps": 100, "resume_from_checkpoint": None}
    outcome = trials.run(
        tmp_path,
        arguments=arguments,
        stock=True,
        phase="step",
        at=3,
        pauses={"step": 0.1},
        timeout_s=40,
        signals=[{"to": [1], "signal": "SIGTERM"}],
    )
    assert outcome["hung"] or len({rank["step"] for rank in outcome["ranks"]}) > 1, outcome
