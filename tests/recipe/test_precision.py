"""Gradients are summed in fp32, over micro-batches and under FSDP2 over ranks, and what is not is reported."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import REPOSITORY
from forked_ranks import run_ranks
from recipe_runs import environment_of, logged, make_workplace, output, run_recipe, warm_up
from tiny import RandomTokens, tiny_model, tiny_trainer
from transformers import Trainer, default_data_collator

from benchmarks.gradient_accumulation import accumulated_error
from hfscale import CommHealthCallback, ParallelArguments, ScalingCallback
from hfscale.errors import UsageError
from hfscale.recipe import train
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.recipe.layout import set_up_parallelism
from hfscale.trainer.precision import why_products_are_slow
from hfscale.trainer.strategies.zero import check_hpz

IN_FP32 = 1e-6
REDUCED_IN_BF16 = 1e-3  # ZeRO-2 and 3 accumulate in fp32 what they have reduced in bf16
# Without the settings the errors are 3.8e-3 and 4.2e-3, and grow with the number of micro-batches.


@pytest.fixture(scope="module", autouse=True)
def libraries():
    warm_up()


def run(tmp_path, ranks, strategy, function, *args):
    """Run a function in forked ranks, and return what it returned on rank 0 and the output of that rank."""
    result = tmp_path / "result"
    codes = run_ranks(ranks, write_result, result, function, *args, log=tmp_path, env=environment_of(strategy))
    text = (tmp_path / "rank-0.log").read_text()
    assert codes == [0] * ranks, text[-4000:]
    return json.loads(result.read_text()), text


def write_result(path, function, *args):
    value = function(*args)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(value))


def error(sync_each_batch):
    return accumulated_error(as_recipes=True, sync_each_batch=sync_each_batch, micro_batches=16)


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("strategy", "most", "sync_each_batch"),
    [
        ("fsdp2", IN_FP32, False),
        ("fsdp2", IN_FP32, True),
        ("zero1", IN_FP32, False),
        ("zero2", REDUCED_IN_BF16, False),
        ("zero3", REDUCED_IN_BF16, False),
    ],
)
def test_the_gradient_of_many_micro_batches_is_that_of_an_exact_sum(tmp_path, strategy, most, sync_each_batch):
    found, _ = run(tmp_path, 2, strategy, error, sync_each_batch)
    assert found < most


def train_without_the_setting(folder, steps):
    config = json.loads((REPOSITORY / "ds_configs" / "zero2.json").read_text())
    del config["data_types"]
    trainer = tiny_trainer(
        folder,
        CommHealthCallback(preflight=False, hang_after_s=None),
        bf16=True,
        deepspeed=config,
        gradient_accumulation_steps=steps,
        max_steps=1,
    )
    trainer.train()


@pytest.mark.world(2)
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.long
def test_a_config_that_accumulates_in_bf16_is_reported(tmp_path, steps):
    _, text = run(tmp_path, 2, "zero2", train_without_the_setting, tmp_path / "out", steps)
    warnings = {line for line in text.splitlines() if "DeepSpeed adds up the gradients" in line}
    assert bool(warnings) == (steps > 1), text[-4000:]
    assert all("in bfloat16, which" in line and '"grad_accum_dtype": "fp32"' in line for line in warnings)


def test_fp32_on_a_gpu_with_bf16_is_reported(tmp_path):
    in_fp32 = tiny_trainer(tmp_path)
    warning = why_products_are_slow(in_fp32, has_bf16=True)
    assert "bf16=True" in warning
    assert why_products_are_slow(in_fp32, has_bf16=False) is None
    loaded = tiny_trainer(tmp_path, model=tiny_model().to(torch.bfloat16))
    assert why_products_are_slow(loaded, has_bf16=True) is None
    assert why_products_are_slow(tiny_trainer(tmp_path, bf16=True), has_bf16=True) is None


CONFIGS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_plain_trainer_under_a_shipped_config_does_not_compute_in_fp32_unseen(path, tmp_path, monkeypatch):
    """Beside a DeepSpeed file Accelerate refuses the key, and a comment says what to do."""
    config = yaml.safe_load(path.read_text())
    if config["distributed_type"] == "DEEPSPEED":
        assert "mixed_precision" not in config
        assert "TrainingArguments(bf16=True)" in path.read_text()
        return
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", config["mixed_precision"])
    assert config["mixed_precision"] in ("bf16", "fp8")
    if config["mixed_precision"] == "bf16":
        assert tiny_trainer(tmp_path).accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize(("flags", "expected"), [({}, "no"), ({"bf16": False}, "no"), ({"bf16": True}, "bf16")])
def test_the_flag_of_a_recipe_decides_and_not_the_config(tmp_path, monkeypatch, flags, expected):
    """Without the flag it is bf16 where the hardware has it, which a CPU is not asked for."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = RecipeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **flags)
    assert args.mixed_precision == expected


