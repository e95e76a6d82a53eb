"""Short trainings of a narrow copy of a model, one for each learning rate, and which rate is the best."""

import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_utils import PreTrainedModel

from hfscale.errors import ParameterError, UsageError
from hfscale.lr_scaling.callback import LRScalingCallback
from hfscale.lr_scaling.narrow_config import config_at_width
from hfscale.lr_scaling.width import initialize_at_width

_LAST = 10
"""The last one in so many steps gives the loss of a trial."""


@dataclass(frozen=True, kw_only=True)
class RateTrial:
    """A training with one learning rate."""

    rate: float
    """The learning rate."""
    loss: float
    """Mean training loss of the last steps, in nats per token; infinite where the training diverged."""


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """What all trainings of a sweep have in common."""

    steps: int = 200
    """Optimizer steps, a tenth of them warm-up; the rate then falls to 0 by a cosine."""
    batch: int = 16
    """Sequences per step."""
    seed: int = 0
    """Of initial values and of the order of the sequences."""
    base_width: int | None = None
    """The width for which copies are initialised; None: they are not."""


def sweep_rates(
    kind: type[PreTrainedModel],
    config: Any,
    rows: torch.Tensor,
    *,
    width: int,
    rates: Sequence[float],
    settings: SweepSettings,
    log: Callable[[RateTrial], None] = lambda trial: None,
) -> list[RateTrial]:
    """Train a narrow copy once with each learning rate.

    Args:
        kind (`type`): the class of a causal language model.
        config (`PreTrainedConfig`): its config at full width.
        rows (`torch.Tensor`): token ids (sequences, tokens).
        width (`int`): the `hidden_size` of the copy.
        rates (`Sequence[float]`): the learning rates.
        settings (`SweepSettings`): what the trainings have in common.
        log (`Callable`): called after each training.

    Returns:
        `list[RateTrial]`: in the order of the rates.
    """
    narrow = config_at_width(config, width, named="width")
    trials = []
    for rate in rates:
        trial = RateTrial(rate=rate, loss=_train(kind, narrow, rows, rate, settings))
        trials.append(trial)
        log(trial)
    return trials


def _train(
    kind: type[PreTrainedModel],
    config: Any,
    rows: torch.Tensor,
    rate: float,
    settings: SweepSettings,
) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = kind(copy.deepcopy(config))  # a base width is noted in it
    callbacks: list[TrainerCallback] = []
    if settings.base_width is not None:
        initialize_at_width(model, base_width=settings.base_width)
        callbacks.append(LRScalingCallback(base_width=settings.base_width))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=settings.steps // 10,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=settings.seed,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            data_collator=default_data_collator,
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    last = losses[-max(1, settings.steps // _LAST) :]
    loss = sum(last) / len(last)
    return loss if math.isfinite(loss) else math.inf


def parse_rates(text: str) -> list[float]:
    """Return learning rates in ascending order.

    Args:
        text (`str`): rates such as `1e-3,2e-3`, or a range such as `1e-4..1e-1`, whose rates double.

    Raises:
        ParameterError: it is neither, or has fewer than three rates.
    """
    rule = "write a range such as 1e-4..1e-1, or at least three rates such as 1e-3,2e-3,4e-3"
    try:
        if ".." in text:
            low, high = (float(word) for word in text.split(".."))
            if not 0 < low <= high < math.inf:
                raise ParameterError("rates", text, rule)
            count = math.floor(math.log2(high / low) + 1e-9) + 1
            rates = [low * 2**place for place in range(count)]
        else:
            rates = sorted({float(word) for word in text.split(",")})
    except ValueError as error:
        raise ParameterError("rates", text, rule) from error
    if len(rates) < 3 or not all(0 < rate < math.inf for rate in rates):
        raise ParameterError("rates", text, rule)
    return rates


def best_trial(trials: Sequence[RateTrial]) -> RateTrial:
    """Return the trial with the lowest loss.

    Args:
        trials (`Sequence[RateTrial]`): in ascending order of their rates.

    Raises:
        UsageError: all of them diverged.
    """
    best = min(trials, key=lambda trial: trial.loss)
    if math.isinf(best.loss):
        raise UsageError(
            f"all trainings diverged, also with {best.rate:g}: give lower rates or more data"
        )
    return best
