"""What `--recompute` keeps of a layer in activation checkpointing, and what the backward pass computes again."""

from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

RECOMPUTE_POLICIES = ("full", "selective")
"""Values of `--recompute`."""

_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_PROFILER = torch.ops.profiler
_OF_THE_PROFILER = (
    _PROFILER._record_function_enter_new.default,
    _PROFILER._record_function_exit._RecordFunction,
)
"""Operators that name a range of a profile and compute nothing. FSDP2's hooks, which `torch.utils.checkpoint` sees in
a layer with experts, run another number of them when the layer is computed again (pytorch#185178, torchtitan#3427)."""
_OF_TORCH = "scaled_dot_product"
"""What the names of all of torch's operators of attention contain, each of which is for one backend."""
_FLASH_PACKAGES = "flash_attn"
"""How the namespaces of FlashAttention 2 and 3 begin, whose operators exist only where the packages are imported."""


def checkpointing_kwargs(policy: str) -> dict[str, Any]:
    """Return the value of `TrainingArguments.activation_checkpointing_kwargs` for one of `RECOMPUTE_POLICIES`.

    `full` recomputes a complete layer. `selective` keeps the outputs of attention and of every second matrix product,
    as torchtitan does by default: it saves most of the memory for about a quarter of the recomputation.

    Args:
        policy (`str`): one of `RECOMPUTE_POLICIES`.
    """
    return (
        {"context_fn": _selective_contexts, "use_reentrant": False} if policy == "selective" else {}
    )


def _selective_contexts() -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of its recomputation, for the `context_fn` of `checkpoint`."""
    seen: Counter[bool] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = _is_attention(op)
        if op in _MATMULS:
            seen[ctx.is_recompute] += 1
            is_kept = seen[ctx.is_recompute] % 2 == 1
        if is_kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    SAC_IGNORED_OPS.update(_OF_THE_PROFILER)
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def _is_attention(op: Any) -> bool:
    """Return whether an operator computes attention forwards, in torch or in a package of FlashAttention.

    Its computation grows with the square of the length, its output linearly.
    """
    name = str(op)
    if name.startswith(_FLASH_PACKAGES):
        return "forward" in name
    return op is torch.ops.higher_order.flex_attention or (
        _OF_TORCH in name and "backward" not in name
    )
