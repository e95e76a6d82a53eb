"""Tells listeners when the batch sampler of a training takes the indices of a batch, or when a stream is read.

A loader without worker processes fetches a batch right after its indices have been taken, so `before_batch` is also
the last moment before the samples of a batch are read. A stream has no indices: there the samples are counted.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import IterableDataset, get_worker_info

from hfscale.trainer.adapter import TrainerAdapter

_COMPARED = 64
"""Entries of each column by which a sample is recognised."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the text of an object, such as an image, where it is in this process."""


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

    def sample_read(self, sample: Any) -> None:
        """Hear that a sample of a stream has been read; it belongs to the batch that was taken last.

        Args:
            sample (`Any`): what the stream yields.
        """

    def end_pass(self, number: int) -> None:
        """Hear that the batch sampler, or the stream, has no more batches.

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


def own_stream_of(train_dataloader: Any) -> Any:
    """Return the stream that a loader reads, if it is a user's own class; else None.

    Args:
        train_dataloader (`DataLoader`): the training data. Streams of `datasets` have positions of their own.
    """
    loader: Any = getattr(train_dataloader, "base_dataloader", train_dataloader)
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDatasetShard):  # Accelerate's part: each rank reads all
        dataset = dataset.dataset
    return dataset if is_own_stream(dataset) else None


def is_hub_stream(dataset: Any) -> bool:
    """Whether training data is a stream of `datasets`.

    Args:
        dataset (`Any`): training data, or None.
    """
    # Trainer works without `datasets`; a stream of it exists only where it is imported
    hub = sys.modules.get("datasets")
    return hub is not None and isinstance(dataset, hub.IterableDataset)


def is_own_stream(dataset: Any) -> bool:
    """Whether training data is a stream of a user's own class.

    Args:
        dataset (`Any`): training data, or None.
    """
    return isinstance(dataset, IterableDataset) and not is_hub_stream(dataset)


def listen_to_stream(
    adapter: TrainerAdapter, stream: Any, samples_per_batch: int, listener: BatchListener
) -> bool:
    """Tell a listener of the samples that this process reads from a stream, until the end of the training.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        stream (`IterableDataset`): what `own_stream_of` returned; a process that does not read it hears nothing.
        samples_per_batch (`int`): how many samples are one batch of the listener.
        listener (`BatchListener`): is told of the batches; `batch_taken` is called when the first sample of a batch is
            about to be read, with None.

    Returns:
        `bool`: whether it will be told: the class of the stream can be derived from.
    """
    kind = type(stream)

    def iterate(self: Any) -> Iterator[Any]:
        samples: Iterator[Any]
        if get_worker_info() is not None:
            samples = kind.__iter__(self)
            return samples
        listener.begin_pass()
        samples = kind.__iter__(self)
        return _heard(samples, samples_per_batch, listener)

    try:
        # A wrapper would hide the attributes and methods that the user's program calls on the stream.
        stream.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate})
    except TypeError:
        return False
    adapter.at_training_end(lambda: setattr(stream, "__class__", kind))
    return True


def digest_of(sample: Any) -> str:
    """Return a hash by which a sample of a stream is recognised: of the beginning of each of its columns.

    Args:
        sample (`Any`): a dictionary of columns, or anything else.
    """
    columns = sample.items() if isinstance(sample, dict) else enumerate([sample])
    heads = [(name, _head(value)) for name, value in columns]
    return xxhash.xxh3_64_hexdigest(_ADDRESS.sub("", repr(heads)).encode())


def _head(value: Any) -> Any:
    """Return the beginning of a column; what cannot be cut as it is: a number, an image, a tensor of one."""
    if isinstance(value, Mapping):
        return [(name, _head(inner)) for name, inner in value.items()]
    try:
        return value[:_COMPARED]
    except Exception:  # each class raises errors of its own
        return value


def _heard(samples: Iterator[Any], per_batch: int, listener: BatchListener) -> Iterator[Any]:
    count = 0
    while True:
        if count % per_batch == 0:
            listener.before_batch(count // per_batch)
        try:
            sample = next(samples)
        except StopIteration:
            listener.end_pass(-(-count // per_batch))
            return
        if count % per_batch == 0:
            listener.batch_taken(count // per_batch, None)
        listener.sample_read(sample)
        count += 1
        yield sample


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
