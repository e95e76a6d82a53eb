"""Records the operations of a step in order, with a digest of what each returns."""

from collections.abc import Callable
from typing import Any

import torch

from hfscale.core.torch_internals import TorchDispatchMode, is_in_torch_dispatch_mode

_UNINITIALIZED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "resize_",
    "set_",
)
"""Operations whose results have no content yet."""
_NAMESPACE = "aten::"
"""Collectives and FSDP's own operators are left out: their results may not have arrived when they return."""


class OperationRecorder(TorchDispatchMode):
    """Calls `add(operation, tensor)` for each operation while it is active, forward and backward.

    Views are left out, since they compute nothing.

    Args:
        add (`Callable`): called with the name of an operation, such as `aten.mm`, and its first result.
    """

    def __init__(self, add: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._add = add
        self._is_active = False
        self.is_paused = False
        """Whether operations are left out, such as those of the recording itself."""

    def start(self) -> bool:
        """Begin to record, unless another dispatch mode is active; return whether it does."""
        if is_in_torch_dispatch_mode():
            return False
        self._is_active = True
        self.__enter__()  # type: ignore[no-untyped-call]  # of torch
        return True

    def stop(self) -> None:
        """Stop recording."""
        if self._is_active:
            self._is_active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operation and record it."""
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if self.is_paused or not name.startswith(_NAMESPACE) or func.is_view:
            return result
        operation = name.removeprefix(_NAMESPACE).partition(".")[0]
        if operation in _UNINITIALIZED:
            return result
        tensor = next((one for one in _tensors(result)), None)
        if tensor is not None and tensor.device.type != "meta":
            self._add(f"aten.{operation}", tensor)
        return result


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return (
        [one for one in result if isinstance(one, torch.Tensor)]
        if isinstance(result, tuple | list)
        else []
    )
