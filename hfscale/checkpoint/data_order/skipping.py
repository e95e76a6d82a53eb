"""Checks that Accelerate can leave out the batches of an epoch that a checkpoint was trained on."""

from typing import Any

from accelerate import skip_first_batches
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import has_length

from hfscale.core.logging import get_logger
from hfscale.errors import UsageError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import micro_batches_of_pass

logger = get_logger(__name__)


def check_can_skip(adapter: TrainerAdapter, train_dataloader: Any) -> None:
    """Check that a resume in the middle of an epoch leaves out the batches that were trained on, and no others.

    Trainer has Accelerate make a loader for the rest of the epoch, from the dataset and the batch sampler of its own.
    A loader of a program's own class may give other batches than these two: that of TRL's IW-OPD repeats them. Where
    the arguments ask that nothing is left out, a line says what follows.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer whose training begins.
        train_dataloader (`DataLoader`): its training data.

    Raises:
        UsageError: the training resumes in the middle of an epoch, and the rest of it would be another one.
    """
    trainer = adapter.trainer
    is_ignored = trainer.args.ignore_data_skip
    if adapter.resumes_from is not None and is_ignored:
        _say_what_follows(trainer, train_dataloader)
    if train_dataloader is None or isinstance(train_dataloader, DataLoader):
        return
    if not has_length(train_dataloader):
        return
    is_resumed = adapter.resumes_from is not None and not is_ignored
    trained = micro_batches_of_pass(trainer, trainer.state.global_step) if is_resumed else 0
    skipped = max(trained, 1)
    # What is not a loader of torch may lack what Accelerate reads, or have another length than what it makes
    try:
        rest = len(skip_first_batches(train_dataloader, skipped))
    except (AttributeError, TypeError):
        rest = -1
    if rest == max(len(train_dataloader) - skipped, 0):
        return
    name = f"{type(trainer).__name__}'s data loader ({type(train_dataloader).__name__})"
    if trained:
        raise UsageError(
            f"{name} cannot leave out the {trained} batches of this epoch that {adapter.resumes_from} was trained on: "
            "resume from a checkpoint at the end of an epoch, or begin the epoch again with ignore_data_skip=True"
        )
    logger.warning(
        "%s cannot leave out batches: no run can resume from a checkpoint in the middle of an epoch",
        name,
    )


def _say_what_follows(trainer: Trainer, train_dataloader: Any) -> None:
    """Say that a resumed training reads other data than an uninterrupted one."""
    steps = trainer.state.global_step
    has_passes = has_length(train_dataloader)
    if has_passes and not micro_batches_of_pass(trainer, steps):
        return  # it continues with a whole pass
    logger.warning(
        "ignore_data_skip is on: what was read before step %d is not left out, so that rows and losses are others "
        "than in an uninterrupted run; leave it out to continue at the next row, as hfscale also does in a stream",
        steps,
    )
