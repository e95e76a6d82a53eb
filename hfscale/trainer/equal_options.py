"""Checks that all ranks were given the same: options and arguments decide whether the ranks meet in an exchange."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hfscale.core.collectives import START
from hfscale.core.options import Options
from hfscale.core.spelling import spelled
from hfscale.errors import HfScaleError, UsageError
from hfscale.trainer.strategies.requested import requested_strategy

if TYPE_CHECKING:
    from transformers import Trainer

OF_ONE_MACHINE = ("baseline", "peak_tflops", "usd_per_gpu_hour")
"""Options about a machine or its files, which may differ: no exchange depends on them."""


ARGUMENTS = (
    "max_steps",
    "num_train_epochs",
    "gradient_accumulation_steps",
    "logging_strategy",
    "logging_steps",
    "save_strategy",
    "save_steps",
    "eval_strategy",
    "eval_steps",
    "bf16",
    "fp16",
    "per_device_train_batch_size",
    "dataloader_drop_last",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
)
"""The arguments of Trainer that decide when the ranks meet, what they compute, and how replicas are stepped: a node
with an older config would train on without an error. A script may give each rank a seed of its own."""
STRATEGY = "the launcher's strategy"


def check_equal_options(callbacks: Iterable[object], trainer: "Trainer") -> None:
    """Check that options, arguments and strategy are equal on all ranks. Every rank must call it.

    Args:
        callbacks (`Iterable`): the callbacks, the same ones on every rank; those without `options` are left out.
        trainer (`Trainer`): the trainer, before it has prepared its model.

    Raises:
        UsageError: one differs; raised on every rank. Otherwise some ranks would wait for ever for the others.
    """
    own = own_options(callbacks)
    try:
        own[STRATEGY] = requested_strategy(trainer.args, os.environ)
    except (
        HfScaleError
    ) as error:  # raised again by the strategy's own check, where it is on all ranks
        own[STRATEGY] = str(error)
    for name in ARGUMENTS:
        own[name] = _shown(getattr(trainer.args, name, None))
    START.combine("start: options", own, _check)


def own_options(callbacks: Iterable[object]) -> dict[str, str]:
    """Return the options of callbacks as texts, by their names.

    Args:
        callbacks (`Iterable`): as for `check_equal_options`.
    """
    found = {}
    for callback in callbacks:
        options = getattr(callback, "options", None)
        if not isinstance(options, Options):
            continue
        for option in fields(options):
            if option.name not in OF_ONE_MACHINE:
                found[option.name] = _shown(getattr(options, option.name))
    return found


def _shown(value: Any) -> str:
    """Return a value as text; of an object whose text is another one in each process, its type."""
    if value is None:
        return "not given"
    if isinstance(value, dict):
        items = []
        for name in sorted(value, key=str):
            shown = _shown(value[name])
            items.append(f"{name}={shown}")
        return ", ".join(items)
    is_plain = isinstance(value, bool | int | float | str | tuple | list)
    return str(value) if is_plain else type(value).__name__


def _check(ranks: list[Mapping[str, str]]) -> None:
    first = ranks[0]
    for number, other in enumerate(ranks):
        for name in {**first, **other}:
            mine, theirs = first.get(name), other.get(name)
            if mine == theirs:
                continue
            named = name if name == STRATEGY else spelled(name)
            values = f"{mine} on rank 0, {theirs} on rank {number}"
            raise UsageError(f"{named} differs: {values}; give the same on all ranks")
