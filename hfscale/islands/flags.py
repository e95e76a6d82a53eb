"""The flags of training on several islands, and the callback that they make."""

from dataclasses import dataclass

from hfscale.core.flags import flag
from hfscale.core.spelling import speaking
from hfscale.facts.compression import Compression
from hfscale.islands.callback import DiLoCoCallback
from hfscale.islands.client import own_token


@dataclass(kw_only=True)
class IslandArguments:
    """Options of `DiLoCoCallback`."""

    islands: int = flag(
        "Number of islands that train together across slow links (DiLoCo).", default=1
    )
    island_rank: int = flag("Number of this island, from 0.", default=0)
    island_rendezvous: str | None = flag(
        "host:port where the islands meet, on the machine of island 0."
    )
    island_steps: int = flag("Optimizer steps between two rounds of the islands (H).", default=100)
    island_overlap_steps: int = flag(
        "Steps that train while a round exchanges; its result is used then.", default=0
    )
    island_fragments: int = flag(
        "Parts of the parameters, of whole layers, that have rounds in turn.", default=1
    )
    island_quorum: int = flag("Least number of islands that a round needs.", default=1)
    island_deadline_s: float = flag(
        "Seconds that a round waits for islands that are late.", default=600.0
    )
    island_bits: int = flag(
        "Bits per value that islands exchange: 32, 8, 4, and 2 with a density.", default=32
    )
    island_density: float | None = flag(
        "Fraction of the values that islands exchange (top-k), such as 0.0156."
    )
    outer_lr: float | None = flag(
        "Learning rate of the outer optimizer. Default: 0.7, with a density 1."
    )
    outer_momentum: float | None = flag("Its Nesterov momentum. Default: 0.9, with a density 0.")


ISLAND_FLAGS = {
    "rendezvous": "island_rendezvous",
    "every_steps": "island_steps",
    "overlap_steps": "island_overlap_steps",
    "fragments": "island_fragments",
    "quorum": "island_quorum",
    "deadline_s": "island_deadline_s",
}
"""Parameter of `DiLoCoCallback` -> the flag that gives its value, where it has another name."""


@speaking("recipe", ISLAND_FLAGS)
def island_callbacks(args: IslandArguments) -> list[DiLoCoCallback]:
    """Return the callback for training on several islands, or an empty list with `--islands 1`.

    Call it before the model is loaded, so that a mistake is reported at once.

    Args:
        args (`IslandArguments`): the flags of the islands.

    Raises:
        UsageError: a flag is out of range, or the token of the islands is not set.
    """
    if args.islands == 1:
        return []
    own_token()
    with speaking("recipe", {"bits": "island_bits", "density": "island_density"}):
        compression = Compression(bits=args.island_bits, density=args.island_density)
    return [
        DiLoCoCallback(
            islands=args.islands,
            island_rank=args.island_rank,
            rendezvous=args.island_rendezvous,
            every_steps=args.island_steps,
            overlap_steps=args.island_overlap_steps,
            fragments=args.island_fragments,
            quorum=args.island_quorum,
            deadline_s=args.island_deadline_s,
            outer_lr=args.outer_lr,
            outer_momentum=args.outer_momentum,
            compression=compression,
        )
    ]
