"""Tells listeners when the batch sampler of a training takes the indices of a batch.

A loader without worker processes fetches a batch right after its indices have been taken, so `before_batch` is also
the last moment before the samples of a batch are read.
"""

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset

from hfscale.trainer.adapter import TrainerAdapter


class BatchListener:
    """What can be heard of the batches of a pass; each method does nothing unless a subclass has its own."""

    def begin_pass(self) -> None:
        """Hear that a pass over the data begins, before its sampler draws the order of the samples."""

    def before_batch(self, number: int) -> None:
        """Hear that the indices of a batch are about to be taken, and the batch before it has been asked for.

        Args:
            number (`int`): the number of the batch in the pass, from 0; batches that a resume skips count too.
        """

    def batch_taken(self, number: int, batch: Any) -> None:
        """Hear the indices of a batch.

        Args:
            number (`int`): the number of the batch in the pass, from 0.
            batch (`Any`): what the batch sampler yields: usually a list of the dataset's indices.
        """

    def end_pass(self, number: int) -> None:
        """Hear that the batch sampler has no more batches.

        Args:
            number (`int`): how many there were.
        """


def batch_sampler_of(train_dataloader: Any) -> Any:
    """Return the batch sampler of a loader whose order it decides; None if it has none.

    Args:
        train_dataloader (`DataLoader`): the training data. A stream, and a loader in which rank 0 reads for all ranks,
            have none.
    """
    if isinstance(train_dataloader, DataLoaderDispatcher):
        return None
    # Without Accelerate's part
    loader: Any = getattr(train_dataloader, "base_dataloader", train_dataloader)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # whose batch sampler yields no indices
    return getattr(loader, "batch_sampler", None)


def listen_to_batches(
    adapter: TrainerAdapter, train_dataloader: Any, listener: BatchListener
) -> bool:
    """Tell a listener of the batches of each pass, until the end of the training.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        train_dataloader (`DataLoader`): its training data.
        listener (`BatchListener`): is told on this rank of the batches of this rank.

    Returns:
        `bool`: whether it will be told: the loader has a batch sampler whose class can be derived from.
    """
    sampler = batch_sampler_of(train_dataloader)
    if sampler is None:
        return False
    kind = type(sampler)

    def iterate(self: Any) -> Iterator[Any]:
        listener.begin_pass()
        batches = kind.__iter__(self)
        number = 0
        while True:
            listener.before_batch(number)
            try:
                batch = next(batches)
            except StopIteration:
                listener.end_pass(number)
                return
            listener.batch_taken(number, batch)
            yield batch
            number += 1

    try:
        # torch has no event for the batches that a sampler yields, and a data loader keeps the sampler that it has.
        sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate})
    except TypeError:  # a class whose instances cannot have another one, such as a list
        return False
    adapter.at_training_end(lambda: setattr(sampler, "__class__", kind))
    return True
