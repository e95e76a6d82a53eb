"""A run that ends after its last step, but before its evaluation and export, does both when it is relaunched."""

import json
import shutil

import pytest
from recipe_runs import STRATEGIES, logged, output, run_recipe

pytestmark = [pytest.mark.faults, pytest.mark.world(2), pytest.mark.timeout(1800)]
EVALUATED = ("--validation_split_percentage", "10", "--max_eval_samples", "8")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_missing_results_are_produced_by_a_relaunch(workplace, tmp_path, strategy):
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    run_recipe(folder, strategy, 2, *EVALUATED)
    out, losses = folder / "out", logged(folder, "loss")
    results = json.loads((out / "all_results.json").read_text())
    weights = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    assert weights
    for name in ("all_results.json", *weights):
        (out / name).unlink()
    run_recipe(folder, strategy, 2, *EVALUATED)
    assert "has all 6 steps but the run has no results yet" in output(folder)
    again = json.loads((out / "all_results.json").read_text())
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], abs=1e-6)
    assert "train_loss" not in again
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == weights
    assert logged(folder, "loss") == losses, "a step was taken"
    run_recipe(folder, strategy, 2, *EVALUATED)
    assert "nothing to do" in output(folder)
