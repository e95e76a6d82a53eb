"""The planner's tasks: memory and time of reference model and generation, which layouts are tried, what is emitted."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from planner_jobs import TINY, job
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType  # no public name
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from hfscale import estimate, plan
from hfscale.cli import main
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.emit import emit
from hfscale.planner.estimate import estimate_job
from hfscale.planner.memory import GIB
from hfscale.planner.tasks import (
    LOGIT_COPIES_BYTES,
    forward_bytes,
    generated_at_once,
    kv_cache_bytes,
    reference_bytes,
)
from hfscale.recipe.parsing import parse_arguments

STRATEGIES = {
    "ddp": {"dp_replicate": 8, "zero": 0},
    "zero1": {"dp_replicate": 8, "zero": 1},
    "zero2": {"dp_replicate": 8, "zero": 2},
    "fsdp2": {"dp_shard": 8, "zero": 3},
}
PLAN = {"gpu": "H100-80GB", "gpus": 8, "seq_len": 2048}


def tuned(task, strategy="fsdp2", **changes):
    """A run of Llama 3.1 8B with a task on eight GPUs."""
    return job(
        **{"task": task, "activation_checkpointing": "full", "seq_len": 2048, **STRATEGIES[strategy], **changes}
    )


def test_sft_differs_from_plain_training_in_the_loss_alone():
    plain, sft = (estimate_job(tuned(task)) for task in ("text", "sft"))
    for part in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(sft.memory, part) == getattr(plain.memory, part)
    # A tile, and the gradients of hidden states and head in fp32 and bf16, instead of all logits.
    assert sft.memory.loss * GIB == 2 * 2048 * 32768 + 6 * 4096 * (2048 + 128_256)
    assert sft.time.total == pytest.approx(plain.time.total, rel=0.03)


@pytest.mark.parametrize(("strategy", "each"), [("ddp", 4), ("zero1", 2), ("zero2", 2), ("fsdp2", 4 / 8)])
@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_the_reference_is_kept_as_the_strategy_does(task, strategy, each):
    run = tuned(task, strategy, beta=0.04)
    assert reference_bytes(run) == each * run.shape.total_parameters
    assert estimate_job(run).memory.reference == pytest.approx(reference_bytes(run) / GIB)


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "dpo", "method": "lora"},
        {"task": "dpo", "precompute_ref_log_probs": True},
        {"task": "grpo"},
        {"task": "grpo", "beta": 0.04, "method": "qlora"},
        {"task": "sft"},
    ],
)
def test_no_reference_model_where_none_is_needed(changes):
    assert reference_bytes(tuned(**changes)) == 0


def test_a_pair_is_two_sequences():
    sft, dpo = (estimate_job(tuned(task, precompute_ref_log_probs=task == "dpo")) for task in ("sft", "dpo"))
    assert dpo.job.tokens_per_step == 2 * sft.job.tokens_per_step
    assert dpo.memory.activations == pytest.approx(2 * sft.memory.activations)
    assert dpo.time.compute == pytest.approx(2 * sft.time.compute, rel=0.1)
    assert dpo.time.reference == 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_reference_costs_a_forward_pass(method):
    """It takes a third of the FLOPs of full training without recomputation, and half of those of adapters'."""
    run = tuned("dpo", "ddp", activation_checkpointing="none", method=method)
    found = estimate_job(run)
    assert found.time.reference / found.time.compute == pytest.approx({"full": 1 / 3, "lora": 1 / 2}[method], rel=0.2)


