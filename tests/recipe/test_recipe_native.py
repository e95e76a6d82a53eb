"""The sharded recipe where transformers itself shards the model: `--ep_size`, `--fsdp_size`, `--dp_replicate_size`."""

import json
import shutil
from itertools import islice

import pytest
import torch
from recipe_runs import GEMMA_4_EXPERTS, GLOBAL_BATCH, SIZES, logged, output, run_recipe, vocabulary_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig, GptOssConfig, Qwen3MoeConfig, set_seed

from hfscale.recipe import corpus
from hfscale.why.trace_files import read_trace

pytestmark = [pytest.mark.recipes, pytest.mark.world(4)]
SAVING = ("--save_steps", "3", "--learning_rate", "1e-3")
FULL_BATCH = ("--per_device_train_batch_size", str(GLOBAL_BATCH))


@pytest.fixture(scope="module")
def workplace(workplace):
    """The folder, with the config of a small mixture of experts, `qwen3_moe`."""
    Qwen3MoeConfig(
        **SIZES,
        vocab_size=vocabulary_of(workplace),
        num_hidden_layers=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ).save_pretrained(workplace / "qwen3_moe")
    return workplace


@pytest.fixture(scope="module")
def trained(workplace, tmp_path_factory):
    """The folder of a run on one process, with which the others are compared."""
    return train(workplace, tmp_path_factory.mktemp("single"), 1)


def train(source, folder, ranks, *flags):
    """Copy a folder and train in it: with one process as it is, with several as the flags say."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    strategy = "native" if ranks > 1 else "single"
    run_recipe(folder, strategy, ranks, "--config_name", "qwen3_moe", *SAVING, *flags)
    return folder


def resumed(folder, target):
    """Copy a run as it is when it was killed after its first checkpoint."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    shutil.rmtree(target / "out" / "checkpoint-6")
    (target / "out" / "all_results.json").unlink()
    return target


def manifest(folder, step=6):
    return json.loads((folder / "out" / f"checkpoint-{step}" / "hfscale_manifest.json").read_text())


