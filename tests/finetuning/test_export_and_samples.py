"""Exported models load and generate, and samples during training change nothing, under each strategy."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import RECIPE
from forked_ranks import run_ranks
from recipe_runs import FLAGS, SHARDED, TP_PP, _recipe, environment_of, output
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hfscale.parallel.weights import build_model
from hfscale.recipe.corpus import CHAT_TEMPLATE

pytestmark = [pytest.mark.finetuning, pytest.mark.world(2)]

SCRIPTS = {"ddp": RECIPE, "fsdp2": SHARDED, "zero3": SHARDED, "parallel": TP_PP}
GENERATING = ("ddp", "fsdp2", "zero3")
COMMON = ["--model_name_or_path", "base", *FLAGS[2:], "--max_steps", "4", "--seed", "3", "--save_strategy", "no"]
SAMPLES = ["--sample_prompts", "prompts.jsonl", "--sample_steps", "2"]
LORA = ["--use_peft", "true", "--merge_adapters", "true", "--lora_r", "4", "--lora_dropout", "0.1"]
SPLIT = ["--pp_size", "2", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "6"]


@pytest.fixture(scope="module")
def workplace(workplace):
    """The folder, with prompts and a base model with dropout, whose weights are on disk."""
    config = LlamaConfig.from_pretrained(workplace / "deep", attention_dropout=0.1)
    build_model(config, seed=0, dtype=torch.float32).save_pretrained(workplace / "base")
    prompts = [{"prompt": "line 7 is"}, {"messages": [{"role": "user", "content": "line 8?"}]}, {"prompt": "line"}]
    (workplace / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return workplace


@pytest.fixture(scope="module")
def trained(workplace, tmp_path_factory):
    """Return a function that trains on two processes with some flags, once for each strategy and flags."""
    folders: dict[tuple[str, ...], Path] = {}

    def train(strategy: str, *flags: str) -> Path:
        if (strategy, *flags) not in folders:
            folder = shutil.copytree(workplace, tmp_path_factory.mktemp(strategy), dirs_exist_ok=True)
            batch = SPLIT if strategy == "parallel" else ["--per_device_train_batch_size", "6"]
            command = [*COMMON, *batch, *flags]
            env = environment_of(strategy)
            codes = run_ranks(2, _recipe, SCRIPTS[strategy], folder, command, log=folder / "log", env=env)
            assert codes == [0, 0], output(folder)[-6000:]
            folders[strategy, *flags] = folder
        return folders[strategy, *flags]

    return train


def losses(folder):
    lines = (folder / "out" / "scaling.jsonl").read_text().splitlines()
    return [(record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


def samples(folder):
    return [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]


def generate(model, tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "line 8?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.mark.parametrize("strategy", GENERATING)
def test_samples_leave_the_training_bit_equal(trained, strategy):
    with_samples = trained(strategy, *SAMPLES)
    assert losses(with_samples) == losses(trained(strategy))
    found = samples(with_samples)
    assert [(sample["step"], sample["sample"]) for sample in found] == [(s, n) for s in (2, 4) for n in (1, 2, 3)]
    assert found[1]["prompt"] == "### user\nline 8?\n### assistant\n"
    assert all(0 < sample["new_tokens"] <= 64 for sample in found)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_every_strategy_generates_the_same(trained, strategy):
    assert samples(trained(strategy, *SAMPLES)) == samples(trained("ddp", *SAMPLES))


@pytest.mark.parametrize("strategy", [*GENERATING, "parallel"])
def test_the_exported_model_loads_and_generates(trained, strategy):
    out = trained(strategy, *(SAMPLES if strategy in GENERATING else ())) / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(out)
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id  # besides that of the base model
    assert len(generate(model, tokenizer)) > 8
    if strategy in GENERATING:  # the last samples were generated from these weights
        last = samples(trained(strategy, *SAMPLES))[-2]
        ids = tokenizer(last["prompt"], add_special_tokens=False, return_tensors="pt")
        text = tokenizer.decode(
            model.generate(**ids, max_new_tokens=last["new_tokens"], do_sample=False)[0, ids["input_ids"].shape[1] :],
            skip_special_tokens=True,
        )
        assert text == last["generation"]


@pytest.mark.parametrize("strategy", [*GENERATING, "parallel"])
def test_merged_adapters_give_the_model_that_was_trained(trained, strategy):
    from peft import PeftModel

    folder = trained(strategy, *LORA, *(SAMPLES if strategy in GENERATING else ()))
    out, merged = folder / "out", folder / "out" / "merged"
    model = AutoModelForCausalLM.from_pretrained(merged)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), out).eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        assert torch.allclose(model.eval()(input_ids=ids).logits, expected, atol=1e-5)
        assert not torch.allclose(base.eval()(input_ids=ids).logits, expected, atol=1e-3)
    assert not any("lora" in name for name in model.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert generate(model, tokenizer) == generate(adapted, tokenizer)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_adapters_generate_together(trained, strategy):
    folder, by_ddp = trained(strategy, *LORA, *SAMPLES), trained("ddp", *LORA, *SAMPLES)
    assert samples(folder) == samples(by_ddp)
    found = load_file(folder / "out" / "adapter_model.safetensors")
    for name, tensor in load_file(by_ddp / "out" / "adapter_model.safetensors").items():
        assert torch.allclose(found[name], tensor, atol=1e-4), name
