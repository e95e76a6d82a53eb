"""The files that `hfscale plan --emit` writes: compared with the shipped ones, read by their libraries, and
launched."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import REPOSITORY, accelerate_launch
from launch_words import launched_words
from recipe_runs import save_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from hfscale import ParallelArguments, estimate, plan
from hfscale.cli import main
from hfscale.errors import UsageError
from hfscale.facts.families import FAMILIES as SHAPES
from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.models import find_model
from hfscale.facts.support import TENSOR_PARALLEL_PLAN_MISSING
from hfscale.parallel.arguments import plan_stages
from hfscale.parallel.dry_run import dry_run
from hfscale.planner.activations import (
    held_bytes,
    kept_and_waiting,
    kept_and_working,
    new_gradient_bytes,
    transient_bytes,
)
from hfscale.planner.emit import emit, stage_flags
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job
from hfscale.planner.launchable import why_not
from hfscale.planner.layouts import layouts
from hfscale.planner.memory import GIB, state_bytes
from hfscale.planner.peak import rank_parameters
from hfscale.planner.plan import Choice
from hfscale.planner.request import PlanRequest
from hfscale.recipe.parsing import parse_arguments

BLOCK = 32
LINE = "the quick brown fox jumps over the lazy dog\n"
FAMILIES = {
    "ddp": {"layout": {"dp_replicate": 2}},
    "fsdp2": {"layout": {"dp_shard": 2}, "zero": 3, "activation_checkpointing": "full"},
    "fsdp2_grad_op": {"layout": {"dp_shard": 2}, "zero": 3, "reshard": False},
    "fsdp2_hsdp": {"layout": {"dp_replicate": 2, "dp_shard": 2}, "zero": 3, "activation_checkpointing": "selective"},
    "fsdp2_tp": {"layout": {"dp_shard": 2, "tp": 2}, "zero": 3},
    "tp_pp": {"layout": {"dp_shard": 2, "tp": 2, "pp": 2}, "zero": 3, "global_batch": 16},
    "fsdp2_cp": {"layout": {"dp_shard": 2, "cp": 4}, "zero": 3},
    "fp8": {"layout": {"dp_shard": 2}, "zero": 3, "precision": "fp8", "compile": True},
    "zero1": {"layout": {"dp_replicate": 2}, "zero": 1, "optimizer": "adamw_8bit"},
    "zero2": {"layout": {"dp_replicate": 2}, "zero": 2, "optimizer": "sgd"},
    "zero2_offload": {"layout": {"dp_replicate": 2}, "zero": 2, "offload": "optimizer"},
    "zero3_offload": {"layout": {"dp_shard": 2}, "zero": 3, "offload": "full", "liger": True},
}
"""A job for every shipped config that the planner's search can choose, by the config's name."""
SYNCED = ("fsdp2", "fsdp2_grad_op", "fsdp2_hsdp", "fsdp2_tp", "fsdp2_cp", "fp8")
"""Configs whose gradients would be kept unsharded between the micro-batches of a step."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a config.json and a tokenizer, but no weights."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=4)


def planned(model, **options):
    """A plan whose only choice is the given job."""
    asked = plan(str(model), gpu="H100-80GB", gpus=1, seq_len=BLOCK)
    one = estimate(str(model), gpu="H100-80GB", seq_len=BLOCK, micro_batch=2, **options)
    return replace(asked, choices=(Choice(estimate=one),))


def comparable_content(folder, *names):
    """A YAML file's content without the number of processes and the paths of files."""
    content = yaml.safe_load((folder.joinpath(*names)).read_text())
    content.pop("num_processes", None)
    content.get("deepspeed_config", {}).pop("deepspeed_config_file", None)
    return content


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_equal_the_shipped_ones(model, tmp_path, name):
    found = planned(model, **FAMILIES[name])
    written = emit(found, tmp_path)
    assert comparable_content(tmp_path, "accelerate.yaml") == comparable_content(
        REPOSITORY, "accelerate_configs", f"{name}.yaml"
    )
    if name.startswith("zero"):
        shipped = json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())
        assert json.loads((tmp_path / "deepspeed.json").read_text()) == shipped
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    assert load_config_from_file(str(tmp_path / "accelerate.yaml")).num_processes > 1
    recipe = found.choices[0].to_dict()["recipe"]
    assert (REPOSITORY / recipe).is_file()
    assert (tmp_path / "train.py").read_bytes() == (REPOSITORY / recipe).read_bytes()
    words = launched_words(tmp_path / "launch.sh", tmp_path.parent)
    assert words[-3:] == [str(tmp_path / "train.py"), "--config", str(tmp_path / "recipe.yaml")]


