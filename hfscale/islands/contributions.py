"""Which contributions to a round count."""

from collections.abc import Sequence

from torch import Tensor

from hfscale.core.collectives import ISLANDS
from hfscale.core.logging import get_logger
from hfscale.islands.client import Reply

logger = get_logger(__name__)


def finite_contributors(reply: Reply, received: Sequence[Tensor]) -> list[int]:
    """Return the islands whose contributions have neither NaN nor infinity in any part. Every rank must call it.

    All islands have received the same values, so all drop the same contributions: one island cannot spoil the others.

    Args:
        reply (`Reply`): the round.
        received (`Sequence[Tensor]`): the contributions to the part of this rank; empty on ranks without one.

    Returns:
        `list[int]`: the islands in the order of the reply, the same on all ranks of all islands.
    """
    own = [float(value.isfinite().all()) for value in received] or [1.0] * len(reply.contributors)
    are_finite = ISLANDS.gather_numbers("islands: finite", own).amin(dim=0).tolist()
    counted = [
        island
        for island, is_finite in zip(reply.contributors, are_finite, strict=True)
        if is_finite
    ]
    dropped = sorted(set(reply.contributors) - set(counted))
    if dropped:
        logger.warning(
            "round %d: the contribution of island %s has NaN or infinity: all islands drop it",
            reply.anchor,
            ", ".join(map(str, dropped)),
        )
    return counted
