"""Compression of pseudo-gradients: the formats, and the exact number of bytes of each.

Quantisation stores every value as one of `2**bits - 1` evenly spaced levels of its block, of which one is zero, and
the block's largest magnitude in fp32 (block-wise absmax quantisation: Dettmers et al., arXiv 2110.02861).
Pseudo-gradients were sent in 8 bits by INTELLECT-1 (arXiv 2412.01152) and in 4-bit floats by Streaming DiLoCo (arXiv
2501.18512); both report a quality comparable to that of data-parallel training.

Top-k keeps the largest magnitudes of each chunk of 4,096 values and sends their positions, 12 bits each, in addition
(SparseLoCo, arXiv 2508.15706: 1% to 3% of the values with 2 bits each). Covenant-72B (arXiv 2603.08163) kept 1.56%,
which is 64 of 4,096 values: 64 * (12 + 2) bits instead of 4,096 * 32, 146 times fewer.
"""

from dataclasses import dataclass

from hfscale.core.options import option, positive
from hfscale.errors import ParameterError

BLOCK = 256
"""Values that share one scale in quantisation without top-k."""
CHUNK = 4096
"""Values of which top-k keeps a fixed number; their positions need 12 bits (arXiv 2508.15706)."""
INDEX_BITS = 12
"""Bits of a position in a chunk."""
SCALE_BYTES = 4
"""Bytes of a block's or chunk's scale, fp32."""
SPARSE_DECAY = 0.95
"""Decay of the error feedback with top-k, once per round (arXiv 2508.15706, 2603.08163)."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Describes how a pseudo-gradient is sent. By default all values are sent in fp32."""

    bits: int = option(
        32,
        flag="island_bits",
        check=positive,
        help="Bits per value that islands exchange: 32, 8, 4, and 2 with a density",
    )
    density: float | None = option(
        None,
        flag="island_density",
        check=positive,
        help="Fraction of the values that islands exchange (top-k), such as 0.0156",
        unset="all of them",
    )

    def __post_init__(self) -> None:
        allowed = (32, 8, 4) if self.density is None else (32, 8, 4, 2)
        if self.bits not in allowed:
            hint = " (2 bits need a density below 1)" if self.bits == 2 else ""
            raise ParameterError(
                "bits", self.bits, f"use one of {', '.join(map(str, allowed))}{hint}"
            )
        if self.density is not None and not 0 < self.density < 1:
            raise ParameterError(
                "density",
                self.density,
                "give the fraction of values to send, above 0 and below 1, such as 0.0156; leave it out to send all",
            )

    @property
    def lossless(self) -> bool:
        """Whether the receiver gets exactly what was encoded."""
        return self.bits == 32 and self.density is None

    @property
    def decay(self) -> float:
        """Factor of the error feedback at the start of a round: 1 for quantisation, 0.95 with top-k."""
        return 1.0 if self.density is None else SPARSE_DECAY

    @property
    def kept(self) -> int:
        """Values of a chunk that top-k sends, rounded up to a multiple of 4 so that they fill bytes."""
        return min(CHUNK, -(-max(1, round((self.density or 1.0) * CHUNK)) // 4) * 4)

    def bytes_of(self, values: int) -> int:
        """Compute the exact number of bytes in which `values` values are sent.

        Args:
            values (`int`): number of values of the pseudo-gradient.
        """
        if self.lossless:
            return 4 * values
        if self.density is None:
            return -(-values // BLOCK) * (BLOCK * self.bits // 8 + SCALE_BYTES)
        scale = 0 if self.bits == 32 else SCALE_BYTES
        return -(-values // CHUNK) * (self.kept * (INDEX_BITS + self.bits) // 8 + scale)

    def __str__(self) -> str:
        values = "all values" if self.density is None else f"{self.density:.3g} of the values"
        return f"{values} in {self.bits} bits"
