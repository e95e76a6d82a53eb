"""What a step moves besides gradients (`state_of`, `random_states`), and the check that it is no weights.

A replay puts it back, and so does a step that is left out.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer

from hfscale.core.bit_hash import named_hashes, named_numbers
from hfscale.errors import UsageError
from hfscale.replays.kept_state import KeptState
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import own_part

_NOT_OF_A_STEP = (
    "accelerator",
    "callback_handler",
    "compute_metrics",
    "control",
    "data_collator",
    "deepspeed",
    "eval_dataset",
    "lr_scheduler",
    "model_init",
    "model_wrapped",
    "optimizer",
    "preprocess_logits_for_metrics",
    "processing_class",
    "train_dataset",
)
"""Attributes of a Trainer that a computation of the loss does not change; the strategy looks after the wrapper."""


def check_kept(kept: KeptState, asked: str, verb: str = "replayed") -> None:
    """Check that a state can be put back.

    Args:
        kept (`KeptState`): the state.
        asked (`str`): the argument that asks for it, for the message.
        verb (`str`): what is to be done with a step.

    Raises:
        UsageError: something in it cannot; it is named.
    """
    for problem in kept.problems:
        raise UsageError(f"{asked}: {problem}, so that a step cannot be {verb}; leave it out")


def check_state(trainer: Trainer, asked: str, verb: str = "replayed") -> None:
    """Check that what the model and the Trainer hold now can be put back.

    Args:
        trainer (`Trainer`): prepared for training.
        asked (`str`): the argument that asks for it, for the message.
        verb (`str`): what is to be done with a step.

    Raises:
        UsageError: something cannot; it is named.
    """
    kept = state_of(trainer, ())
    check_kept(kept, asked, verb)


def state_of(trainer: Trainer, batch: tuple[Any, ...], *, without: Iterable[Any] = ()) -> KeptState:
    """Return what the computation of a micro-batch may move in this process, apart from random numbers.

    Args:
        trainer (`Trainer`): prepared for training.
        batch (`tuple`): what `training_step` is called with after the model.
        without (`Iterable`): objects that are not entered.
    """
    model = model_of(trainer)
    state = trainer.state
    roots = {"model": model, "the batch": batch, "trainer.state": state, "trainer": trainer}
    left_out: list[Any] = [*state.log_history, *without]
    for name, held in vars(trainer).items():
        if _is_left_out(name):
            left_out.append(held)
    return KeptState(roots, left_out=left_out, model=model)


def random_states() -> tuple[Any, ...]:
    """Return the states of the random number generators of this process."""
    gpu = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gpu = torch.cuda.get_rng_state()
    return (random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu)


def put_random_states_back(states: tuple[Any, ...]) -> None:
    """Set the random number generators of this process.

    Args:
        states (`tuple`): what `random_states` returned.
    """
    of_python, of_numpy, of_torch, of_gpu = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)


def hash_weights(trainer: Trainer, kept: KeptState) -> dict[str, torch.Tensor]:
    """Return hashes of all parameters of the model, and of others that the Trainer refers to, by name.

    Args:
        trainer (`Trainer`): prepared for training.
        kept (`KeptState`): its state, which names those others.
    """
    Strategy.of(trainer).reshard()
    model = model_of(trainer)
    parameters = dict(_named_parameters(model))
    parameters.update(kept.parameters)
    return _hashes(parameters)


def check_weights(
    before: dict[str, torch.Tensor],
    now: dict[str, torch.Tensor],
    asked: str,
    verb: str = "replayed",
) -> None:
    """Check that computing a loss has changed no weight.

    Args:
        before, now (`dict[str, torch.Tensor]`): what `hash_weights` returned before and after it.
        asked (`str`): the argument that asks for it, for the message.
        verb (`str`): what is to be done with a step.

    Raises:
        UsageError: it has: a forward pass, or the loss, writes parameters.
    """
    numbers = named_numbers(now)
    for name, value in named_numbers(before).items():
        if numbers.get(name) != value:
            raise UsageError(
                f"{asked}: computing the loss changes the parameter {name}, so that a step cannot be {verb}; leave it "
                "out, or change it in a callback after the step"
            )


def _is_left_out(name: str) -> bool:
    """Return whether an attribute of a Trainer is not entered; a method replaced on the instance is one too."""
    if name in _NOT_OF_A_STEP:
        return True
    if name == "compute_loss":
        return False
    of_class = getattr(Trainer, name, None)
    return callable(of_class)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter


def _hashes(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in parameters.items():
        own = own_part(parameter)
        if own is None or own.is_meta:
            continue
        has_bytes = own.numel() > 0 and own.layout == torch.strided
        if has_bytes:
            found[name] = own
    return named_hashes(found)
