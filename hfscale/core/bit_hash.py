"""A hash of the bits of a tensor, or of many, computed on their device without waiting for it."""

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import xxhash

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_ROW = 2**20
"""Elements that are multiplied by the same weights as those of other rows: 8 MiB of weights for a device."""
_ROWS = 16
"""Rows that are hashed at once, which bounds the memory that it takes (128 MiB)."""
_JOINED = 4 * _ROW
"""Elements of small tensors that are hashed together, which takes as much memory."""
_MULTIPLIER = 0x5851F42D4C957F2D
"""Of Knuth's linear congruential generator for 64 bits (MMIX), The Art of Computer Programming, vol. 2, 3.3.4."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer of its size, of the same shape.

    Args:
        tensor (`torch.Tensor`): an ordinary tensor, with strides, and not complex.
    """
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def bit_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of the bits of a tensor: () in int64, on its device. CPU and GPU hash in different ways.

    On a CPU it is XXH3 of its bytes; elsewhere `weighted_sum`, which waits for nothing.

    Args:
        tensor (`torch.Tensor`): an ordinary tensor, with strides, and not complex.
    """
    if tensor.device.type != "cpu":
        return weighted_sum(tensor)
    held = bits_of(tensor)  # the bytes live no longer
    value = xxhash.xxh3_64_intdigest(bytes_of(held))
    return torch.tensor(value - 2**64 if value >= 2**63 else value)


def bit_hashes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return `bit_hash` of each of many tensors, in fewer kernels than one after another.

    Args:
        tensors (`Iterable[torch.Tensor]`): ordinary tensors, with strides, and not complex, on any devices.
    """
    queue = HashQueue(copies=False)
    for tensor in tensors:
        queue.add(tensor)
    return queue.take()


def named_hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `bit_hashes` by the names of the tensors.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): as in `bit_hashes`, by name.
    """
    return dict(zip(tensors, bit_hashes(tensors.values()), strict=True))


def named_numbers(hashes: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return `numbers_of` by the names of the hashes.

    Args:
        hashes (`Mapping[str, torch.Tensor]`): hashes by name.
    """
    return dict(zip(hashes, numbers_of(list(hashes.values())), strict=True))


class HashQueue:
    """Hashes tensors one after another, and leaves to the end what can be done for many of them together.

    On a GPU a small tensor alone takes 3 kernels, and some 18 from 2^20 numbers of 32 bits on, of which most work on a
    few numbers. Here small ones are joined, up to 16 MiB of them, and take a dozen kernels together; larger ones take
    2 to 4 each, and a dozen together. Those of more than 2^24 numbers are hashed alone.

    Args:
        copies (`bool`): whether small tensors are copied, since they may change before `take`.
    """

    def __init__(self, *, copies: bool = True) -> None:
        self._copies = copies
        self._hashes: list[torch.Tensor | None] = []
        self._small: dict[torch.device, _Small] = defaultdict(_Small)
        self._middle: dict[torch.device, _Middle] = defaultdict(_Middle)

    def add(self, tensor: torch.Tensor) -> None:
        """Hash a tensor, or begin to.

        Args:
            tensor (`torch.Tensor`): an ordinary tensor, with strides, and not complex.
        """
        if tensor.device.type == "cpu":
            self._hashes.append(bit_hash(tensor))
        else:
            self.add_weighted(tensor)

    def add_weighted(self, tensor: torch.Tensor) -> None:
        """Do the same for a tensor that is hashed as on a GPU, wherever it is.

        Args:
            tensor (`torch.Tensor`): the tensor.
        """
        index = len(self._hashes)
        self._hashes.append(None)
        bits = _flat_bits(tensor)
        is_in_range = 0 < len(bits) < (_ROWS + 1) * _ROW
        if bits.dtype != torch.int32 or not is_in_range:
            self._hashes[index] = weighted_sum(tensor)
        elif len(bits) >= _ROW:
            self._middle[tensor.device].add(index, bits)
        else:
            small = self._small[tensor.device]
            if small.length + len(bits) > _JOINED:
                self._note(small.take())
            small.add(index, bits.clone() if self._copies else bits)

    def take(self) -> list[torch.Tensor]:
        """Return the hashes of all that was added, in its order: () in int64, each on the device of its tensor."""
        for small in self._small.values():
            self._note(small.take())
        for middle in self._middle.values():
            self._note(middle.take())
        hashes, self._hashes = self._hashes, []
        return [one for one in hashes if one is not None]

    def _note(self, hashes: dict[int, torch.Tensor]) -> None:
        for index, value in hashes.items():
            self._hashes[index] = value


class _Small:
    """Bits of less than a row each, which wait to be hashed together."""

    def __init__(self) -> None:
        self.length = 0
        self._waiting: dict[int, torch.Tensor] = {}

    def add(self, index: int, bits: torch.Tensor) -> None:
        self._waiting[index] = bits
        self.length += len(bits)

    def take(self) -> dict[int, torch.Tensor]:
        waiting, self._waiting, self.length = self._waiting, {}, 0
        if not waiting:
            return {}
        flat = list(waiting.values())
        device = flat[0].device
        lengths = tuple(map(len, flat))
        weights = _weights(device)
        products = torch.cat(flat) * torch.cat([weights[:length] for length in lengths])
        hashes = _sums_of_parts(products, lengths) + _mixed_lengths(lengths, device)
        return dict(zip(waiting, hashes.unbind(), strict=True))


