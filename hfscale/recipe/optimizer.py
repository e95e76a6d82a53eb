"""`--optim muon`, which transformers' `TrainingArguments` does not have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError
from hfscale.optim.muon import Muon
from hfscale.trainer.hooks import use_optimizer
from hfscale.trainer.state import requested_optimizer

if TYPE_CHECKING:
    from transformers import Trainer

MUON = "muon"
"""The value of `--optim`."""
DEFAULT_OPTIMIZER: str = TrainingArguments.default_optim
"""transformers' own default of `--optim`."""
OPTIMIZERS = (*(name.value for name in OptimizerNames), MUON)
"""What `--optim` may be."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "momentum": float,
    "iterations": int,
    "adjust_lr": str,
    "dtype": lambda text: _DTYPES[text],
}
"""What `--optim_args` may set for Muon, and how it is read."""


@contextmanager
def hidden_from_transformers(args: TrainingArguments) -> Iterator[None]:
    """Let `TrainingArguments` check arguments whose `optim` is `muon`: it sees AdamW in the meantime.

    Args:
        args (`TrainingArguments`): within the context, `optim` is `adamw_torch` if it was `muon`.

    Raises:
        UsageError: `optim_args` has something that Muon does not know.
    """
    if requested_optimizer(args) != MUON:
        yield
        return
    muon_options(args)  # a mistake is reported before the model is loaded
    args.optim = "adamw_torch"
    try:
        yield
    finally:
        args.optim = MUON


def muon_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the keyword arguments of `Muon` that the flags give, without its module.

    Args:
        args (`TrainingArguments`): `optim_args` may have the options of the matrices, such as
            `momentum=0.95,iterations=5`; AdamW's are `--adam_beta1`, `--adam_beta2` and `--adam_epsilon`.

    Raises:
        UsageError: an option is not known, or has a value that it cannot have.
    """
    options: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    for pair in filter(None, (args.optim_args or "").replace(" ", "").split(",")):
        name, _, text = pair.partition("=")
        try:
            options[name] = _OPTIONS[name](text)
        except (KeyError, ValueError):
            raise ParameterError(
                "optim_args",
                pair,
                f"{spelled('optim', MUON)} takes momentum=0.95, iterations=5, adjust_lr=match_rms_adamw or original, "
                "and dtype=bfloat16 or float32",
            ) from None
    return options


def use_muon(trainer: "Trainer") -> None:
    """Let a Trainer make Muon if its arguments ask for it.

    Args:
        trainer (`Trainer`): a Trainer that has its model and has not made its optimizer.

    Raises:
        UsageError: an option of `--optim_args` is out of its range, or no matrix of a hidden layer is trained.
    """
    if trainer.args.optim == MUON:
        use_optimizer(trainer, Muon, {**muon_options(trainer.args), "module": trainer.model})
