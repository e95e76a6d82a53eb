"""The sharded recipe with the text part of mixtures of experts whose checkpoints also have one that reads images."""

import json
import shutil
from itertools import islice

import pytest
from recipe_runs import GEMMA_4_EXPERTS, SIZES, logged, output, run_recipe, vocabulary_of
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    set_seed,
)

from hfscale.recipe import corpus

pytestmark = pytest.mark.recipes
SAVING = ("--save_steps", "2", "--max_steps", "4", "--learning_rate", "1e-3", "--config_name", "")


def qwen3_5(text):
    """Return a small Qwen3.5 with experts, as its hub checkpoint has it: linear attention, a part for images."""
    text |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision))


def gemma_4(text):
    """Return a small Gemma 4 with experts, as its hub checkpoint has it: with a part that reads images."""
    text |= {**GEMMA_4_EXPERTS, "moe_intermediate_size": 16}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision))


@pytest.fixture(scope="module")
def workplace(workplace):
    """The folder, with the checkpoints of both families."""
    text = {"vocab_size": vocabulary_of(workplace), **SIZES}
    for name, build in (("qwen3_5", qwen3_5), ("gemma_4", gemma_4)):
        set_seed(0)
        build({**text, "num_hidden_layers": 2, "head_dim": 8}).save_pretrained(workplace / name)
    return workplace


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
METHODS = {"full": (), "lora": ("--use_peft", "true", "--lora_target_modules", *ADAPTED)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["qwen3_5", "gemma_4"])
def test_the_text_part_trains_resumes_and_exports_like_one_process(workplace, tmp_path, family, method):
    """Killed after step 2 and started again, with all experts on each rank."""
    flags = (*SAVING, "--model_name_or_path", family, *METHODS[method])
    for name, ranks, sharding in (("single", 1, ()), ("run", 2, ("--ep_size", "2"))):
        shutil.copytree(workplace, tmp_path / name)
        run_recipe(tmp_path / name, "native" if ranks > 1 else "single", ranks, *flags, *sharding)
    single, run = tmp_path / "single", tmp_path / "run"
    assert "strategy native on 2 processes (cpu)" in output(run)
    assert ("kept as loaded, since text does not pass them" in output(run)) == (family == "gemma_4")
    assert logged(run, "loss") == pytest.approx(logged(single, "loss"), abs=1e-4)
    assert logged(run, "grad_norm") == pytest.approx(logged(single, "grad_norm"), rel=1e-4)
    check_export(run, workplace / family, method)
    shutil.rmtree(run / "out" / "checkpoint-4")
    (run / "out" / "all_results.json").unlink()
    run_recipe(run, "native", 2, *flags, "--ep_size", "1")
    assert "continues from checkpoint-2" in output(run)
    assert logged(run, "loss") == pytest.approx(logged(single, "loss"), abs=1e-4)
    check_export(run, workplace / family, method)


def check_export(run, loaded, method):
    """The exported model or adapters change the text part, and nothing else."""
    before = AutoModelForCausalLM.from_pretrained(loaded).state_dict()
    if method == "lora":
        names = list(load_file(run / "out" / "adapter_model.safetensors"))
        assert any(".layers." in name for name in names)
        assert not [name for name in names if "vision" in name]
        return
    model, report = AutoModelForCausalLM.from_pretrained(run / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, weight in model.named_parameters():
        assert ("vision" in name) == bool(weight.equal(before[name])), name


@pytest.mark.parametrize("family", ["qwen3_5", "gemma_4"])
def test_conversations_as_in_the_yaml_files(workplace, tmp_path, family):
    """Rows of different lengths: each token has the same weight, on any number of ranks and micro-batches.

    Attention that cannot be cut between the conversations of a row is refused in one line.
    """
    rows = "".join(json.dumps(row) + "\n" for row in islice(corpus.chat_records("train"), 64))
    (workplace / "chats.jsonl").write_text(rows)
    flags = (*SAVING, "--model_name_or_path", family, "--train_file", "chats.jsonl", "--block_size", "64")
    spread = ("--ep_size", "2", "--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2")
    for name, ranks, sharding in (("single", 1, ()), ("run", 2, spread)):
        shutil.copytree(workplace, tmp_path / name)
        limits = ("--max_train_samples", "24", "--max_steps", "2", "--packing", "none")
        run_recipe(tmp_path / name, "native" if ranks > 1 else "single", ranks, *flags, *limits, *sharding)
    single, run = tmp_path / "single", tmp_path / "run"
    assert "average the means" not in output(run)
    assert logged(run, "loss") == pytest.approx(logged(single, "loss"), abs=1e-5)
    assert logged(run, "grad_norm") == pytest.approx(logged(single, "grad_norm"), rel=1e-4)
    shutil.copytree(workplace, tmp_path / "packed")
    with pytest.raises(AssertionError, match="give --document_attention false, or --packing none"):
        run_recipe(tmp_path / "packed", "single", 1, *flags)