class _Middle:
    """Bits of 1 to 16 rows each: their rows are summed at once, and the sums wait to be hashed together."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._of_rows: list[torch.Tensor] = []
        self._rests: dict[int, torch.Tensor] = {}

    def add(self, index: int, bits: torch.Tensor) -> None:
        weights = _weights(bits.device)
        whole = len(bits) // _ROW * _ROW
        self._lengths[index] = len(bits)
        self._of_rows.append((bits[:whole].view(-1, _ROW) * weights).sum(1))
        if whole < len(bits):
            self._rests[index] = (bits[whole:] * weights[: len(bits) - whole]).sum()

    def take(self) -> dict[int, torch.Tensor]:
        if not self._lengths:
            return {}
        of_rows = self._of_rows
        device = of_rows[0].device
        lengths = tuple(self._lengths.values())
        rows = tuple(map(len, of_rows))
        weights = _weights(device)
        of_row_numbers = torch.cat([weights[:count] for count in rows])
        sums = _sums_of_parts(_mixed(torch.cat(of_rows)) * of_row_numbers, rows)
        hashes = _mixed(sums + _mixed_lengths(lengths, device)).unbind()
        found = dict(zip(self._lengths, hashes, strict=True))
        for index, rest in self._rests.items():
            found[index] = rest + found[index]
        self._lengths, self._of_rows, self._rests = {}, [], {}
        return found


def numbers_of(hashes: Sequence[torch.Tensor]) -> list[int]:
    """Return hashes as numbers, and wait once for each device.

    Args:
        hashes (`Sequence[torch.Tensor]`): what `bit_hash` or `bit_hashes` returned.
    """
    of_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, one in enumerate(hashes):
        of_device[one.device].append(index)
    numbers = [0] * len(hashes)
    for indices in of_device.values():
        values = torch.stack([hashes[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            numbers[index] = value
    return numbers


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor as an object with the buffer protocol, which lives no longer than the tensor.

    `Tensor.numpy` would mark the storage as one that cannot be resized, and FSDP2 then could not free a gathered
    parameter whose memory it is.

    Args:
        tensor (`torch.Tensor`): a tensor on a CPU whose elements follow one another.
    """
    count = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * count).from_address(tensor.data_ptr()) if count else b""


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of a tensor, weighted by their position, modulo 2^64: () in int64, on its device.

    The bits are taken as numbers of 32 bits where its bytes can be divided by four. The weights are odd and irregular,
    so that a changed element always changes the sum, and the changes of several do not cancel but by chance.

    Args:
        tensor (`torch.Tensor`): an ordinary tensor, with strides, and not complex.
    """
    bits = _flat_bits(tensor)
    weights = _weights(bits.device)
    # Of a number that the host knows: on the device each of these operations would be a kernel of its own
    mixed: torch.Tensor | int = _mixed_number(len(bits))
    whole = len(bits) // _ROW * _ROW
    for begin in range(0, whole, _ROWS * _ROW):
        for_row = (bits[begin : min(whole, begin + _ROWS * _ROW)].view(-1, _ROW) * weights).sum(1)
        mixed = _mixed((_mixed(for_row) * weights[: len(for_row)]).sum() + mixed)
    return (bits[whole:] * weights[: len(bits) - whole]).sum() + mixed


def _sums_of_parts(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the sums of consecutive parts of a tensor, modulo 2^64."""
    up_to = values.cumsum(0)[_last_indices(lengths, values.device)]
    return torch.diff(up_to, prepend=up_to.new_zeros(1))


# Numbers that the host knows are copied to the device once: each copy might wait for it
@lru_cache(maxsize=64)
def _last_indices(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([end - 1 for end in accumulate(lengths)], device=device)


@lru_cache(maxsize=64)
def _mixed_lengths(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([_mixed_number(length) for length in lengths], device=device)


def _flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor in one dimension, as numbers of 32 bits where its bytes can be divided by four."""
    bits = bits_of(tensor).reshape(-1)
    if bits.numel() * bits.element_size() % 4 == 0:
        if bits.storage_offset() * bits.element_size() % 4:
            bits = bits.clone()
        bits = bits.view(torch.int32)
    return bits


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    return _mixed(_mixed(torch.arange(1, _ROW + 1, device=device))) | 1


def _mixed(sums: torch.Tensor) -> torch.Tensor:
    """Return irregular numbers for regular ones, and others for others."""
    mixed = (sums ^ (sums >> 32)) * _MULTIPLIER
    return mixed ^ (mixed >> 29)


def _mixed_number(number: int) -> int:
    """Return `_mixed` of a number of 64 bits."""
    mixed = _signed((number ^ (number >> 32)) * _MULTIPLIER)
    return mixed ^ (mixed >> 29)


def _signed(number: int) -> int:
    """Return a number modulo 2^64, from -2^63 on."""
    return (number + 2**63) % 2**64 - 2**63
