"""Emitted plans of each recipe and kind of strategy: every file is read, and a small model of the family trains.

tests/faults/test_plans.py does the same with 200 random requests.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY
from emitted_plans import check_files, choices_of, emit_choice, small_flags, small_launcher, small_layout, start
from plan_requests import NOT_SAMPLED, SAMPLERS, Request, built_in

from hfscale.core.options import options_of
from hfscale.planner.options import IslandOptions, PlanOptions, PlanOutput

PLANS = {
    "ddp": ("ddp", "smollm2-360m", "--gpu", "RTX4090", "--gpus", "8", "--method", "lora", "--seq-len", "2048"),
    "fsdp2": ("sharded", "qwen3-8b", "--gpu", "H100-80GB", "--gpus", "8", "--global-batch", "64"),
    "zero2": ("sharded", "mistral-7b", "--gpu", "H200", "--gpus", "16", "--tokens", "1B"),
    "parallel": ("tp_pp", "qwen2.5-72b", "--gpu", "H100-80GB", "--gpus", "64", "--seq-len", "4096"),
    "native": ("sharded", "qwen3-30b-a3b", "--gpu", "H200", "--gpus", "16", "--global-batch", "64"),
    "zero1": ("sft", "gemma-3-1b", "--gpu", "A100-80GB", "--gpus", "4", "--task", "sft", "--seq-len", "1024"),
}
"""Strategy -> recipe, model and flags of a plan that has a choice of both."""


@pytest.mark.recipes
@pytest.mark.parametrize("strategy", PLANS)
def test_an_emitted_plan_starts(tmp_path, strategy):
    recipe, model, *flags = PLANS[strategy]
    config = built_in(model)
    request = Request(model=model, family=config.model_type, config=config, flags=(*flags, "--top", "100"))
    choices = choices_of(request)
    wanted = (strategy, f"recipes/{recipe}/train.py")
    index = [(choice["strategy"], choice["recipe"]) for choice in choices].index(wanted)
    plan = emit_choice(request, choices, index, tmp_path / "plan")
    check_files(plan, tmp_path)
    start(plan, tmp_path)


@pytest.mark.recipes
@pytest.mark.parametrize("axes", [{"tp": 2, "dp_replicate": 1}, {"tp": 1, "dp_shard": 1}])
def test_an_emitted_plan_of_spread_experts_without_a_pipeline_starts(tmp_path, axes):
    """Over the ranks of tensor-parallel groups, and over replicas of the dense layers."""
    config = built_in("qwen3-30b-a3b")
    flags = ("--gpu", "H200", "--gpus", "16", "--global-batch", "64", "--top", "200")
    request = Request(model="qwen3-30b-a3b", family=config.model_type, config=config, flags=flags)
    choices = choices_of(request)
    wanted = {"pp": 1, **axes}
    index = next(
        number
        for number, choice in enumerate(choices)
        if choice["recipe"] == "recipes/tp_pp/train.py" and wanted.items() <= choice["layout"].items()
    )
    assert choices[index]["layout"]["ep"] > 1
    plan = emit_choice(request, choices, index, tmp_path / "plan")
    check_files(plan, tmp_path)
    start(plan, tmp_path)


PROGRAMS = {"hfscale": "hfscale", "accelerate": "accelerate.commands.accelerate_cli"}
"""What launch.sh starts, by the module that this interpreter runs for it."""


@pytest.mark.recipes
@pytest.mark.timeout(600)
def test_a_launched_plan_that_gets_sigterm_saves_and_resumes(tmp_path):
    """launch.sh, `hfscale run`, the launcher and two ranks, each a process of its own."""
    recipe, model, *flags = PLANS["ddp"]
    config = built_in(model)
    request = Request(model=model, family=config.model_type, config=config, flags=(*flags, "--top", "100"))
    choices = choices_of(request)
    index = [(choice["strategy"], choice["recipe"]) for choice in choices].index(("ddp", f"recipes/{recipe}/train.py"))
    plan = emit_choice(request, choices, index, tmp_path / "plan")
    small = small_layout(plan)
    words = ["sh", "plan/launch.sh", *small_flags(plan, small, tmp_path)]
    small_launcher(plan, small, tmp_path).replace(plan.folder / "accelerate.yaml")
    for name, module in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    logged = tmp_path / "out" / "scaling.jsonl"

    def found():
        return json.loads((tmp_path / "out" / "hfscale_status.json").read_text(encoding="utf-8"))

    started = subprocess.Popen([*words, "--max_steps", "100000"], cwd=tmp_path, env=env)
    while not logged.exists() or logged.read_text(encoding="utf-8").count("\n") < 2:
        assert started.poll() is None
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    assert started.wait(120) == 75
    stopped = found()
    step = stopped["step"]
    assert (stopped["status"], stopped["reason"]) == ("preempted", f"SIGTERM: checkpoint-{step} is committed")
    assert (tmp_path / "out" / f"checkpoint-{step}").is_dir()
    again = subprocess.run(
        [*words, "--max_steps", str(step + 2)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert (found()["status"], found()["step"]) == ("completed", step + 2)
    state = json.loads(
        (tmp_path / "out" / f"checkpoint-{step + 2}" / "trainer_state.json").read_text(encoding="utf-8")
    )
    steps = [row["step"] for row in state["log_history"] if "loss" in row]
    assert steps == [*range(1, step + 3)]  # those before the signal come from the checkpoint


def test_every_option_of_a_plan_is_drawn_or_left_out_for_a_reason():
    options = {name for group in (PlanOptions, IslandOptions, PlanOutput) for name in options_of(group)}
    assert options - {"gpu"} == {*SAMPLERS, *NOT_SAMPLED}
