"""The sharded recipe: its options, other numbers of processes, and a user's mistakes reported in one line."""

import json
import re
import shutil

import pytest
import torch
from conftest import REPOSITORY, accelerate_launch, agent_launch
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaConfig

from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.parallel.weights import build_model

pytestmark = pytest.mark.recipes
SHARDED = REPOSITORY / "recipes" / "sharded" / "train.py"
FLAGS = [
    "--config_name",
    "deep",
    "--tokenizer_name",
    "tokenizer",
    "--train_file",
    "text.txt",
    "--block_size",
    "32",
    "--max_steps",
    "3",
    "--save_steps",
    "2",
    "--logging_steps",
    "1",
    "--per_device_train_batch_size",
    "2",
    "--lr_scheduler_type",
    "constant",
    "--validation_split_percentage",
    "0",
    "--disable_tqdm",
    "true",
    "--output_dir",
    "out",
]
# Runs a recipe as on a machine without DeepSpeed.
WITHOUT_DEEPSPEED = """
import runpy, sys
from hfscale.core import versions
installed = versions.installed
versions.installed = lambda package: None if package == "deepspeed" else installed(package)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def folder(workplace, tmp_path):
    """A copy of the folder, in which one test runs."""
    return shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def trained(workplace, tmp_path_factory):
    """The folder of a plain FSDP2 run of four steps on two processes, with which tests compare theirs."""
    folder = shutil.copytree(workplace, tmp_path_factory.mktemp("trained"), dirs_exist_ok=True)
    done = accelerate_launch(
        folder, REPOSITORY / "accelerate_configs" / "fsdp2.yaml", 2, SHARDED, *FLAGS, "--max_steps", "4"
    )
    assert done.code == 0, done.err[-4000:]
    return folder


@pytest.fixture
def sharded(folder, launch):
    """Return a function `sharded(2, "fsdp2", "--flag")`: the recipe on two processes with that config."""

    def run(processes, config, *flags, env=None):
        return launch(
            processes, SHARDED, *FLAGS, *flags, config=REPOSITORY / "accelerate_configs" / f"{config}.yaml", env=env
        )

    return run


def records(folder):
    return [json.loads(line) for line in (folder / "out" / "scaling.jsonl").read_text().splitlines()]


def reports(done, *parts):
    lines = done.lines("hfscale: error")
    assert len(lines) == 1, done.err[-4000:]
    assert done.code != 0
    assert "Traceback" not in done.err.split("hfscale: error")[0]
    for part in parts:
        assert part in lines[0]


@pytest.mark.world(2)
class TestMistakes:
    """Each stops all processes at the start; test_parallelism.py has many more."""

    def test_a_config_for_more_processes(self, sharded):
        done = sharded(2, "fsdp2_hsdp")
        reports(done, "dp_replicate=2 x dp_shard=2", "needs 4 processes, but the world has 2", "set dp_shard=1")

    def test_more_tensor_parallel_ranks_than_heads(self, sharded):
        reports(sharded(4, "fsdp2_tp", "--tp_size", "4"), "tp_size 4", "2 key-value heads: choose one of 1, 2")


def test_deepspeed_that_is_not_installed(folder, python):
    done = python("-c", WITHOUT_DEEPSPEED, SHARDED, *FLAGS, "--deepspeed", "ds_configs/zero2.json")
    reports(done, "--deepspeed: ", "deepspeed", "not installed", 'pip install --upgrade "deepspeed>=0.19.8"')
    assert done.code == 2


@pytest.mark.world(2)
def test_fsdp2_resumes_on_more_processes(sharded, folder, trained):
    """Four processes instead of two keep the global batch and the losses of the uninterrupted run."""
    uninterrupted = [record["loss"] for record in records(trained)]
    shutil.copytree(trained / "out", folder / "out")
    shutil.rmtree(folder / "out" / "checkpoint-4")
    done = sharded(4, "fsdp2", "--max_steps", "4")
    assert done.code == 0, done.err[-4000:]
    assert "4 processes instead of 2: the global batch stays 4 sequences, by 1 per device x 1" in done.err
    assert [record["loss"] for record in records(folder)] == pytest.approx(uninterrupted, abs=2e-5)


@pytest.mark.world(2)
def test_the_options_for_memory_and_speed_keep_the_losses(sharded, folder, trained):
    """Recomputation, a compiled layer and a profiled step change how the training is computed, not its losses."""
    plain = [record["loss"] for record in records(trained)]
    done = sharded(
        2,
        "fsdp2",
        "--max_steps",
        "4",
        "--activation_checkpointing",
        "true",
        "--recompute",
        "selective",
        "--profile_steps",
        "2",
        "--torch_compile_regional",
        "true",
        "--torch_compile_backend",
        "aot_eager",
    )
    assert done.code == 0, done.err[-4000:]
    assert [record["loss"] for record in records(folder)] == pytest.approx(plain, abs=1e-5)
    assert [path.name for path in (folder / "out" / "profile").iterdir()] == ["step-2.json"]
    trace = (folder / "out" / "profile" / "step-2.json").read_text()
    assert "CompiledFunctionBackward" in trace or "Torch-Compiled Region" in trace


def saved_names(folder, step):
    """Return the names in an FSDP2 checkpoint: of the model's weights, of the optimizer's states, and our own list."""
    checkpoint = folder / "out" / f"checkpoint-{step}"
    parts = [FileSystemReader(checkpoint / name) for name in ("pytorch_model_fsdp_0", "optimizer_0")]
    names = [sorted(part.read_metadata().state_dict_metadata) for part in parts]
    return [*names, (checkpoint / PARAMETERS_NAME).read_text()]


COMPILED = {
    "full": ["--torch_compile", "true", "--torch_compile_backend", "eager"],
    "regional": ["--torch_compile_regional", "true", "--torch_compile_backend", "eager"],
}


@pytest.mark.world(2)
@pytest.mark.parametrize("compiled", COMPILED)
def test_a_compiled_fsdp2_run_resumes_without_compilation_and_the_other_way_round(sharded, folder, trained, compiled):
    """Two steps compiled, one without, one compiled: the losses and the names are those of the plain run."""
    config = REPOSITORY / "accelerate_configs" / "fsdp2.yaml"
    logs = {"TORCH_LOGS": "graph_breaks"}
    done = agent_launch(folder, config, 2, SHARDED, *FLAGS, "--max_steps", "2", *COMPILED[compiled], **logs)
    assert done.code == 0, done.err[-4000:]
    assert ("Graph break in user code" in done.err) == (compiled == "full")  # FSDP2's own hooks break a full graph
    assert re.findall(r"Graph break in user code at \S*hfscale/\S*", done.err) == []
    assert saved_names(folder, 2) == saved_names(trained, 2)
    for step, flags in ((3, []), (4, COMPILED[compiled])):
        done = sharded(2, "fsdp2", "--max_steps", str(step), *flags)
        assert done.code == 0, done.err[-4000:]
        assert f"continues from checkpoint-{step - 1}" in done.err
    losses = [[record["loss"] for record in records(run)] for run in (folder, trained)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert saved_names(folder, 4) == saved_names(trained, 4)


@pytest.mark.faults
@pytest.mark.world(2)
@pytest.mark.parametrize("flag", ["--torch_compile", "--torch_compile_regional"])
@pytest.mark.parametrize("config", ["fsdp2", "zero1", "zero2"])
@pytest.mark.timeout(1200)
def test_a_strategy_trains_and_resumes_under_inductor(folder, trained, config, flag):
    """The compiled run is stopped after two steps, and resumes: its losses are those of the plain FSDP2 run."""
    path = REPOSITORY / "accelerate_configs" / f"{config}.yaml"
    for step in (2, 4):
        flags = [*FLAGS, "--max_steps", str(step), flag, "true"]
        done = agent_launch(folder, path, 2, SHARDED, *flags, TORCH_LOGS="output_code")
        assert done.code == 0, done.err[-4000:]
        assert "Output code written to" in done.err or "Output code:" in done.err
    losses = [[record["loss"] for record in records(run)] for run in (folder, trained)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.world(2)
def test_under_fsdp2_only_one_rank_reads_the_model(folder, launch):
    """transformers reads it on every rank despite fsdp_cpu_ram_efficient_loading; the recipe prevents this.

    The weights are in bf16, as on the hub: in fp32 they would only be mapped and take no memory before their use.
    """
    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8
    )
    model = build_model(config, seed=0, dtype=torch.bfloat16)
    model.save_pretrained(folder / "large")
    fp32_mib = sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20
    worker = REPOSITORY / "tests" / "workers" / "loading.py"
    done = launch(2, worker, folder / "large", config=REPOSITORY / "accelerate_configs" / "fsdp2.yaml")
    assert done.code == 0, done.err[-4000:]
    first, second = (float((folder / f"rank-{rank}").read_text()) for rank in (0, 1))
    assert first > fp32_mib  # the measurement detects a rank that reads
    # The other rank needs its half and the shards in transit; a rank that reads would need as much as rank 0.
    assert second < 0.8 * first, (first, second)
