"""Copies a training's state to host memory, which is reused for every copy."""

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from hfscale.core.launch_variables import launch_number
from hfscale.core.torch_internals import is_traceable_wrapper_subclass

_MIN_BLOCK_BYTES = 2**20
_MAX_BLOCK_BYTES = 2**32
_PAGE_BYTES = 4096
_ALIGNMENT = 512  # bytes, as CUDA's allocator of device memory aligns tensors
_SLICE_BYTES = 16 * 2**20
_MAX_THREADS = 4  # two to four cores saturate the memory channels of a socket

StorageKey = tuple[torch.device, int, int]
"""Device, address and bytes of a storage."""


class HostCopy:
    """Copies nested dictionaries, lists and tuples of tensors to host memory.

    The copy keeps everything that saving depends on: shapes, strides, which tensors share a storage, and which
    containers are the same object. Memory for tensors on an accelerator is pinned. The next copy reuses the memory,
    so **a copy is valid until the next `take`**. No accelerator memory is used. The copy needs as much host memory as
    the state, and a few percent more where it is pinned (`_Memory`).
    """

    def __init__(self) -> None:
        self._memory = {is_pinned: _Memory(is_pinned) for is_pinned in (False, True)}

    def bytes_to_allocate(self, tree: Any) -> int:
        """Return the bytes of host memory that `take(tree)` would allocate, beyond the memory that exists.

        Args:
            tree (`Any`): what would be copied.
        """
        by_kind = _sort(_storages(tree))
        others = sum(t.numel() * t.element_size() for t in _tensors(tree) if not _is_plain(t))
        return others + sum(
            self._memory[kind].bytes_to_allocate(_sizes(keys)) for kind, keys in by_kind.items()
        )

    def reserve(self, tree: Any) -> None:
        """Start to allocate on another thread what `take(tree)` would allocate; `take` waits for it.

        Pinned memory is allocated at 1 to 2 GB/s and copied to at 20 GB/s or more, so that a first copy would make the
        training wait for its memory most of all.

        Args:
            tree (`Any`): what will be copied.
        """
        for kind, keys in _sort(_storages(tree)).items():
            self._memory[kind].reserve(_sizes(keys))

    def stop_reserving(self) -> None:
        """End what `reserve` has started, after the block that it allocates."""
        for memory in self._memory.values():
            memory.stop_reserving()

    @torch.no_grad()
    def take(self, tree: Any) -> Any:
        """Return a copy of `tree`; changes to the originals after the call do not affect it.

        Args:
            tree (`Any`): nested dictionaries, lists and tuples of tensors on any device and of other values.

        Returns:
            `Any`: the same structure with all tensors in host memory, valid until the next `take`.
        """
        originals = _storages(tree)
        copies: dict[StorageKey, torch.Tensor] = {}
        for is_pinned, keys in _sort(originals).items():
            copies |= zip(keys, self._memory[is_pinned].divide(_sizes(keys)), strict=True)
        copied = _copy_tree(tree, copies, {})
        _transfer([(copies[key], _bytes(original, key[0])) for key, original in originals.items()])
        return copied


class _Block:
    """A piece of memory while it is divided, from its beginning.

    Args:
        size (`int`): bytes.
        memory (`torch.Tensor`, *optional*): the memory, flat and of bytes; None: it must be allocated.
    """

    def __init__(self, size: int, memory: torch.Tensor | None = None) -> None:
        self.size = size
        self.left = size
        self.memory = memory


