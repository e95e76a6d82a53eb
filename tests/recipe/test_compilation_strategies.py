"""Under every strategy compiled layers train, evaluate and resume as the others do."""

import json
import shutil
from pathlib import Path

import pytest
from recipe_runs import logged, output, run_recipe

EVALUATED = ("--validation_split_percentage", "50", "--eval_strategy", "steps", "--eval_steps", "2")
COMPILED = ("--torch_compile_regional", "true", "--torch_compile_backend", "aot_eager")
LORA = ("--use_peft", "true", "--lora_r", "4")
RECOMPUTED = ("--activation_checkpointing", "true")


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("ddp", RECOMPUTED),
        ("zero2", ()),
        ("ddp", LORA),
        ("fsdp2", LORA),
        ("fsdp2", RECOMPUTED),
        ("zero1", ()),
        ("zero2", (*LORA, *RECOMPUTED)),
    ],
)
def test_compiled_layers_train_evaluate_and_resume_as_the_others(
    strategy: str, flags: tuple[str, ...], workplace: Path, tmp_path: Path
) -> None:
    """Three steps compiled, one without, two compiled: losses and evaluations are those of a run without."""
    asked = ("--config_name", "deep", *EVALUATED, *flags)
    plain, compiled = (Path(shutil.copytree(workplace, tmp_path / name)) for name in ("plain", "compiled"))
    run_recipe(plain, strategy, 2, *asked, "--lr_scheduler_type", "constant")
    for steps, how in (("3", COMPILED), ("4", ()), ("6", COMPILED)):
        run_recipe(compiled, strategy, 2, *asked, "--max_steps", steps, "--lr_scheduler_type", "constant", *how)
        if steps != "3":
            assert "continues from checkpoint-" in output(compiled)
    for key in ("loss", "grad_norm"):
        assert logged(compiled, key) == pytest.approx(logged(plain, key), rel=1e-4), key
    found = evaluations(compiled)
    assert {step: found[step] for step in (2, 4, 6)} == pytest.approx(evaluations(plain), rel=1e-4)


def evaluations(folder: Path) -> dict[int, float]:
    """Return the losses of the evaluations by step."""
    state = json.loads((folder / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    return {entry["step"]: entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry}
