"""Learning rate scaling with the global batch, for any optimizer and scheduler, also after a resume."""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hfscale.core.late import late
from hfscale.core.logging import get_logger
from hfscale.core.options import names_of, takes_options
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.batch_schedule import BatchSchedule, parse_batch_schedule
from hfscale.facts.lr_rules import LRScaling, scale_learning_rate
from hfscale.lr_scaling.growing_batch import NOISE_SCALE, GrowingBatch
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
from hfscale.trainer.state import (
    global_batch_size,
    growing_batch_state,
    model_of,
    saved_state,
    stepped_optimizer,
    unwrap_compiled,
)
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

_WARMUP_ARGUMENTS = ("warmup_steps", "warmup_ratio")  # transformers 4 has both


@dataclass(frozen=True, kw_only=True)
class _Created:
    """An optimizer that has been made and scaled, between `create_optimizer` and the beginning of the training."""

    rates: list[float]
    """Its scaled learning rates, by parameter group; empty: unknown."""
    factor: float
    """By which they are scaled: that of the first batch, so that a schedule is made from the same rate at a resume."""
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
    | `scaling/global_batch` | sequences | sequences of the last optimizer step; absent where the batch is constant |

    With `batch_schedule` the global batch changes during the training, and the rule is applied at each change. With
    `base_width` the groups of the optimizer are split, and each has the rate that its parameters need at the width of
    the model.

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
        self._schedule: BatchSchedule | None = None
        self._row_length: int | None = None
        if options.batch_schedule is not None:
            with names_of(LRScalingOptions):
                schedule = parse_batch_schedule(options.batch_schedule)
                self._schedule = schedule.in_samples(options.block_size)
                self._row_length = options.block_size if schedule.counts_tokens else None
        self._begin_run()

    @property
    def decides_accumulation(self) -> bool:
        """Whether it decides how many micro-batches a step has: where the global batch changes."""
        return self._schedule is not None

    def _begin_run(self) -> None:
        self._created: _Created | None = None
        self._factor: float | None = None
        self._growing: GrowingBatch | None = None
        self._optimizer = ""  # its name before an engine has wrapped it
        self._has_begun = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_init_end(args, state, control, **kwargs)
        # Checks what is known before the optimizer and the batch are
        self._decide(optimizer="adamw", batch_size=1)
        if (
            self._schedule is not None
        ):  # what asks for the number of steps before the training gets it
            self._grow(TrainerAdapter.current())

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Scale the optimizer as soon as it has been made."""
        self._begin_run()
        adapter.announced.base_width = self.options.base_width
        if self._schedule is not None:
            self._growing = self._grow(adapter)
            self._growing.begin()
        restorer = _ArgumentRestorer(adapter)
        adapter.wrap_method(
            "create_optimizer",
            lambda create: functools.partial(self._create_scaled, adapter, restorer, create),
        )

    def _grow(self, adapter: TrainerAdapter) -> GrowingBatch:
        assert self._schedule is not None
        return GrowingBatch(
            adapter,
            self._schedule,
            row_length=self._row_length,
            counts_tokens=self.options.lr_clock == "tokens",
            on_change=functools.partial(self._batch_changed, adapter),
        )

    def _batch_changed(self, adapter: TrainerAdapter) -> None:
        """Scale the learning rate for another global batch, between two steps."""
        if not self._has_begun:
            return  # `_create_scaled` scales for the batch in which the training begins
        trainer = adapter.trainer
        size = global_batch_size(trainer)
        self.scaling = scaling = self._decide(self._optimizer, size)
        if self._factor is not None:
            scale_to(trainer, scaling.factor, contained=self._factor)
            self._factor = scaling.factor
            saved = saved_state(trainer.state, "lr_scaling")
            saved.update(factor=scaling.factor, kappa=scaling.kappa, rule=scaling.rule)
        logger.info(
            "the global batch is %d sequences from step %d: learning rate x %.4g: %s",
            size,
            trainer.state.global_step + 1,
            scaling.factor,
            scaling.reason,
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
        self._split_by_width(adapter)
        self._optimizer = optimizer_name(trainer)
        size = self._schedule.first if self._schedule else global_batch_size(trainer)
        self.scaling = scaling = self._decide(self._optimizer, size)
        scale_to(trainer, scaling.factor)
        restore_config = scale_deepspeed_config(
            trainer, factor=scaling.factor, warmup_factor=scaling.warmup_factor
        )
        self._created = _Created(
            rates=given_rates(trainer), factor=scaling.factor, restore_config=restore_config
        )
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

    def _split_by_width(self, adapter: TrainerAdapter) -> None:
        """Split the optimizer's groups by the roles of their parameters, if a base width is given."""
        base_width = self.options.base_width
        with names_of(LRScalingOptions):
            _check_resumed_width(adapter.resumes_from, base_width)
            if base_width is None:
                return
            trainer = adapter.trainer
            optimizer = stepped_optimizer(trainer.optimizer)  # it is wrapped in a second training
            model = unwrap_compiled(model_of(trainer))
            width = late("width")
            width.check_width(model, base_width)
            width.split_groups(optimizer, trainer.lr_scheduler, model, base_width)

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
            self._check_no_width()
            if Strategy.of(trainer).engine_steps:
                raise UsageError(
                    "with DeepSpeed give LRScalingCallback to Trainer(callbacks=[...]), not add_callback()"
                )
            self._optimizer = optimizer_name(trainer)
            self.scaling = self._decide(self._optimizer, global_batch_size(trainer))
            if state.global_step == 0:
                scale_to(trainer, self.scaling.factor)
        elif self._schedule is not None:  # it may have grown before the resume
            self.scaling = self._decide(self._optimizer, global_batch_size(trainer))
        assert self.scaling is not None
        factor = self.scaling.factor
        saved = saved_state(state, "lr_scaling")
        is_as_made = created is not None and rates_in_use(trainer.optimizer) == created.rates
        if state.global_step > 0 and not is_as_made:
            restored_factor = saved.get("factor", 1.0)  # of a checkpoint with its optimizer
            if restored_factor != factor:
                scale_to(trainer, factor, contained=restored_factor)
                logger.info(
                    "lr_scaling: resumed with factor %.4g, rescaled to %.4g",
                    restored_factor,
                    factor,
                )
        if created is None:
            rates = rates_in_use(trainer.optimizer)
        else:
            if is_as_made and factor != created.factor:
                scale_to(trainer, factor, contained=created.factor)
            rates = [rate / created.factor * factor for rate in created.rates]
        self._check_scheduler(trainer, rates)
        self._announce(trainer, state, rates)
        adapter.when_unused("learning rate", lambda: scale_to(trainer, 1.0))
        saved.update(factor=factor, kappa=self.scaling.kappa, rule=self.scaling.rule)
        if self.options.base_width is not None:
            saved.update(base_width=self.options.base_width)
        adapter.add_metrics(self._keys)
        self._check_growth(state)
        self._has_begun = True

    def _check_no_width(self) -> None:
        """Refuse a base width where this callback has not seen how the optimizer was made."""
        if self.options.base_width is not None:
            raise UsageError(
                "with base_width give the callback to Trainer(callbacks=[...]), not add_callback(), and let the "
                "Trainer make the optimizer in create_optimizer()"
            )

    def _check_scheduler(self, trainer: Trainer, rates: list[float]) -> None:
        """Refuse a base width where the scheduler gives all groups rates of its own."""
        if self.options.base_width is None or not foreign_rates(trainer.lr_scheduler, rates):
            return
        with names_of(LRScalingOptions):
            named = spelled("base_width", self.options.base_width)
        raise UsageError(
            f"{named}: {type(trainer.lr_scheduler).__name__} gives all groups of the optimizer its own rates; use a "
            "schedule that multiplies those of the optimizer, such as cosine"
        )

    def _check_growth(self, state: TrainerState) -> None:
        """Refuse a training whose batch would not be what the checkpoint or the options say."""
        if self._schedule is None:
            if growing_batch_state(state):
                name = spelled("batch_schedule")
                raise UsageError(
                    f"the checkpoint is of a training whose global batch changes: give {name} again, as its steps do "
                    "not say how much it has seen"
                )
            return
        if self._growing is None:
            raise UsageError(
                "with batch_schedule give the callback to Trainer(callbacks=[...]), not add_callback()"
            )
        self._growing.check_loss()
        self._growing.move_schedule(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._growing is not None and logs is not None and NOISE_SCALE in logs:
            self._growing.noise_measured(state, logs[NOISE_SCALE])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._growing is not None:
            self._growing.check_measured()

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
        keys = {}
        if self._factor is not None:
            keys["lr_scaling/factor"] = self._factor
        if self._growing is not None and self._growing.batch is not None:
            keys["scaling/global_batch"] = float(self._growing.batch)
        return keys

    def _decide(self, optimizer: str, batch_size: int) -> LRScaling:
        options = self.options
        base = options.base_global_batch_size
        if base is None and self._schedule is not None:
            base = self._schedule.first  # the batch that the given learning rate is for
        with names_of(LRScalingOptions):
            return scale_learning_rate(
                rule=options.rule,
                optimizer=optimizer,
                global_batch_size=batch_size,
                base_global_batch_size=base,
                block_size=options.block_size,
                base_block_size=options.base_block_size,
                critical_batch_size=options.critical_batch_size,
                warmup_scale=options.warmup_scale,
            )


def _check_resumed_width(checkpoint: str | None, base_width: int | None) -> None:
    """Refuse to resume from a checkpoint whose optimizer has the groups of another base width."""
    path = Path(checkpoint or "") / TRAINER_STATE_NAME
    if checkpoint is None or not path.is_file():
        return
    saved = saved_state(TrainerState.load_from_json(str(path)), "lr_scaling").get("base_width")
    if saved != base_width:
        asked = spelled("base_width", base_width)
        had = "without one" if saved is None else f"with {spelled('base_width', saved)}"
        raise UsageError(
            f"{asked}: {checkpoint} was trained {had}; resume as it was, or start from scratch"
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
