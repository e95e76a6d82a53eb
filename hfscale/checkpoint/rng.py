"""States of the random number generators for another number of ranks.

Ranks that were there keep their states; a new rank's are drawn from the first rank's and its own number, so they are
the same at every relaunch and no two ranks draw the same numbers.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hfscale.checkpoint.formats.archives import load_archive
from hfscale.errors import CheckpointError

_SINGLE = "rng_state.pth"
_OF_A_RANK = "rng_state_{}.pth"


class _NumpyPart:
    """A stand-in for the pieces of a NumPy state, which nothing here looks at."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


_NUMPY: list[Any] = [
    (_NumpyPart, name)
    for name in (
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.UInt32DType",
    )
]


def write_rng_states(source: Path, folder: Path, *, world_size: int, alike: bool = False) -> None:
    """Write into `folder` a state for each of `world_size` ranks, from those of the checkpoint `source`.

    Nothing is written where the source has none (as one saved with `save_only_model`).

    Args:
        alike (`bool`): all ranks get the first one's, as all begin a run with one seed: for ranks that compute one
            matrix together, and have to drop out the same of its elements.

    Raises:
        CheckpointError: a state cannot be read without unpickling it.
    """
    ranks = 1 if alike else world_size
    known = [path for rank in range(ranks) if (path := source / _OF_A_RANK.format(rank)).is_file()]
    if (source / _SINGLE).is_file():
        known = [source / _SINGLE]
    if not known:
        return
    for rank in range(world_size):
        target = folder / (_SINGLE if world_size == 1 else _OF_A_RANK.format(rank))
        if rank < len(known) or alike:
            shutil.copyfile(known[0 if alike else rank], target)
        else:
            torch.save(derived_state(known[0], rank), target)


def derived_state(first: Path, rank: int) -> dict[str, Any]:
    """What `rng_state_N.pth` of a new rank holds, drawn from the file of the first rank."""
    known = load_archive(first, _NUMPY)
    if not isinstance(known, dict) or "cpu" not in known:
        raise CheckpointError(f"{first} holds no states of random number generators")
    digest = xxhash.xxh3_64(bytes(known["cpu"].numpy().tobytes()))
    digest.update(f"rank {rank}".encode())
    seed = digest.intdigest() >> 1  # torch takes seeds below 2**63
    state = {
        "python": random.Random(seed).getstate(),  # noqa: S311 - these seed augmentations, no keys
        "numpy": np.random.RandomState(seed % 2**32).get_state(),
        "cpu": torch.Generator().manual_seed(seed).get_state(),
    }
    if "cuda" in known:  # seed and offset, eight bytes each
        state["cuda"] = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8).clone()
    return state
