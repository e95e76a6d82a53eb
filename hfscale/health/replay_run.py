"""How a micro-batch is computed without training on it, under each strategy.

| strategy | what is computed twice | the gradients of the replay |
|---|---|---|
| one process, DDP | forward and backward pass of the first micro-batch of a step | stay on the rank, and are dropped |
| FSDP2, HSDP, transformers' own sharding | the same | are reduced, and dropped: FSDP2 can drop no others |
| ZeRO-1, ZeRO-2 | the same, of the module inside of the engine | are returned to us, which the engine does not see |
| ZeRO-3 | the forward pass alone: what the engine does with gradients cannot be undone | there are none |
| `ParallelTrainer` | all micro-batches of the step, through the same schedule | are reduced, and dropped |
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from hfscale.core.versions import sequence_parallel_size
from hfscale.errors import UsageError
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.native import native_layout
from hfscale.trainer.strategies.parallel import is_parallel_trainer
from hfscale.trainer.strategy import running_strategy

STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "native", "parallel")


def check_can_replay(trainer: Trainer, asked: str) -> None:
    """Check that a step of a training can be computed twice.

    Args:
        trainer (`Trainer`): prepared for training.
        asked (`str`): the argument that asks for it, for the message.

    Raises:
        UsageError: the strategy or the arguments do not allow it.
    """
    strategy = running_strategy(trainer)
    args = trainer.args
    if strategy not in STRATEGIES:
        raise UsageError(
            f"{asked}: a step cannot be replayed under {strategy}, only under {', '.join(STRATEGIES)}; leave it out"
        )
    if args.torch_compile:
        raise UsageError(f"{asked}: a compiled model has no hooks; leave it out")
    if not strategy.startswith("zero"):
        return
    engine: Any = trainer.model_wrapped
    if sequence_parallel_size(trainer) > 1:
        raise UsageError(
            f"{asked}: DeepSpeed's sequence parallelism cannot be replayed; leave it out"
        )
    if strategy != "zero3" and engine.fp16_enabled():
        raise UsageError(
            f"{asked}: under {strategy} a step in fp16 cannot be replayed; use bf16, or leave it out"
        )
    options: Any = args.gradient_checkpointing_kwargs or {}
    if strategy != "zero3" and args.gradient_checkpointing and options.get("use_reentrant"):
        raise UsageError(
            f"{asked}: under {strategy} reentrant activation checkpointing cannot be replayed; set use_reentrant to "
            "false"
        )


class MicroBatch:
    """Computes a micro-batch of a training as often as asked, and trains on it at most once.

    Args:
        trainer (`Trainer`): prepared for training, with a strategy that `check_can_replay` accepts.
        training_step (`Callable`): that of the Trainer.
    """

    def __init__(self, trainer: Trainer, training_step: Callable[..., Any]) -> None:
        self._trainer = trainer
        self._training_step = training_step
        self._strategy = running_strategy(trainer)
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
        with self._without_effect():
            model: Any = self._trainer.model_wrapped
            if self._strategy in ("zero1", "zero2"):
                model = model.module
            loss: torch.Tensor = self._training_step(model, _copied(inputs), *args, **kwargs)
        if not self._strategy.startswith("zero"):
            model_of(self._trainer).zero_grad()
        _restore(self._randoms)
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        return loss

    @contextmanager
    def _without_effect(self) -> Iterator[None]:
        trainer: Any = self._trainer
        if self._strategy.startswith("zero"):
            backward = _drop if self._strategy == "zero3" else self._local_backward
            with replaced(trainer.accelerator, "backward", backward):
                yield
        elif is_parallel_trainer(trainer):
            with trainer.keeping_batches():
                yield
        elif isinstance(model_of(trainer), FSDPModule):
            with self._with_reduction():
                yield
        else:
            with trainer.model_wrapped.no_sync() if self._strategy == "ddp" else nullcontext():
                yield

    def _local_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients without accumulating them, so that no hook of the engine runs."""
        trained = [
            parameter
            for parameter in model_of(self._trainer).parameters()
            if parameter.requires_grad
        ]
        torch.autograd.grad(loss, trained, allow_unused=True)

    @contextmanager
    def _with_reduction(self) -> Iterator[None]:
        """Let FSDP2 reduce the gradients also where the training would wait for the last micro-batch."""
        model: Any = model_of(self._trainer)
        model.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            if not self._trainer.accelerator.sync_gradients:
                layout = native_layout(model)
                if layout is not None and layout.dp_replicate > 1:
                    # As transformers does until the last micro-batch
                    model.set_requires_all_reduce(False)
                else:
                    model.set_requires_gradient_sync(False)


def _drop(loss: torch.Tensor, **kwargs: Any) -> None:
    """Compute no gradients."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an instance another attribute, or method, in the `with` block.

    Args:
        owner (`Any`): the instance.
        name (`str`): the attribute.
        value (`Any`): its value in the block.
    """
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


def _random_states() -> tuple[Any, ...]:
    gpu = (
        torch.cuda.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else None
    )
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
    return (
        dict(inputs)
        if type(inputs) is dict
        else inputs.copy()
        if hasattr(inputs, "copy")
        else inputs
    )
