"""Checks that every rank has the same rows in the same order, where the data loader of a library divides them.

Accelerate gives each rank a part of the indices of one dataset. Where a rank has shuffled or split it with random
numbers of its own, or a set has numbered its labels (Python draws the hashes of texts anew in every process), ranks
leave rows out, repeat those of others, and train the same label as different numbers.
"""

from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from hfscale.checkpoint.dataset_rows import LABELS, labels_of, row_hashes
from hfscale.checkpoint.identity_differences import describe_samples, is_sample
from hfscale.core.collectives import START
from hfscale.core.counts import counted
from hfscale.errors import UsageError
from hfscale.trainer.state import model_of, unwrap_compiled

_LIBRARIES = ("transformers", "trl", "sentence_transformers", "hfscale")


def check_ranks(trainer: Trainer) -> None:
    """Check that all ranks have the rows and the labels of rank 0. Every rank must call it.

    Nothing is compared where a script decides which rows a rank has: a stream, a `get_train_dataloader` of its own,
    the shares of islands, and batches that rank 0 sends to the others (`dispatch_batches`).

    Args:
        trainer (`Trainer`): the Trainer that is about to train.

    Raises:
        UsageError: a rank has other ones; raised on every rank.
    """
    difference = START.combine("rows of ranks", _rows_of(trainer), _first_difference)
    if difference is not None:
        rank, what = difference
        raise UsageError(
            f"rank {rank} does not train on the data of rank 0 ({what}), and each rank takes its part of the rows by "
            "their numbers, so that rows would be left out and repeated: give every rank the same rows and labels in "
            "the same order, or return a data loader of your own from get_train_dataloader"
        )


def _rows_of(trainer: Trainer) -> dict[str, Any]:
    """Return what this rank has to have in common with the others; nothing where a script divides the rows."""
    dataset: Any = trainer.train_dataset
    if not _is_divided(trainer, dataset):
        return {}
    config = getattr(unwrap_compiled(model_of(trainer)), "config", None)
    return {"rows": len(dataset), **labels_of(config), **row_hashes(dataset)}


def _is_divided(trainer: Trainer, dataset: Any) -> bool:
    home = next(base for base in type(trainer).__mro__ if "get_train_dataloader" in vars(base))
    if home.__module__.partition(".")[0] not in _LIBRARIES:
        return False
    if trainer.accelerator.dispatch_batches or isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__len__") and not hasattr(dataset, "hfscale_shares")


def _first_difference(values: list[dict[str, Any]]) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0, and in what."""
    first = values[0]
    for rank, found in enumerate(values):
        changed = [name for name in first if name in found and found[name] != first[name]]
        if not changed:
            continue
        if "rows" in changed:
            return rank, f"{counted(found['rows'], 'row')}, rank 0 {first['rows']}"
        if LABELS in changed:
            return rank, "its labels have other numbers: does a set order them?"
        return rank, describe_samples(filter(is_sample, changed))
    return None
