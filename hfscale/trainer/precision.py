"""The precision of the products, and that in which gradients are summed: over ranks, and over micro-batches."""

from typing import TYPE_CHECKING, Any

import torch

from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import Trainer


def why_accumulation_is_inexact(trainer: "Trainer") -> str | None:
    """Return a warning if DeepSpeed accumulates gradients in 16 bits, with how to fix it; None if it does not.

    DeepSpeed accumulates in the format of the model unless its config says otherwise. bf16 has 8 significant bits, so
    that what is less than 1/512 of the sum is lost.

    Args:
        trainer (`Trainer`): prepared for training.
    """
    count = trainer.args.gradient_accumulation_steps
    if count == 1 or not Strategy.of(trainer).engine_steps:
        return None
    engine: Any = trainer.model_wrapped
    _, dtype = engine.get_data_types()
    if dtype == torch.float32 or not engine.zero_optimization():
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"DeepSpeed adds up the gradients of {count} micro-batches in {name}, which loses small ones: "
        'add "data_types": {"grad_accum_dtype": "fp32"} to the DeepSpeed config'
    )


def why_products_are_slow(trainer: "Trainer", *, has_bf16: bool) -> str | None:
    """Return a warning if everything is computed in fp32 on a device that has bf16; None otherwise.

    `TrainingArguments(bf16=False)`, the default, and a launcher's config without `mixed_precision` give that. bf16
    products have 8 to 16 times the peak of fp32 without tensor cores (hfscale/facts/hardware.toml).

    Args:
        trainer (`Trainer`): prepared for training.
        has_bf16 (`bool`): whether the device computes in bf16.
    """
    if not has_bf16 or trainer.args.tf32 or trainer.accelerator.mixed_precision != "no":
        return None
    if any(parameter.dtype != torch.float32 for parameter in model_of(trainer).parameters()):
        return None  # a quantized model, or one that was loaded in 16 bits
    return (
        "all matrix products are computed in fp32, and this GPU has bf16: give TrainingArguments(bf16=True), or "
        "tf32=True to keep fp32 with faster products"
    )
