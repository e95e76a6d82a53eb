"""Emitted plans of each recipe and kind of strategy: every file is read, and a small model of the family trains.

tests/faults/test_plans.py does the same with 200 random requests.
"""

import json
import subprocess

import pytest
from emitted_plans import check_files, choices_of, emit_choice, launched_plan, preempt, start
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


LAUNCHED = {"ddp": PLANS["ddp"], "single": ("ddp", "qwen3-0.6b", "--gpu", "A100-80GB", "--gpus", "1")}
"""Strategy -> the same, of launchers that pass signals on to their ranks, and that do not."""


@pytest.mark.recipes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", LAUNCHED)
def test_a_launched_plan_that_gets_sigterm_saves_and_resumes(tmp_path, strategy):
    """launch.sh, `hfscale run`, the launcher and its ranks, each a process of its own."""
    recipe, model, *flags = LAUNCHED[strategy]
    config = built_in(model)
    request = Request(model=model, family=config.model_type, config=config, flags=(*flags, "--top", "100"))
    choices = choices_of(request)
    index = [(choice["strategy"], choice["recipe"]) for choice in choices].index(
        (strategy, f"recipes/{recipe}/train.py")
    )
    plan = emit_choice(request, choices, index, tmp_path / "plan")
    launched = launched_plan(plan, tmp_path / "run")
    step = preempt(launched, plan.title)
    again = subprocess.run(
        [*launched.words, "--max_steps", str(step + 2)],
        cwd=launched.folder,
        env=launched.env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert again.returncode == 0, again.stderr[-3000:]
    found = launched.status()
    assert (found["status"], found["step"]) == ("completed", step + 2)
    state = json.loads((launched.output / f"checkpoint-{step + 2}" / "trainer_state.json").read_text(encoding="utf-8"))
    steps = [row["step"] for row in state["log_history"] if "loss" in row]
    assert steps == [*range(1, step + 3)]  # those before the signal come from the checkpoint


def test_every_option_of_a_plan_is_drawn_or_left_out_for_a_reason():
    options = {name for group in (PlanOptions, IslandOptions, PlanOutput) for name in options_of(group)}
    assert options - {"gpu"} == {*SAMPLERS, *NOT_SAMPLED}