def test_fsdp2_gathers_the_whole_reference_twice():
    with_reference, without = (
        estimate_job(tuned("dpo", precompute_ref_log_probs=precomputed)).memory for precomputed in (False, True)
    )
    parameters = tuned("dpo").shape.total_parameters
    assert (with_reference.buffers - without.buffers) * GIB > 0.9 * 4 * parameters


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(num_key_value_heads=2, num_attention_heads=4),
        Gemma3TextConfig(num_key_value_heads=2, num_attention_heads=4, head_dim=16, sliding_window=8),
    ],
    ids=["llama", "sliding"],
)
def test_the_cache_of_transformers_has_the_predicted_size(config):
    """The cache is measured at its end in fp32, after the last token, which is not in it."""
    for name, value in {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 128}.items():
        setattr(config, name, value)
    if hasattr(config, "layer_types"):
        config.layer_types = ["sliding_attention", "full_attention"] * 3
    model = AutoModelForCausalLM.from_config(config)
    prompts = torch.randint(3, 100, (3, 16))
    found = model.generate(
        prompts, min_new_tokens=9, max_new_tokens=9, do_sample=True, return_dict_in_generate=True, pad_token_id=0
    )
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in found.past_key_values.layers)
    shape = ModelShape.from_config(config.to_dict())
    layout = ParallelLayout()
    run = replace(tuned("grpo"), shape=shape, layout=layout, zero=0, micro_batch=3, global_batch=3)
    assert 2 * kv_cache_bytes(run, 16 + 9 - 1) == pytest.approx(measured, rel=0.06)  # a window may keep one token less


def tracked_peak(model, run):
    """The most bytes, besides the model's, that exist while `run()` runs without gradients."""
    tracker = MemTracker()
    tracker.track_external(model)
    with torch.no_grad(), tracker:
        run()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return sum(size for kind, size in peak.items() if kind not in ("Total", _MemRefType.PARAM, _MemRefType.BUFFER))


@pytest.mark.parametrize(("hidden", "inner"), [(256, 704), (512, 1024), (256, 2048)])
def test_a_forward_pass_keeps_one_layer(hidden, inner):
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=3, num_attention_heads=4, vocab_size=500
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = torch.randint(0, 500, (2, 256))
    run = replace(tuned("dpo"), shape=ModelShape.from_config(config.to_dict()), seq_len=256)
    measured = tracked_peak(model, lambda: model.model(tokens, use_cache=False))
    assert forward_bytes(run) == pytest.approx(measured, rel=0.05)


def test_sampling_a_token_keeps_copies_of_the_logits():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=50_000
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 1}
    prompts = torch.randint(3, 50_000, (32, 4))
    measured = tracked_peak(model, lambda: model.generate(prompts, pad_token_id=0, **options))
    assert measured / 32 / 50_000 == pytest.approx(LOGIT_COPIES_BYTES, rel=0.05)


def test_rounds_of_generation_trade_memory_for_time():
    runs = [tuned("grpo", micro_batch=4, global_batch=1024, generation_rounds=rounds) for rounds in (1, 4)]
    one, four = map(estimate_job, runs)
    assert [generated_at_once(run) for run in runs] == [128, 32]
    assert kv_cache_bytes(runs[0], 2048) == 4 * kv_cache_bytes(runs[1], 2048)
    assert one.memory.total > four.memory.total
    assert one.time.generation < four.time.generation < 4 * one.time.generation


def test_decoding_is_bound_by_what_is_read():
    """Twice the completions take less than twice the time; FSDP2 gathers the weights again for each token."""
    few, many = (estimate_job(tuned("grpo", "zero2", global_batch=size)).time for size in (64, 128))
    assert few.generation < many.generation < 1.8 * few.generation
    sharded = estimate_job(tuned("grpo", "fsdp2", global_batch=64)).time
    assert sharded.generation > 1.3 * few.generation
    run = tuned("grpo", "zero2", global_batch=64)
    slow = replace(run, gpu=replace(run.gpu, memory_tb_s=run.gpu.memory_tb_s / 4, achieved_memory_tb_s=None))
    assert estimate_job(slow).time.generation > 2 * few.generation


def test_plans_of_a_task_use_its_recipe_and_data_parallelism_alone():
    for task in ("sft", "dpo", "grpo"):
        found = plan("qwen3-8b", task=task, top=20, **PLAN)
        assert found.choices
        for choice in found.choices:
            layout = choice.estimate.job.layout
            assert (layout.tp, layout.pp, layout.cp) == (1, 1, 1)
            assert choice.to_dict()["recipe"] == f"recipes/{task}/train.py"
        assert found.to_dict()["task"]["name"] == task


def test_the_default_task_prints_no_new_key():
    found = plan("qwen3-8b", **PLAN).to_dict()
    assert "task" not in found
    assert "generation_rounds" not in found["choices"][0]
    assert not {"reference", "kv_cache"} & set(found["choices"][0]["memory_gib"])
    assert not {"reference", "generation"} & set(found["choices"][0]["time_s"])