@pytest.mark.parametrize(("family", "asks"), [("qwen3_moe", False), ("qwen3_5_moe_text", True)])
def test_experts_that_no_test_has_compared_are_launched_with_the_comparison(model, tmp_path, family, asks):
    """The recipe refuses to spread them without it."""
    shape = replace(find_model("qwen3-30b-a3b"), model_type=family)
    sizes = {"seq_len": 4096, "micro_batch": 1, "global_batch": 64, "expert_parallel": 8}
    job = Job(shape=shape, gpu=accelerator("H100"), layout=ParallelLayout(dp_shard=64, pp=8), **sizes)
    assert stage_flags(job).get("check_parity", False) is asks


@pytest.mark.parametrize(("beta", "key"), [(0.0, "config_name"), (0.04, "model_name_or_path")])
def test_a_folder_with_only_a_config_is_named_as_a_checkpoint_where_a_reference_model_is_loaded(
    model, tmp_path, beta, key
):
    completions = {"num_generations": 4, "max_completion_length": BLOCK // 2, "beta": beta}
    emit(planned(model, task="grpo", layout=ParallelLayout(), global_batch=32, **completions), tmp_path)
    flags = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert flags[key] == str(model)
    words = ["--config", str(tmp_path / "recipe.yaml"), "--reward_functions", "rewards.py:is_correct"]
    model_args, _, _, args, *_ = parse_arguments(words, task="grpo")
    args.check_method(model_args)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_recipe_accepts_every_flag(model, tmp_path, name):
    options = {**FAMILIES[name], "global_batch": 32}
    emit(planned(model, **options), tmp_path)
    groups = parse_arguments(["--config", str(tmp_path / "recipe.yaml")], also=[ParallelArguments])
    model_args, data_args, _, args, _ = groups
    assert (model_args.config_name, model_args.model_name_or_path) == (str(model), None)
    assert (data_args.block_size, args.per_device_train_batch_size) == (BLOCK, 2)
    assert args.activation_checkpointing == ("activation_checkpointing" in FAMILIES[name])
    assert args.recompute == FAMILIES[name].get("activation_checkpointing", "full")
    not_by_default = ("fsdp2_tp", "tp_pp", "fsdp2_cp", "zero3_offload")
    assert args.torch_compile_regional == (None if name in not_by_default else True)
    accumulation = args.accelerator_config.gradient_accumulation_kwargs or {}
    assert accumulation.get("sync_each_batch", False) == (options.get("zero") == 3 and name in SYNCED)
    assert args.optim == {"zero1": "adamw_bnb_8bit", "zero2": "sgd"}.get(name, "adamw_torch_fused")


@pytest.mark.parametrize(
    ("name", "packs", "said"),
    [
        ("qwen3-8b", True, None),
        ("gpt-oss-20b", False, "those of gpt_oss would see each other"),
        ("qwen3.5-4b", True, "need kernels of other packages: causal-conv1d"),
    ],
)
def test_conversations_are_packed_where_the_recipe_does_not_refuse(tmp_path, name, packs, said):
    """recipes/sft refuses to pack documents that would see each other."""
    found = plan(name, gpu="H100-80GB", gpus=8, seq_len=4096, global_batch=64, task="sft")
    emit(found, tmp_path)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["packing"] is packs
    lines = [line for line in found.assumptions if "packed" in line and "sft: " in line]
    assert [said in line for line in lines] == ([] if said is None else [True])


@pytest.mark.parametrize("gpu", [accelerator("MI300X"), replace(accelerator("H100-80GB"), device_names=())])
def test_layers_are_not_compiled_on_what_is_no_nvidia_gpu(tmp_path, gpu):
    found = plan("qwen3-8b", gpu=gpu, gpus=8, seq_len=4096, global_batch=64)
    emit(found, tmp_path)
    assert "torch_compile_regional" not in yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert not any(choice.estimate.job.compile for choice in found.choices)


@pytest.mark.parametrize(
    ("name", "options", "compiled", "loss"),
    [
        ("qwen3-8b", {}, True, {"fused_loss": "chunked"}),
        ("qwen3-8b", {"compile": False}, False, {"fused_loss": "chunked"}),
        ("gemma-2-9b", {}, True, {"use_liger_kernel": True}),  # it changes its logits
        ("qwen3-30b-a3b", {}, None, {"fused_loss": "chunked"}),
        ("qwen3-8b", {"task": "sft"}, True, {}),
        ("qwen3-8b", {"task": "grpo"}, None, {}),
    ],
)
def test_a_plan_says_whether_layers_are_compiled_and_how_the_loss_is_computed(tmp_path, name, options, compiled, loss):
    """What is written agrees with the default of the recipes, and with what was estimated."""
    liger = {} if "task" in options else {"liger": True}
    found = plan(name, gpu="H100-80GB", gpus=8, seq_len=4096, global_batch=64, **liger, **options)
    fsdp2 = next(number for number, choice in enumerate(found.choices, 1) if choice.to_dict()["strategy"] == "fsdp2")
    emit(found, tmp_path, number=fsdp2)
    job = found.choices[fsdp2 - 1].estimate.job
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert recipe.get("torch_compile_regional") == compiled
    assert job.compile == bool(compiled)
    assert {key: recipe[key] for key in ("fused_loss", "use_liger_kernel") if key in recipe} == loss


def test_precision_and_adapters_are_written_as_flags(tmp_path):
    asked = plan("qwen3-0.6b", gpu="RTX4090", gpus=2, method="lora", lora_rank=8, precision="fp32", seq_len=512)
    emit(asked, tmp_path)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert recipe["model_name_or_path"] == "Qwen/Qwen3-0.6B"
    assert (recipe["bf16"], recipe["tf32"]) == (False, True)  # the estimate counts on tf32 products
    assert (recipe["use_peft"], recipe["lora_r"]) == (True, 8)
    emit(plan("qwen3-0.6b", gpu="V100-32GB", gpus=2, precision="fp16", seq_len=512), tmp_path)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["fp16"] is True


def test_a_folder_with_weights_is_a_checkpoint_and_special_names_are_quoted(model, tmp_path):
    odd = tmp_path / "a model: #1"
    odd.mkdir()
    (odd / "config.json").write_bytes((model / "config.json").read_bytes())
    (odd / "model.safetensors").write_bytes(b"")
    emit(planned(odd / "config.json", layout={"dp_replicate": 2}, zero=1), tmp_path / "out: #2")
    recipe = yaml.safe_load((tmp_path / "out: #2" / "recipe.yaml").read_text())
    assert (recipe["model_name_or_path"], recipe["output_dir"]) == (str(odd), "runs/a model: #1")
    config = load_config_from_file(str(tmp_path / "out: #2" / "accelerate.yaml"))
    assert Path(config.deepspeed_config["deepspeed_config_file"]).is_file()


@pytest.mark.parametrize("name", ["fsdp2", "zero2"])
def test_the_command_for_several_machines(model, tmp_path, name):
    options = {**FAMILIES[name], "optimizer": "adamw", "gpus_per_node": 1}
    emit(planned(model, **options), tmp_path)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (config.num_machines, config.num_processes) == (2, 2)
    # Not over ssh, which is accelerate's default for DeepSpeed.
    assert name == "fsdp2" or config.deepspeed_config["deepspeed_multinode_launcher"] == "standard"
    script = (tmp_path / "launch.sh").read_text()
    assert '--machine_rank "$MACHINE_RANK" --main_process_ip "$MAIN_IP" --main_process_port 29500' in script
    assert "# Run on each of the 2 machines" in script


def test_mesh_and_schedule_of_a_pipeline_are_written_as_flags(model, tmp_path):
    found = planned(
        model,
        layout={"dp_replicate": 2, "pp": 2},
        global_batch=32,
        schedule="1f1b",
        virtual_stages=1,
        activation_checkpointing="full",
    )
    emit(found, tmp_path)
    groups = parse_arguments(["--config", str(tmp_path / "recipe.yaml")], also=[ParallelArguments])
    args, parallel = groups[3], groups[4]
    layout, stages = plan_stages(parallel, args, world_size=4)
    assert layout == found.choices[0].estimate.job.layout
    assert (stages.schedule, stages.per_rank, parallel.sequence_parallel) == ("1F1B", 1, False)
    assert (args.gradient_accumulation_steps, args.activation_checkpointing) == (8, True)
    assert found.choices[0].to_dict()["pipeline_schedule"] == "1F1B"
    assert found.choices[0].to_dict()["recipe"] == "recipes/tp_pp/train.py"


def test_sequence_parallelism_is_written_as_a_flag(model, tmp_path):
    found = planned(model, **FAMILIES["tp_pp"])
    emit(found, tmp_path)
    parallel = parse_arguments(["--config", str(tmp_path / "recipe.yaml")], also=[ParallelArguments])[4]
    assert found.choices[0].estimate.job.sequence_parallel
    assert parallel.sequence_parallel


ODD_NAMES = (
    "b c'd",
    "$(touch RAN)",
    "$HOME",
    "-x",
    "n\nuse_cpu: true",
    "end\n",
    "#m",
    "- m",
    "null",
    "1e3",
    "u\u2028v",
)
"""Names that a shell or YAML would read as something else, of the emitted folder and of the model's."""


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_names(model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    named = tmp_path / "m" / name
    named.mkdir(parents=True)
    (named / "config.json").write_bytes((model / "config.json").read_bytes())
    written = emit(planned(named, **FAMILIES["zero3_offload"]), Path("plans", name))
    (tmp_path / "elsewhere").mkdir()
    words = launched_words(Path("..", "plans", name, "launch.sh"), tmp_path, cwd=tmp_path / "elsewhere")
    found = {flag: words[words.index(flag) + 1] for flag in ("--config_file", "--deepspeed_config_file", "--config")}
    assert {Path("elsewhere", path).resolve() for path in found.values()} < {path.resolve() for path in written}
    recipe = yaml.safe_load((tmp_path / "plans" / name / "recipe.yaml").read_text())
    assert (recipe["config_name"], recipe["output_dir"]) == (str(named), f"runs/{name}")
    launcher = yaml.safe_load((tmp_path / "plans" / name / "accelerate.yaml").read_text())
    assert (launcher["use_cpu"], launcher["num_machines"]) == (False, 1)
    assert not list(tmp_path.rglob("RAN"))


def test_the_adapters_of_a_plan_are_those_of_the_recipe(tmp_path):
    options = {"gpu": "H100-80GB", "gpus": 8, "seq_len": 2048, "method": "lora", "top": 1}
    named = plan("qwen3-8b", **options, lora_target_modules="q_proj,v_proj", lora_dropout=0.1)
    whole = plan("qwen3-8b", **options).choices[0].estimate.memory
    assert named.choices[0].estimate.memory.optimizer < whole.optimizer
    emit(named, tmp_path)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert (recipe["lora_target_modules"], recipe["lora_dropout"]) == (["q_proj", "v_proj"], 0.1)


def test_files_that_were_changed_are_kept(model, tmp_path):
    one, other = planned(model, **FAMILIES["ddp"]), planned(model, **FAMILIES["zero1"])
    written = emit(one, tmp_path)
    emit(other, tmp_path)
    texts = {path: path.read_text() for path in written}
    for path in written:
        path.write_text(texts[path] + "# mine\n")
        with pytest.raises(UsageError, match=rf"emit=.*{path.name} was changed.*force=True"):
            emit(one, tmp_path)
        changed = {each.name: each.read_text() for each in written if each.read_text() != texts[each]}
        assert changed == {path.name: texts[path] + "# mine\n"}  # none of the others was written
        path.write_text(texts[path])
    mine = tmp_path / "project"
    mine.mkdir()
    (mine / "train.py").write_text("# mine\n")
    with pytest.raises(UsageError, match=r"train\.py was changed, or hfscale did not write it"):
        emit(one, mine)
    assert [path.name for path in mine.iterdir()] == ["train.py"]
    assert len(emit(one, mine, force=True)) == 4


def test_the_cores_are_shared_by_the_ranks_of_an_offloading_machine(model, tmp_path):
    emit(planned(model, **FAMILIES["zero3_offload"]), tmp_path)
    script = (tmp_path / "launch.sh").read_text()
    assert "_NPROCESSORS_ONLN) / 2))" in script
    assert "export OMP_NUM_THREADS" in script
    emit(planned(model, **FAMILIES["ddp"]), tmp_path / "ddp")
    assert "OMP_NUM_THREADS" not in (tmp_path / "ddp" / "launch.sh").read_text()


def test_the_launcher_gets_the_signal_and_its_code_is_that_of_the_script(model, tmp_path):
    """Without `hfscale run`, which tests/recovery covers, and with it."""
    emit(planned(model, **FAMILIES["ddp"]), tmp_path / "plan")
    program = tmp_path / "accelerate"
    program.write_text("#!/bin/sh\ntrap 'exit 75' TERM\ntouch started\nwhile :; do sleep 0.05; done\n")
    program.chmod(0o755)
    run = tmp_path / "supervised" / "hfscale"
    run.parent.mkdir()
    run.write_text(f'#!/bin/sh\nexec {sys.executable} -m hfscale "$@"\n')
    run.chmod(0o755)
    for path in (f"{tmp_path}:/usr/bin:/bin", f"{run.parent}:{tmp_path}:/usr/bin:/bin"):
        (tmp_path / "started").unlink(missing_ok=True)
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        started = subprocess.Popen(["sh", "plan/launch.sh"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
        while not (tmp_path / "started").exists():
            assert started.poll() is None
            time.sleep(0.02)
        started.send_signal(signal.SIGTERM)
        assert started.wait(30) == 75


def test_evaluation_warm_up_and_saves_are_written(tmp_path):
    """Large checkpoints are saved about once an hour."""
    found = plan("llama-3.1-70b", gpu="H100-80GB", gpus=64, tokens=1e9)
    emit(found, tmp_path)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    seconds = recipe["save_steps"] * found.choices[0].estimate.time.total
    assert 1200 < seconds <= 3600
    assert (recipe["save_minutes"], recipe["warmup_steps"]) == (60, 0.03)
    assert (recipe["eval_strategy"], recipe["eval_steps"]) == ("steps", recipe["save_steps"])
    without = ["--config", str(tmp_path / "recipe.yaml"), "--validation_split_percentage", "0"]
    assert parse_arguments(without, also=[ParallelArguments])[3].eval_strategy == "no"


PIPELINE = {"layout": {"tp": 2, "pp": 2, "dp_replicate": 2}, "zero": 1}


class TestUnlaunchableChoices:
    def test_the_error_names_a_choice_that_can_be_launched(self, model, tmp_path):
        first = planned(model, **PIPELINE)
        both = replace(first, choices=(*first.choices, *planned(model, **FAMILIES["fsdp2"]).choices))
        with pytest.raises(UsageError, match=r"^emit: .*pp 2.*shards all states.*choice=2 can \(fsdp2") as error:
            emit(both, tmp_path / "out")
        assert len(str(error.value).splitlines()) == 1
        assert not (tmp_path / "out").exists()
        emit(both, tmp_path / "out", number=2)
        assert both.choices[0].to_dict()["recipe"] is None

    def test_the_error_says_if_no_choice_can_be_launched(self, model, tmp_path):
        with pytest.raises(UsageError, match=r"none of the 1 choices can: raise top$"):
            emit(planned(model, **PIPELINE), tmp_path)

    def test_a_choice_that_does_not_exist(self, capsys, tmp_path):
        argv = ["plan", "llama-3.1-8b", "--gpu", "H100", "--gpus", "8", "--top", "2", "--emit", str(tmp_path / "out")]
        assert main([*argv, "--choice", "3"]) == 2
        assert "--choice is 3" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"optimizer": "sgd_momentum"}, "no optimizer sgd_momentum"),
            ({"offload": "full", "optimizer": "adamw_8bit"}, "offload supports AdamW"),
            ({"offload": "full", "precision": "fp8"}, "fp8 .* DeepSpeed"),
        ],
    )
    def test_unsupported_combinations(self, model, tmp_path, options, reason):
        with pytest.raises(UsageError, match=reason):
            emit(planned(model, layout={"dp_shard": 2}, zero=3, **options), tmp_path)

    def test_the_table_lists_unlaunchable_choices(self, capsys):
        main(["plan", "llama-3.1-8b", "--gpu", "H100", "--gpus", "8", "--optimizer", "adamw_bf16"])
        assert "Trainer has no optimizer adamw_bf16" in capsys.readouterr().out

    def test_every_choice_of_a_large_model_can_be_launched(self):
        found = plan("llama-3.1-405b", gpu="H100", gpus=1024, seq_len=8192, top=100)
        recipes = {choice.to_dict()["recipe"] for choice in found.choices}
        assert recipes == {"recipes/sharded/train.py", "recipes/tp_pp/train.py"}


