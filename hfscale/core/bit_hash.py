"""A hash of the bits of a tensor, computed on its device without waiting for it."""

import torch

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHUNK = 2**24
"""Elements that are hashed at once, which bounds the memory that it takes (256 MiB)."""
_MULTIPLIER = 0x5851F42D4C957F2D
"""Of Knuth's linear congruential generator for 64 bits (MMIX), The Art of Computer Programming, vol. 2, 3.3.4."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer of its size, of the same shape.

    Args:
        tensor (`torch.Tensor`): an ordinary tensor, with strides, and not complex.
    """
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def bit_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of a tensor, weighted by their position, modulo 2^64: () in int64, on its device.

    Args:
        tensor (`torch.Tensor`): an ordinary tensor, with strides, and not complex.
    """
    bits = bits_of(tensor).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), _CHUNK):
        part = bits[begin : begin + _CHUNK].to(torch.int64)
        x = torch.arange(begin + 1, begin + 1 + len(part), device=bits.device) * _MULTIPLIER
        total = total + ((part + 1) * ((x ^ (x >> 29)) | 1)).sum()
    return total