def test_generation_in_rounds_is_found_where_the_cache_is_too_large_at_once():
    found = plan("qwen3-4b", gpu="A100-40GB", gpus=8, task="grpo", seq_len=4096, max_completion_length=3072)
    best = found.choices[0].estimate.job
    assert best.generation_rounds > 1
    assert not estimate_job(replace(best, generation_rounds=1)).fits
    assert best.global_batch // best.generation_rounds % best.num_generations == 0


@pytest.mark.parametrize("task", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_emitted_files_hold_the_flags_of_the_task(tmp_path, task, method):
    found = plan("qwen3-4b", task=task, method=method, tokens=1e9, **PLAN)
    files = {path.name: path for path in emit(found, tmp_path)}
    flags = yaml.safe_load(files["recipe.yaml"].read_text(encoding="utf-8"))
    run = found.choices[0].estimate.job
    assert "block_size" not in flags
    assert flags["per_device_train_batch_size"] == run.micro_batch
    assert flags["activation_checkpointing"] == (run.activation_checkpointing != "none")
    assert flags["max_steps"] == -(-1e9 // run.tokens_per_step)
    lengths = {"max_completion_length": 512, "num_generations": 8} if task == "grpo" else {"max_length": 2048}
    assert lengths.items() <= flags.items()
    assert f"recipes/{task}/train.py" in files["train.py"].read_text(encoding="utf-8")
    rewards = ["--reward_functions", "hfscale.recipe.rewards:similarity_to_answer"] if task == "grpo" else []
    training = parse_arguments(["--config", str(files["recipe.yaml"]), *rewards], task=task)[3]
    assert training.gradient_checkpointing == (run.activation_checkpointing != "none")
    if task == "grpo":
        assert training.steps_per_generation == run.micro_batches // run.generation_rounds


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--beta", "0.1"], ["--beta", "grpo", "text"]),
        (["--task", "dpo", "--num-generations", "4"], ["--num-generations", "grpo", "dpo"]),
        (["--task", "grpo", "--precompute-ref-log-probs"], ["--precompute-ref-log-probs", "dpo"]),
        (["--task", "dpo", "--precompute-ref-log-probs", "--method", "lora"], ["--method lora"]),
        (["--task", "grpo", "--num-generations", "1"], ["--num-generations is 1"]),
        (["--task", "grpo", "--global-batch", "100"], ["100", "--num-generations 8", "96"]),
        (["--task", "grpo", "--max-completion-length", "5000"], ["5000", "4096", "4095"]),
        (["--task", "grpo", "--beta", "-1"], ["--beta is -1"]),
        (["--task", "sft", "--stack", "megatron"], ["sft", "hf", "megatron"]),
        (["--task", "sft", "--liger"], ["--liger"]),
        (["--task", "ppo"], ["ppo", "sft"]),
    ],
)
def test_bad_input_of_a_task_is_one_line(capsys, argv, names):
    assert main(["plan", "qwen3-4b", "--gpu", "H100-80GB", "--gpus", "8", *argv]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    for name in names:
        assert name in err


def test_layouts_that_no_recipe_of_a_task_runs_are_refused():
    with pytest.raises(LayoutError, match="data parallelism"):
        estimate(TINY, gpu="H100-80GB", layout={"tp": 2}, seq_len=512, task="dpo")
    with pytest.raises(UsageError, match="offload"):
        estimate(TINY, gpu="H100-80GB", layout={"dp_shard": 2}, zero=3, seq_len=512, task="dpo", offload="full")


def test_the_table_of_a_task_names_it_and_its_parts(capsys):
    argv = ["plan", "qwen3-4b", "--gpu", "H100-80GB", "--gpus", "8", "--task", "grpo", "--beta", "0.04"]
    assert main([*argv, "--details"]) == 0
    out = capsys.readouterr().out
    for word in ("task grpo", "kv_cache", "reference", "generation", "beta 0.04"):
        assert word in out
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["task"] == {"name": "grpo", "num_generations": 8, "max_completion_length": 512, "beta": 0.04}
    assert found["choices"][0]["time_s"]["generation"] > 0
