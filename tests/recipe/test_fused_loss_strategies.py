"""Under every strategy a recipe has the same losses and gradient norms with the loss in chunks as from all logits."""

import json
import shutil
from pathlib import Path

import pytest
from recipe_runs import logged, output, run_recipe

LORA = ("--use_peft", "true", "--lora_r", "4")
ACCUMULATED = ("--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "3")
EVALUATED = ("--validation_split_percentage", "50", "--eval_strategy", "steps", "--eval_steps", "3")
RECOMPUTED = ("--activation_checkpointing", "true", "--recompute", "selective")
DOCUMENTS = ("--train_file", "documents.jsonl", "--packing", "bestfit", "--document_attention", "true")


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    documents = (" ".join(f"{n} is not {n * k}" for k in range(1 + n % 4)) for n in range(400))
    (workplace / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return workplace


@pytest.fixture(scope="module")
def controls() -> dict[tuple[str, ...], list[dict[int, float]]]:
    """The runs that compute all logits, by their flags."""
    return {}


def run(workplace: Path, folder: Path, strategy: str, ranks: int, *flags: str) -> list[dict[int, float]]:
    shutil.copytree(workplace, folder)
    run_recipe(folder, strategy, ranks, *flags)
    return [logged(folder, key) for key in ("loss", "grad_norm")]


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("strategy", "model", "flags"),
    [
        ("fsdp2", "model", ACCUMULATED),  # its embeddings are tied
        ("fsdp2", "deep", LORA),
        ("zero3", "deep", EVALUATED),
        ("ddp", "deep", ACCUMULATED),
        ("ddp", "experts", ()),
        ("fsdp2", "experts", ()),
        ("fsdp2", "deep", (*RECOMPUTED, *EVALUATED)),
        ("zero1", "model", ()),
        ("ddp", "deep", (*DOCUMENTS, *ACCUMULATED)),
        ("fsdp2", "deep", (*DOCUMENTS, "--attn_implementation", "eager")),
        ("zero2", "deep", ACCUMULATED),
        ("zero3", "model", ()),
        ("zero3", "experts", ()),
        ("zero3", "deep", LORA),
    ],
)
def test_losses_and_gradient_norms_are_those_from_all_logits(
    strategy: str,
    model: str,
    flags: tuple[str, ...],
    workplace: Path,
    controls: dict[tuple[str, ...], list[dict[int, float]]],
    tmp_path: Path,
) -> None:
    asked = ("--config_name", model, *flags)
    if asked not in controls:
        controls[asked] = run(workplace, tmp_path / "control", "ddp", 2, *asked, "--fused_loss", "none")
    found = run(workplace, tmp_path / "chunked", strategy, 2, *asked, "--fused_loss", "chunked")
    assert "loss: head and cross-entropy for 1,024 tokens at a time" in output(tmp_path / "chunked")
    losses, norms = zip(found, controls[asked], strict=True)
    assert len(losses[1]) == 6
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
