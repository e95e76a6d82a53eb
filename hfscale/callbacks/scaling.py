"""The four parts together."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.callbacks.comm_health import CommHealthCallback
from hfscale.callbacks.lr_scaling import LRScalingCallback
from hfscale.callbacks.scaling_metrics import ScalingMetricsCallback
from hfscale.callbacks.spot_checkpoint import SpotCheckpointCallback
from hfscale.integrations.trainer import AdapterCallback, TrainerAdapter


class ScalingCallback(AdapterCallback):
    """Everything hfscale does for a training, in one callback: `Trainer(..., callbacks=[ScalingCallback()])`.

    It has no logic of its own; each event goes to the parts in this order. Pass a part to configure it.

    | part | does |
    |---|---|
    | [`CommHealthCallback`] | stops a run that is not the one asked for, or not well, and names who holds it up |
    | [`LRScalingCallback`] | scales the learning rate to the global batch |
    | [`SpotCheckpointCallback`] | commits checkpoints that survive a lost machine |
    | [`ScalingMetricsCallback`] | logs tokens/s, MFU and where the time goes |
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
        self._heard: dict[str, list[Callable[..., None]]] = {}

    @property
    def parts(self) -> tuple[TrainerCallback, ...]:
        """The parts, in the order in which they see each event."""
        return (self.comm_health, self.lr_scaling, self.spot_checkpoint, self.metrics)

    def before_train(self, adapter: TrainerAdapter) -> None:
        for part in self.parts:
            if isinstance(part, AdapterCallback):
                part.before_train(adapter)

    def _listen(self, event: str) -> None:
        """Find the handlers of the parts that do something at `event`; of a step's five, most have one or two."""
        handlers = [getattr(part, event) for part in self.parts]
        unheard = getattr(TrainerCallback, event)
        self._heard[event] = [hear for hear in handlers if getattr(hear, "__func__", None) is not unheard]


def _forward(event: str) -> Any:
    def handle(
        self: ScalingCallback, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if event == "on_train_begin":
            self._heard = {}  # looked for once per training, as events come often
        if event not in self._heard:
            self._listen(event)
        for hear in self._heard[event]:
            hear(args, state, control, **kwargs)

    handle.__name__ = event
    return handle


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(ScalingCallback, _event, _forward(_event))
