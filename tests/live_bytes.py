"""Bytes that a computation leaves alive, such as what autograd keeps for the backward pass."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class _Made(TorchDispatchMode):
    """Remembers the storages of what operations return, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        return made


def live_bytes(compute: Callable[[], Any], besides: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of what `compute` has made and that lives as long as what it returns.

    Args:
        compute (`callable`): its result is kept alive until the bytes are counted.
        besides (`Iterable`): tensors that do not count, such as parameters of which it returns views.
    """
    made = _Made()
    with made:
        result = compute()
    own = {tensor.untyped_storage()._cdata for tensor in besides}
    live = {ref.cdata: size for ref, size in made.storages if not ref.expired() and ref.cdata not in own}
    del result
    return sum(live.values())
