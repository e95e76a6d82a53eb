"""`--optim muon` under every strategy: the losses of one process, and resumes under another layout."""

import shutil

import pytest
from recipe_runs import logged, output, run_recipe

from hfscale.errors import UsageError
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.recipe.optimizer import muon_options

pytestmark = pytest.mark.recipes
STEPS = 20
MUON = ["--optim", "muon", "--optim_args", "dtype=float32", "--max_steps", str(STEPS), "--num_train_epochs", "9"]
SMALL = [*MUON, "--config_name", "deep", "--save_steps", "10"]


def copy_of(workplace, folder):
    return shutil.copytree(workplace, folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def single(workplace, tmp_path_factory):
    """The folder of a run on one process, with checkpoints of steps 10 and 20."""
    folder = copy_of(workplace, tmp_path_factory.mktemp("single"))
    run_recipe(folder, "single", 1, *SMALL)
    return folder


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        ("ddp", 2, {}),
        ("fsdp2", 3, {}),
        ("fsdp2", 4, {"hsdp": True}),
        ("parallel", 2, {"tp": 2}),
        ("parallel", 4, {"tp": 2, "pp": 2}),
        ("parallel", 2, {"tp": 1}),
    ],
)
def test_the_losses_of_twenty_steps_are_those_of_one_process(workplace, single, tmp_path, strategy, ranks, options):
    folder = copy_of(workplace, tmp_path)
    run_recipe(folder, strategy, ranks, *SMALL, **options)
    for key in ("loss", "grad_norm"):
        assert logged(folder, key) == pytest.approx(logged(single, key), rel=1e-4 if key == "grad_norm" else 1e-5)


@pytest.mark.world(2)
def test_experts_that_ranks_share_equal_those_of_one_process(workplace, tmp_path):
    runs = [copy_of(workplace, tmp_path / name) for name in ("single", "native")]
    flags = [*MUON, "--config_name", "experts"]
    run_recipe(runs[0], "single", 1, *flags)
    run_recipe(runs[1], "native", 2, *flags, "--ep_size", "2", "--fsdp_size", "2")
    assert logged(runs[1], "loss") == pytest.approx(logged(runs[0], "loss"), rel=2e-5)


@pytest.mark.world(2)
@pytest.mark.parametrize(("strategy", "options"), [("fsdp2", {}), ("parallel", {"tp": 2}), ("ddp", {})])
def test_a_run_of_one_process_resumes_under_another_strategy_and_back(workplace, tmp_path, strategy, options):
    folder = copy_of(workplace, tmp_path)
    run_recipe(folder, "single", 1, *SMALL, "--max_steps", "10", "--lr_scheduler_type", "constant")
    whole = copy_of(workplace, tmp_path / "whole")
    run_recipe(whole, "single", 1, *SMALL, "--lr_scheduler_type", "constant")
    run_recipe(folder, strategy, 2, *SMALL, "--max_steps", "15", "--lr_scheduler_type", "constant", **options)
    assert "continues from checkpoint-10" in output(folder)
    run_recipe(folder, "single", 1, *SMALL, "--lr_scheduler_type", "constant")
    assert "continues from checkpoint-15" in output(folder)
    assert logged(folder, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)


@pytest.mark.world(2)
def test_zero_is_refused_in_one_line(workplace, tmp_path):
    with pytest.raises(AssertionError, match="Muon updates complete matrices, and DeepSpeed cuts them"):
        run_recipe(copy_of(workplace, tmp_path), "zero2", 2, *SMALL)


@pytest.mark.parametrize(
    "options", ["momentum", "momentum=x", "steps=3", "dtype=int8", "momentum=0.9,iterations=five", "=0.9"]
)
def test_wrong_options_are_one_line(tmp_path, options):
    with pytest.raises(UsageError, match="--optim muon takes momentum="):
        RecipeTrainingArguments(output_dir=str(tmp_path), optim="muon", optim_args=options, use_cpu=True)


def test_the_flags_of_adamw_reach_the_other_parameters(tmp_path):
    args = RecipeTrainingArguments(
        output_dir=str(tmp_path), optim="muon", optim_args="momentum=0.9", adam_beta2=0.95, use_cpu=True
    )
    assert args.optim == "muon"
    assert muon_options(args) == {"lr": 5e-5, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.9}
