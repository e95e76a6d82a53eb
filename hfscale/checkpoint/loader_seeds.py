"""Makes data loaders draw as many random numbers in a resumed run as in an uninterrupted one.

A loader draws a seed for its workers from torch's global generator when it starts them. A loader that keeps its
workers (`persistent_workers`) draws once in an uninterrupted run, and Trainer resumes with a new loader, which draws
again at the next epoch or evaluation. All random numbers after it, such as those of dropout, would then differ.
"""

from collections.abc import Callable
from typing import Any

import torch

from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import saved_state

logger = get_logger(__name__)


def keep_loader_seeds(adapter: TrainerAdapter, train_dataloader: Any) -> None:
    """Keep the loaders of a training that resumes from drawing seeds that the run has drawn before.

    Call it at the beginning of each training, before its workers start. What the workers themselves draw (such as the
    masks of a collator) is not that of an uninterrupted run, since their generators are not in a checkpoint.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        train_dataloader (`DataLoader`): its training data.
    """
    state = adapter.trainer.state
    started = (
        saved_state(state, "eval_loaders")
        if adapter.trainer.args.dataloader_persistent_workers
        else {}
    )
    # Names of the loaders whose workers earlier launches of the run have started
    before = set(started)

    def at_evaluation(loader: Any) -> None:
        # Trainer sets it when it keeps the first one
        kept = getattr(adapter.trainer, "_eval_dataloaders", {})
        name = next((name for name, other in kept.items() if other is loader), None)
        if name is None or not _keeps_workers(loader):
            return
        if name in before:
            _use_own_generator(loader, state.global_step)
        started[name] = True

    def take_started() -> Callable[[], None]:
        held = dict(started)

        def put_back() -> None:
            started.clear()
            started.update(held)

        return put_back

    adapter.evaluations.on_eval_dataloader("seeds", at_evaluation)
    # The launch that makes it up draws the seed, as the uninterrupted run did
    adapter.evaluations.put_back_if_cut("started loaders", take_started)
    if adapter.resumes_from is not None and _keeps_workers(train_dataloader):
        _use_own_generator(train_dataloader, state.global_step)
        # Their generators go on from pass to pass
        warn_of_workers(adapter.trainer.args.dataloader_num_workers, "this pass and later ones")


def warn_of_workers(count: int, passes: str) -> None:
    """Log that what the workers of a data loader draw is not that of an uninterrupted run.

    Args:
        count (`int`): the number of workers.
        passes (`str`): in which passes over the data.
    """
    logger.warning(
        "random numbers that the %d processes of the data loader draw for %s, such as masks of a collator, "
        "are not those of an uninterrupted run: set dataloader_num_workers to 0 if the data draw any",
        count,
        passes,
    )


def _keeps_workers(loader: Any) -> bool:
    return bool(getattr(getattr(loader, "base_dataloader", loader), "persistent_workers", False))


def _use_own_generator(loader: Any, step: int) -> None:
    """Give a loader its own generator for the seed of its workers; each launch and step have another seed."""
    loader = getattr(loader, "base_dataloader", loader)
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed() + step)
