"""Copies a training's state to host memory, into buffers that are reused for every copy."""

import copy
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hfscale.core.torch_internals import is_traceable_wrapper_subclass

_SLICE_BYTES = 16 * 2**20
_MAX_THREADS = 4  # two to four cores saturate the memory channels of a socket


class HostCopy:
    """Copies nested dictionaries, lists and tuples of tensors to host memory.

    The copy keeps everything that saving depends on: shapes, strides, which tensors share a storage, and which
    containers are the same object. Buffers for tensors on an accelerator are pinned. The next copy reuses the
    buffers of the same size, so **a copy is valid until the next `take`**. No accelerator memory is used. The
    buffers need as much host memory as the state; CUDA's allocator of pinned memory rounds each up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def bytes_to_allocate(self, tree: Any) -> int:
        """Return the bytes of host memory that `take(tree)` would allocate, beyond the buffers that exist.

        Args:
            tree (`Any`): what would be copied.
        """
        wanted = Counter((_is_pinned_for(device), size) for device, _, size in _storages(tree))
        wanted -= Counter(map(_kind, self._buffers))
        buffers = sum(count * _allocated_bytes(*kind) for kind, count in wanted.items())
        others = sum(t.numel() * t.element_size() for t in _tensors(tree) if not _is_plain(t))
        return buffers + others

    @torch.no_grad()
    def take(self, tree: Any) -> Any:
        """Return a copy of `tree`; changes to the originals after the call do not affect it.

        Args:
            tree (`Any`): nested dictionaries, lists and tuples of tensors on any device and of other values.

        Returns:
            `Any`: the same structure with all tensors in host memory, valid until the next `take`.
        """
        free = self._free_all_but(Counter((_is_pinned_for(device), size) for device, _, size in _storages(tree)))
        used: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def buffer(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr(), storage.nbytes())
            if key not in used:
                kind = (_is_pinned_for(tensor.device), storage.nbytes())
                used[key] = free[kind].pop() if free[kind] else _host_bytes(*kind)
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copies.append((used[key], source))
            return used[key]

        copied = _copy_tree(tree, buffer, {})
        _transfer(copies)
        self._buffers = list(used.values())
        return copied

    def _free_all_but(self, wanted: Counter[tuple[bool, int]]) -> dict[tuple[bool, int], list[torch.Tensor]]:
        """Return the buffers that fit what is wanted, by kind, and free the others before new ones are allocated."""
        kept: dict[tuple[bool, int], list[torch.Tensor]] = defaultdict(list)
        for buffer in self._buffers:
            if len(kept[_kind(buffer)]) < wanted[_kind(buffer)]:
                kept[_kind(buffer)].append(buffer)
        self._buffers = []
        return kept


def _storages(tree: Any) -> set[tuple[torch.device, int, int]]:
    """Return device, address and bytes of each storage of the tensors of `tree`."""
    found = set()
    for tensor in filter(_is_plain, _tensors(tree)):
        storage = tensor.untyped_storage()
        found.add((tensor.device, storage.data_ptr(), storage.nbytes()))
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied as the bytes of its storage."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _is_pinned_for(device: torch.device) -> bool:
    return device.type != "cpu" and torch.accelerator.is_available()


def _kind(buffer: torch.Tensor) -> tuple[bool, int]:
    return buffer.is_pinned(), buffer.numel()


def _allocated_bytes(is_pinned: bool, size: int) -> int:
    """Return what a buffer really takes: CUDA's allocator rounds pinned memory up (`CachingHostAllocatorImpl`)."""
    return 1 << (size - 1).bit_length() if is_pinned and size > 0 else size


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree; for one that wraps others (a DTensor, quantized states), those that it wraps."""
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _host_bytes(is_pinned: bool, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def _copy_tree(value: Any, buffer: Callable[[torch.Tensor], torch.Tensor], memo: dict[int, Any]) -> Any:
    """Copy containers and tensors; immutable values (numbers, strings, functions) are used as they are.

    An object that occurs twice is copied once. Serializers write such an object once, so the files are the same as if
    the originals were saved.
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
    elif isinstance(value, dict):  # for example a defaultdict
        copied = memo[id(value)] = value.copy()
        for key, item in value.items():
            copied[key] = _copy_tree(item, buffer, memo)
    else:
        copied = copy.deepcopy(value)
    memo[id(value)] = copied
    return copied


def _copy_tensor(tensor: torch.Tensor, buffer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):
        # A DTensor too: `from_local` would move the copy to the mesh's device.
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        copies = {n: _copy_tensor(p, buffer) if isinstance(p, torch.Tensor) else p for n, p in parts.items()}
        copied: torch.Tensor = tensor.__tensor_unflatten__(copies, context, tensor.size(), tensor.stride())
        return copied
    if not _is_plain(tensor):
        return tensor.detach().to("cpu", copy=True)  # a subclass with data of its own implements its own copy
    host = buffer(tensor)
    return torch.empty(0, dtype=tensor.dtype).set_(
        host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _transfer(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Fill the buffers: from accelerators asynchronously with one synchronization, in host memory with threads.

    Args:
        copies: pairs of target and source, both flat and of bytes.
    """
    devices = set()
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
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
    left = iter(pieces)  # shared by the threads: a task per piece would take longer than copying a small piece

    def copy_some() -> None:
        for target, source in left:
            target.copy_(source)

    size = sum(target.numel() for target, _ in pieces)
    extra_threads = min(_copy_threads() - 1, size // _SLICE_BYTES)
    if extra_threads == 0:
        copy_some()
        return
    with ThreadPoolExecutor(extra_threads) as pool:
        futures = [pool.submit(copy_some) for _ in range(extra_threads)]
        copy_some()
    for future in futures:
        future.result()


def _copy_threads() -> int:
    if torch.get_num_threads() > 1:
        return 1  # torch itself divides each copy over several cores
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // local_ranks))
