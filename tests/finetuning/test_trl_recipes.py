"""The recipes for TRL's trainers on two processes: killed, preempted and resumed, under DDP, FSDP2 and ZeRO-3."""

import json
import math
import os
import shutil
import signal
import threading
import time
from itertools import islice

import pytest
import recipe_runs
import torch
from conftest import REPOSITORY
from datasets import Dataset
from forked_ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hfscale.checkpoint.store import verify
from hfscale.core.counts import counted
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.facts.batch_split import split_batch
from hfscale.recipe import corpus
from hfscale.recipe.entrypoint import refused_by_trl

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
    "distillation": {"teacher_model_name_or_path": "teacher", "max_completion_length": "8"},
}
RECORDS = {
    "sft": corpus.chat_records,
    "dpo": corpus.preference_records,
    "grpo": corpus.prompt_records,
    "distillation": corpus.prompt_records,
}
KEYS = {
    "sft": ("loss", "grad_norm"),
    "dpo": ("loss", "rewards/margins"),
    "grpo": ("reward", "grad_norm"),
    "distillation": ("loss", "grad_norm"),
}
"""What is compared; GRPO's loss itself is nearly 0 in every step."""
REWARDS = """
def words(completions, answer, **columns):
    return [float(len(set(completion[0]["content"]) & set(right))) for completion, right in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def workplace(workplace):
    import hfscale.recipe.trl  # noqa: F401

    LlamaConfig.from_pretrained(workplace / "deep", max_position_embeddings=256).save_pretrained(workplace / "model")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(workplace / "model")).save_pretrained(
        workplace / "teacher"
    )
    (workplace / "rewards.py").write_text(REWARDS)
    for recipe, records in RECORDS.items():
        rows = islice(records("train"), 200)
        (workplace / f"{recipe}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workplace / "prompts.txt").write_text("What does os.getcwd do?\nline 7 is\n")
    return workplace


def run(folder, recipe, strategy, *, ranks=2, stop=None, **flags):
    """Run a recipe on forked ranks and return their exit codes.

    Args:
        folder (`Path`): a copy of the workplace.
        recipe (`str`): `sft`, `dpo`, `grpo` or `distillation`.
        strategy (`str`): `single` or one of `STRATEGIES`.
        ranks (`int`): number of processes.
        stop (`tuple`, *optional*): a signal and a step; rank 1 gets the signal once the step's checkpoint is there.
        flags: further flags.
    """
    text = {"train_file": f"{recipe}.jsonl"}
    given = [
        f"--{name}={value}" for name, value in (COMMON | FLAGS[recipe] | text | flags).items() if value is not None
    ]
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


def test_every_strategy_trains_the_same(uninterrupted):
    """Also with DPO's second model, which TRL shards in its own way. GRPO's samples depend on the order of sums."""
    for recipe in ("sft", "dpo"):
        expected = values(uninterrupted(recipe, "ddp"), recipe)
        for strategy in ("fsdp2", "zero3"):
            found = values(uninterrupted(recipe, strategy), recipe)
            for key in KEYS[recipe]:
                assert found[key] == pytest.approx(expected[key], abs=2e-3), (recipe, strategy, key)
    assert values(uninterrupted("dpo", "ddp"), "dpo")["loss"][0] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize(("recipe", "strategy"), [("sft", "ddp"), ("sft", "fsdp2"), ("dpo", "ddp"), ("dpo", "fsdp2")])
def test_compiled_layers_train_as_the_others(uninterrupted, workplace, tmp_path, recipe, strategy):
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    flags = {"torch_compile_regional": "true", "torch_compile_backend": "aot_eager"}
    assert run(folder, recipe, strategy, **flags) == [0, 0], recipe_runs.output(folder)[-6000:]
    for key, wanted in values(uninterrupted(recipe, strategy), recipe).items():
        assert values(folder, recipe)[key] == pytest.approx(wanted, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize(
    ("recipe", "strategy", "ranks"), [("sft", "zero3", 1), ("dpo", "fsdp2", 4), ("sft", "ddp", 1)]
)
def test_another_number_of_processes_keeps_the_losses(uninterrupted, tmp_path, recipe, strategy, ranks):
    whole = uninterrupted(recipe, strategy)
    folder = interrupted(whole, tmp_path)
    target = "single" if ranks == 1 else strategy
    assert run(folder, recipe, target, ranks=ranks) == [0] * ranks, recipe_runs.output(folder)[-6000:]
    assert f"{counted(ranks, 'process')} instead of 2: the global batch stays 4 sequences" in recipe_runs.output(
        folder
    )
    for key, wanted in values(whole, recipe).items():
        assert values(folder, recipe)[key] == pytest.approx(wanted, abs=2e-3), key


def test_a_teacher_that_each_rank_keeps_is_the_same_as_one_that_they_share(uninterrupted, workplace, tmp_path):
    """And both are the one of a single strategy: the first loss, before any update, is equal."""
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    flags = {"shard_teacher": "false", "max_steps": "1", "save_steps": "1", "teacher_dtype": "float32"}
    assert run(folder, "distillation", "fsdp2", **flags) == [0, 0], recipe_runs.output(folder)[-6000:]
    loss = history(folder, 1)[1]["loss"]
    for strategy in STRATEGIES:
        assert values(uninterrupted("distillation", strategy), "distillation")["loss"][0] == pytest.approx(
            loss, abs=1e-5
        )


def test_grpo_keeps_its_batches_on_another_number_of_processes(uninterrupted, tmp_path):
    """The completions are other ones: each process draws its own random numbers."""
    whole = uninterrupted("grpo", "ddp")
    folder = interrupted(whole, tmp_path)
    assert run(folder, "grpo", "single", ranks=1) == [0], recipe_runs.output(folder)[-6000:]
    expected, found = history(whole), history(folder)
    assert list(found) == list(expected)
    assert found[2] == expected[2]
    assert [found[step]["epoch"] for step in found] == [expected[step]["epoch"] for step in expected]
    saved = torch.load(folder / "out" / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert (saved.gradient_accumulation_steps, saved.steps_per_generation, saved.generation_batch_size) == (2, 2, 4)


@pytest.mark.parametrize(
    ("recipe", "strategy", "flags"),
    [("sft", "fsdp2", {}), ("dpo", "zero3", {}), ("grpo", "ddp", {"beta": "0.04"})],
)
def test_adapters_are_trained_and_resumed(workplace, tmp_path, recipe, strategy, flags):
    """With adapters the reference is the model without them: DPO's first loss is log 2, GRPO's first divergence 0."""
    flags = flags | {"use_peft": "true", "lora_r": "4"}
    folder = shutil.copytree(workplace, tmp_path / "whole")
    assert run(folder, recipe, strategy, **flags) == [0, 0], recipe_runs.output(folder)[-6000:]
    resumed = interrupted(folder, tmp_path / "resumed")
    assert run(resumed, recipe, strategy, **flags) == [0, 0], recipe_runs.output(resumed)[-6000:]
    assert values(resumed, recipe) == values(folder, recipe)
    assert (folder / "out" / "adapter_config.json").is_file()
    first, last = history(folder)[1], history(folder)[6]
    if recipe == "dpo":
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert last["loss"] != pytest.approx(math.log(2), abs=1e-6)
    if recipe == "grpo":
        assert first["kl"] == 0
        assert last["kl"] > 0


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_the_reference_has_the_weights_of_the_checkpoint(workplace, uninterrupted, tmp_path, strategy):
    """TRL loads it on every rank; before the first update it agrees with the model that is trained."""
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    start = {"model_name_or_path": str(uninterrupted("sft", "ddp") / "out"), "config_name": None, "max_steps": "1"}
    start |= {"save_steps": "1", "max_eval_samples": "2"}
    assert run(folder, "dpo", strategy, **start) == [0, 0], recipe_runs.output(folder)[-6000:]
    assert history(folder, 1)[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    shutil.rmtree(folder / "out")
    assert run(folder, "grpo", strategy, **start, beta="0.04") == [0, 0], recipe_runs.output(folder)[-6000:]
    assert history(folder, 1)[1]["kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trained_model_generates(uninterrupted, strategy):
    folder = uninterrupted("sft", strategy) / "out"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What does calendar.pryear do?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape == (1, prompt["input_ids"].shape[1] + 3)


def test_completions_of_different_lengths_do_not_hang_fsdp2(workplace, tmp_path):
    """Every eighth token ends a completion here. A rank that has finished must go on until the others have, too."""
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    ending = json.dumps({"eos_token_id": list(range(0, 4096, 8))})
    flags = {"generation_kwargs": ending, "max_completion_length": "24", "max_steps": "2", "max_eval_samples": "2"}
    assert run(folder, "grpo", "fsdp2", **flags) == [0, 0], recipe_runs.output(folder)[-6000:]


MISTAKES = {
    "no known column": ("sft", {"train_file": "text.csv"}, ["text.csv", "columns question", "messages", "text"]),
    "no rejected answer": ("dpo", {"train_file": "chosen.jsonl"}, ["chosen.jsonl", "chosen and rejected"]),
    "a text without turns": ("sft", {"train_file": "text.txt"}, ["assistant_only_loss", "conversational"]),
    "a flag of our own packing": ("sft", {"block_size": "64"}, ["unknown flag --block_size"]),
    "too long": ("dpo", {"max_length": "1000"}, ["--max_length 1000", "256 positions"]),
    "negative": ("dpo", {"beta": "-1"}, ["--beta", "-1"]),
    "unknown modules": ("sft", {"use_peft": "true", "lora_target_modules": "nothing"}, ["nothing", "base model"]),
    "no reward functions": ("grpo", {"reward_functions": None}, ["--reward_functions", "rewards.py:"]),
    "no such file": ("grpo", {"reward_functions": "reward.py:words"}, ["reward.py", "does not exist"]),
    "no such function": ("grpo", {"reward_functions": "rewards.py:word"}, ["rewards.py", "did you mean words"]),
    "no function": ("grpo", {"reward_functions": "rewards.py"}, ["rewards.py", "path.py:name"]),
    "a file with an error": ("grpo", {"reward_functions": "broken.py:words"}, ["broken.py", "SyntaxError"]),
    "no reference model": ("grpo", {"beta": "0.1"}, ["--beta 0.1", "--model_name_or_path"]),
    "incomplete groups": ("grpo", {"num_generations": "3"}, ["num_generations", "3"]),
    "no teacher": ("distillation", {"teacher_model_name_or_path": None}, ["--teacher_model_name_or_path", "missing"]),
    "another vocabulary": ("distillation", {"config_name": "wide"}, ["teacher", "predicts", "vocabulary"]),
    "a teacher that none shares": ("distillation", {"shard_teacher": "true"}, ["--shard_teacher true", "single"]),
    "no divergence": ("distillation", {"beta": "1.5"}, ["--beta 1.5"]),
    "broken JSON": ("grpo", {"generation_kwargs": "{x"}, ["--generation_kwargs {x", "not JSON"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(workplace, tmp_path, name):
    recipe, flags, parts = MISTAKES[name]
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    (folder / "text.csv").write_text("question,solution\n1+1,2\n")
    (folder / "chosen.jsonl").write_text('{"prompt": "1+1", "chosen": "2"}\n')
    (folder / "broken.py").write_text("def words(")
    words = AutoConfig.from_pretrained(folder / "model").vocab_size + 8
    LlamaConfig.from_pretrained(folder / "model", vocab_size=words).save_pretrained(folder / "wide")
    assert run(folder, recipe, "single", ranks=1, validation_split_percentage="0", **flags) == [2]
    lines = [line for line in recipe_runs.output(folder).splitlines() if line.startswith("hfscale: error: ")]
    assert len(lines) == 1, recipe_runs.output(folder)[-6000:]
    assert "Traceback" not in recipe_runs.output(folder)
    for part in parts:
        assert part in lines[0], lines[0]


def interrupted(whole, folder):
    """Copy the folder of a complete run, without what followed its second step."""
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    for step in (4, 6):
        shutil.rmtree(folder / "out" / f"checkpoint-{step}")
    (folder / "out" / "all_results.json").unlink()
    return folder


def test_only_errors_that_libraries_raise_are_reported_as_mistakes_in_flags():
    from trl import SFTTrainer

    class Argument:
        """Calls a function where the constructor first reads an attribute of it."""

        def __init__(self, function):
            self.function = function

        def __getattr__(self, name):
            self.function()

    def refusal(function):
        """Return what becomes of the error that a function raises."""
        with pytest.raises(Exception) as caught:  # noqa: PT011
            function()
        return refused_by_trl(caught.value)

    def in_constructor(function):
        return refusal(
            lambda: SFTTrainer("model", Argument(function), train_dataset=Dataset.from_list([{"text": "a"}]))
        )

    def of_a_library():
        AutoConfig.for_model("no-such-model")

    assert "no-such-model" in str(in_constructor(of_a_library))
    assert in_constructor(lambda: split_batch("8", 2, 4)) is None  # a TypeError in hfscale
    assert refusal(of_a_library) is None  # in the code that calls the constructor
