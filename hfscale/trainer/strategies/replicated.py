"""One process, and DDP: each rank holds and steps the complete model."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from hfscale.trainer.strategies.requested import gradient_compression
from hfscale.trainer.strategies.strategy import Strategy

if TYPE_CHECKING:
    from transformers import Trainer


class Replicated(Strategy):
    """One process (`single`), or several of which each has the complete model (`ddp`)."""

    @classmethod
    def name_in(cls, trainer: "Trainer") -> str | None:
        """Return `single` or `ddp`: whatever nothing else distributes is one of them."""
        return "ddp" if trainer.args.world_size > 1 else "single"

    @property
    def equal_gradients(self) -> bool:
        """Whether all ranks have the same gradients when the optimizer steps.

        1-bit Adam and LAMB do not: after their warm-up they average momenta in the optimizer.
        """
        return not gradient_compression(self.trainer.args).startswith("onebit")

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        """Keep DDP from averaging the gradients."""
        ddp = self.ddp()
        with nullcontext() if ddp is None else ddp.no_sync():
            yield

    def is_wrapped(self, wrapper: nn.Module) -> bool:
        """Return whether DDP has wrapped the model; one process needs no wrapper."""
        return self.trainer.args.world_size == 1 or self.ddp() is not None
