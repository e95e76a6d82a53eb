"""One process, and DDP: each rank holds and steps the complete model."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate.utils import DDPCommunicationHookType
from torch import nn

from hfscale.facts.support import Combination
from hfscale.trainer.strategies.requested import gradient_compression
from hfscale.trainer.strategies.strategy import Strategy

if TYPE_CHECKING:
    from transformers import Trainer


_METHODS = {
    DDPCommunicationHookType.FP16: "fp16",
    DDPCommunicationHookType.BF16: "bf16",
    DDPCommunicationHookType.POWER_SGD: "powersgd",
    DDPCommunicationHookType.BATCHED_POWER_SGD: "powersgd",
}
"""Accelerate's hooks that compress gradients -> the compression, as rules know it."""


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

    def combination(self, environ: Mapping[str, str] = os.environ) -> Combination:
        """Describe the training, with the hook by which DDP compresses gradients where a script has set one."""
        asked = super().combination(environ)
        handler = self.trainer.accelerator.ddp_handler
        is_from_script = handler is not None and asked.compression == "none"
        if not is_from_script or self.trainer.args.world_size == 1:
            return asked
        return replace(asked, compression=_METHODS.get(handler.comm_hook, "none"))

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        """Keep DDP from averaging the gradients, and have its next forward pass broadcast buffers as this one does."""
        ddp = self.ddp()
        if ddp is None:
            yield
            return
        broadcasts = ddp.require_forward_param_sync
        with ddp.no_sync():
            yield
        ddp.require_forward_param_sync = broadcasts

    def is_wrapped(self, wrapper: nn.Module) -> bool:
        """Return whether DDP has wrapped the model; one process needs no wrapper."""
        return self.trainer.args.world_size == 1 or self.ddp() is not None
