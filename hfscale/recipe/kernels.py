"""Which implementation of attention a model gets where the flags name none.

What is chosen depends on the GPU and on the packages that are installed, both of which are parameters (`Kernels`), so
that a machine without a GPU can test the choice.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from transformers.utils import import_utils

from hfscale.core.logging import get_logger
from hfscale.core.versions import is_at_least
from hfscale.recipe.document_attention import is_dense, is_flash_attention
from hfscale.trainer.attention import attention_implementation

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = get_logger(__name__)

_AMPERE = (8, 0)
_HOPPER = 9
"""Major compute capability of the only GPUs that FlashAttention 3 is written for."""
_FLEX_HEAD_DIMS = (16, 256)
"""Smallest and largest head for which flex_attention is chosen; torch refuses smaller ones."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a run can choose kernels from."""

    capability: tuple[int, int] | None
    """Compute capability of the NVIDIA GPU that the run uses; None without one."""
    half_precision: bool
    """Whether the model computes in bf16 or fp16, as FlashAttention needs it."""
    installed: frozenset[str]
    """Names of the attention implementations that can be imported, beside those that torch always has."""

    @classmethod
    def here(cls, args: "TrainingArguments") -> "Kernels":
        """Look at this machine.

        Args:
            args (`TrainingArguments`): the device and the precision of the run.
        """
        uses_nvidia = args.device.type == "cuda" and torch.version.cuda is not None
        checks = {
            "flash_attention_3": import_utils.is_flash_attn_3_available(),
            "flash_attention_2": import_utils.is_flash_attn_2_available(),
            "flex_attention": is_at_least("torch", "2.7"),  # 2.6 fails to compile its backward pass for some shapes
        }
        return cls(
            capability=torch.cuda.get_device_capability(args.device) if uses_nvidia else None,
            half_precision=bool(args.bf16 or args.fp16),
            installed=frozenset(name for name, is_installed in checks.items() if is_installed),
        )

    def attention(self) -> list[str]:
        """Return the implementations that skip what documents hide from each other, the fastest one first."""
        if self.capability is None or self.capability < _AMPERE:
            return []
        fits = {
            "flash_attention_3": self.half_precision and self.capability[0] == _HOPPER,
            "flash_attention_2": self.half_precision,
            "flex_attention": True,
        }
        return [name for name, does_fit in fits.items() if does_fit and name in self.installed]


def use_fast_document_attention(model: PreTrainedModel, kernels: Kernels) -> None:
    """Give a model the fastest attention that is cut between documents without a dense mask, where there is one.

    Args:
        model (`PreTrainedModel`): a model with the attention that transformers has chosen; changed in place.
        kernels (`Kernels`): what there is to choose from.
    """
    current = attention_implementation(model.config)
    if current is None or not is_dense(current):
        return
    chosen = next((name for name in kernels.attention() if _supports(model, name)), None)
    if chosen is None:
        return
    model.set_attn_implementation(chosen)
    logger.info(
        "attention: %s instead of %s, because documents are packed and it skips what they hide from each other",
        chosen,
        current,
    )


def _supports(model: PreTrainedModel, name: str) -> bool:
    if is_flash_attention(name):
        compatible = getattr(model, "_compatible_flash_implementations", None)
        return model._supports_flash_attn and (not compatible or name in compatible)
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    smallest, largest = _FLEX_HEAD_DIMS
    has_dropout = bool(getattr(text, "attention_dropout", 0.0))  # transformers refuses it with flex_attention
    has_two_widths = getattr(text, "kv_lora_rank", None) is not None  # multi-head latent attention
    return model._supports_flex_attn and smallest <= head_dim <= largest and not has_dropout and not has_two_widths
