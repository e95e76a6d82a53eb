"""Requests that transformers and Accelerate silently turn into something else; each is launched."""

import json

import pytest
import torch
import yaml
from conftest import REPOSITORY
from tiny import tiny_arguments, tiny_model
from transformers import Trainer, TrainingArguments

from hfscale import CommHealthCallback, ParallelTrainer
from hfscale.checkpoint.manifest import read_manifest
from hfscale.errors import StrategyMismatchError, UsageError
from hfscale.recipe.arguments import DataArguments, RecipeTrainingArguments, ScalingArguments
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.start import start_run
from hfscale.trainer.strategies.requested import check_launch

pytestmark = pytest.mark.recipes

WORKER = REPOSITORY / "tests" / "workers" / "strategy.py"
DDP = yaml.safe_load((REPOSITORY / "accelerate_configs" / "ddp.yaml").read_text())
FSDP2 = DDP | {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
    },
}


@pytest.fixture
def start(launch, tmp_path):
    """Starts two processes with the given Accelerate config and training arguments."""

    def run(config, env=None, **arguments):
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump(config))
        return launch(2, WORKER, json.dumps(arguments), config=path, env=env)

    return run


SILENT = {
    "without use_cpu: two independent trainings": (
        DDP,
        {"use_cpu": False},
        {},
        "--use_cpu true",
    ),
    "MULTI_CPU starts one process": (
        DDP | {"distributed_type": "MULTI_CPU"},
        {},
        {},
        "use distributed_type MULTI_GPU",
    ),
    "FSDP on a CPU becomes DDP": (FSDP2, {}, {}, "FSDP was asked for but DDP would run"),
    "DeepSpeed with ACCELERATE_USE_CPU becomes DDP": (
        DDP,
        {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}},
        {"ACCELERATE_USE_CPU": "true"},
        "ZERO was asked for but DDP would run",
    ),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("case", SILENT)
def test_a_silent_change_of_strategy_is_one_error_line(start, tmp_path, case):
    config, arguments, env, message = SILENT[case]
    done = start(config, env, **arguments)
    assert done.code != 0
    lines = done.lines("hfscale: error")
    assert len(lines) == 1, done.err[-3000:]
    assert message in lines[0]
    assert not (tmp_path / "out" / "checkpoint-2").exists()


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("ddp", {}),
        ("zero2", {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}}),
    ],
)
def test_the_requested_strategy_runs_and_is_in_the_manifest(start, tmp_path, strategy, arguments):
    done = start(DDP, **arguments)
    assert done.code == 0, done.err[-3000:]
    (line,) = done.lines("hfscale: strategy")
    assert line.startswith(f"hfscale: strategy {strategy} on 2 processes (cpu)")
    manifest = read_manifest(tmp_path / "out" / "checkpoint-2")
    assert (manifest.strategy, manifest.world_size, manifest.global_batch_size) == (strategy, 2, 8)


@pytest.mark.world(2)
def test_an_unwrapped_model_is_an_error(start):
    """Two replicas that never exchange a gradient would diverge."""
    done = start(DDP, keep_bare=True)
    assert done.code != 0
    lines = done.lines("hfscale: error")
    assert len(lines) == 1, done.err[-3000:]
    assert "bare LlamaForCausalLM" in lines[0]


@pytest.mark.world(2)
def test_ranks_that_see_different_folders_are_an_error(start):
    done = start(DDP, resume_on_rank_0=True)
    assert done.code != 0
    lines = done.lines("hfscale: error")
    assert len(lines) == 1, done.err[-3000:]
    assert "[2, 0]" in lines[0]


def eight_gpus(args):
    """Give arguments the GPUs that transformers would find in a single process."""
    args._n_gpu = 8
    return args


def test_one_process_with_eight_gpus_is_refused_by_the_callback(tmp_path):
    args = eight_gpus(tiny_arguments(tmp_path))
    with pytest.raises(StrategyMismatchError) as raised:
        Trainer(tiny_model(), args, callbacks=[CommHealthCallback()])
    line = str(raised.value)
    assert "8 GPUs are visible and 1 process was started" in line
    assert "accelerate launch --num_processes 8" in line
    assert "CUDA_VISIBLE_DEVICES=0" in line


def test_one_process_with_eight_gpus_is_refused_by_recipes_before_they_write(tmp_path):
    args = eight_gpus(RecipeTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True))
    with pytest.raises(StrategyMismatchError, match="8 GPUs are visible"):
        start_run(ModelArguments(), DataArguments(), ScalingArguments(), args)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model_name_or_path", "config_name"])
def test_a_model_without_a_text_does_not_train_on_the_embedded_one(tmp_path, name):
    args = RecipeTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    with pytest.raises(UsageError, match=f"^--{name} mine is given without a training text: give --dataset_name or"):
        start_run(ModelArguments(**{name: "mine"}), DataArguments(), ScalingArguments(), args)
    assert not (tmp_path / "out").exists()


def test_one_process_with_eight_gpus_is_refused_by_parallel_trainer(tmp_path):
    with pytest.raises(StrategyMismatchError, match="8 GPUs are visible"):
        ParallelTrainer(tiny_model(), eight_gpus(tiny_arguments(tmp_path)))


def test_a_model_that_is_split_over_the_gpus_by_a_device_map_is_not_refused(tmp_path):
    model = tiny_model()
    model.hf_device_map = {"model": 0, "lm_head": 1}
    trainer = Trainer(model, eight_gpus(tiny_arguments(tmp_path)), callbacks=[CommHealthCallback()])
    assert trainer.args.n_gpu == 1


def test_gpus_count_as_transformers_counts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    check_launch(TrainingArguments(str(tmp_path), use_cpu=True), {})
    with pytest.raises(StrategyMismatchError, match="8 GPUs are visible"):
        check_launch(TrainingArguments(str(tmp_path), use_cpu=False), {})
