"""Which runs of the recipes have compiled layers (`torch.compile`) by default; plans count with it."""

from hfscale.facts.support import LISTS

_TRIED_TASKS = ("text", "sft", "dpo")
"""Tasks whose steps had the losses of layers that are not compiled (tests/recipe/test_compilation_strategies.py,
tests/finetuning/test_trl_recipes.py)."""

_TRIED_IN_4_BITS = ("single", "ddp")
"""Strategies under which layers with bitsandbytes' weights compute the same (tests/versions/quantized.py, on one
process; DDP leaves the layers as they are)."""


def why_not_compiled(
    *, task: str, family: str, method: str, strategy: str, ranks_per_replica: int, precision: str
) -> str | None:
    """Return why the layers of a run on an NVIDIA GPU are not compiled by default; None if they are.

    What is left out may work with `--torch_compile_regional true`: it was not tried, or not found to be faster.

    Args:
        task (`str`): `text`, or the task of a Trainer of TRL, such as `sft`.
        family (`str`): the model's family, transformers' `model_type`.
        method (`str`): which parameters train: `full`, `lora` or `qlora`.
        strategy (`str`): the strategy, by its name in a checkpoint's manifest.
        ranks_per_replica (`int`): ranks that share the matrices or the sequences of a replica.
        precision (`str`): format of the matrix products.
    """
    reasons = {
        f"it was not tried with the task {task}": task not in _TRIED_TASKS,
        "ranks share matrices or sequences": ranks_per_replica > 1,
        f"it was not tried with models of the family {family}": family
        not in LISTS["compiled_families"],
        f"it was not tried with 4-bit weights and {strategy}": (
            method == "qlora" and strategy not in _TRIED_IN_4_BITS
        ),
        f"it was not tried with {strategy}": strategy not in LISTS["compiled_strategies"],
        "it was not tried in fp16": precision == "fp16",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
