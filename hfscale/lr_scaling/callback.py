"""Learning rate scaling with the global batch, for any optimizer and scheduler, also after a resume."""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.core.logging import get_logger
from hfscale.core.options import names_of, takes_options
from hfscale.errors import UsageError
from hfscale.facts.lr_rules import LRScaling, scale_learning_rate
from hfscale.lr_scaling.learning_rate import (
    foreign_rates,
    given_rates,
    optimizer_name,
    rates_in_use,
    scale_deepspeed_config,
    scale_to,
)
from hfscale.lr_scaling.options import LRScalingOptions
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.loss_rule import why_loss_grows
from hfscale.trainer.state import global_batch_size, saved_state
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

_WARMUP_ARGUMENTS = ("warmup_steps", "warmup_ratio")  # transformers 4 has both


@dataclass(frozen=True, kw_only=True)
class _Created:
    """An optimizer that has been made and scaled, between `create_optimizer` and the beginning of the training."""

    rates: list[float]
    """Its scaled learning rates, by parameter group; empty: unknown."""
    restore_config: Callable[[], None]
    """Restores DeepSpeed's config."""


class LRScalingCallback(AdapterCallback):
    """Multiplies the learning rate by a factor that depends on how much larger the global batch has become.

    The factor is computed for each training, from the batch and the optimizer that it runs with, and is applied to all
    learning rates of the optimizer when that has been made, wherever they come from: `TrainingArguments`, a trial of
    `hyperparameter_search`, an overridden `create_optimizer`, or the user's own optimizer and scheduler. The training
    arguments are scaled only while the scheduler is made. The factor is kept in every checkpoint: on a resume it is
    not applied a second time, and if it has changed (another global batch) the restored optimizer and scheduler are
    rescaled by the ratio.

    | metric key | unit | meaning |
    |---|---|---|
    | `lr_scaling/factor` | ratio | learning rate in use / learning rate given; absent where it cannot be applied |

    Args:
        **options: the options, see below.

    Raises:
        UsageError: the rule is unknown or a size is not positive. When training begins, no
            rule is known for the optimizer, or, under DeepSpeed, the callback was added by `add_callback` after the
            Trainer was made.
    """

    @takes_options(LRScalingOptions)
    def __init__(self, options: LRScalingOptions) -> None:
        self.options = options
        self.scaling: LRScaling | None = None
        """The factor and its reason in the last training; None before the first."""
        self._begin_run()

    def _begin_run(self) -> None:
        self._created: _Created | None = None
        self._factor: float | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_init_end(args, state, control, **kwargs)
        # Checks what is known before the optimizer and the batch are
        self._decide(optimizer="adamw", batch_size=1)

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Scale the optimizer as soon as it has been made."""
        self._begin_run()
        restorer = _ArgumentRestorer(adapter)
        adapter.wrap_create_optimizer(
            lambda create: functools.partial(self._create_scaled, adapter, restorer, create)
        )

    def _create_scaled(
        self,
        adapter: TrainerAdapter,
        restorer: "_ArgumentRestorer",
        create: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the Trainer's `create_optimizer`, and scale what it has made."""
        trainer = adapter.trainer
        self._restore(adapter)  # DeepSpeed's start calls this twice
        optimizer = create(*args, **kwargs)
        self.scaling = scaling = self._decide(optimizer_name(trainer), global_batch_size(trainer))
        scale_to(trainer, scaling.factor)
        restore_config = scale_deepspeed_config(
            trainer, factor=scaling.factor, warmup_factor=scaling.warmup_factor
        )
        self._created = _Created(rates=given_rates(trainer), restore_config=restore_config)
        if scaling.factor == scaling.warmup_factor == 1:
            return optimizer
        # A scheduler that an overridden `create_scheduler` makes from the arguments must have the scaled rate too.
        adapter.prepend_callback(restorer)
        adapter.set_argument("learning_rate", trainer.args.learning_rate * scaling.factor)
        for name in _WARMUP_ARGUMENTS:
            steps = vars(trainer.args).get(name)
            if steps:
                adapter.set_argument(name, _scaled_warmup(steps, scaling.warmup_factor))
        return optimizer

    def _restore(self, adapter: TrainerAdapter) -> None:
        restore_arguments(adapter)
        if self._created is not None:
            self._created.restore_config()
            self._created = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        adapter = TrainerAdapter.current()
        trainer = adapter.trainer
        created = self._created
        self._restore(adapter)
        # The callback was added when the optimizer existed, or nothing called create_optimizer
        if created is None:
            if Strategy.of(trainer).engine_steps:
                raise UsageError(
                    "with DeepSpeed give LRScalingCallback to Trainer(callbacks=[...]), not add_callback()"
                )
            self.scaling = self._decide(optimizer_name(trainer), global_batch_size(trainer))
            if state.global_step == 0:
                scale_to(trainer, self.scaling.factor)
        assert self.scaling is not None
        factor = self.scaling.factor
        saved = saved_state(state, "lr_scaling")
        if state.global_step > 0 and (
            created is None or rates_in_use(trainer.optimizer) != created.rates
        ):
            restored_factor = saved.get("factor", 1.0)  # of a checkpoint with its optimizer
            if restored_factor != factor:
                scale_to(trainer, factor, contained=restored_factor)
                logger.info(
                    "lr_scaling: resumed with factor %.4g, rescaled to %.4g",
                    restored_factor,
                    factor,
                )
        rates = created.rates if created is not None else rates_in_use(trainer.optimizer)
        self._announce(trainer, state, rates)
        adapter.when_unused("learning rate", lambda: scale_to(trainer, 1.0))
        saved.update(factor=factor, kappa=self.scaling.kappa, rule=self.scaling.rule)
        adapter.add_metrics(self._keys)

    def _announce(self, trainer: Trainer, state: TrainerState, rates: list[float]) -> None:
        """Log what was done, or warn that the factor does not hold for the rates that are used.

        Args:
            trainer (`Trainer`): prepared for training.
            state (`TrainerState`): the state of the Trainer when training begins.
            rates (`list[float]`): the scaled rates of the optimizer, by parameter group.
        """
        scaling = self.scaling
        assert scaling is not None
        grows = why_loss_grows(trainer) if scaling.factor != 1 else None
        if grows is not None:
            raise UsageError(f"the learning rate cannot be scaled with the batch: {grows}")
        self._factor = scaling.factor
        given = [rate / scaling.factor for rate in rates]
        whose = " of this trial" if state.is_hyper_param_search else ""
        if scaling.factor == 1:
            level = logging.DEBUG if self.options.base_global_batch_size is None else logging.INFO
            logger.log(
                level,
                "lr_scaling: learning rate%s stays %s: %s",
                whose,
                _range(given),
                scaling.reason,
            )
            return
        foreign = foreign_rates(trainer.lr_scheduler, rates) if state.global_step == 0 else []
        if foreign or not rates:
            sets = type(trainer.lr_scheduler).__name__ if foreign else optimizer_name(trainer)
            its_own = f", {_range(foreign)}," if foreign else ""
            logger.warning(
                "lr_scaling: the learning rates%s are set by %s itself: they are not scaled by %.4g (%s); give it "
                "rates for this batch, or use the rule 'none'",
                its_own,
                sets,
                scaling.factor,
                scaling.reason,
            )
            self._factor = None
            return
        given_steps = next(
            (
                vars(trainer.args)[name]
                for name in _WARMUP_ARGUMENTS
                if vars(trainer.args).get(name)
            ),
            0,
        )
        steps = _scaled_warmup(given_steps, scaling.warmup_factor)
        warmup = f"warm-up {steps:g}" + (" steps kept" if scaling.warmup_factor == 1 else " steps")
        logger.info(
            "lr_scaling: learning rate%s %s -> %s, %s: %s",
            whose,
            _range(given),
            _range(rates),
            warmup,
            scaling.reason,
        )

    def _keys(self, state: TrainerState, logs: Mapping[str, float]) -> dict[str, float]:
        return {"lr_scaling/factor": self._factor} if self._factor is not None else {}

    def _decide(self, optimizer: str, batch_size: int) -> LRScaling:
        with names_of(LRScalingOptions):
            return scale_learning_rate(
                **vars(self.options), optimizer=optimizer, global_batch_size=batch_size
            )


class _ArgumentRestorer(TrainerCallback):
    """Restores the training arguments before any other callback, such as those that report them, can read them."""

    def __init__(self, adapter: TrainerAdapter) -> None:
        self._adapter = adapter

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        restore_arguments(self._adapter)


def restore_arguments(adapter: TrainerAdapter) -> None:
    """Restore the user's values of the training arguments that scaling has changed.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer.
    """
    for name in ("learning_rate", *_WARMUP_ARGUMENTS):
        adapter.restore_argument(name)


def _scaled_warmup(warmup_steps: float, factor: float) -> float:
    """Scale `warmup_steps`, which below 1 is a share of all steps and otherwise a number of steps."""
    if factor == 1:
        return warmup_steps
    all_steps = math.nextafter(1.0, 0.0)  # 1.0 would be one step
    return (
        min(all_steps, warmup_steps * factor) if warmup_steps < 1 else round(warmup_steps * factor)
    )


def _range(rates: list[float]) -> str:
    """Return "0.01" for equal rates, else "0.001 to 0.01"; "unknown" for none."""
    if not rates:
        return "unknown"
    low, high = f"{min(rates):.4g}", f"{max(rates):.4g}"
    return low if low == high else f"{low} to {high}"
