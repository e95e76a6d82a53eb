"""How far rounding alone can take two runs apart that do the same arithmetic in another order."""

import math

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of each format (IEEE 754; bfloat16 has 8 bits of significand): N. J. Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., section 2.1."""
SPREAD = 8.0
"""Relative error of a sum in units of `roundoff`: Higham and Mary, A New Approach to Probabilistic Rounding Error
Analysis, SIAM J. Sci. Comput. 41(5), 2019: the error of a sum of n terms is at most lambda sqrt(n) u, for lambda = 8
with a probability of 1 - 1e-13. The blocks in which BLAS and collectives add up make n small; it is left at 1 for a
rank, and each rank adds a term."""
REDUCTIONS = 16.0
"""Roundings in a row that a gradient has passed, relative to one sum: an assumption of ours, not measured."""


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a floating-point format.

    Args:
        dtype (`str`): such as `bfloat16`; an unknown format counts as bfloat16.
    """
    return UNIT_ROUNDOFF.get(dtype.removeprefix("torch."), UNIT_ROUNDOFF["bfloat16"])


def relative_tolerance(
    dtype: str, *, ranks: int, steps: int = 1, chained: bool = False, of_norm: int = 0
) -> float:
    """Return the relative difference that rounding explains, between two orders of the same arithmetic.

    Args:
        dtype (`str`): the format of the lowest precision in which the runs compute.
        ranks (`int`): the larger number of ranks of the two runs.
        steps (`int`): optimizer steps since both runs had the same weights; each adds as much again.
        chained (`bool`): whether the number has passed a whole forward and backward pass, as a gradient has.
        of_norm (`int`): for a gradient norm, and what depends on one: elements of the model on a CPU, as for
            `norm_tolerance`.

    Returns:
        `float`: `SPREAD x sqrt(ranks) x steps x roundoff`, times `REDUCTIONS` for a gradient, or the error of the norm
            where that is larger; at most 0.5.
    """
    factor = SPREAD * math.sqrt(max(ranks, 1)) * max(steps, 1) * (REDUCTIONS if chained else 1.0)
    return max(min(factor * roundoff(dtype), 0.5), norm_tolerance(of_norm))


def norm_tolerance(elements: int) -> float:
    """Return the relative error of a norm that torch computes on a CPU in fp32, where it adds up squares one by one.

    Measured with torch 2.13.0 against fp64 on normal random numbers: 1e-5 for a million elements, 7e-5 for four
    million, 1.6e-3 for thirty million. What is returned is 2 to 12 times that.

    Args:
        elements (`int`): elements of the gradients, as a bound of those of the largest; 0 if no CPU is involved.

    Returns:
        `float`: `elements x roundoff / 512`; at most 0.5.
    """
    return min(elements * UNIT_ROUNDOFF["float32"] / 512, 0.5)


def relative_difference(a: float, b: float) -> float:
    """Return |a - b| relative to the larger of the two; infinity if one alone is not finite.

    Args:
        a (`float`): a number.
        b (`float`): another one.
    """
    if math.isfinite(a) != math.isfinite(b):
        return math.inf
    if not math.isfinite(a) or a == b:
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))
