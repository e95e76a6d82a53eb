"""Encoding of pseudo-gradients as bytes, with error feedback; `hfscale.facts.compression` describes the formats.

All functions work on one flat fp32 tensor on the CPU. A payload's length follows from the number of values and the
compression alone, so that a receiver can check it before it decodes.

Shapes: N values, B blocks or chunks, S values per block or chunk, K values kept per chunk.
"""

import torch
from torch import Tensor

from hfscale.errors import LayoutError
from hfscale.facts.compression import BLOCK, CHUNK, Compression


def encode(values: Tensor, compression: Compression) -> Tensor:
    """Encode values as bytes.

    Args:
        values (`Tensor`): the values, fp32, shape [N].
        compression (`Compression`): the format.

    Returns:
        `Tensor`: the payload, uint8, shape [compression.bytes_of(N)].
    """
    if compression.lossless:
        return values.contiguous().view(torch.uint8).clone()
    if compression.density is None:
        rows = _rows(values, BLOCK)  # [B, S]
        scales = rows.abs().amax(dim=1)
        return torch.cat(
            [_bytes(scales), _pack(_quantize(rows, scales, compression.bits), compression.bits)]
        )
    rows = _rows(values, CHUNK)  # [B, S]
    # Sorted positions make the payload a function of the values alone, whatever order topk returns equal ones in.
    # [B, K]
    index = rows.abs().topk(compression.kept, dim=1, sorted=False).indices.sort(dim=1).values
    kept = rows.gather(1, index)
    if compression.bits == 32:
        return torch.cat([_pack_positions(index), _bytes(kept)])
    scales = kept.abs().amax(dim=1)
    levels = _pack(_quantize(kept, scales, compression.bits), compression.bits)
    return torch.cat([_pack_positions(index), _bytes(scales), levels])


def decode(payload: Tensor, values: int, compression: Compression) -> Tensor:
    """Decode a payload; it never reads beyond it, and refuses one of another length.

    Args:
        payload (`Tensor`): the bytes, uint8.
        values (`int`): number of values N that were encoded.
        compression (`Compression`): the format.

    Returns:
        `Tensor`: the values, fp32, shape [N]; zero where top-k sent none.

    Raises:
        LayoutError: the payload's length is not that of N values in this format.
    """
    expected = compression.bytes_of(values)
    if payload.dtype != torch.uint8 or payload.numel() != expected:
        raise LayoutError(
            f"a pseudo-gradient of {values} values has {payload.numel()} bytes, and {compression} need {expected}: "
            "use the same model, layout and settings on all islands"
        )
    if compression.lossless:
        return payload.clone().view(torch.float32)
    bits = compression.bits
    if compression.density is None:
        blocks = -(-values // BLOCK)
        scales = _floats(payload[: 4 * blocks])
        levels = _unpack(payload[4 * blocks :], bits).view(blocks, BLOCK)
        return _dequantize(levels, scales, bits).flatten()[:values]
    chunks = -(-values // CHUNK)
    kept = compression.kept
    size_of_positions = chunks * kept * 3 // 2
    positions = payload[:size_of_positions]
    rest = payload[size_of_positions:]
    index = _unpack_positions(positions).view(chunks, kept)
    if bits == 32:
        sent = _floats(rest).view(chunks, kept)
    else:
        scales = _floats(rest[: 4 * chunks])
        levels = _unpack(rest[4 * chunks :], bits).view(chunks, kept)
        sent = _dequantize(levels, scales, bits)
    return torch.zeros(chunks, CHUNK).scatter_(1, index, sent).flatten()[:values]


def encode_with_feedback(values: Tensor, residual: Tensor, compression: Compression) -> Tensor:
    """Encode values together with what earlier rounds did not send, and keep what this round does not send.

    Error feedback (Karimireddy et al., arXiv 1901.09847): without it, values that are always rounded to zero would
    never reach the other islands.

    Args:
        values (`Tensor`): the pseudo-gradient, fp32, shape [N].
        residual (`Tensor`): what was not sent so far, fp32, shape [N]; changed in place. Zero in the first round.
        compression (`Compression`): the format; its `decay` is applied to the residual first.

    Returns:
        `Tensor`: the payload, uint8.
    """
    residual.mul_(compression.decay).add_(values)
    payload = encode(residual, compression)
    residual.sub_(decode(payload, residual.numel(), compression))
    return payload


def _rows(values: Tensor, size: int) -> Tensor:
    """Return the values as rows of `size`, the last one filled up with zeros: [B, S]."""
    return torch.nn.functional.pad(values.float(), (0, -values.numel() % size)).view(-1, size)


def _levels(bits: int) -> int:
    """Return the number of levels: odd, so that zero is a level; with 2 bits, of top-k values only, all four."""
    return 4 if bits == 2 else 2**bits - 1


def _quantize(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the nearest level of each value, uint8, where level 0 is minus the row's scale and the last one plus."""
    # A row of zeros has the scale 0: every level means 0 there. NaN and infinity stay in the scale, and so in the row.
    unit = rows / torch.where(scales == 0, 1.0, scales)[:, None]
    return (
        ((unit.nan_to_num(0.0).clamp(-1, 1) + 1) * (_levels(bits) - 1) / 2).round().to(torch.uint8)
    )


def _dequantize(levels: Tensor, scales: Tensor, bits: int) -> Tensor:
    # Levels that the format does not use (of a damaged payload) are not larger than the scale.
    return (levels.float() * (2 / (_levels(bits) - 1)) - 1).clamp(-1, 1) * scales[:, None]


def _pack(levels: Tensor, bits: int) -> Tensor:
    """Pack levels of 2, 4 or 8 bits into bytes, the first one into the lowest bits."""
    per_byte = 8 // bits
    if per_byte == 1:
        return levels.flatten()
    shifts = torch.arange(per_byte, dtype=torch.uint8) * bits
    return (levels.view(-1, per_byte) << shifts).sum(dim=1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    shifts = torch.arange(per_byte, dtype=torch.uint8) * bits
    levels: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return levels.flatten()


def _pack_positions(index: Tensor) -> Tensor:
    """Pack pairs of 12-bit positions into three bytes each."""
    first, second = index.view(-1, 2).unbind(dim=1)
    parts = (first & 0xFF, first >> 8 | (second & 0xF) << 4, second >> 4)
    return torch.stack(parts, dim=1).to(torch.uint8).flatten()


def _unpack_positions(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(-1, 3).long().unbind(dim=1)
    return torch.stack((low | (middle & 0xF) << 8, middle >> 4 | high << 4), dim=1).flatten()


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).flatten()


def _floats(payload: Tensor) -> Tensor:
    return payload.clone().view(torch.float32)
