"""Checks that every rank trains the same: the rows and labels, and the order of the model's parameters.

Accelerate gives each rank a part of the indices of one dataset. Where a rank has shuffled or split it with random
numbers of its own, or a set has numbered its labels (Python draws the hashes of texts anew in every process), ranks
leave rows out, repeat those of others, and train the same label as different numbers. DDP, FSDP2 and ZeRO exchange the
gradients of parameters by their positions: where a set has ordered the heads of a model, those of different ones.
"""

from typing import Any

import xxhash
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from hfscale.checkpoint.dataset_rows import LABELS, labels_of, row_hashes
from hfscale.checkpoint.identity_differences import describe_samples, is_sample
from hfscale.core.collectives import START
from hfscale.core.counts import counted
from hfscale.errors import UsageError
from hfscale.trainer.state import model_of, unwrap_compiled
from hfscale.trainer.strategies import Strategy

_PARAMETERS = "parameters"
_LIBRARIES = ("transformers", "trl", "sentence_transformers", "hfscale")


def check_ranks(trainer: Trainer) -> None:
    """Check that all ranks have the rows, the labels and the parameters of rank 0. Every rank must call it.

    Rows and labels are not compared where a script decides which rows a rank has: a stream, a `get_train_dataloader`
    of its own, the shares of islands, and batches that rank 0 sends to the others (`dispatch_batches`). Parameters are
    not where ranks may have other ones: under `ParallelTrainer` and transformers' `distributed_config`.

    Args:
        trainer (`Trainer`): the Trainer that is about to train.

    Raises:
        UsageError: a rank has other ones; raised on every rank.
    """
    # Otherwise a rank that cannot read a file would leave the others waiting in the exchange
    with START.agreed("start: read rows"):
        mine = _rows_of(trainer) | _parameters_of(trainer)
    difference = START.combine("what ranks train", mine, _first_difference)
    if difference is not None:
        rank, problem = difference
        raise UsageError(f"rank {rank} does not train what rank 0 trains: {problem}")


def _rows_of(trainer: Trainer) -> dict[str, Any]:
    """Return what this rank has to have in common with the others; nothing where a script divides the rows."""
    dataset: Any = trainer.train_dataset
    if not _is_divided(trainer, dataset):
        return {}
    model = unwrap_compiled(model_of(trainer))
    config = getattr(model, "config", None)
    return {"rows": len(dataset), **labels_of(config), **row_hashes(dataset)}


def _parameters_of(trainer: Trainer) -> dict[str, str]:
    """Return a hash of the names of the parameters, in their order."""
    facts = Strategy.of(trainer).facts
    has_all = facts.is_replicated or facts.by_fsdp or facts.by_deepspeed
    if not has_all:
        return {}
    digest = xxhash.xxh3_64()
    for name, _ in model_of(trainer).named_parameters():
        digest.update(f"{name}\n".encode())
    return {_PARAMETERS: digest.hexdigest()}


def _is_divided(trainer: Trainer, dataset: Any) -> bool:
    if "get_train_dataloader" in vars(trainer):
        return False
    home = next(base for base in type(trainer).__mro__ if "get_train_dataloader" in vars(base))
    if home.__module__.partition(".")[0] not in _LIBRARIES:
        return False
    if trainer.accelerator.dispatch_batches or isinstance(dataset, IterableDataset):
        return False
    return has_length(dataset) and not hasattr(dataset, "hfscale_shares")


def _first_difference(values: list[dict[str, Any]]) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0, and in what."""
    first = values[0]
    for rank, found in enumerate(values):
        changed = [name for name in first if name in found and found[name] != first[name]]
        if not changed:
            continue
        return rank, _describe(first, found, changed)
    return None


def _describe(first: dict[str, Any], found: dict[str, Any], changed: list[str]) -> str:
    """Return in what a rank differs from rank 0, and what would happen."""
    if changed == [_PARAMETERS]:
        return (
            "its model has the parameters in another order, so that the gradients of different ones would be "
            "averaged: does a set order them?"
        )
    if "rows" in changed:
        what = f"{counted(found['rows'], 'row')}, rank 0 {first['rows']}"
    elif LABELS in changed:
        what = "its labels have other numbers: does a set order them?"
    else:
        what = describe_samples(filter(is_sample, changed))
    return (
        f"{what}; each rank takes its part of the rows by their numbers, so that rows would be left out and repeated: "
        "give every rank the same rows and labels in the same order, or return a data loader of your own from "
        "get_train_dataloader"
    )
