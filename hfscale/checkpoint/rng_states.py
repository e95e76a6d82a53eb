"""Writes the states of the random number generators of a checkpoint for other ranks than those that saved it.

The file of a rank has the states of Python, NumPy and torch on the CPU. With GPUs it also has `cuda`: in a run of one
process the state of the current GPU; else a list with the states of all GPUs that the process saw, of which it has
drawn from its own only, the one with the rank's number on its node. Trainer restores the list GPU by GPU, so a process
of another rank would get the state of a GPU from which nothing was drawn. That is why here all GPUs of a list get the
state of the rank's own GPU.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hfscale.checkpoint.pickles import RNG_STATE_CLASSES, load_archive
from hfscale.errors import CheckpointError

_SINGLE_FILE = "rng_state.pth"
_RANK_FILE = "rng_state_{}.pth"


def write_rng_states(
    source: Path, folder: Path, *, world_size: int, same_on_all_ranks: bool = False
) -> None:
    """Write into `folder` the RNG states for `world_size` ranks, from those of the checkpoint `source`.

    Ranks that existed keep their states. The state of a new rank is derived from rank 0's state and its own number, so
    it is the same at every relaunch, and no two ranks draw the same numbers. Nothing is written if the source has no
    states, for example because it was saved with `save_only_model`.

    Args:
        source (`Path`): a checkpoint.
        folder (`Path`): where the states are written.
        world_size (`int`): number of ranks.
        same_on_all_ranks (`bool`): give all ranks the state of rank 0, as they all start a run with one seed. Ranks
            that compute one matrix together need this, because they must drop out the same elements of it.

    Raises:
        CheckpointError: a file cannot be read without unpickling it, or has no RNG states.
    """
    ranks = 1 if same_on_all_ranks else world_size
    known = [path for rank in range(ranks) if (path := source / _RANK_FILE.format(rank)).is_file()]
    if (source / _SINGLE_FILE).is_file():
        known = [source / _SINGLE_FILE]
    if not known:
        return
    for rank in range(world_size):
        target = folder / (_SINGLE_FILE if world_size == 1 else _RANK_FILE.format(rank))
        of_rank = 0 if same_on_all_ranks else rank
        if of_rank < len(known):
            copy_rng_state(known[of_rank], target, rank=of_rank, world_size=world_size)
        else:
            torch.save(derived_rng_state(known[0], rank, world_size=world_size), target)


def copy_rng_state(source: Path, target: Path, *, rank: int, world_size: int) -> None:
    """Copy the file of a rank, for a rank with any number.

    Args:
        source (`Path`): `rng_state.pth` or `rng_state_N.pth`.
        target (`Path`): the new file.
        rank (`int`): the rank that saved the source.
        world_size (`int`): number of ranks of the launch that will read the new file.

    Raises:
        CheckpointError: the source cannot be read without unpickling it, or has no RNG states.
    """
    state = _load(source)
    if "cuda" not in state:
        shutil.copyfile(source, target)
        return
    known = state["cuda"]
    own = known[rank % len(known)] if isinstance(known, list) else known
    torch.save(
        state | {"numpy": _numpy_state(source, state), "cuda": _of_gpus(own, known, world_size)},
        target,
    )


def copy_first_rng_state(checkpoint: Path, target: Path, *, world_size: int) -> None:
    """Copy the file of the first rank of a checkpoint, for a rank with any number; nothing if it has no states.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        target (`Path`): the new file.
        world_size (`int`): number of ranks of the launch that will read the new file.

    Raises:
        CheckpointError: the file cannot be read without unpickling it, or has no RNG states.
    """
    candidates = (checkpoint / _RANK_FILE.format(0), checkpoint / _SINGLE_FILE)
    first = next((path for path in candidates if path.is_file()), None)
    if first is not None:
        copy_rng_state(first, target, rank=0, world_size=world_size)


def derived_rng_state(first: Path, rank: int, *, world_size: int) -> dict[str, Any]:
    """Return the content of `rng_state_N.pth` for a new rank.

    Args:
        first (`Path`): the file of rank 0.
        rank (`int`): the new rank.
        world_size (`int`): number of ranks.

    Returns:
        `dict[str, Any]`: the states of Python, NumPy and torch on the CPU by the keys that Trainer uses; `cuda` only
            if the file of rank 0 has it.

    Raises:
        CheckpointError: the file cannot be read without unpickling it, or has no RNG states.
    """
    known = _load(first)
    digest = xxhash.xxh3_64(bytes(known["cpu"].numpy().tobytes()))
    digest.update(f"rank {rank}".encode())
    seed = digest.intdigest() >> 1  # torch takes seeds below 2**63
    state: dict[str, Any] = {
        "python": random.Random(seed).getstate(),  # noqa: S311 - this is for data augmentation, not for cryptography
        "numpy": np.random.RandomState(seed % 2**32).get_state(),
        "cpu": torch.Generator().manual_seed(seed).get_state(),
    }
    if "cuda" in known:
        # Seed and offset, eight bytes each
        own = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8).clone()
        state["cuda"] = _of_gpus(own, known["cuda"], world_size)
    return state


def _load(path: Path) -> dict[str, Any]:
    state = load_archive(path, RNG_STATE_CLASSES)
    if not isinstance(state, dict) or "cpu" not in state:
        raise CheckpointError(f"{path} has no states of random number generators")
    return state


def _numpy_state(path: Path, state: dict[str, Any]) -> tuple[Any, ...]:
    """Return the state for `numpy.random.set_state`, whose array `load_archive` does not make."""
    try:
        name, keys, *others = state["numpy"]
        return (name, np.frombuffer(keys.state[-1], dtype=np.uint32), *others)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has no state of NumPy's generator: {type(error).__name__}: {error}"
        ) from None


def _of_gpus(own: torch.Tensor, known: Any, world_size: int) -> torch.Tensor | list[torch.Tensor]:
    """Return the state of one GPU in the form that Trainer restores in a launch of `world_size` ranks."""
    if world_size == 1:
        return own
    gpus = torch.cuda.device_count() or (len(known) if isinstance(known, list) else world_size)
    return [own] * gpus