class _Memory:
    """Holds memory, pinned or not, and divides it into storages.

    CUDA's allocator rounds each piece of pinned memory up to a power of two (`CachingHostAllocatorImpl::allocate` of
    torch). So storages share blocks whose sizes are powers of two: of 4 GiB, larger for a larger storage, and smaller
    ones for the rest. Memory that is not pinned is not rounded, and each storage has a block of its own.

    Args:
        is_pinned (`bool`): whether the memory is pinned.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._memory: list[torch.Tensor] = []
        self._reservation: _Reservation | None = None

    def bytes_to_allocate(self, sizes: Sequence[int]) -> int:
        """Return the bytes that `divide(sizes)` would allocate.

        Args:
            sizes (`Sequence[int]`): bytes of each storage, the largest first.
        """
        self._finish_reservation()
        blocks, _ = self._place(sizes)
        return sum(block.size for block in blocks if block.memory is None)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Start to allocate what `divide(sizes)` would allocate; the next call of a method waits for it.

        Args:
            sizes (`Sequence[int]`): bytes of each storage, the largest first.
        """
        self._finish_reservation()
        blocks, _ = self._place(sizes)
        missing = [block.size for block in blocks if block.memory is None]
        if missing:
            self._reservation = _Reservation(missing, self._is_pinned)

    def stop_reserving(self) -> None:
        """Allocate no more; what `reserve` has allocated stays."""
        if self._reservation is not None:
            self._reservation.stop()
            self._finish_reservation()

    def _finish_reservation(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            self._memory += reservation.wait()

    def divide(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return flat tensors of bytes, each with a storage of its own, valid until the next call.

        Args:
            sizes (`Sequence[int]`): bytes of each storage, the largest first.
        """
        self._finish_reservation()
        blocks, places = self._place(sizes)
        self._memory = []  # blocks that are no longer needed are freed before others are allocated
        for block in blocks:
            if block.memory is None:
                block.memory = _allocate(block.size, self._is_pinned)
            self._memory.append(block.memory)
        parts = []
        for size, (block, offset) in zip(sizes, places, strict=True):
            part = block.memory
            assert part is not None
            if size != block.size:
                part = _bytes(part.untyped_storage()[offset : offset + size], part.device)
            parts.append(part)
        return parts

    def _place(self, sizes: Sequence[int]) -> tuple[list[_Block], list[tuple[_Block, int]]]:
        """Put each storage into the first block in which it fits, or else into a new one.

        Equal sizes get equal places, so that a copy of the same state allocates nothing.

        Args:
            sizes (`Sequence[int]`): bytes of each storage, the largest first.

        Returns:
            The blocks in use, and for each storage its block and the offset in it.
        """
        blocks = [_Block(memory.numel(), memory) for memory in self._memory]
        smallest = max(sizes[-1], 1) if sizes else 0
        to_place = sum(sizes)
        first = 0  # the blocks before it are full
        places = []
        for size in sizes:
            while first < len(blocks) and blocks[first].left < smallest:
                first += 1
            fitting = (
                blocks[index] for index in range(first, len(blocks)) if size <= blocks[index].left
            )
            block = next(fitting, None)
            if block is None:
                block = _Block(_block_bytes(size, to_place) if self._is_pinned else size)
                blocks.append(block)
            places.append((block, block.size - block.left))
            block.left -= -(-size // _ALIGNMENT) * _ALIGNMENT
            to_place -= size
        in_use = {block for block, _ in places}
        return [block for block in blocks if block in in_use], places


class _Reservation:
    """Allocates memory on a thread of its own, one block after another.

    What cannot be allocated is left out: the copy then tries it again, and its error is that of the save.

    Args:
        sizes (`Sequence[int]`): bytes of each block.
        is_pinned (`bool`): whether the memory is pinned.
    """

    def __init__(self, sizes: Sequence[int], is_pinned: bool) -> None:
        self._sizes = sizes
        self._is_pinned = is_pinned
        self._blocks: list[torch.Tensor] = []
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._allocate, name="hfscale-host-memory")
        self._thread.start()

    def _allocate(self) -> None:
        with suppress(RuntimeError, MemoryError):
            for size in self._sizes:
                if self._is_stopped.is_set():
                    return
                block = _allocate(size, self._is_pinned)
                if not self._is_pinned:
                    block[::_PAGE_BYTES].zero_()  # the system gives a page when it is first written
                self._blocks.append(block)

    def stop(self) -> None:
        """Allocate no further block."""
        self._is_stopped.set()

    def wait(self) -> list[torch.Tensor]:
        """Wait until all is allocated, and return it."""
        self._thread.join()
        return self._blocks


def _allocate(size: int, is_pinned: bool) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def _block_bytes(size: int, to_place: int) -> int:
    """Return the size of a new block of pinned memory: a power of two, so that CUDA's allocator adds nothing to it.

    Args:
        size (`int`): bytes of the storage that it is for.
        to_place (`int`): bytes of all storages that have no place yet, this one included.
    """
    that_holds_it = 1 << (max(size, _MIN_BLOCK_BYTES) - 1).bit_length()
    that_is_filled = 1 << (max(to_place, 1).bit_length() - 1)
    return max(that_holds_it, min(that_is_filled, _MAX_BLOCK_BYTES))


def _storages(tree: Any) -> dict[StorageKey, torch.UntypedStorage]:
    """Return the storages of the tensors of `tree`."""
    return {_key(tensor): tensor.untyped_storage() for tensor in filter(_is_plain, _tensors(tree))}


def _key(tensor: torch.Tensor) -> StorageKey:
    storage = tensor.untyped_storage()
    return (tensor.device, storage.data_ptr(), storage.nbytes())


def _sort(keys: Iterable[StorageKey]) -> dict[bool, list[StorageKey]]:
    """Return the storages by whether their copy is pinned, the largest first."""
    by_kind: dict[bool, list[StorageKey]] = {False: [], True: []}
    for key in sorted(keys, key=lambda key: -key[2]):
        by_kind[_is_pinned_for(key[0])].append(key)
    return by_kind


def _sizes(keys: Iterable[StorageKey]) -> list[int]:
    return [size for _, _, size in keys]


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return a storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied as the bytes of its storage."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _is_pinned_for(device: torch.device) -> bool:
    return device.type != "cpu" and torch.accelerator.is_available()


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


def _copy_tree(value: Any, copies: Mapping[StorageKey, torch.Tensor], memo: dict[int, Any]) -> Any:
    """Copy containers and tensors; immutable values (numbers, strings, functions) are used as they are.

    An object that occurs twice is copied once. Serializers write such an object once, so the files are the same as if
    the originals were saved.
    """
    if id(value) in memo:
        return memo[id(value)]
    copied: Any
    if isinstance(value, torch.Tensor):
        copied = _copy_tensor(value, copies)
    elif type(value) in (dict, OrderedDict):
        copied = memo[id(value)] = type(value)()
        for key, item in value.items():
            copied[key] = _copy_tree(item, copies, memo)
    elif type(value) is list:
        copied = memo[id(value)] = []
        copied.extend(_copy_tree(item, copies, memo) for item in value)
    elif type(value) is tuple:
        items = tuple(_copy_tree(item, copies, memo) for item in value)
        unchanged = all(new is old for new, old in zip(items, value, strict=True))
        copied = value if unchanged else items
    elif isinstance(value, dict):  # for example a defaultdict
        copied = memo[id(value)] = value.copy()
        for key, item in value.items():
            copied[key] = _copy_tree(item, copies, memo)
    else:
        copied = copy.deepcopy(value)
    memo[id(value)] = copied
    return copied


def _copy_tensor(tensor: torch.Tensor, copies: Mapping[StorageKey, torch.Tensor]) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):
        # A DTensor too: `from_local` would move the copy to the mesh's device.
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        copied_parts = {
            n: _copy_tensor(p, copies) if isinstance(p, torch.Tensor) else p
            for n, p in parts.items()
        }
        copied: torch.Tensor = tensor.__tensor_unflatten__(
            copied_parts, context, tensor.size(), tensor.stride()
        )
        return copied
    if not _is_plain(tensor):
        # A subclass with data of its own implements its own copy
        return tensor.detach().to("cpu", copy=True)
    host = copies[_key(tensor)]
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
    # Shared by the threads: a task per piece would take longer than copying a small piece
    left = iter(pieces)

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
    local_ranks = launch_number("LOCAL_WORLD_SIZE", 1)
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // local_ranks))
