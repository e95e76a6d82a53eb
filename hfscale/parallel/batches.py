"""A step's batches as the pipeline takes them: one under the other, all of one shape."""

from typing import Any

import torch
from torch import nn

from hfscale.errors import UsageError

_IGNORED = -100  # the label that transformers' losses skip
_PADDING = {"labels": _IGNORED, "shift_labels": _IGNORED}


def stack_batches(batches: list[dict[str, Any]], micro_batches: int) -> dict[str, torch.Tensor]:
    """The micro-batches of a step one under the other, (micro-batches x rows, length), padded to the longest with
    labels that are ignored; where there are fewer than `micro_batches`, ones without labels follow.

    Raises:
        UsageError: an input that is not a tensor of (batch, sequence).
    """
    batches = [*batches, *({**batches[-1], **_ignored(batches[-1])} for _ in range(micro_batches - len(batches)))]
    rows = max(batch["input_ids"].shape[0] for batch in batches)
    length = max(batch["input_ids"].shape[1] for batch in batches)
    stacked = {}
    for name, value in batches[0].items():
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            raise UsageError(f"input {name} is not a tensor of (batch, sequence): a pipeline cannot cut it")
        fill = _PADDING.get(name, 0)
        parts = [
            nn.functional.pad(b[name], (0, length - b[name].shape[1], 0, rows - b[name].shape[0]), value=fill)
            for b in batches
        ]
        stacked[name] = torch.cat(parts)
    return stacked


def _ignored(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(batch[name], _IGNORED) for name in _PADDING if name in batch}
