"""Names of the strategy functions that other modules still use."""

from typing import TYPE_CHECKING

from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import Trainer


def running_strategy(trainer: "Trainer") -> str:
    """Return the name of the strategy that is set up.

    Args:
        trainer (`Trainer`): a Trainer or a subclass of it.
    """
    return Strategy.of(trainer).name
