"""Counting tokens on the host, from the shapes of what enters the model."""

from typing import Any

import torch
from torch import nn


class TokenCounter:
    """Counts the tokens that enter a model in training, by a hook on the module that the Trainer calls.

    Shapes are read on the host, so nothing waits for a GPU. Padding counts: it is computed on like any token. Put it
    on the outermost wrapper (DDP, DeepSpeed engine, compiled module): its hooks run once per micro-batch, outside any
    compiled graph.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens seen by this process since `attach`."""
        self.sequence_length = 0
        """Tokens per sequence of the last micro-batch."""
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def attach(self, module: nn.Module) -> None:
        """Count what enters `module` from now on, and nothing else."""
        self.detach()
        self._handle = module.register_forward_pre_hook(self._count, with_kwargs=True)

    def detach(self) -> None:
        """Stop counting."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        inputs = kwargs.get("input_ids", kwargs.get("inputs_embeds"))  # (batch, sequence[, hidden])
        if inputs is None and args and isinstance(args[0], torch.Tensor):
            inputs = args[0]
        if inputs is not None and inputs.ndim >= 2:
            self.tokens += inputs.shape[0] * inputs.shape[1]
            self.sequence_length = inputs.shape[1]
