"""Ranges around the parts of a step (`step 7`, `forward`, `backward`, `optimizer`), which Nsight Systems shows."""

from typing import Any, Protocol

import torch
from torch import nn

BETWEEN = "between steps"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"


class Ranges(Protocol):
    """What `torch.cuda.nvtx` has, and what a test records."""

    def range_push(self, msg: str) -> Any:
        """Begin a range inside those that are open."""

    def range_pop(self) -> Any:
        """End the range that was begun last."""


class StepRanges:
    """Opens and closes the ranges; its methods are called at the events of a training, in the thread that trains.

    `backward` reaches from the end of a forward to the end of the micro-batch: it includes the loss, where that is
    computed outside the model, and the clipping of gradients. `optimizer` is the optimizer's step. What lies between
    two steps, the wait for data and every log, save and evaluation, is `between steps`.

    Args:
        ranges (`Ranges`): where the ranges go, such as the module `torch.cuda.nvtx`.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._open: list[str] = []
        self._handles: list[Any] = []

    def start(self, model: nn.Module) -> None:
        """Begin: the training is about to take its first step.

        Args:
            model (`torch.nn.Module`): the model whose forwards are marked.
        """
        # Compiled with the model, a hook would become a part of its graph.
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        self._handles = [
            model.register_forward_pre_hook(enter),
            model.register_forward_hook(leave, always_call=True),
        ]
        self._push(BETWEEN)

    def begin_step(self, number: int) -> None:
        """Begin an optimizer step, given its number, counted from 1."""
        self._close_all()
        self._push(f"step {number}")

    def end_micro_batch(self) -> None:
        """End a backward: Trainer goes on to the next micro-batch or to the optimizer."""
        self._close(BACKWARD)

    def begin_optimizer(self) -> None:
        """Begin the step of the optimizer."""
        self._close(BACKWARD)
        self._push(OPTIMIZER)

    def end_optimizer(self) -> None:
        """End the step of the optimizer."""
        self._close(OPTIMIZER)

    def end_step(self) -> None:
        """End the optimizer step."""
        self._close_all()
        self._push(BETWEEN)

    def stop(self) -> None:
        """End all ranges, and let the model go. Calling it again has no effect."""
        self._close_all()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, *_: Any) -> None:
        self._close(BACKWARD)  # a loss of several forwards
        self._push(FORWARD)

    def _leave(self, *_: Any) -> None:
        self._close(FORWARD)
        is_in_step = any(name.startswith("step ") for name in self._open)
        if is_in_step and torch.is_grad_enabled():
            self._push(BACKWARD)

    def _push(self, name: str) -> None:
        self._ranges.range_push(name)
        self._open.append(name)

    def _close(self, name: str) -> None:
        """End a range and those inside it; without an open one of this name, do nothing."""
        if name not in self._open:
            return
        while self._pop() != name:
            pass

    def _close_all(self) -> None:
        while self._open:
            self._pop()

    def _pop(self) -> str:
        self._ranges.range_pop()
        return self._open.pop()
