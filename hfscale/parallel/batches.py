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
        parts = [_padded(name, batch[name], rows, length) for batch in batches]
        stacked[name] = torch.cat(parts)
    return stacked


def pad_to_multiple(inputs: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Every input lengthened on the right to a `multiple` of tokens, with labels that are ignored: a causal model's
    other tokens do not see them."""
    rows, length = inputs["input_ids"].shape
    return {name: _padded(name, value, rows, -(-length // multiple) * multiple) for name, value in inputs.items()}


def _ignored(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(batch[name], _IGNORED) for name in _PADDING if name in batch}


def _padded(name: str, value: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """A batch's input, (rows, length). Rows that are added attend to themselves: one that attends to nothing has
    logits that are no numbers, and so are the gradients, whether or not the labels are ignored."""
    fill = _PADDING.get(name, 0)
    value = nn.functional.pad(value, (0, length - value.shape[1]), value=fill)
    return nn.functional.pad(value, (0, 0, 0, rows - value.shape[0]), value=1 if name == "attention_mask" else fill)
