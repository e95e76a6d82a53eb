"""`ScalingCallback`: all callbacks in one."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.callback import SpotCheckpointCallback
from hfscale.health.callback import CommHealthCallback
from hfscale.lr_scaling.callback import LRScalingCallback
from hfscale.metrics.callback import ScalingMetricsCallback
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.equal_options import check_equal_options

PARTS: Mapping[str, type[AdapterCallback]] = {
    "comm_health": CommHealthCallback,
    "lr_scaling": LRScalingCallback,
    "spot_checkpoint": SpotCheckpointCallback,
    "metrics": ScalingMetricsCallback,
}
"""Keyword of `ScalingCallback` -> the class of this part."""


class ScalingCallback(AdapterCallback):
    """Combines all callbacks of hfscale in one: `Trainer(..., callbacks=[ScalingCallback()])`.

    It has no logic of its own: it passes each event to its parts, in this order.

    | part | what it does |
    |---|---|
    | [`CommHealthCallback`] | stops a run that is unhealthy or not the one asked for, and names what slows it down |
    | [`LRScalingCallback`] | scales the learning rate with the global batch |
    | [`SpotCheckpointCallback`] | commits checkpoints that survive the loss of the machine |
    | [`ScalingMetricsCallback`] | logs tokens/s, MFU and where the time goes |

    Args:
        comm_health (`CommHealthCallback`, *optional*): the part to use instead of one with default arguments.
        lr_scaling (`LRScalingCallback`, *optional*): the same.
        spot_checkpoint (`SpotCheckpointCallback`, *optional*): the same.
        metrics (`ScalingMetricsCallback`, *optional*): the same.

    Raises:
        HfScaleError: what the parts raise; see the docstring of each.
    """

    def __init__(
        self,
        *,
        comm_health: CommHealthCallback | None = None,
        lr_scaling: LRScalingCallback | None = None,
        spot_checkpoint: SpotCheckpointCallback | None = None,
        metrics: ScalingMetricsCallback | None = None,
    ) -> None:
        self.comm_health = comm_health or CommHealthCallback()
        self.lr_scaling = lr_scaling or LRScalingCallback()
        self.spot_checkpoint = spot_checkpoint or SpotCheckpointCallback()
        self.metrics = metrics or ScalingMetricsCallback()
        self._begin_run()

    def _begin_run(self) -> None:
        self._handlers: dict[str, list[Callable[..., None]]] = {}

    @property
    def parts(self) -> tuple[TrainerCallback, ...]:
        """The parts, in the order in which they receive each event."""
        return (self.comm_health, self.lr_scaling, self.spot_checkpoint, self.metrics)

    @property
    def decides_accumulation(self) -> bool:
        """Whether a part decides how many micro-batches a step has."""
        return self.lr_scaling.decides_accumulation

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Pass the call to each part that is an `AdapterCallback`; first compare their options on all ranks."""
        check_equal_options(self.parts, adapter.trainer)
        for part in self.parts:
            if isinstance(part, AdapterCallback):
                part.before_train(adapter)

    def _find_handlers(self, event: str) -> list[Callable[..., None]]:
        """Return the methods of the parts that do something at `event`; most events of a step have one or two."""
        methods = [getattr(part, event) for part in self.parts]
        inherited = getattr(TrainerCallback, event)
        return [method for method in methods if getattr(method, "__func__", None) is not inherited]


def _forward(event: str) -> Any:
    def handle(
        self: ScalingCallback,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if event == "on_train_begin":
            self._begin_run()  # handlers are found once per training, as events are frequent
        if event not in self._handlers:
            self._handlers[event] = self._find_handlers(event)
        for handler in self._handlers[event]:
            handler(args, state, control, **kwargs)

    handle.__name__ = event
    return handle


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(ScalingCallback, _event, _forward(_event))
