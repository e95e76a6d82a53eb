"""The recipe for vision-language models on two processes, of which one often has no image; killed and resumed."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import recipe_runs
import torch
import vision_families
from conftest import REPOSITORY
from forked_ranks import run_ranks
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hfscale.checkpoint.store import verify
from hfscale.core.run_files import MANIFEST_NAME

pytestmark = pytest.mark.finetuning

SCRIPT = REPOSITORY / "recipes" / "vision" / "train.py"
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
COMMON = {
    "train_file": "pictures.jsonl",
    "max_eval_samples": "3",
    "validation_split_percentage": "20",
    "per_device_train_batch_size": "1",
    "per_device_eval_batch_size": "1",
    "gradient_accumulation_steps": "2",
    "learning_rate": "1e-2",
    "lr_scheduler_type": "linear",
    "max_steps": "6",
    "save_steps": "2",
    "eval_strategy": "steps",
    "eval_steps": "3",
    "asynchronous_save": "false",
    "logging_steps": "1",
    "dataloader_num_workers": "0",
    "disable_tqdm": "true",
    "use_cpu": "true",
    "train_vision_tower": "true",
    "output_dir": "out",
}


@pytest.fixture(scope="module")
def workplace(workplace):
    import hfscale.recipe.images
    import hfscale.recipe.vision  # noqa: F401

    for family in vision_families.FAMILIES:
        vision_families.save_family(family, workplace / family)
    vision_families.write_pictures(workplace)
    return workplace


def run(folder, family, strategy, *, ranks=2, stop=None, **flags):
    """Run the recipe on forked ranks and return their exit codes.

    Args:
        folder (`Path`): a copy of the workplace.
        family (`str`): one of `vision_families.FAMILIES`.
        strategy (`str`): `single` or one of `STRATEGIES`.
        ranks (`int`): number of processes.
        stop (`tuple`, *optional*): a signal and a step; rank 1 gets the signal once the step's checkpoint is there.
        flags: further flags; None leaves one out.
    """
    named = COMMON | {"config_name": family} | flags
    given = [f"--{name}={value}" for name, value in named.items() if value is not None]
    env = recipe_runs.environment_of(strategy)
    ends_all = stop is None or stop[0] == signal.SIGKILL  # preempted ranks end by themselves
    return run_ranks(ranks, _run, folder, given, stop, log=folder / "log", env=env, ends_all=ends_all)


def _run(folder, flags, stop):
    if stop is not None and os.environ["RANK"] == "1":
        threading.Thread(target=_stop_after, args=(folder / "out", *stop), daemon=True).start()
    recipe_runs._recipe(SCRIPT, folder, flags)


def _stop_after(output_dir, number, step):
    while not (output_dir / f"checkpoint-{step}" / MANIFEST_NAME).exists():
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def values(folder, key="loss", step=6):
    """Return the values of a key of all training logs, as the checkpoint of the last step has them."""
    state = json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [entry[key] for entry in state["log_history"] if key in entry]


@pytest.fixture(scope="module")
def uninterrupted(workplace, tmp_path_factory):
    """Return a function that gives the folder of a complete run: one process, or two under a strategy."""
    done = {}

    def folder_of(family, strategy):
        if (family, strategy) not in done:
            folder = shutil.copytree(workplace, tmp_path_factory.mktemp(f"{family}-{strategy}"), dirs_exist_ok=True)
            ranks = 1 if strategy == "single" else 2
            more = {"gradient_accumulation_steps": "4"} if ranks == 1 else {}
            codes = run(folder, family, strategy, ranks=ranks, **more)
            assert codes == [0] * ranks, recipe_runs.output(folder)[-6000:]
            done[family, strategy] = folder
        return done[family, strategy]

    return folder_of


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", vision_families.FAMILIES)
def test_ranks_without_an_image_neither_hang_nor_change_the_losses(uninterrupted, family, strategy):
    """Every second record has no image, so that in most micro-batches a rank has none."""
    single, run = uninterrupted(family, "single"), uninterrupted(family, strategy)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert values(run, key) == pytest.approx(values(single, key), rel=2e-3, abs=2e-3), key


@pytest.mark.parametrize(
    ("family", "strategy"), [("llava", "ddp"), ("gemma3", "fsdp2"), ("idefics3", "zero3"), ("llava", "zero2")]
)
def test_a_killed_and_preempted_run_has_the_losses_of_an_uninterrupted_one(
    workplace, uninterrupted, tmp_path, family, strategy
):
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    codes = run(folder, family, strategy, stop=(signal.SIGKILL, 2))
    assert codes[1] == -signal.SIGKILL, recipe_runs.output(folder)[-6000:]
    verify(folder / "out" / "checkpoint-2")
    codes = run(folder, family, strategy, stop=(signal.SIGTERM, 4))
    assert codes == [75, 75], recipe_runs.output(folder)[-6000:]
    assert run(folder, family, strategy) == [0, 0], recipe_runs.output(folder)[-6000:]
    assert "continues from checkpoint-" in recipe_runs.output(folder)
    whole = uninterrupted(family, strategy)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert values(folder, key) == values(whole, key), key


@pytest.mark.parametrize("family", vision_families.FAMILIES)
def test_the_trained_model_reads_an_image(uninterrupted, family):
    folder = uninterrupted(family, "fsdp2")
    model = AutoModelForImageTextToText.from_pretrained(folder / "out")
    processor = AutoProcessor.from_pretrained(folder / "out")
    picture = Image.open(folder / "pictures" / "0.png")
    question = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]}]
    prompt = processor.apply_chat_template(
        question, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    generated = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape == (1, prompt["input_ids"].shape[1] + 3)


@pytest.mark.parametrize("family", vision_families.FAMILIES)
def test_the_tower_is_frozen_and_the_projector_is_not(workplace, uninterrupted, tmp_path, family):
    """By default; under FSDP2 from a checkpoint, which only rank 0 reads."""
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    start = uninterrupted(family, "ddp") / "out"
    flags = {"config_name": None, "model_name_or_path": str(start), "train_vision_tower": None}
    assert run(folder, family, "fsdp2", **flags) == [0, 0], recipe_runs.output(folder)[-6000:]
    assert "vision tower: frozen; projector: trained" in recipe_runs.output(folder)
    before = AutoModelForImageTextToText.from_pretrained(start)
    after = AutoModelForImageTextToText.from_pretrained(folder / "out").state_dict()
    tower = {id(weight) for weight in before.get_encoder(modality="image").parameters()}
    moved = {"tower": 0, "rest": 0}
    for name, weight in before.named_parameters():
        moved["tower" if id(weight) in tower else "rest"] += not torch.equal(weight, after[name])
    assert moved["tower"] == 0
    assert moved["rest"] > len(after) // 4


@pytest.mark.parametrize(("family", "strategy"), [("llava", "ddp"), ("gemma3", "fsdp2"), ("idefics3", "zero3")])
def test_adapters_are_of_the_language_model_and_are_merged(workplace, uninterrupted, tmp_path, family, strategy):
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    start = str(uninterrupted(family, "ddp") / "out")
    flags = {"config_name": None, "model_name_or_path": start, "train_vision_tower": None}
    flags |= {"use_peft": "true", "lora_r": "4", "merge_adapters": "true"}
    assert run(folder, family, strategy, **flags) == [0, 0], recipe_runs.output(folder)[-6000:]
    whole = values(folder)
    shutil.rmtree(folder / "out" / "checkpoint-6")
    shutil.rmtree(folder / "out" / "checkpoint-4")
    (folder / "out" / "all_results.json").unlink()
    assert run(folder, family, strategy, **flags) == [0, 0], recipe_runs.output(folder)[-6000:]
    assert values(folder) == whole
    merged = AutoModelForImageTextToText.from_pretrained(folder / "out" / "merged")
    before = AutoModelForImageTextToText.from_pretrained(start).state_dict()
    changed = {name for name, weight in merged.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed
    assert all("language_model" in name or "text_model" in name for name in changed), changed


MISTAKES = {
    "no such image": ({"train_file": "missing.jsonl"}, ["missing.jsonl", "record 2", "absent.png", "does not exist"]),
    "no image": ({"train_file": "text.jsonl"}, ["text.jsonl", "record 1", "pictures.jsonl is no image"]),
    "placeholders": ({"train_file": "places.jsonl"}, ["places.jsonl", "record 1", "(1)", "(2)"]),
    "no column": ({"train_file": "words.jsonl"}, ["words.jsonl", "columns messages", "images"]),
    "no images at all": ({"train_file": "none.jsonl"}, ["none.jsonl", "images"]),
    "a model of text": ({"config_name": "model", "tokenizer_name": "llava"}, ["llama", "reads no images"]),
    "a tokenizer": ({"tokenizer_name": "tokenizer"}, ["--tokenizer_name tokenizer", "no processor of images"]),
    "packing": ({"packing": "true"}, ["--packing true", "leave it out"]),
    "too short": ({"max_length": "8"}, ["--max_length 8", "cuts an image"]),
    "a stream": ({"streaming": "true"}, ["--streaming true", "leave it out"]),
    "adapters and a tower": ({"use_peft": "true"}, ["--train_vision_tower true", "--use_peft true"]),
    "prompts": ({"sample_prompts": "text.txt"}, ["--sample_prompts", "leave it out"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(workplace, tmp_path, name):
    flags, parts = MISTAKES[name]
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    said = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "a square"}]
    twice = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    files = {
        "missing": [{"images": ["pictures/0.png"], "messages": said}, {"images": ["absent.png"], "messages": said}],
        "text": [{"images": ["pictures.jsonl"], "messages": said}],
        "places": [{"images": ["pictures/0.png"], "messages": twice}],
        "words": [{"messages": said}],
        "none": [{"images": [], "messages": said}],
    }
    for file, rows in files.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = {"validation_split_percentage": "0", "eval_strategy": None, "eval_steps": None}
    assert run(folder, "llava", "single", ranks=1, **plain, **flags) == [2], recipe_runs.output(folder)[-3000:]
    lines = [line for line in recipe_runs.output(folder).splitlines() if line.startswith("hfscale: error: ")]
    assert len(lines) == 1, recipe_runs.output(folder)[-6000:]
    assert "Traceback" not in recipe_runs.output(folder)
    for part in parts:
        assert part in lines[0], lines[0]


def test_a_damaged_image_is_one_line_also_from_a_process_of_the_data_loader(workplace, tmp_path):
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    for picture in (folder / "pictures").iterdir():
        content = picture.read_bytes()
        picture.write_bytes(content[: len(content) // 2])
    assert run(folder, "llava", "single", ranks=1, dataloader_num_workers="1") == [2]
    lines = [line for line in recipe_runs.output(folder).splitlines() if line.startswith("hfscale: error: ")]
    assert len(lines) == 1, recipe_runs.output(folder)[-6000:]
    assert "Traceback" not in lines[0]
    assert "pictures/" in lines[0]
    assert "cannot be read" in lines[0]
