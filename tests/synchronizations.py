"""A stand-in for CUDA that counts what would make the host wait for the GPU, in a training on the CPU.

Values that are read from a tensor are counted, and copies of batches or of hfscale that are not asynchronous. Left out
are reads of tensors that are on the host anyway, those of data loading, and other calls of `Tensor.to` in libraries:
their tensors are on the GPU already, and nothing is copied.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
_ON_THE_HOST = ("torch.utils.data", "transformers.data.data_collator", "tiny")
"""Modules that work on tensors that are never on a GPU."""
_COPIES_FROM_THE_HOST = ("accelerate", "hfscale")
"""Packages whose calls of `Tensor.to` are counted: the one that copies batches, and ours."""


class Synchronizations(TrainerCallback):
    """Counts the synchronisations of some steps, after a log and before the next one, by the line that causes them.

    Args:
        first (`int`): the step before which counting begins, counted from 1.
        last (`int`): the step before which it ends.
    """

    def __init__(self, *, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.lines: Counter[str] = Counter()
        self.counted_steps = 0
        self._counts = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counts = self.first <= state.global_step + 1 < self.last
        self.counted_steps += self._counts

    def by(self, package: str) -> list[str]:
        """Return the lines in a package or module, such as `hfscale`."""
        return [line for line in self.lines if line.startswith((f"{package}.", f"{package}:"))]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Count while the context is open."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _READS:
                patch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name), name))
            patch.setattr(torch.Tensor, "to", self._counted(torch.Tensor.to, "to"))
            yield

    def _counted(self, original: Any, name: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._counts and (name != "to" or _waits(args, kwargs)):
                self._record(name)  # the caller is two frames above
            return original(tensor, *args, **kwargs)

        return call

    def _record(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        line = f"{frame.f_globals['__name__']}:{frame.f_lineno} {name}"
        modules = []
        while frame is not None and len(modules) < 4:
            modules.append(frame.f_globals["__name__"])
            frame = frame.f_back
        is_counted = name != "to" or modules[0].startswith(_COPIES_FROM_THE_HOST)
        if is_counted and not any(module.startswith(_ON_THE_HOST) for module in modules):
            self.lines[line] += 1


def _waits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `Tensor.to` copies to a device, and not asynchronously."""
    target = kwargs.get("device", args[0] if args else None)
    return isinstance(target, torch.device | str | int) and not kwargs.get("non_blocking", False)
