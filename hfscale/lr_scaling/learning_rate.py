"""The learning rates of a Trainer's optimizer and scheduler, whoever made them: read, scaled, restored.

An optimizer is scaled after it has been made and before its scheduler is, so that it does not matter where its rates
come from: `TrainingArguments`, an overridden `create_optimizer`, `optimizer_cls_and_kwargs`, or the user's own object.
What DeepSpeed builds from its config is scaled in that config until training begins.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from hfscale.trainer.strategies import Strategy

_DEEPSPEED_LR_KEYS = {
    "optimizer": ("lr",),
    "scheduler": (
        "warmup_min_lr",
        "warmup_max_lr",
        "cycle_min_lr",
        "cycle_max_lr",
        "lr_range_test_min_lr",
    ),
}
_GROUP_LR_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")  # the latter two are those of OneCycleLR
# Not every scheduler has them; Trainer logs `_last_lr`
_SCHEDULER_LR_KEYS = ("base_lrs", "max_lrs", "_last_lr")

_applied: WeakKeyDictionary[Optimizer, float] = WeakKeyDictionary()
"""The factor that the rates of an optimizer contain. An optimizer can take part in several trainings."""


def optimizer_name(trainer: Trainer) -> str:
    """Return the name of the optimizer that is used: its class, or its type in DeepSpeed's config.

    Args:
        trainer (`Trainer`): its optimizer has been made.
    """
    section = _deepspeed_config(trainer).get("optimizer")
    if section is not None:
        return str(section["type"])
    optimizer: Any = trainer.optimizer
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, LayerWiseDummyOptimizer) and optimizer.optimizer_dict:
        optimizer = next(iter(optimizer.optimizer_dict.values()))
    return type(optimizer).__name__


def given_rates(trainer: Trainer) -> list[float]:
    """Return the learning rate of each parameter group, from which a scheduler will start.

    Args:
        trainer (`Trainer`): its optimizer has been made, or, by DeepSpeed, is about to be.

    Returns:
        `list[float]`: empty where no rate is known: for an optimizer that sets its own (Adafactor with
            `relative_step`), and where DeepSpeed's config leaves the rate to the optimizer's default.
    """
    section = _deepspeed_config(trainer).get("optimizer")
    if section is None:
        return rates_in_use(trainer.optimizer)
    rate = section.get("params", {}).get("lr")
    return [float(rate)] if isinstance(rate, int | float) else []


def rates_in_use(optimizer: Any) -> list[float]:
    """Return the learning rate of each parameter group of an optimizer, without what its scheduler multiplies it by.

    Args:
        optimizer (`torch.optim.Optimizer`): an optimizer, also one that Accelerate or DeepSpeed has wrapped.
    """
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    return [float(rate) for rate in rates if rate is not None]


def scale_to(trainer: Trainer, factor: float, *, contained: float | None = None) -> None:
    """Scale the optimizer of a Trainer, and its scheduler if there is one.

    Args:
        trainer (`Trainer`): its optimizer has been made. If it is one that DeepSpeed will build, nothing is done.
        factor (`float`): what the rates are to be multiplied by in all.
        contained (`float`, *optional*): the factor that they contain; None: that of the last call for this optimizer,
            which may have been scaled in an earlier training, or before `auto_find_batch_size` restarted this one.
    """
    optimizer: Any = trainer.optimizer
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if contained is not None:
        scale_rates(optimizer, trainer.lr_scheduler, factor / contained)
    elif isinstance(optimizer, Optimizer):
        ratio = factor / _applied.get(optimizer, 1.0)
        scale_rates(optimizer, trainer.lr_scheduler, ratio)
        if optimizer.defaults.get("lr") is not None:
            # Some schedulers of transformers read their peak there
            optimizer.defaults["lr"] *= ratio
    if isinstance(optimizer, Optimizer):
        _applied[optimizer] = factor


def scale_rates(optimizer: Any, scheduler: Any, ratio: float) -> None:
    """Multiply the learning rates of an existing optimizer and scheduler by `ratio`.

    A DeepSpeed scheduler restores only its position, and takes its learning rates from the current config, which has
    been scaled: of its attributes only the last learning rates need the ratio.

    Args:
        optimizer (`torch.optim.Optimizer`): an optimizer, also one that Accelerate or DeepSpeed has wrapped.
        scheduler (`torch.optim.lr_scheduler.LRScheduler`, *optional*): its scheduler.
        ratio (`float`): new rate / present rate.
    """
    if ratio == 1:
        return
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        for of_a_layer in (optimizer.optimizer_dict or {}).values():
            scale_rates(of_a_layer, None, ratio)
    for group in optimizer.param_groups:
        for key in _GROUP_LR_KEYS:
            if group.get(key) is not None:
                group[key] = group[key] * ratio
    for single in _schedulers(scheduler):
        for name in _SCHEDULER_LR_KEYS if isinstance(single, LRScheduler) else ("_last_lr",):
            if name in vars(single):
                setattr(single, name, [lr * ratio for lr in getattr(single, name)])


def scale_deepspeed_config(
    trainer: Trainer, *, factor: float, warmup_factor: float
) -> Callable[[], None]:
    """Scale the values from which DeepSpeed will build optimizer and scheduler.

    Args:
        trainer (`Trainer`): its optimizer is being made; "auto" values of the config have been filled.
        factor (`float`): factor of the learning rates.
        warmup_factor (`float`): factor of the warm-up steps; a warm-up of one step is none, and stays.

    Returns:
        `Callable`: restores the values.
    """
    config = _deepspeed_config(trainer)
    before: list[tuple[dict[str, Any], str, float]] = []
    for section, keys in (*_DEEPSPEED_LR_KEYS.items(), ("scheduler", ("warmup_num_steps",))):
        params = config.get(section, {}).get("params", {})
        before += [
            (params, key, params[key]) for key in keys if isinstance(params.get(key), int | float)
        ]
    for params, key, value in before:
        if key != "warmup_num_steps":
            params[key] = value * factor
        elif value > 1:
            params[key] = round(value * warmup_factor)

    def restore() -> None:
        for params, key, value in before:
            params[key] = value

    return restore


def foreign_rates(scheduler: Any, expected: list[float]) -> list[float]:
    """Return the learning rates of a scheduler that are not those of its optimizer.

    Args:
        scheduler (`torch.optim.lr_scheduler.LRScheduler`): the scheduler of a training that begins.
        expected (`list[float]`): the rates that the optimizer had when the scheduler was made, by parameter group.

    Returns:
        `list[float]`: empty where they are the same, or where the scheduler does not state them.
    """
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    rates = vars(scheduler).get("base_lrs", [])
    if len(rates) != len(expected):
        return []
    peaks = [
        group.get("max_lr", rate)
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True)
    ]
    return [
        float(peak)
        for peak, rate in zip(peaks, expected, strict=True)
        if abs(peak - rate) > 1e-6 * abs(rate)
    ]


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield the scheduler itself and those that it consists of."""
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    if scheduler is None:
        return
    yield scheduler
    for part in vars(scheduler).get("_schedulers", ()):  # of SequentialLR and ChainedScheduler
        yield from _schedulers(part)


def _deepspeed_config(trainer: Trainer) -> dict[str, Any]:
    """Return the DeepSpeed config of the Trainer; it is empty under another strategy."""
    return Strategy.of(trainer).engine_config()
