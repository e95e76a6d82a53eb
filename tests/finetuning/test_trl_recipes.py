"""The recipes for TRL's trainers on two processes: killed, preempted and resumed, under DDP, FSDP2 and ZeRO-3."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import recipe_runs
from conftest import REPOSITORY
from forked_ranks import run_ranks
from transformers import LlamaConfig

from hfscale.checkpoint.manifest import MANIFEST_NAME
from hfscale.checkpoint.store import verify

pytestmark = pytest.mark.finetuning

STRATEGIES = ("ddp", "fsdp2", "zero3")
COMMON = {
    "config_name": "model",
    "tokenizer_name": "tokenizer",
    "max_train_samples": "64",
    "max_eval_samples": "4",
    "per_device_train_batch_size": "2",
    "per_device_eval_batch_size": "2",
    "learning_rate": "1e-2",
    "lr_scheduler_type": "linear",
    "max_steps": "6",
    "save_steps": "2",
    "asynchronous_save": "false",
    "logging_steps": "1",
    "dataloader_num_workers": "0",
    "disable_tqdm": "true",
    "output_dir": "out",
}
FLAGS = {
    "sft": {"max_length": "96", "assistant_only_loss": "true", "packing": "true"},
    "dpo": {"max_length": "96"},
    "grpo": {
        "reward_functions": "rewards.py:words",
        "num_generations": "2",
        "max_completion_length": "8",
        "beta": "0",
    },
}
KEYS = {"sft": ("loss", "grad_norm"), "dpo": ("loss", "rewards/margins"), "grpo": ("reward", "grad_norm")}
"""What is compared; GRPO's loss itself is nearly 0 in every step."""
REWARDS = """
def words(completions, answer, **columns):
    return [float(len(set(completion[0]["content"]) & set(right))) for completion, right in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    recipe_runs.warm_up()
    import hfscale.recipe.trl  # noqa: F401

    folder = recipe_runs.make_workplace(tmp_path_factory.mktemp("workplace"))
    LlamaConfig.from_pretrained(folder / "deep", max_position_embeddings=256).save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "prompts.txt").write_text("What does os.getcwd do?\nline 7 is\n")
    return folder


def run(folder, recipe, strategy, *, ranks=2, stop=None, **flags):
    """Run a recipe on forked ranks and return their exit codes.

    Args:
        folder (`Path`): a copy of the workplace.
        recipe (`str`): `sft`, `dpo` or `grpo`.
        strategy (`str`): `single` or one of `STRATEGIES`.
        ranks (`int`): number of processes.
        stop (`tuple`, *optional*): a signal and a step; rank 1 gets the signal once the step's checkpoint is there.
        flags: further flags.
    """
    given = [f"--{name}={value}" for name, value in (COMMON | FLAGS[recipe] | flags).items()]
    script = REPOSITORY / "recipes" / recipe / "train.py"
    env = recipe_runs.environment_of(strategy)
    ends_all = stop is None or stop[0] == signal.SIGKILL  # preempted ranks end by themselves
    return run_ranks(ranks, _run, script, folder, given, stop, log=folder / "log", env=env, ends_all=ends_all)


def _run(script, folder, flags, stop):
    if stop is not None and os.environ["RANK"] == "1":
        threading.Thread(target=_stop_after, args=(folder / "out", *stop), daemon=True).start()
    recipe_runs._recipe(script, folder, flags)


def _stop_after(output_dir, number, step):
    while not (output_dir / f"checkpoint-{step}" / MANIFEST_NAME).exists():
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def history(folder, step=6):
    """Return the training logs by step, as the checkpoint of a step has them."""
    state = json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return {entry["step"]: entry for entry in state["log_history"] if "loss" in entry}


def values(folder, recipe):
    return {key: [entry[key] for entry in history(folder).values()] for key in KEYS[recipe]}


@pytest.fixture(scope="module")
def uninterrupted(workplace, tmp_path_factory):
    """Return a function that gives the folder of a complete run on two processes, which also generates samples."""
    done = {}

    def folder_of(recipe, strategy):
        if (recipe, strategy) not in done:
            folder = shutil.copytree(workplace, tmp_path_factory.mktemp(f"{recipe}-{strategy}"), dirs_exist_ok=True)
            samples = {"sample_prompts": "prompts.txt", "sample_steps": "4"}
            assert run(folder, recipe, strategy, **samples) == [0, 0], recipe_runs.output(folder)[-6000:]
            done[recipe, strategy] = folder
        return done[recipe, strategy]

    return folder_of


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recipe", FLAGS)
def test_a_killed_and_preempted_run_has_the_losses_of_an_uninterrupted_one(
    workplace, uninterrupted, tmp_path, recipe, strategy
):
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    codes = run(folder, recipe, strategy, stop=(signal.SIGKILL, 2))
    assert codes[1] == -signal.SIGKILL, recipe_runs.output(folder)[-6000:]
    verify(folder / "out" / "checkpoint-2")
    assert not (folder / "out" / "checkpoint-6").exists()
    codes = run(folder, recipe, strategy, stop=(signal.SIGTERM, 4))
    assert codes == [75, 75], recipe_runs.output(folder)[-6000:]
    status = json.loads((folder / "out" / "hfscale_status.json").read_text())
    assert status["status"] == "preempted"
    assert 4 <= status["step"] < 6
    assert run(folder, recipe, strategy) == [0, 0], recipe_runs.output(folder)[-6000:]
    assert f"continues from checkpoint-{status['step']}" in recipe_runs.output(folder)
    whole = uninterrupted(recipe, strategy)
    assert values(folder, recipe) == values(whole, recipe)
    samples = [json.loads(line) for line in (whole / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (4, "What does os.getcwd do?"),
        (4, "line 7 is"),
    ]
    manifest = verify(folder / "out" / "checkpoint-6")
    assert (manifest.strategy, manifest.world_size, manifest.global_batch_size) == (strategy, 2, 4)
