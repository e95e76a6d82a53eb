"""Checks the training itself: losses that are not finite or jump, and replicas that should be equal and are not."""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from hfscale.core.findings import Finding, Level, rank_error

WINDOW = 50
"""Number of logged losses with which a new one is compared."""
MIN_LOSSES = 10
"""Number of losses below which nothing is called a spike."""
Z_SCORE = 8.0
"""Robust z-score of a spike (1.4826 x MAD for the standard deviation): a chance of 1e-15 under a normal distribution,
and far above the tails of real losses."""
MIN_RISE = 0.1
"""A spike is also at least this far above the median, relative to it: a flat loss has hardly any spread."""
SAMPLED_PARAMETERS = 32
SAMPLED_ELEMENTS = 1024
NORM_TOLERANCE = 1e-3
"""Relative difference of gradient norms between replicas; after an all-reduce they are bit-identical."""


class LossGuard:
    """Judges the losses that the Trainer logs, which are already the mean over all ranks."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, step: int, loss: float, grad_norm: float | None) -> Finding | None:
        """Check the logged values of a step.

        A finite loss joins the window with which later ones are compared; a single spike does not move the median of
        the window.

        Args:
            step (`int`): the step of the log.
            loss (`float`): the logged loss.
            grad_norm (`float`, *optional*): the logged gradient norm; None if none is logged.

        Returns:
            `Finding | None`: what is wrong; None if nothing is.
        """
        if not math.isfinite(loss):
            return _loss_finding(
                "error",
                f"the loss is {loss} at step {step}",
                "lower the learning rate, or clip gradients",
            )
        if grad_norm is not None and not math.isfinite(grad_norm):
            problem = f"the gradient norm is {grad_norm} at step {step}"
            return _loss_finding("error", problem, "lower the learning rate, or look at the batch")
        median, limit = self._limit()
        self._losses.append(loss)
        if limit is None or loss <= limit:
            return None
        earlier = len(self._losses) - 1
        problem = f"the loss jumps to {loss:.4g} at step {step} (median of the last {earlier}: {median:.4g})"
        return _loss_finding("warning", problem, "look at the batch, or lower the learning rate")

    def _limit(self) -> tuple[float, float | None]:
        """Return the recent median, and the loss above which one is a spike."""
        if len(self._losses) < MIN_LOSSES:
            return math.nan, None
        median = statistics.median(self._losses)
        spread = 1.4826 * statistics.median(abs(loss - median) for loss in self._losses)
        return median, median + max(Z_SCORE * spread, MIN_RISE * abs(median))


def _loss_finding(level: Level, problem: str, fix: str) -> Finding:
    return Finding(level=level, check="loss", problem=problem, fix=fix)


def checksum(parameters: Iterable[torch.nn.Parameter], step: int) -> float:
    """Return a checksum of a sample of the weights, equal on replicas whose weights are bit-identical.

    Up to 32 parameters contribute up to 1,024 neighbouring elements each (32,768 in all); which ones changes with the
    step. Their bits are summed with weights that depend on the position, modulo 2^52, which a double holds exactly.

    Args:
        parameters (`Iterable[torch.nn.Parameter]`): the parameters of the replica; frozen ones are left out.
        step (`int`): the current step, which selects the sample.

    Returns:
        `float`: the checksum, an integer; 0 if no parameter is trained.
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
    positions = torch.arange(1, len(bits) + 1, device=bits.device)
    return float(int((bits * positions).sum().item()) % 2**52)


def compare_replicas(
    checksums: npt.ArrayLike, norms: npt.ArrayLike, hosts: Sequence[str], step: int
) -> list[Finding]:
    """Find ranks whose weights or gradient norm differ from those of the others.

    Each comparison needs a finite value of every rank. Where most gradient norms differ, nothing has reduced the
    gradients, and no rank is to blame for its weights. Elsewhere norms are compared only if no weights differ.

    Args:
        checksums (`ArrayLike`): the checksum of each rank at the same step, (ranks,); NaN if none was computed.
        norms (`ArrayLike`): the gradient norm of each rank, (ranks,); NaN if there is none.
        hosts (`Sequence[str]`): the host of each rank, (ranks,).
        step (`int`): the step of the checksums.

    Returns:
        `list[Finding]`: an error for each rank that differs.
    """
    host_of = dict(enumerate(hosts))
    of_ranks = np.asarray(norms)
    apart = _differing_norms(of_ranks)
    is_reduced = len(apart) < len(of_ranks) / 2
    other_weights = []
    if np.isfinite(checksums).all() and is_reduced:
        other_weights = _differing_ranks(np.asarray(checksums).tolist())
    found = []
    for rank in other_weights:
        problem = f"has other weights than the other replicas at step {step}: its device or its link computes wrongly"
        fix = "resume from a checkpoint before that step, without this device"
        found.append(rank_error("replicas", rank, host_of, problem, fix))
    if found:
        return found
    for rank in apart:
        problem = f"has the gradient norm {of_ranks[rank]:.6g} at step {step}, the others {_median(of_ranks):.6g}"
        fix = (
            "gradients are not reduced over all ranks: check no_sync, custom training steps, and losses that call "
            "the model itself in place of the one that Trainer gives them"
        )
        error = rank_error("replicas", rank, host_of, problem, fix)
        found.append(error if is_reduced else replace(error, blames_host=False))
    return found


def _median(norms: npt.NDArray[np.float64]) -> float:
    """Return the norm that the ranks share, if most of them do."""
    return float(np.sort(norms)[(len(norms) - 1) // 2])


def _differing_norms(norms: npt.NDArray[np.float64]) -> list[int]:
    """Return the ranks whose gradient norm is not the median; none if a norm is not finite."""
    if not np.isfinite(norms).all():
        return []
    median = _median(norms)
    allowed = NORM_TOLERANCE * max(abs(median), 1e-12)
    ranks: list[int] = np.flatnonzero(abs(norms - median) > allowed).tolist()
    return ranks


def compare_learning_rates(rates: npt.ArrayLike, step: int) -> list[Finding]:
    """Find ranks that step their replica with another learning rate.

    Each rank has a scheduler of its own, and a schedule or a callback that follows a loss of its rank, or how far its
    data are, parts the replicas without an error.

    Args:
        rates (`ArrayLike`): the learning rate of each rank, (ranks,); nothing is compared if one is not finite.
        step (`int`): the step of the log.

    Returns:
        `list[Finding]`: an error for each rank that differs. None blames a host.
    """
    values = np.asarray(rates).tolist()
    if not np.isfinite(values).all():
        return []
    found = []
    for rank in _differing_ranks(values):
        mine = values[rank]
        others = next(value for value in values if value != mine)
        finding = Finding(
            check="replicas",
            level="error",
            problem=f"has the learning rate {mine:.6g} at step {step}, others {others:.6g}: the replicas part",
            fix="a schedule or a callback depends on what its rank alone sees: give it what all ranks know",
            ranks=(rank,),
            blames_host=False,
        )
        found.append(finding)
    return found


def _differing_ranks(values: list[float]) -> list[int]:
    """Return the ranks that do not have the most common value; all ranks where no single value is the most common."""
    (first, most), *rest = Counter(values).most_common()
    is_tied = bool(rest) and rest[0][1] == most
    return [rank for rank, value in enumerate(values) if is_tied or value != first]
