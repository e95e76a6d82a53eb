"""The requests that transformers and accelerate turn into something else without a word, each launched for real."""

import json

import pytest
import yaml
from conftest import REPOSITORY

from hfscale.checkpoint.manifest import read_manifest

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
    """Two processes with an Accelerate config made here and arguments of `Trainer`'s."""

    def run(config, env=None, **arguments):
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump(config))
        return launch(2, WORKER, json.dumps(arguments), config=path, env=env)

    return run


SILENT = {
    "no use_cpu: two trainings that know nothing of each other": (
        DDP,
        {"use_cpu": False},
        {},
        "started 2 processes but each of them trains alone",
    ),
    "MULTI_CPU: one process": (
        DDP | {"distributed_type": "MULTI_CPU"},
        {},
        {},
        "asks for several CPU processes but its launcher started one",
    ),
    "FSDP on a CPU: DDP": (FSDP2, {}, {}, "FSDP was asked for but DDP would run"),
    "DeepSpeed with ACCELERATE_USE_CPU: DDP": (
        DDP,
        {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}},
        {"ACCELERATE_USE_CPU": "true"},
        "ZERO was asked for but DDP would run",
    ),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("case", SILENT)
def test_a_silent_exchange_becomes_one_line(start, tmp_path, case):
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
def test_what_was_asked_for_runs_and_stands_in_the_manifest(start, tmp_path, strategy, arguments):
    done = start(DDP, **arguments)
    assert done.code == 0, done.err[-3000:]
    assert done.lines("hfscale: strategy") == [f"hfscale: strategy {strategy} on 2 processes (cpu)"]
    manifest = read_manifest(tmp_path / "out" / "checkpoint-2")
    assert (manifest.strategy, manifest.world_size, manifest.global_batch_size) == (strategy, 2, 8)


@pytest.mark.world(2)
def test_a_model_that_nothing_wraps_is_told(start):
    """Two replicas that never exchange a gradient would train apart."""
    done = start(DDP, keep_bare=True)
    assert done.code != 0
    lines = done.lines("hfscale: error")
    assert len(lines) == 1, done.err[-3000:]
    assert "DDP was asked for but the model is a bare LlamaForCausalLM" in lines[0]


@pytest.mark.world(2)
def test_ranks_that_see_different_folders_are_told(start):
    done = start(DDP, resume_on_rank_0=True)
    assert done.code != 0
    lines = done.lines("hfscale: error")
    assert len(lines) == 1, done.err[-3000:]
    assert "the ranks start at different steps [2, 0]" in lines[0]
