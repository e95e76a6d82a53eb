"""Hash and norm of a tensor, computed on its device and read later, all at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from hfscale.core.bit_hash import bit_hash, bytes_of
from hfscale.trainer.strategies.tensors import own_part


@dataclass(frozen=True, kw_only=True)
class Digest:
    """What a trace keeps of the part of a tensor that a rank holds."""

    shape: tuple[int, ...]
    """Shape of that part."""
    dtype: str
    """Its format, such as `float32`."""
    hash: str
    """Hash of its bits, of 16 hexadecimal digits. CPU and GPU hash in different ways."""
    square: float
    """Sum of its squares, in fp64."""
    sum: float
    """Sum of its elements, in fp64."""

    def to_list(self) -> list[Any]:
        """Return the digest as a line of a trace has it."""
        return [list(self.shape), self.dtype, self.hash, self.square, self.sum]


class DigestQueue:
    """Computes digests where the tensors are, and gives them to those who asked when it is emptied.

    On a GPU nothing waits for the device before that.
    """

    def __init__(self) -> None:
        self._waiting: list[
            tuple[
                torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, str], Callable[[Digest], None]
            ]
        ] = []

    def add(self, tensor: torch.Tensor, give: Callable[[Digest], None]) -> None:
        """Have `give(digest)` called with the digest of a tensor as it is now; its content is read on its device.

        Args:
            tensor (`torch.Tensor`): any tensor; of a DTensor, the part of this rank. Tensors that wrap others, such as
                quantized ones, are left out.
            give (`Callable`): called when the queue is emptied, or at once on a CPU.
        """
        local = own_part(tensor)
        if local is None or local.layout != torch.strided:
            return
        if local.device.type == "cpu":
            give(_digest_on_cpu(local))
            return
        numbers = local if local.is_floating_point() else local.to(torch.float64)
        square = torch.linalg.vector_norm(numbers, dtype=torch.float64).square()
        total = numbers.sum(dtype=torch.float64)
        what = (tuple(local.shape), _name(local.dtype))
        self._waiting.append((square, total, bit_hash(local), what, give))

    def empty(self) -> None:
        """Read the waiting digests, and give them away."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        device = waiting[0][0].device
        squares = torch.stack([square.to(device) for square, *_ in waiting]).tolist()
        sums = torch.stack([total.to(device) for _, total, *_ in waiting]).tolist()
        hashes = torch.stack([value.to(device) for _, _, value, *_ in waiting]).tolist()
        for (*_, (shape, dtype), give), square, total, value in zip(
            waiting, squares, sums, hashes, strict=True
        ):
            give(
                Digest(
                    shape=shape, dtype=dtype, hash=f"{value % 2**64:016x}", square=square, sum=total
                )
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest_on_cpu(local: torch.Tensor) -> Digest:
    flat = local.contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    if flat.is_floating_point():
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) if flat.numel() else 0.0
        total = float(flat.sum(dtype=torch.float64))
    else:
        values = flat.to(torch.float64)
        norm, total = float(values.norm()), float(values.sum())
    return Digest(
        shape=tuple(local.shape),
        dtype=_name(local.dtype),
        hash=xxhash.xxh3_64_hexdigest(bytes_of(flat)),
        square=norm * norm,
        sum=total,
    )
