"""Is the training itself well: a loss that is no number or jumps, and replicas that should be equal and are not."""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import torch

from hfscale.utils.findings import Finding

WINDOW = 50
"""Logged losses that a new one is compared with."""
LEAST = 10
"""Losses below which nothing is called a spike."""
Z_SCORE = 8.0
"""Robust z-score of a spike (1.4826 x MAD for the standard deviation): a chance of 1e-15 under a normal distribution,
and far above the tails of real losses."""
LEAST_RISE = 0.1
"""A spike is also at least so far above the median, relative to it: a flat loss has hardly any spread."""
SAMPLED_PARAMETERS = 32
SAMPLED_ELEMENTS = 1024
NORM_TOLERANCE = 1e-3
"""Relative difference of gradient norms between replicas; after an all-reduce they are equal to the bit."""


class LossGuard:
    """Judges the losses that the Trainer logs, which are already the mean over all ranks."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, step: int, loss: float, grad_norm: float | None) -> Finding | None:
        """What is wrong with the log of a step, if anything. A spike is not taken among what the next is compared
        with, unless the loss stays there."""
        if not math.isfinite(loss):
            return self._finding(
                "error", f"the loss is {loss} at step {step}: lower the learning rate, or clip gradients"
            )
        if grad_norm is not None and not math.isfinite(grad_norm):
            text = f"the gradient norm is {grad_norm} at step {step}: lower the learning rate, or look at the batch"
            return self._finding("error", text)
        median, limit = self._limit()
        self._losses.append(loss)
        if limit is None or loss <= limit:
            return None
        text = (
            f"the loss jumps to {loss:.4g} at step {step} (median of the last {len(self._losses) - 1}: {median:.4g})"
        )
        return self._finding("warning", f"{text}: a bad batch, or too high a learning rate")

    def _limit(self) -> tuple[float, float | None]:
        """The median of late, and the loss above which one is a spike."""
        if len(self._losses) < LEAST:
            return math.nan, None
        median = statistics.median(self._losses)
        spread = 1.4826 * statistics.median(abs(loss - median) for loss in self._losses)
        return median, median + max(Z_SCORE * spread, LEAST_RISE * abs(median))

    def _finding(self, level: str, text: str) -> Finding:
        return Finding(level=level, check="loss", problem=text)  # type: ignore[arg-type]


def checksum(parameters: Iterable[torch.nn.Parameter], step: int) -> float:
    """A number that is equal on replicas whose weights are, to the bit: of a sample that moves on with the step.

    Up to 32 parameters give up to 1,024 neighbouring elements each, (at most 32768,) in all; their bits are summed
    with weights that depend on the place, modulo 2^52, which a double holds exactly.
    """
    trained = [p for p in parameters if p.requires_grad and p.is_contiguous() and p.numel() > 0]
    if not trained:
        return 0.0
    stride = max(1, len(trained) // SAMPLED_PARAMETERS)
    pieces = []
    for parameter in trained[step % stride :: stride][:SAMPLED_PARAMETERS]:
        flat = parameter.detach().view(-1)
        count = min(SAMPLED_ELEMENTS, flat.numel())
        start = (step * SAMPLED_ELEMENTS) % (flat.numel() - count + 1)
        pieces.append(flat[start : start + count].float())
    bits = torch.cat(pieces).view(torch.int32).to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    return float(int((bits * places).sum().item()) % 2**52)


def compare_replicas(
    checksums: Sequence[float], norms: Sequence[float], hosts: Sequence[str], step: int
) -> list[Finding]:
    """Ranks whose weights or gradient norm are not those of the others.

    Args:
        checksums: of each rank, all of the same step; NaN: none was made.
        norms: the gradient norms, NaN where there is none.
    """
    found = []
    if all(math.isfinite(value) for value in checksums):
        for rank in _odd(list(checksums)):
            text = (
                f"has other weights than the other replicas at step {step}: its device or its link computes wrongly; "
            )
            text += "go on from a checkpoint before that, without it"
            found.append(Finding(level="error", check="replicas", problem=text, ranks=(rank,), host=hosts[rank]))
    if not found and all(math.isfinite(norm) for norm in norms):
        middle = statistics.median_low(norms)
        for rank, norm in enumerate(norms):
            if abs(norm - middle) > NORM_TOLERANCE * max(abs(middle), 1e-12):
                text = (
                    f"has the gradient norm {norm:.6g} at step {step}, the others {middle:.6g}: they are not reduced"
                )
                found.append(Finding(level="error", check="replicas", problem=text, ranks=(rank,), host=hosts[rank]))
    return found


def _odd(values: list[float]) -> list[int]:
    """The ranks that do not have the commonest value; all, where no value is commoner than the next."""
    (first, most), *rest = Counter(values).most_common()
    tied = bool(rest) and rest[0][1] == most
    return [rank for rank, value in enumerate(values) if tied or value != first]