class TestSearchOffersOnlyWhatRecipesSupport:
    def found(self, name, stack="hf", gpus=8, method="full"):
        from hfscale.facts.models import find_model

        asked = PlanRequest(shape=find_model(name), gpu=accelerator("H100"), gpus=gpus, stack=stack, method=method)
        return [(layout, zero) for layout, zero, _ in layouts(asked, gpus)]

    def test_no_tensor_parallelism_with_deepspeed_ddp_or_adapters(self):
        assert any(layout.tp > 1 for layout, _ in self.found("llama-3.1-8b"))
        for layout, zero in self.found("llama-3.1-8b"):
            assert layout.tp == 1 or layout.pp > 1 or layout.dp_shard * layout.dp_replicate == 1 or zero == 3
            assert layout.cp == 1 or zero == 3
            assert layout.cp == 1 or layout.tp == 1 or layout.pp > 1
        assert all(layout.tp == 1 for layout, _ in self.found("llama-3.1-8b", method="lora"))

    def test_key_value_heads_are_not_replicated(self):
        few = "qwen2.5-1.5b"  # two key-value heads and twelve query heads, so that four ranks would copy them
        assert max(layout.tp for layout, _ in self.found("qwen2.5-7b") if layout.pp == 1) == 4
        assert max(layout.tp for layout, _ in self.found(few) if layout.pp == 1) == 2
        assert max(layout.tp for layout, _ in self.found(few, stack="megatron") if layout.pp == 1) == 4

    def test_models_without_a_tensor_parallel_plan(self):
        assert all(layout.tp == 1 or layout.pp > 1 for layout, _ in self.found("gpt2"))
        plans = {name: CONFIG_MAPPING[name]().get_text_config().base_model_tp_plan for name in SHAPES}
        assert {name for name, plan in plans.items() if not plan} == TENSOR_PARALLEL_PLAN_MISSING

    def test_models_without_context_parallelism(self):
        layout = {"pp": 2, "cp": 4, "tp": 8}
        asked = {"layout": layout, "zero": 3, "seq_len": 8192, "loss_parallel": True, "sequence_parallel": True}
        job = estimate("llama-3.1-8b", gpu="H100-80GB", **asked).job
        assert why_not(job) is None
        assert "(ZeRO stage 3)" in why_not(replace(job, zero=0))
        assert why_not(replace(job, seq_len=8200)).startswith(
            "sequences of 8200 tokens do not divide into the 32 parts"
        )
        bloom = estimate("bloom-176b", gpu="H100-80GB", **asked).job
        assert "bloom cannot be split into pipeline stages" in why_not(bloom)
        unknown = replace(job, shape=replace(job.shape, model_type="of_tomorrow"), sequence_parallel=False)
        assert "context parallelism was not tested with of_tomorrow" in why_not(unknown)

    def test_context_parallel_stages_keep_keys_and_values_of_all_ranks(self):
        asked = {"layout": {"pp": 2, "cp": 4}, "zero": 3, "seq_len": 8192}
        job, stack = estimate("llama-3.1-8b", gpu="H100-80GB", **asked).job, find_framework("hf")
        alone = replace(job, seq_len=2048, layout=replace(job.layout, cp=1))  # as many tokens on a rank
        more = kept_and_working(job, stack)[0] - kept_and_working(alone, stack)[0]
        assert more == 2 * 2048 * (8 + 8) * 128 * 3


