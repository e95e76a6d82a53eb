"""Tells which samples of the dataset an optimizer step reads on this rank, so that a failure can name them."""

from typing import Any

from transformers.trainer_utils import has_length

from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.batch_indices import BatchListener, listen_to_batches
from hfscale.trainer.state import steps_per_epoch


class StepSamples(BatchListener):
    """The samples of each optimizer step; `record_samples` makes it.

    Args:
        steps_per_pass (`int`): optimizer steps in a pass over the data.
        accumulation (`int`): micro-batches of a step.
    """

    def __init__(self, *, steps_per_pass: int, accumulation: int) -> None:
        # The indices of this rank's micro-batches by their number in the pass, as far as they have been taken
        self._batches: dict[int, list[Any]] = {}
        self._steps_per_pass = steps_per_pass
        self._accumulation = accumulation

    def begin_pass(self) -> None:
        self._batches.clear()

    def batch_taken(self, number: int, batch: Any) -> None:
        self._batches[number] = batch

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
    trainer = adapter.trainer
    if not has_length(train_dataloader):
        return None
    if trainer.args.ignore_data_skip and trainer.state.global_step:
        return None
    samples = StepSamples(
        steps_per_pass=steps_per_epoch(trainer),
        accumulation=trainer.args.gradient_accumulation_steps,
    )
    return samples if listen_to_batches(adapter, train_dataloader, samples) else None
