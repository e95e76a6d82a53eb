"""Averages a vector over the ranks with one bit per element and direction, and with error feedback on both ends.

This is the compressed all-reduce of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888, section 4). Each of N ranks
encodes its vector and sends the n-th part of it to rank n (all-to-all). Rank n averages the n-th parts, encodes the
average and sends it to all ranks (all-gather). What an encoding leaves out is kept and added to the next vector of
this rank, or to the next average.

The signs of `BLOCK` elements share one scale, the mean of their magnitudes: of all scales it leaves the smallest
error, which is shorter than the vector (Karimireddy et al. 2019, arXiv 1901.09847). An encoded element takes
1 + 32 / `BLOCK` bits.

Shapes: N is the number of ranks, B the number of blocks in the part of one rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 1024
"""Elements that share one scale, a multiple of 8."""
_SCALE_BYTES = 4  # fp32


class SignMean:
    """Averages vectors of one size over the ranks of the default process group, again and again.

    Args:
        size (`int`): elements of the vectors.
        device (`torch.device`): device of the vectors.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        blocks = -(-size // (BLOCK * world_size))  # B
        part = blocks * BLOCK
        starts = torch.arange(0, world_size * part, BLOCK, device=device).view(world_size, blocks)
        self._size = size
        self._own_size = min(max(size - rank * part, 0), part)
        # Elements of each block that are not padding, [N, B]
        self._counts = (size - starts).clamp(1, BLOCK)
        self._own_counts = self._counts[rank : rank + 1]
        self._worker_error = torch.zeros(world_size, part, device=device)
        self._server_error = torch.zeros(1, part, device=device)

    def __call__(self, values: Tensor) -> Tensor:
        """Average a vector over the ranks. Every rank must call it, and all get the same result, bit by bit.

        Args:
            values (`Tensor`): the vector of this rank, fp32, shape [size].

        Returns:
            `Tensor`: the average as far as the signs can represent it, fp32, shape [size]. The sum of many results
            differs from the sum of the exact averages by no more than the errors of one call.
        """
        self._worker_error.view(-1)[: self._size].add_(values)
        self._worker_error.view(-1)[self._size :] = 0  # the padding
        sent = _encode(self._worker_error, self._counts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)

        self._server_error.add_(_decode(received).mean(dim=0, keepdim=True))
        self._server_error.view(-1)[self._own_size :] = 0
        average = _encode(self._server_error, self._own_counts)
        gathered = torch.empty_like(sent)
        dist.all_gather(list(gathered.split(1)), average)
        return _decode(gathered).view(-1)[: self._size]


def _encode(values: Tensor, counts: Tensor) -> Tensor:
    """Encode the rows of a matrix as signs and scales, and subtract from `values` what the result represents.

    Args:
        values (`Tensor`): fp32, shape [N, B * BLOCK], changed in place.
        counts (`Tensor`): the elements of each block that are not padding, shape [N, B].

    Returns:
        `Tensor`: for each row its signs, then its scales, uint8, shape [N, B * (BLOCK / 8 + 4)].
    """
    blocks = values.view(*counts.shape, BLOCK)
    scales = blocks.abs().sum(dim=-1) / counts
    is_positive = blocks >= 0
    blocks.sub_(_signed(is_positive, scales))
    bits = is_positive.view(len(values), -1, 8).to(torch.uint8)
    signs = (bits << _bit_numbers(values.device)).sum(dim=-1, dtype=torch.uint8)
    return torch.cat([signs, scales.view(torch.uint8)], dim=1)


def _decode(encoded: Tensor) -> Tensor:
    """Return the values that `_encode` has encoded, fp32, shape [N, B * BLOCK]."""
    rows, row_bytes = encoded.shape
    blocks = row_bytes // (BLOCK // 8 + _SCALE_BYTES)  # B
    signs, scales = encoded.split([blocks * BLOCK // 8, blocks * _SCALE_BYTES], dim=1)
    is_positive = (signs.unsqueeze(-1) >> _bit_numbers(encoded.device)) & 1 == 1
    return _signed(
        is_positive.view(rows, blocks, BLOCK), scales.contiguous().view(torch.float32)
    ).view(rows, -1)


def _signed(is_positive: Tensor, scales: Tensor) -> Tensor:
    """Return the scale of its block with each element's sign, shape [N, B, BLOCK]."""
    return torch.where(is_positive, scales.unsqueeze(-1), -scales.unsqueeze(-1))


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
