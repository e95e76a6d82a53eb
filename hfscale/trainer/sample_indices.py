"""Tells which samples of the dataset an optimizer step reads on this rank, so that a failure can name them."""

from typing import Any

from transformers import Trainer
from transformers.trainer_utils import has_length

from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.batch_indices import BatchListener, listen_to_batches
from hfscale.trainer.state import micro_batches_of_pass


class StepSamples(BatchListener):
    """The samples of each optimizer step; `record_samples` makes it.

    Args:
        trainer (`Trainer`): the Trainer whose training has begun.
    """

    def __init__(self, trainer: Trainer) -> None:
        # The indices of this rank's micro-batches by their number in the pass, as far as they have been taken
        self._batches: dict[int, list[Any]] = {}
        self._trainer = trainer

    def begin_pass(self) -> None:
        self._batches.clear()

    def batch_taken(self, number: int, batch: Any) -> None:
        self._batches[number] = batch

    def of_step_after(self, steps: int) -> list[Any]:
        """Return the dataset indices of a step on this rank, once its batches have been fetched.

        Args:
            steps (`int`): optimizer steps of the run before it.
        """
        return [index for batch in self.batches_after(steps) for index in batch]

    def batches_after(self, steps: int) -> list[Any]:
        """Return the dataset indices of each micro-batch of a step on this rank, once they have been fetched.

        Args:
            steps (`int`): optimizer steps of the run before it.
        """
        batches = self._batches
        first = micro_batches_of_pass(self._trainer, steps)
        accumulation = int(self._trainer.args.gradient_accumulation_steps)
        for number in [number for number in batches if number < first]:
            del batches[number]
        # A data loader reads ahead, so there are later batches too.
        numbers = range(first, first + accumulation)
        return [batches[number] for number in numbers if number in batches]


def record_samples(adapter: TrainerAdapter, train_dataloader: Any) -> StepSamples | None:
    """Record, until the end of the training, which samples each rank reads.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer, whose state is that of the beginning of the training.
        train_dataloader (`DataLoader`): its training data.

    Returns:
        `StepSamples` or `None`: None if the indices cannot be known: the dataset is iterable, rank 0 reads for all,
        the data loader has no length or no batch sampler, or a resumed run does not skip what it has read.
    """
    trainer = adapter.trainer
    if not has_length(train_dataloader):
        return None
    if trainer.args.ignore_data_skip and trainer.state.global_step:
        return None
    samples = StepSamples(trainer)
    return samples if listen_to_batches(adapter, train_dataloader, samples) else None
