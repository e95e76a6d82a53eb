"""Asks before each update of the optimizer whether it is made, and leaves out an update that is refused.

Trainer's own way to leave one out is that of fp16: the step counts, the optimizer and the schedule stay where they
are, and `Accelerator.optimizer_step_was_skipped` says so, which averages of weights ask too. The same is done here.

- Where Trainer steps the optimizer, it is asked when Trainer has the norm of the gradients, and `step` of Accelerate's
  optimizer does nothing.
- Under ZeRO the engine is asked in its update, which is in the last backward pass, and drops the gradients as where
  they overflow.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from hfscale.core.collectives import TRAINING
from hfscale.core.versions import has_epoch_methods
from hfscale.errors import MissingDependencyError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import is_distributed_tensor

_SKIPPED = "_is_overflow"
"""Attribute of Accelerate's optimizer that `step_was_skipped` returns; only a gradient scaler sets it."""


class UpdateGate:
    """Asks before each update, until the end of the training; `open` begins it.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer that is prepared for training.
        ask (`Callable`): called on every rank with the norm of the gradients of the step, before they were clipped;
            returns whether the update is made, the same on all ranks.
        left_out (`Callable`): called on every rank for an update that is refused, when Trainer has added up the loss
            of the step and before any callback hears of the update.
    """

    def __init__(
        self, adapter: TrainerAdapter, ask: Callable[[float], bool], left_out: Callable[[], None]
    ) -> None:
        self._adapter = adapter
        self._ask = ask
        self._left_out = left_out
        self._has_engine = Strategy.of(adapter.trainer).engine_steps
        self._is_made = True

    def open(self) -> None:
        """Begin to ask.

        Raises:
            MissingDependencyError: the installed transformers does not say the norm before the optimizer steps.
        """
        if not has_epoch_methods():
            raise MissingDependencyError(
                "the norm of the gradients is not known before the optimizer steps: upgrade transformers "
                "(pip install --upgrade 'transformers>=5.4')"
            )
        adapter = self._adapter
        adapter.wrap_method("_get_grad_norm", self._asking)
        if self._has_engine:
            adapter.at_training_end(Strategy.of(adapter.trainer).ask_engine(self._ask_of_engine))
        else:
            adapter.wrap_optimizer_step(self._stepping)

    def _ask_of_engine(self, square: float) -> bool:
        """Answer the engine, which gives the squared norm of the gradients that this rank updates with."""
        squares = TRAINING.gather_numbers("norm of the gradients", [square])
        self._is_made = self._ask(math.sqrt(float(squares.sum())))
        return self._is_made

    def _asking(self, norm_of: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(norm_of)
        def norm_and_ask(*args: Any, **kwargs: Any) -> Any:
            norm = norm_of(*args, **kwargs)
            if not self._has_engine:
                self._is_made = self._ask(_number(norm))
            if self._is_made:
                return norm
            self._left_out()
            return None  # Trainer then logs none

        return norm_and_ask

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        optimizer: Any = self._adapter.trainer.optimizer

        @functools.wraps(step)
        def step_if_made(*args: Any, **kwargs: Any) -> Any:
            setattr(optimizer, _SKIPPED, not self._is_made)
            return step(*args, **kwargs) if self._is_made else None

        return step_if_made


def _number(norm: Any) -> float:
    """Return a norm as a number, which waits for a GPU."""
    return float(norm.full_tensor() if is_distributed_tensor(norm) else norm)