BF16 = ("--bf16", "true", "--lr_scheduler_type", "constant")


@pytest.mark.recipes
@pytest.mark.world(2)
def test_zero1_in_bf16_resumes_exactly_and_on_other_ranks_and_strategies(tmp_path):
    """DeepSpeed's BF16_Optimizer, which accumulates in fp32: three steps and three more are six, also converted."""
    (tmp_path / "workplace").mkdir()
    workplace = make_workplace(tmp_path / "workplace")
    whole, halves, others, ddp = (tmp_path / name for name in ("whole", "halves", "others", "ddp"))
    shutil.copytree(workplace, whole)
    run_recipe(whole, "zero1", 2, *BF16)
    shutil.copytree(workplace, halves)
    run_recipe(halves, "zero1", 2, *BF16, "--max_steps", "3")
    for folder, strategy, ranks in ((others, "zero1", 3), (ddp, "ddp", 2), (halves, "zero1", 2)):
        if folder is not halves:
            shutil.copytree(halves, folder)
        run_recipe(folder, strategy, ranks, *BF16)
        assert "continues from checkpoint-3" in output(folder)
        tolerance = 0 if folder is halves else 2e-3
        assert logged(folder, "loss") == pytest.approx(logged(whole, "loss"), abs=tolerance), strategy


def reduced_by_fsdp2(folder):
    """Train as a recipe does, in bf16, and return the formats in which gradients were reduced."""
    args = RecipeTrainingArguments(
        output_dir=str(folder), use_cpu=True, bf16=True, max_steps=1, save_strategy="no", dataloader_num_workers=0
    )
    set_up_parallelism(ParallelArguments(), args)
    trainer = Trainer(
        model=tiny_model(),
        args=args,
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback()],
    )
    formats = set()
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce_scatter = getattr(dist, name)

    def recorded(output, input, *rest, **options):  # the names of torch
        formats.add(str(input.dtype))
        return reduce_scatter(output, input, *rest, **options)

    setattr(dist, name, recorded)  # of this forked process
    train(trainer, None)
    return sorted(formats)


@pytest.mark.world(2)
@pytest.mark.long
def test_the_recipes_reduce_gradients_of_fsdp2_in_fp32(tmp_path):
    formats, _ = run(tmp_path, 2, "fsdp2", reduced_by_fsdp2, tmp_path / "out")
    assert formats == ["torch.float32"]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "ds_configs").glob("zero*.json")), ids=lambda path: path.stem)
def test_the_shipped_configs_accumulate_in_fp32(path):
    assert json.loads(path.read_text())["data_types"] == {"grad_accum_dtype": "fp32"}


def check_copies(size, *, ranks, of_node):
    config = {"zero_optimization": {"zero_hpz_partition_size": size}}
    check_hpz(config, {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(of_node)})


def test_copies_of_parameters_are_those_of_a_node(caplog):
    check_copies(8, ranks=16, of_node=8)
    check_copies(1, ranks=16, of_node=8)
    check_hpz({}, {})
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        check_copies(2, ranks=16, of_node=8)
        check_copies(16, ranks=32, of_node=8)
    wasteful, slow = caplog.messages
    assert "is 2 " in wasteful
    assert "2 bytes x parameters / 2 more: set it to 8" in wasteful
    assert "is 16 " in slow
    assert "over the network: set it to 8" in slow
    with pytest.raises(UsageError, match=r"is 6 .* 16 processes: set it to 8"):
        check_copies(6, ranks=16, of_node=8)
