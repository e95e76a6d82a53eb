"""Runs a script whose large models are initialised fast: `fast_init.py SCRIPT [ARGUMENT …]`.

An 8B model takes minutes to draw on one core, and these are minutes of a GPU. Speed does not depend on the values, so
large tensors on the CPU repeat one block of random numbers. Only this measurement's own process is changed.
"""

import runpy
import sys
from typing import Any

import torch

BLOCK = 2**22
"""Numbers that are drawn; smaller tensors are drawn as usual."""
draw = torch.Tensor.normal_
_block = torch.empty(BLOCK)


def repeat_block(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
    """Fill a tensor as `Tensor.normal_` does, a large one with repeated numbers."""
    if self.device.type != "cpu" or self.numel() <= BLOCK or not self.is_contiguous():
        return draw(self, mean, std, generator=generator)
    draw(_block)
    scaled = (_block * std + mean).to(self.dtype)
    flat = self.view(-1)
    for begin in range(0, flat.numel(), BLOCK):
        part = flat[begin : begin + BLOCK]
        part.copy_(scaled[: part.numel()])
    return self


if __name__ == "__main__":
    torch.Tensor.normal_ = repeat_block
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
