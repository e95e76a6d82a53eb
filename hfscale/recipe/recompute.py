"""Selective activation checkpointing: keep what is dear to compute again and small to keep, recompute the rest."""

from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

POLICIES = ("full", "selective")

_aten = torch.ops.aten
_MATMULS = (_aten.mm.default, _aten.addmm.default)
_KEPT = (  # attention: quadratic in the length to compute, linear to keep
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def checkpointing_kwargs(policy: str) -> dict[str, Any]:
    """What to put into `TrainingArguments.activation_checkpointing_kwargs` for a policy of `POLICIES`.

    `full` recomputes a whole layer. `selective` keeps the outputs of attention and of every second matrix product, as
    torchtitan does by default: most of the memory saved, for about a quarter of the recomputation.
    """
    return {"context_fn": selective_contexts, "use_reentrant": False} if policy == "selective" else {}


def selective_contexts() -> tuple[Any, Any]:
    """The contexts that `torch.utils.checkpoint` takes as `context_fn`: of the forward and of its repetition."""
    seen: Counter[bool] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _MATMULS:
            seen[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if seen[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
