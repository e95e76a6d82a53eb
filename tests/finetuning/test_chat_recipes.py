"""The recipes on conversations: equal losses under every strategy and after a resume, and one line for a bad file."""

import json
import shutil

import pytest
import recipe_runs
from conftest import RECIPE
from forked_ranks import run_ranks
from transformers import AutoTokenizer, LlamaConfig

pytestmark = pytest.mark.finetuning

FLAGS = {
    "--config_name": "deep64",
    "--train_file": "chats.jsonl",
    "--loss_on": "assistant",
    "--block_size": "64",
    "--save_steps": "3",
    "--show_samples": "1",
    "--validation_split_percentage": "10",
}


def conversation(number):
    """Return a conversation; different ones have different numbers of turns and of trained tokens."""
    turns = [("user", f"add {number}"), ("assistant", f"{number} and " * (number % 9) + f"{number * 2}")]
    turns += [("user", "sure?"), ("assistant", "yes")] * (number % 3)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture(scope="module")
def workplace(workplace):
    LlamaConfig.from_pretrained(workplace / "deep", max_position_embeddings=128).save_pretrained(workplace / "deep64")
    records = [conversation(number) for number in range(600)]
    records[7] = {"messages": [{"role": "narrator", "content": "x"}]}
    (workplace / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return workplace


def run(workplace, folder, strategy, ranks=2, **layout):
    if not (folder / "chats.jsonl").exists():
        shutil.copytree(workplace, folder, dirs_exist_ok=True)
    recipe_runs.run_recipe(folder, strategy, ranks, *(text for flag in FLAGS.items() for text in flag), **layout)
    return recipe_runs.logged(folder, "loss")


@pytest.fixture(scope="module")
def single(workplace, tmp_path_factory):
    """Return the folder and the losses of a run on one process."""
    folder = tmp_path_factory.mktemp("single")
    return folder, run(workplace, folder, "single", ranks=1)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("ddp", {}),
        ("fsdp2", {}),
        ("zero3", {}),
        ("parallel", {"tp": 2}),
        ("parallel", {"tp": 2, "pp": 2, "ranks": 4}),
    ],
    ids=["ddp", "fsdp2", "zero3", "tp", "tp and pp"],
)
def test_conversations_train_with_equal_losses_under_each_strategy(strategy, layout, workplace, single, tmp_path):
    assert run(workplace, tmp_path, strategy, **layout) == pytest.approx(single[1], abs=2e-5)


def test_a_resumed_run_has_equal_losses_and_the_saved_model_has_the_template(workplace, single, tmp_path):
    folder, losses = single
    assert "1 of 600 samples are left out: 1 broken roles or messages (first: row 8" in recipe_runs.output(folder)
    assert r"trained '0<|endoftext|>'" in recipe_runs.output(folder)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    assert run(workplace, tmp_path, "ddp") == pytest.approx(losses, abs=2e-5)
    assert "continues from checkpoint-3" in recipe_runs.output(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_bad_row_is_one_line_on_two_processes(workplace, tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps(conversation(1)) + '\n{"messages": []}\n')
    for name in ("tokenizer", "deep64"):
        shutil.copytree(workplace / name, tmp_path / name)
    flags = [text for flag in (FLAGS | {"--train_file": "bad.jsonl"}).items() for text in flag]
    given = [*recipe_runs.FLAGS, *flags]
    codes = run_ranks(2, recipe_runs._recipe, RECIPE, tmp_path, given, log=tmp_path / "log")
    output = recipe_runs.output(tmp_path)
    assert codes[0] == 2, output[-3000:]  # the launcher then ends the other
    lines = [line for line in output.splitlines() if line.startswith("hfscale: error")]
    assert lines == ["hfscale: error: --train_file bad.jsonl, row 2 is an empty conversation: remove the row"]
    assert "Traceback" not in output
