"""Tells which samples of the dataset an optimizer step reads on this rank, so that a failure can name them."""

import math
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

from hfscale.trainer.adapter import TrainerAdapter


class StepSamples:
    """The samples of each optimizer step; `record_samples` makes it.

    Args:
        batches (`dict[int, list]`): the indices of this rank's micro-batches by their number in the pass, as far as
            they have been taken.
        steps_per_pass (`int`): optimizer steps in a pass over the data.
        accumulation (`int`): micro-batches of a step.
    """

    def __init__(
        self, batches: dict[int, list[Any]], steps_per_pass: int, accumulation: int
    ) -> None:
        self._batches = batches
        self._steps_per_pass = steps_per_pass
        self._accumulation = accumulation

    def of_step_after(self, steps: int) -> list[Any]:
        """Return the dataset indices of a step on this rank, once its batches have been fetched.

        Args:
            steps (`int`): optimizer steps of the run before it.
        """
        batches = self._batches
        first = steps % self._steps_per_pass * self._accumulation
        for number in [number for number in batches if number < first]:
            del batches[number]
        # A data loader reads ahead, so there are later batches too.
        step = [
            batches[number]
            for number in range(first, first + self._accumulation)
            if number in batches
        ]
        return [index for batch in step for index in batch]


def record_samples(adapter: TrainerAdapter, train_dataloader: Any) -> StepSamples | None:
    """Record, until the end of the training, which samples each rank reads.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer, whose state is that of the beginning of the training.
        train_dataloader (`DataLoader`): its training data.

    Returns:
        `StepSamples` or `None`: None if the indices cannot be known: the dataset is iterable, rank 0 reads for all,
        the data loader has no length or no batch sampler, or a resumed run does not skip what it has read.
    """
    args = adapter.trainer.args
    if isinstance(train_dataloader, DataLoaderDispatcher) or not has_length(train_dataloader):
        return None
    if args.ignore_data_skip and adapter.trainer.state.global_step:
        return None
    # Without Accelerate's part
    loader: Any = getattr(train_dataloader, "base_dataloader", train_dataloader)
    sampler = getattr(loader, "batch_sampler", None)
    # Whose batch sampler yields no indices
    if sampler is None or isinstance(loader.dataset, IterableDataset):
        return None
    kind = type(sampler)
    batches = dict[int, list[Any]]()

    def iterate(self: Any) -> Iterator[list[Any]]:
        batches.clear()
        for number, batch in enumerate(kind.__iter__(self)):
            batches[number] = batch
            yield batch

    try:
        # torch has no event for the batches that a sampler yields, and a data loader keeps the sampler that it has.
        sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate})
    except TypeError:  # a class whose instances cannot have another one
        return None
    adapter.at_training_end(lambda: setattr(sampler, "__class__", kind))
    accumulation = args.gradient_accumulation_steps
    return StepSamples(
        batches, max(1, math.ceil(len(train_dataloader) / accumulation)), accumulation
    )
