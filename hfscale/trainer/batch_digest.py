"""Hashes of batches and random states, which are the same on any number of ranks."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hfscale.core.bit_hash import bits_of

MODULUS = 2**64
"""Hashes are added up modulo this."""
_IGNORED_LABEL = -100
_NOT_DATA = ("labels", "attention_mask", "position_ids", "decoder_attention_mask")
_MULTIPLIERS = (0x5851F42D4C957F2D, 0x14057B7EF767814F)
"""Of Knuth's linear congruential generator for 64 bits (MMIX), The Art of Computer Programming, vol. 2, 3.3.4."""


class BatchDigest:
    """Adds up hashes of the rows of batches, on the device where they are."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._positions: dict[tuple[torch.device, int], torch.Tensor] = {}

    def see(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Add the rows of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]`): the tensors of a batch by name, each (rows, ...).
        """
        ids = batch.get("input_ids")
        mask = batch.get("attention_mask")
        if ids is not None and ids.ndim == 2:
            kept = mask if mask is not None and mask.shape == ids.shape else None
            self._add("inputs", ids, kept)
        for name, value in batch.items():
            if (
                value.ndim
                and name not in _NOT_DATA
                and not (name == "input_ids" and value.ndim == 2)
            ):
                self._add("inputs", value, None)
        labels = batch.get("labels")
        if labels is not None and labels.ndim:
            self._add(
                "labels", labels, None if labels.is_floating_point() else labels != _IGNORED_LABEL
            )

    def take(self) -> dict[str, int]:
        """Return the sums of `inputs` and `labels` since the last call, and start again. It waits for the device."""
        sums, self._sums = self._sums, {}
        return {name: int(value) % MODULUS for name, value in sums.items()}

    def _add(self, name: str, value: torch.Tensor, kept: torch.Tensor | None) -> None:
        rows = value.detach().reshape(value.shape[0], -1)
        if rows.is_floating_point():
            rows = bits_of(rows)
        numbers = rows.to(torch.int64) + 1
        if kept is not None:
            numbers = numbers * kept.reshape(numbers.shape).to(torch.int64)
        hashes = (numbers * self._weights(numbers)).sum(1)
        total = (hashes * (hashes + _MULTIPLIERS[1])).sum()
        earlier = self._sums.get(name)
        self._sums[name] = total if earlier is None else earlier + total

    def _weights(self, rows: torch.Tensor) -> torch.Tensor:
        """Return an odd pseudo-random number for each position of a row, (length,) in int64, modulo 2^64."""
        key = (rows.device, rows.shape[1])
        if key not in self._positions:
            if len(self._positions) > 64:
                self._positions.clear()
            x = (
                torch.arange(1, rows.shape[1] + 1, device=rows.device) * _MULTIPLIERS[0]
                + _MULTIPLIERS[1]
            )
            self._positions[key] = (x ^ (x >> 29)) * _MULTIPLIERS[0] | 1
        return self._positions[key]


def rng_digest() -> str:
    """Return a hash of the random states of this process: Python, NumPy, torch and the current GPU."""
    digest = hashlib.blake2b(digest_size=8)
    _, words, spare = random.getstate()
    digest.update(np.array(words, dtype=np.uint32).tobytes() + repr(spare).encode())
    numpy_state: Any = np.random.get_state(legacy=True)
    digest.update(numpy_state[1].tobytes() + repr(numpy_state[2:]).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()
