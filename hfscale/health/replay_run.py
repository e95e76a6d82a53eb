"""How a micro-batch is computed twice, and trained on once (`Strategy.without_effect`).

| strategy | what is computed twice | the gradients of the replay |
|---|---|---|
| one process, DDP | forward and backward pass of the first micro-batch of a step | stay on the rank, and are dropped |
| FSDP2, HSDP, transformers' own sharding | the same | are reduced, and dropped: FSDP2 can drop no others |
| ZeRO-0 to ZeRO-2 | the same, of the module inside of the engine | are returned to us, which the engine does not see |
| ZeRO-3 | the forward pass alone: what the engine does with gradients cannot be undone | there are none |
| `ParallelTrainer` | all micro-batches of the step, through the same schedule | are reduced, and dropped |
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from hfscale.errors import UsageError
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy


def check_can_replay(trainer: Trainer, asked: str) -> None:
    """Check that a step of a training can be computed twice.

    Args:
        trainer (`Trainer`): prepared for training.
        asked (`str`): the argument that asks for it, for the message.

    Raises:
        UsageError: the strategy or the arguments do not allow it.
    """
    if trainer.args.torch_compile:
        raise UsageError(f"{asked}: a compiled model has no hooks; leave it out")
    problem = Strategy.of(trainer).why_effects_remain()
    if problem is not None:
        raise UsageError(f"{asked}: {problem}")


class MicroBatch:
    """Computes a micro-batch of a training as often as asked, and trains on it at most once.

    Args:
        trainer (`Trainer`): prepared for training, with a strategy that `check_can_replay` accepts.
        training_step (`Callable`): that of the Trainer.
    """

    def __init__(self, trainer: Trainer, training_step: Callable[..., Any]) -> None:
        self._strategy = Strategy.of(trainer)
        self._training_step = training_step
        self._randoms = _random_states()
        self._buffers = [(buffer, buffer.clone()) for buffer in model_of(trainer).buffers()]

    def replay(self, inputs: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Compute it, and leave everything as it was.

        Args:
            inputs (`Any`): the batch.
            args, kwargs: further arguments of the training step.

        Returns:
            The loss.
        """
        with self._strategy.without_effect() as model:
            loss: torch.Tensor = self._training_step(model, _copied(inputs), *args, **kwargs)
        _restore(self._randoms)
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        return loss


def _random_states() -> tuple[Any, ...]:
    gpu = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gpu = torch.cuda.get_rng_state()
    return (random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu)


def _restore(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch, of_gpu = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)


def _copied(inputs: Any) -> Any:
    """Return a copy of a batch from which a trainer may take entries."""
    if type(inputs) is dict:
        return dict(inputs)
    return inputs.copy() if hasattr(inputs, "copy") else inputs