def test_experts_over_two_ranks_train_resume_and_export_like_one_process(workplace, trained, tmp_path):
    """From a config alone; killed after step 3 and started again, with all experts on each rank."""
    run = train(workplace, tmp_path / "run", 2, "--ep_size", "2")
    assert "strategy native on 2 processes (cpu)" in output(run)
    assert "fsdp=2, experts over 2 ranks" in output(run)
    assert manifest(run)["strategy"] == "native"
    assert logged(run, "loss") == pytest.approx(logged(trained, "loss"), abs=1e-5)
    assert logged(run, "grad_norm") == pytest.approx(logged(trained, "grad_norm"), rel=1e-4)
    model, report = AutoModelForCausalLM.from_pretrained(run / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = AutoModelForCausalLM.from_pretrained(trained / "out").state_dict()
    for name, weight in model.state_dict().items():
        assert weight.sub(expected[name]).abs().max() < 1e-4, name
    again = resumed(run, tmp_path / "again")
    run_recipe(again, "native", 2, "--config_name", "qwen3_moe", *SAVING, "--ep_size", "1")
    assert "continues from checkpoint-3" in output(again)
    assert logged(again, "loss") == pytest.approx(logged(trained, "loss"), abs=1e-5)


def test_gemma_4_trains_and_resumes_like_one_process(workplace, tmp_path):
    """Its plan for experts also splits the dense MLP beside them, which FSDP2 refuses."""
    sizes = json.loads((workplace / "qwen3_moe" / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    text = {
        **{name: sizes[name] for name in (*names, "moe_intermediate_size", "max_position_embeddings", "head_dim")},
        **GEMMA_4_EXPERTS,
        "num_hidden_layers": 2,
    }
    Gemma4TextConfig(**text).save_pretrained(workplace / "gemma4")
    flags = ("--config_name", "gemma4", *SAVING)
    for name, ranks, sharding in (("single", 1, ()), ("run", 2, ("--ep_size", "2"))):
        shutil.copytree(workplace, tmp_path / name)
        run_recipe(tmp_path / name, "native" if ranks > 1 else "single", ranks, *flags, *sharding)
    expected = tmp_path / "single"
    assert logged(tmp_path / "run", "loss") == pytest.approx(logged(expected, "loss"), abs=1e-5)
    assert logged(tmp_path / "run", "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-4)
    assert "base_model_ep_plan" not in (tmp_path / "run" / "out" / "config.json").read_text()
    again = resumed(tmp_path / "run", tmp_path / "again")
    run_recipe(again, "native", 2, *flags, "--ep_size", "2", "--tp_size", "2", *FULL_BATCH)
    assert logged(again, "loss") == pytest.approx(logged(expected, "loss"), abs=1e-5)


def test_a_traced_step_computes_what_it_computes_without(workplace, trained, tmp_path):
    """FSDP2 must be able to free the parameters whose bytes a trace has hashed."""
    run = train(workplace, tmp_path / "run", 2, "--ep_size", "2", "--max_steps", "2", "--trace_steps", "1")
    assert logged(run, "loss")[1] == pytest.approx(logged(trained, "loss")[1], abs=1e-5)
    events = [trace.events for trace in read_trace(run / "out" / "hfscale_trace" / "step-1")]
    for of_rank in events:
        assert {event.name for event in of_rank if event.phase == "forward"} >= {"model.layers.1.mlp.experts"}
        assert {event.phase for event in of_rank} >= {"backward", "gradient", "optimizer", "updated"}
    assert len(events) == 2


def test_the_loss_in_chunks_is_that_from_all_logits(workplace, trained, tmp_path):
    run = train(workplace, tmp_path / "run", 2, "--ep_size", "2", "--fused_loss", "chunked")
    assert "loss: head and cross-entropy for" in output(run)
    assert logged(run, "loss") == pytest.approx(logged(trained, "loss"), abs=1e-5)
    assert logged(run, "grad_norm") == pytest.approx(logged(trained, "grad_norm"), rel=1e-4)


def test_a_run_continues_on_four_ranks_with_replicas(workplace, trained, tmp_path):
    again = resumed(train(workplace, tmp_path / "run", 2, "--ep_size", "2"), tmp_path / "again")
    run_recipe(
        again,
        "native",
        4,
        "--config_name",
        "qwen3_moe",
        *SAVING,
        "--dp_replicate_size",
        "2",
        "--ep_size",
        "2",
        "--per_device_train_batch_size",
        str(GLOBAL_BATCH // 2),
    )
    assert "4 processes instead of 2" in output(again)
    assert logged(again, "loss") == pytest.approx(logged(trained, "loss"), abs=1e-5)


ATTENTION = ("--use_peft", "true", "--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj")


def test_adapters_of_the_attention_train_resume_and_export_like_one_process(workplace, tmp_path):
    single = train(workplace, tmp_path / "single", 1, *ATTENTION)
    run = train(workplace, tmp_path / "run", 2, "--ep_size", "2", *ATTENTION)
    assert "strategy native on 2 processes (cpu)" in output(run)
    assert logged(run, "loss") == pytest.approx(logged(single, "loss"), abs=1e-5)
    assert logged(run, "grad_norm") == pytest.approx(logged(single, "grad_norm"), abs=1e-5)
    again = resumed(run, tmp_path / "again")
    default = ATTENTION[:2]  # the attention, where transformers shards the model
    run_recipe(again, "native", 2, "--config_name", "qwen3_moe", *SAVING, "--fsdp_size", "2", *default)
    assert logged(again, "loss") == pytest.approx(logged(single, "loss"), abs=1e-5)
    replicas = train(
        workplace,
        tmp_path / "replicas",
        4,
        *("--dp_replicate_size", "2", "--fsdp_size", "2", "--per_device_train_batch_size", str(GLOBAL_BATCH // 4)),
        *ATTENTION,
    )
    assert logged(replicas, "loss") == pytest.approx(logged(single, "loss"), abs=1e-5)
    stored = [load_file(folder / "out" / "adapter_model.safetensors") for folder in (single, run, again, replicas)]
    for adapters in stored[1:]:
        assert adapters.keys() == stored[0].keys()
        for name, weight in adapters.items():
            assert weight.sub(stored[0][name]).abs().max() < 1e-4, name


def test_adapters_of_experts_train_resume_and_export_like_one_process(workplace, tmp_path):
    """Where each rank gathers all experts of a layer, and where it has some of them."""
    experts = ("--use_peft", "true", "--lora_target_modules", "q_proj", "gate_proj", "up_proj", "down_proj")
    single = train(workplace, tmp_path / "single", 1, *experts)
    gathered = train(workplace, tmp_path / "gathered", 2, "--fsdp_size", "2", *experts)
    again = resumed(gathered, tmp_path / "again")
    run_recipe(again, "native", 2, "--config_name", "qwen3_moe", *SAVING, "--ep_size", "2", *experts)
    spread = train(workplace, tmp_path / "spread", 2, "--ep_size", "2", *experts)
    expected = load_file(single / "out" / "adapter_model.safetensors")
    assert any(".experts." in name for name in expected)
    for folder in (gathered, again, spread):
        assert logged(folder, "loss") == pytest.approx(logged(single, "loss"), abs=1e-5)
        adapters = load_file(folder / "out" / "adapter_model.safetensors")
        assert adapters.keys() == expected.keys()
        for name, weight in adapters.items():
            assert weight.sub(expected[name]).abs().max() < 1e-4, name


def test_conversations_with_attention_that_is_cut(workplace, tmp_path):
    """Rows of several conversations, of which the assistant's tokens are trained on."""
    rows = "".join(json.dumps(row) + "\n" for row in islice(corpus.chat_records("train"), 64))
    (workplace / "chats.jsonl").write_text(rows)
    flags = ("--train_file", "chats.jsonl", "--block_size", "64", "--max_train_samples", "24", "--max_steps", "2")
    single = train(workplace, tmp_path / "single", 1, *flags)
    run = train(workplace, tmp_path / "run", 2, "--ep_size", "2", *flags)
    assert logged(run, "loss") == pytest.approx(logged(single, "loss"), abs=1e-5)


def test_the_loss_that_balances_experts_is_averaged_over_ranks_and_micro_batches(workplace, trained, tmp_path):
    """In Trainer its weight grows with both; here it adds about the same in every split of the batch."""
    weight = ("--router_aux_loss_coef", "0.5", "--max_steps", "1")
    added = {}
    for name, ranks, micro_batches, flags in (
        ("single", 1, 1, ()),
        ("accumulated", 1, 4, ()),
        ("spread", 2, 2, ("--ep_size", "2")),
    ):
        batch = str(GLOBAL_BATCH // ranks // micro_batches)
        split = ("--per_device_train_batch_size", batch, "--gradient_accumulation_steps", str(micro_batches))
        run = train(workplace, tmp_path / name, ranks, *weight, *split, *flags)
        added[name] = logged(run, "loss")[1] - logged(trained, "loss")[1]
        assert json.loads((run / "out" / "config.json").read_text())["router_aux_loss_coef"] == 0.5
    assert added["single"] > 0.5
    assert added["spread"] == pytest.approx(added["accumulated"], abs=1e-5)  # of the same micro-batches
    assert added["accumulated"] == pytest.approx(added["single"], rel=0.2)


def test_the_4_bit_experts_of_gpt_oss_are_dequantised(workplace, tmp_path):
    make_mxfp4(workplace / "gpt_oss", json.loads((workplace / "deep" / "config.json").read_text())["vocab_size"])
    flags = ("--config_name", "", "--model_name_or_path", "gpt_oss", "--max_steps", "2")
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    runs = {}
    for name, ranks, sizes in (("single", 1, ()), ("native", 2, ("--ep_size", "2"))):
        run_recipe(tmp_path, name, ranks, *flags, *sizes)
        runs[name] = logged(tmp_path, "loss")
        (tmp_path / "out").rename(tmp_path / name)
    assert runs["native"] == pytest.approx(runs["single"], abs=1e-5)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in runs]
    for name, weight in models[0].items():
        assert weight.is_floating_point()
        assert weight.sub(models[1][name]).abs().max() < 1e-4, name


def make_mxfp4(folder, vocab_size):
    """Save a small gpt-oss with experts in the format of the published one: 4-bit values with a scale per 32."""
    config = GptOssConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    set_seed(0)
    weights = {
        name: value.contiguous() for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()
    }
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 121, dtype=torch.uint8)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
