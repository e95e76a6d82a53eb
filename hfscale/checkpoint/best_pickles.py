"""Checks the best checkpoint of a run before a training that will load it at its end."""

from pathlib import Path

from hfscale.checkpoint.best import best_step_of
from hfscale.checkpoint.pickles import check_pickles
from hfscale.core.exchanges import Exchanges


def check_best_on_all_ranks(checkpoint: Path, run_dir: Path, exchanges: Exchanges) -> None:
    """Check the pickles of the best checkpoint that `checkpoint` names. Every rank must call it.

    At the end of the training Trainer loads it without another check.

    Args:
        checkpoint (`Path`): the checkpoint to resume from.
        run_dir (`Path`): the folder of the run's checkpoints.
        exchanges (`Exchanges`): between all ranks.

    Raises:
        CheckpointError: a pickle of the best checkpoint has more than tensors and plain values; raised on every rank.
    """
    with exchanges.agreed("pickles of the best checkpoint"):
        if exchanges.rank == 0:
            step = best_step_of(checkpoint)
            best = run_dir / f"checkpoint-{step}"
            if step is not None and best.is_dir():
                check_pickles(best)
