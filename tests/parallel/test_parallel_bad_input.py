"""`recipes/tp_pp/train.py` with sizes and models that do not fit together: an error of one line with the fix, exit
code 2, and no process group."""

import os
import re
import runpy
import sys

import pytest
import torch.distributed as dist
from conftest import REPOSITORY
from forked_ranks import run_ranks
from transformers import LlamaConfig, OPTConfig, Qwen3MoeConfig, XGLMConfig

RECIPE = REPOSITORY / "recipes" / "tp_pp" / "train.py"
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QUANTISED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
EVEN, OPT = LlamaConfig(**TINY), OPTConfig(vocab_size=96, hidden_size=32, num_attention_heads=4, num_hidden_layers=4)
XGLM = XGLMConfig(vocab_size=96, d_model=32, ffn_dim=64, attention_heads=4, num_layers=4)
THREE = LlamaConfig(**TINY | {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3})
EXPERTS = Qwen3MoeConfig(**TINY | {"num_experts": 4, "moe_intermediate_size": 16})
CASES = {
    "world": (EVEN, "--tp_size 2 --pp_size 3", "set --pp_size 2, or start 6"),
    "replicas": (EVEN, "--dp_shard_size 3", "needs 3 processes, but the world has 8"),
    "contexts": (EVEN, "--cp_size 3", "cp_size 3 x dp_replicate_size 1 = 3 does not divide the 8"),
    "heads": (EVEN, "--tp_size 8", "--tp_size is 8.*4 attention heads.*--tp_size 4"),
    "key-value heads": (THREE, "--tp_size 2", "--tp_size is 2.*3 key-value heads.*--tp_size 1 .one of 1, 3, 6, 12"),
    "layers": (EVEN, "--pp_size 8 --gradient_accumulation_steps 8", "4 layers: set --pp_size 4"),
    "micro-batches": (
        EVEN,
        "--pp_size 4",
        "accumulation_steps is 1: .* set --gradient_accumulation_steps 4",
    ),
    "no plan": (OPT, "--tp_size 2", "tensor-parallel plan for opt; set --tp_size 1"),
    "no contexts": (XGLM, "--cp_size 2", "--cp_size 2.*xglm.*--cp_size 1"),
    "schedule": (EVEN, "--pp_size 2 --pipeline_schedule ZBV --virtual_stages 1", "--virtual_stages is 1: ZBV"),
    "no schedule": (EVEN, "--pipeline_schedule 2F2B", "--pipeline_schedule.*2F2B.*GPipe.*1F1B"),
    "experts of a stage": (EXPERTS, "--ep_size 3", "ep_size 3 must divide the 8 ranks .*: choose one of 1, 2, 4, 8"),
    "few experts": (EXPERTS, "--ep_size 8", "ep_size 8 does not divide the model's 4 experts: .* 1, 2, 4"),
    "no experts": (EVEN, "--ep_size 2", "--ep_size 2.*spreads experts of llama.*leave --ep_size out"),
    "quantised": (
        LlamaConfig(**TINY, **QUANTISED),
        "--pp_size 2 --gradient_accumulation_steps 2",
        "quantised",
    ),
}
"""Model, flags, and a pattern of the error."""


def recipe(flags):
    def forbidden(*args, **kwargs):
        raise AssertionError("a process group was created")

    dist.init_process_group = forbidden
    run_recipe(flags)


def run_recipe(flags):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # set by a launcher: a dry run has none
    sys.argv = [str(RECIPE), *flags]
    runpy.run_path(str(RECIPE), run_name="__main__")


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import what every run needs, before anything is forked."""


@pytest.mark.parametrize("name", CASES)
def test_the_error_is_one_line_and_comes_before_any_process_group(name, tmp_path):
    config, flags, line = CASES[name]
    config.save_pretrained(tmp_path / "model")
    flags = ["--config_name", str(tmp_path / "model"), "--use_cpu", "true", "--dry_run", "8", *flags.split()]
    codes = run_ranks(1, recipe, flags, log=tmp_path / "log")
    output = (tmp_path / "log" / "rank-0.log").read_text(encoding="utf-8")
    errors = [row for row in output.splitlines() if row.startswith("hfscale: error: ")]
    assert (codes, len(errors)) == ([2], 1), output
    assert "Traceback" not in output
    assert re.search(line, errors[0]), errors[0]


def test_a_dry_run_reads_no_data(tmp_path):
    """So nothing is known about documents, and no flag of theirs is asked for."""
    flags = ["--use_cpu", "true", "--dry_run", "2", "--tp_size", "2"]
    assert run_ranks(1, run_recipe, flags, log=tmp_path / "log") == [0]
    assert "activations" in (tmp_path / "log" / "rank-0.log").read_text(encoding="utf-8")


def test_a_dry_run_simulates_the_largest_batch_of_a_schedule(tmp_path):
    """The schedule decides the micro-batches, so that no `--gradient_accumulation_steps` is asked for."""
    flags = ["--use_cpu", "true", "--dry_run", "4", "--pp_size", "2", "--per_device_train_batch_size", "2"]
    flags += ["--batch_schedule", "16@0,32@100Ksamples"]
    assert run_ranks(1, run_recipe, flags, log=tmp_path / "log") == [0]
    assert "8 micro-batches per step" in (tmp_path / "log" / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("16@0,34@100Ksamples", "34 sequences are no multiple of 4"),
        ("4@0,16@100Ksamples", "with 4 sequences 1F1B on 2"),
    ],
)
def test_a_dry_run_refuses_a_batch_that_the_pipeline_does_not_run(tmp_path, schedule, message):
    flags = ["--use_cpu", "true", "--dry_run", "4", "--pp_size", "2", "--per_device_train_batch_size", "2"]
    assert run_ranks(1, run_recipe, [*flags, "--batch_schedule", schedule], log=tmp_path / "log") == [2]
    (line,) = [
        row
        for row in (tmp_path / "log" / "rank-0.log").read_text(encoding="utf-8").splitlines()
        if row.startswith("hfscale: error: ")
    ]
    assert message in line
