"""A hash of the bits of a tensor, computed on its device without waiting for it."""

import ctypes
from functools import lru_cache
from typing import Any

import torch
import xxhash

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_ROW = 2**20
"""Elements that are multiplied by the same weights as those of other rows: 8 MiB of weights for a device."""
_ROWS = 16
"""Rows that are hashed at once, which bounds the memory that it takes (128 MiB)."""
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
    bits = bits_of(tensor).reshape(-1)
    if bits.numel() * bits.element_size() % 4 == 0:
        if bits.storage_offset() * bits.element_size() % 4:
            bits = bits.clone()
        bits = bits.view(torch.int32)
    weights = _weights(bits.device)
    # Of a number that the host knows: on the device each of these operations would be a kernel of its own
    mixed: torch.Tensor | int = _mixed_number(len(bits))
    whole = len(bits) // _ROW * _ROW
    for begin in range(0, whole, _ROWS * _ROW):
        for_row = (bits[begin : min(whole, begin + _ROWS * _ROW)].view(-1, _ROW) * weights).sum(1)
        mixed = _mixed((_mixed(for_row) * weights[: len(for_row)]).sum() + mixed)
    return (bits[whole:] * weights[: len(bits) - whole]).sum() + mixed


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
