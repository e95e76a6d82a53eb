"""Learning rate scaling with the global batch, for any optimizer and scheduler, also after a resume."""

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from hfscale.errors import UsageError
from hfscale.facts.lr_rules import LRScaling, scale_learning_rate
from hfscale.integrations.trainer import AdapterCallback, TrainerAdapter, global_batch_size, saved_state
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_DEEPSPEED_LR_KEYS = {
    "optimizer": ("lr",),
    "scheduler": ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr"),
}


class LRScalingCallback(AdapterCallback):
    """Multiplies the learning rate by a factor that depends on how much larger the global batch has become.

    The factor is computed when the Trainer is made, before the optimizer and the scheduler exist, so that they are
    built with the scaled values. It is kept in every checkpoint: on a resume it is not applied a second time, and if
    it has changed (another global batch) the restored optimizer and scheduler are rescaled by the ratio.

    | metric key | unit | meaning |
    |---|---|---|
    | `lr_scaling/factor` | ratio | learning rate in use / learning rate given by the user |

    Args:
        rule (`str`): `auto`, `linear`, `sqrt`, `rubric` or `none`; see `hfscale.facts.lr_rules`.
        base_global_batch_size (`int`, *optional*): sequences per step for which the given learning rate was tuned.
            Without it the learning rate is not changed.
        block_size (`int`, *optional*): tokens per sequence in this run.
        base_block_size (`int`, *optional*): tokens per sequence in the base run.
        critical_batch_size (`int`, *optional*): sequences per step beyond which the factor stops growing.
        warmup_scale (`float`): factor for the number of warm-up steps; 1 keeps it.

    Raises:
        UsageError: when the Trainer is made, the rule or the optimizer is unknown, or a size is not positive. When
            training begins under DeepSpeed, the callback was added by `add_callback` after the Trainer was made.
    """

    def __init__(
        self,
        *,
        rule: str = "auto",
        base_global_batch_size: int | None = None,
        block_size: int | None = None,
        base_block_size: int | None = None,
        critical_batch_size: int | None = None,
        warmup_scale: float = 1.0,
    ) -> None:
        self.rule = rule
        self.base_global_batch_size = base_global_batch_size
        self.block_size = block_size
        self.base_block_size = base_block_size
        self.critical_batch_size = critical_batch_size
        self.warmup_scale = warmup_scale
        self.scaling: LRScaling | None = None
        """The factor and its reason; None until the Trainer is made."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = TrainerAdapter.current().trainer
        self.scaling = scaling = self._decide(trainer)
        given = args.learning_rate
        args.learning_rate *= scaling.factor
        args.warmup_steps = _scaled_warmup(args.warmup_steps, scaling.warmup_factor)
        if trainer.optimizer is not None:
            given = _scale_built(trainer.optimizer, trainer.lr_scheduler, scaling.factor)
        if trainer.is_deepspeed_enabled:
            _scale_deepspeed_config(trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config, scaling)
        self._log(args, scaling, given)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        adapter = TrainerAdapter.current()
        trainer = adapter.trainer
        saved = saved_state(state, "lr_scaling")
        # The factor that optimizer and scheduler have now: those of a fresh run were built with ours (or, if this
        # callback was added after the Trainer was made, with none); those of a resumed run have the checkpoint's.
        built_with = self.scaling.factor if self.scaling else 1.0
        if self.scaling is None:
            if trainer.is_deepspeed_enabled:
                raise UsageError(
                    "with DeepSpeed give LRScalingCallback to Trainer(callbacks=[...]), not add_callback()"
                )
            self.scaling = self._decide(trainer)
            self._log(args, self.scaling, args.learning_rate)
        current = saved.get("factor", 1.0) if state.global_step > 0 else built_with
        factor = self.scaling.factor
        if current != factor:
            _scale_built(trainer.optimizer, trainer.lr_scheduler, factor / current)
            if state.global_step > 0:
                logger.info("lr_scaling: resumed with factor %.4g, rescaled to %.4g", current, factor)
        saved.update(factor=factor, kappa=self.scaling.kappa, rule=self.scaling.rule)
        adapter.add_metrics(self._keys)

    def _keys(self, state: TrainerState) -> dict[str, float]:
        return {"lr_scaling/factor": self.scaling.factor} if self.scaling else {}

    def _decide(self, trainer: Trainer) -> LRScaling:
        return scale_learning_rate(
            rule=self.rule,
            optimizer=_optimizer_name(trainer),
            global_batch_size=global_batch_size(trainer),
            base_global_batch_size=self.base_global_batch_size,
            block_size=self.block_size,
            base_block_size=self.base_block_size,
            critical_batch_size=self.critical_batch_size,
            warmup_scale=self.warmup_scale,
        )

    def _log(self, args: TrainingArguments, scaling: LRScaling, given: float) -> None:
        if scaling.factor == 1:
            logger.info("lr_scaling: learning rate stays %.4g: %s", given, scaling.reason)
            return
        warmup = f"warm-up {args.warmup_steps:g}" + (" steps kept" if scaling.warmup_factor == 1 else " steps")
        scaled = given * scaling.factor
        logger.info("lr_scaling: learning rate %.4g -> %.4g, %s: %s", given, scaled, warmup, scaling.reason)


def _optimizer_name(trainer: Trainer) -> str:
    """Return the optimizer's name, from the optimizer itself, from DeepSpeed's config, or from the arguments."""
    optimizer = trainer.optimizer
    if optimizer is not None:
        return type(optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer).__name__
    if trainer.is_deepspeed_enabled:
        config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
        if "optimizer" in config:
            return str(config["optimizer"]["type"])
    return str(getattr(trainer.args.optim, "value", trainer.args.optim))


def _scaled_warmup(warmup_steps: float, factor: float) -> float:
    """Scale `warmup_steps`, which below 1 is a share of all steps (at most 1) and otherwise a number of steps."""
    if factor == 1:
        return warmup_steps
    return min(1.0, warmup_steps * factor) if warmup_steps < 1 else round(warmup_steps * factor)


def _scale_built(optimizer: Optimizer, scheduler: Any, ratio: float) -> float:
    """Multiply the learning rates of an existing optimizer and scheduler by `ratio`.

    A DeepSpeed scheduler restores only its position, and takes its learning rates from the current config, which is
    scaled already: of its attributes only the last learning rate needs the ratio.

    Returns:
        `float`: the learning rate of the first parameter group before the change.
    """
    before = float(optimizer.param_groups[0]["lr"])
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] *= ratio
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    if scheduler is not None:
        for name in ("base_lrs", "_last_lr"):  # not every scheduler has both; Trainer logs `_last_lr`
            if name in vars(scheduler):
                setattr(scheduler, name, [lr * ratio for lr in getattr(scheduler, name)])
    return before


def _scale_deepspeed_config(config: dict[str, Any], scaling: LRScaling) -> None:
    """Scale the values from which DeepSpeed will build optimizer and scheduler; "auto" values follow `args`."""
    for section, keys in _DEEPSPEED_LR_KEYS.items():
        params = config.get(section, {}).get("params", {})
        for key in keys:
            if isinstance(params.get(key), int | float):
                params[key] *= scaling.factor
    scheduler = config.get("scheduler", {}).get("params", {})
    if isinstance(scheduler.get("warmup_num_steps"), int | float):
        scheduler["warmup_num_steps"] = round(scheduler["warmup_num_steps"] * scaling.warmup_factor)
