"""A copy of a training's state in host memory, taken quickly and again and again into the same buffers."""

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_SLICE_BYTES = 16 * 2**20
_MOST_THREADS = 4  # two to four cores fill the memory channels of a socket


class HostSnapshot:
    """Copies nested dictionaries, lists and tuples of tensors to host memory.

    The copy keeps what saving looks at: shapes, strides, which tensors share a storage, which containers are one. The
    buffers are pinned where the source is on an accelerator, and those of one snapshot are filled again by the next:
    **a snapshot is valid until the next `take`**. No accelerator memory is used. Buffers cost as much host memory as
    the state; CUDA's allocator of pinned memory rounds each up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tree: Any) -> Any:
        """The copy of `tree`; when it returns, changes to the originals no longer reach it."""
        used: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def buffer(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr(), storage.nbytes())
            if key not in used:
                used[key] = self._buffers[key] if key in self._buffers else _host_bytes(tensor)
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copies.append((used[key], source))
            return used[key]

        copied = _copy_tree(tree, buffer, {})
        _transfer(copies)
        self._buffers = used  # of tensors that are gone, the buffers go too
        return copied


def tensor_bytes(tree: Any) -> int:
    """Bytes of the tensors of `tree` on this rank, each storage once: what a snapshot of it takes in host memory."""
    storages = {}
    for tensor in _tensors(tree):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[(local.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.device.type != "cpu" and torch.accelerator.is_available()
    return torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, pin_memory=pinned)


def _copy_tree(value: Any, buffer: Callable[[torch.Tensor], torch.Tensor], memo: dict[int, Any]) -> Any:
    """Copies containers; what cannot change (numbers, strings, functions) is taken as it is.

    One object that stands in two places stays one: serialisers write it once, and the files are then those that
    saving the originals would give.
    """
    if id(value) in memo:
        return memo[id(value)]
    copied: Any
    if isinstance(value, torch.Tensor):
        copied = _copy_tensor(value, buffer)
    elif type(value) in (dict, OrderedDict):
        copied = memo[id(value)] = type(value)()
        for key, item in value.items():
            copied[key] = _copy_tree(item, buffer, memo)
    elif type(value) is list:
        copied = memo[id(value)] = []
        copied.extend(_copy_tree(item, buffer, memo) for item in value)
    elif type(value) is tuple:
        items = tuple(_copy_tree(item, buffer, memo) for item in value)
        unchanged = all(new is old for new, old in zip(items, value, strict=True))
        copied = value if unchanged else items
    elif isinstance(value, dict):  # a defaultdict, say
        copied = memo[id(value)] = value.copy()
        for key, item in value.items():
            copied[key] = _copy_tree(item, buffer, memo)
    else:
        copied = copy.deepcopy(value)
    memo[id(value)] = copied
    return copied


def _copy_tensor(tensor: torch.Tensor, buffer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        # By the protocol of tensors that wrap others: `from_local` would send the copy to the mesh's devices.
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        copies = {n: _copy_tensor(p, buffer) if isinstance(p, torch.Tensor) else p for n, p in parts.items()}
        return DTensor.__tensor_unflatten__(copies, context, tensor.size(), tensor.stride())
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain:
        return tensor.detach().to("cpu", copy=True)  # a subclass (quantised states): it knows how to copy itself
    host = buffer(tensor)
    return torch.empty(0, dtype=tensor.dtype).set_(
        host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _transfer(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """All copies, as (to, from): those from accelerators in one go with one wait, those in host memory by threads."""
    devices, pieces = set(), []
    for target, source in copies:
        if source.device.type != "cpu":
            devices.add(source.device)
            target.copy_(source, non_blocking=True)
        elif target.numel() > _SLICE_BYTES:
            pieces += zip(target.split(_SLICE_BYTES), source.split(_SLICE_BYTES), strict=True)
        else:
            pieces.append((target, source))
    _copy_in_threads(pieces)
    for device in devices:
        torch.accelerator.synchronize(device)


def _copy_in_threads(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    left = iter(pieces)  # a task for each of hundreds of pieces would cost more than the small ones take

    def copy_some() -> None:
        for target, source in left:
            target.copy_(source)

    size = sum(target.numel() for target, _ in pieces)
    helpers = min(_copy_threads() - 1, size // _SLICE_BYTES)
    if helpers == 0:
        copy_some()
        return
    with ThreadPoolExecutor(helpers) as pool:
        helping = [pool.submit(copy_some) for _ in range(helpers)]
        copy_some()
    for thread in helping:
        thread.result()


def _copy_threads() -> int:
    if torch.get_num_threads() > 1:
        return 1  # each copy is cut over several cores by torch itself
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_here))
