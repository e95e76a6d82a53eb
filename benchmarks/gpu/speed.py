"""Parts: speed and peak memory of recipes with shipped defaults, beside what `hfscale estimate` says."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.part import report
from benchmarks.gpu.prediction import predict
from benchmarks.gpu.recipe_runs import Launch, run_recipe
from benchmarks.gpu.settings import work_folder
from benchmarks.gpu.shapes import config_folder, shape_named, tokens_file

LIMIT_S = 200
CHOICES = ("layers:", "loss:", "attention:", "experts:", "strategy")
"""Lines of the log that say what the recipe has chosen."""
ZERO_OF = {"ddp": 0, "zero2": 2, "zero3": 3, "fsdp2": 3}
"""What each config shards, for the prediction."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run a recipe."""

    run: str
    """Its name in results and tables."""
    flags: tuple[str, ...] = ()
    documents: bool = False
    """Whether the data are documents, which are packed."""
    compiled: bool | None = None
    """For the prediction: `None` as recipes do."""
    predicted: bool = True
    """Whether the planner describes it."""


VARIANTS = {
    "default": Variant(run="recipe, defaults"),
    "eager": Variant(
        run="recipe, not compiled, no Liger",
        flags=("--torch_compile_regional", "false", "--use_liger_kernel", "false"),
        compiled=False,
    ),
    "packed": Variant(
        run="recipe, packed documents",
        flags=("--packing", "bestfit", "--document_attention", "true"),
        documents=True,
        predicted=False,
    ),
    "packed_compiled": Variant(
        run="recipe, packed documents, flex attention in compiled layers",
        flags=(
            *("--packing", "bestfit", "--document_attention", "true", "--torch_compile_regional", "true"),
            *("--attn_implementation", "flex_attention"),
        ),
        documents=True,
        predicted=False,
    ),
    "muon": Variant(run="recipe, Muon", flags=("--optim", "muon"), predicted=False),
}


def recipe(shape: str, variant: str = "default") -> None:
    """Run a recipe in one process.

    Args:
        shape (`str`): The name of a shape.
        variant (`str`): A key of `VARIANTS`.
    """
    chosen = VARIANTS[variant]
    flags = list(chosen.flags)
    if chosen.documents:
        flags += ["--train_file", str(tokens_file(shape_named(shape).length, documents=True))]
    predicted = {}
    if chosen.predicted:
        predicted = predict(shape, compiled=chosen.compiled, fused_loss=True)
    _measure(shape, chosen.run, flags, predicted=predicted)


def strategy(shape: str, config: str, processes: int = 1) -> None:
    """Run a recipe under a strategy.

    Args:
        shape (`str`): The name of a shape.
        config (`str`): A key of `ZERO_OF`.
        processes (`int`): Number of GPUs.
    """
    tier = "sharded"
    if config == "ddp":
        tier = "ddp"
    launch = Launch(config=config, tier=tier, processes=processes)
    predicted = predict(shape, fused_loss=True, processes=processes, zero=ZERO_OF[config])
    run = f"recipe, {config}.yaml"
    if processes > 1:
        run += f", {processes} processes"
    _measure(shape, run, [], launch=launch, predicted=predicted)


def experts() -> None:
    """Two layers with 128 experts each, as recipes run them under FSDP2 on one GPU."""
    _measure("qwen3-30b-2-layers", "recipe, fsdp2.yaml", [], launch=Launch(config="fsdp2"))


def qlora() -> None:
    """LoRA and QLoRA on the same saved weights of the 1B model."""
    model = _saved_model("llama-1b")
    adapters = ["--use_peft", "true", "--lora_r", "16"]
    _measure("llama-1b", "recipe, LoRA", adapters, model=model, method="lora r=16")
    _measure("llama-1b", "recipe, QLoRA", [*adapters, "--load_in_4bit", "true"], model=model, method="qlora r=16")


def _measure(
    shape: str,
    run: str,
    flags: Sequence[str],
    *,
    launch: Launch | None = None,
    predicted: dict[str, float] | None = None,
    model: Path | None = None,
    method: str | None = None,
) -> None:
    done = run_recipe(shape, flags, limit_s=LIMIT_S, launch=launch, model=model)
    choices = [line.removeprefix("hfscale: ")[:120] for line in done.lines if any(word in line for word in CHOICES)]
    report(
        shape=shape,
        method=method or shape_named(shape).method,
        run=run,
        **done.summary(),
        **(predicted or {}),
        seconds=round(done.seconds, 1),
        chosen=choices,
    )


def _saved_model(shape: str) -> Path:
    """Save random weights of a shape in bf16, and return their folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = config_folder(shape)
    folder = Path(tempfile.mkdtemp(dir=work_folder(), prefix="model-"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