RUNS = {
    "pipeline": ({"layout": {"pp": 2}, "global_batch": 4}, "parallel", 2),
    "fsdp2": ({"layout": {"dp_shard": 2}, "zero": 3}, "fsdp2", 2),
    "fsdp2_accumulated": ({"layout": {"dp_shard": 2}, "zero": 3, "global_batch": 8}, "fsdp2", 2),
    "tp": ({"layout": {"tp": 2}}, "parallel", 2),
    "interleaved": (
        {"layout": {"dp_shard": 2, "pp": 2}, "zero": 3, "virtual_stages": 2, "global_batch": 8},
        "parallel",
        4,
    ),
    "all_axes": ({"layout": {"dp_shard": 2, "tp": 2, "pp": 2}, "zero": 3, "global_batch": 8}, "parallel", 8),
    "long": ({"layout": {"cp": 2, "pp": 2}, "zero": 3, "global_batch": 8}, "parallel", 4),
    "zero_bubble": (
        {"layout": {"tp": 2, "pp": 2}, "virtual_stages": 2, "schedule": "zbv", "global_batch": 8},
        "parallel",
        4,
    ),
}
"""Jobs whose emitted files are launched: options, strategy, processes."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.recipes if name in ("pipeline", "tp") else pytest.mark.faults)
        for name in RUNS
    ],
)
def test_the_command_trains(model, tmp_path, name):
    """Runs the command of launch.sh, with a text to train on added."""
    options, strategy, processes = RUNS[name]
    found = planned(model, **options)
    assert found.choices[0].to_dict()["strategy"] == strategy
    emit(found, tmp_path / "plan")
    (tmp_path / "text.txt").write_text(LINE * 200)
    command = launched_words(tmp_path / "plan" / "launch.sh", tmp_path)
    assert command[:3] == ["accelerate", "launch", "--config_file"]
    recipe, *flags = command[4:]
    done = accelerate_launch(
        tmp_path,
        Path(command[3]),
        processes,
        REPOSITORY / recipe,
        *flags,
        "--train_file",
        "text.txt",
        "--max_steps",
        "2",
        "--validation_split_percentage",
        "0",
        "--disable_tqdm",
        "true",
        "--output_dir",
        "out",
    )
    assert done.code == 0, done.err[-4000:]
    runs = "native" if name == "tp" else strategy  # what a run calls the tensor parallelism of transformers
    (line,) = done.lines("hfscale: strategy")
    assert line.split(": ")[1] == f"strategy {runs} on {processes} processes (cpu)"
    assert ("sequences cut over 2 ranks" in line) == (name in ("all_axes", "zero_bubble"))
    status = json.loads((tmp_path / "out" / "hfscale_status.json").read_text())
    assert (status["status"], status["step"]) == ("completed", 2)
    if name != "tp":  # a run with tensor parallelism alone saves none
        manifest = json.loads((tmp_path / "out" / status["checkpoint"] / "hfscale_manifest.json").read_text())
        assert manifest["global_batch_size"] == found.choices[0].estimate.job.global_batch


@pytest.mark.parametrize("schedule", [("1f1b", 1), ("1f1b", 2), ("zbv", 2)])
def test_the_dry_run_of_an_emitted_pipeline_needs_the_planned_memory(tmp_path, schedule):
    """Builds the model on ranks of a fake process group from the recipe's flags and counts weights, gradients and
    moments."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    config.save_pretrained(tmp_path / "model")
    found = planned(
        tmp_path / "model",
        layout={"dp_shard": 4, "tp": 2, "pp": 2},
        zero=3,
        global_batch=64,
        schedule=schedule[0],
        virtual_stages=schedule[1],
        activation_checkpointing="full" if schedule[0] == "1f1b" else "none",
    )
    emit(found, tmp_path)
    _, data_args, _, args, parallel = parse_arguments(
        ["--config", str(tmp_path / "recipe.yaml"), "--bf16", "true"], also=[ParallelArguments]
    )
    layout, stages = plan_stages(parallel, args, world_size=16)

    def empty_model():
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    ranks = dry_run(
        empty_model,
        layout,
        stages,
        args,
        block_size=data_args.block_size,
        sequence_parallel=parallel.sequence_parallel,
    )
    job, memory = found.choices[0].estimate.job, found.choices[0].estimate.memory
    assert job.rank_layers == tuple(sum(map(span, rank.layers.split())) for rank in ranks)
    found_states = state_bytes(job, find_framework("hf"))
    states = (found_states.parameters + found_states.gradients + found_states.optimizer) / GIB
    assert states == pytest.approx(max(rank.states for rank in ranks), rel=0.03)
    _, working = kept_and_working(job, find_framework("hf"))
    of_a_layer = kept_and_waiting(job, find_framework("hf"))
    held = max(
        held_bytes(job, rank, layers, of_a_layer) + new_gradient_bytes(job, parameters)
        for rank, (layers, parameters) in enumerate(zip(job.rank_layers, rank_parameters(job), strict=True))
    )
    opening = (held + working + transient_bytes(job)) / GIB
    assert opening == pytest.approx(max(rank.activations for rank in ranks), rel=1e-3)
    assert memory.activations + memory.loss <= max(rank.activations + rank.loss for rank in ranks) * 1.001


def span(layers):
    """Number of layers in a text such as `3-7`."""
    first, last = map(int, layers.split("-"))
    return last - first + 1
