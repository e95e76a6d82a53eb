"""Measures goodput and cost, with the times and the price of `hfscale.metrics.goodput`."""

from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger
from hfscale.metrics.goodput import GoodputTracker, Rate, rate
from hfscale.metrics.meters.meter import Meter, Window
from hfscale.metrics.throughput import device_name
from hfscale.trainer.collector import Columns

logger = get_logger(__name__)


class GoodputMeter(Meter):
    """Measures `scaling/goodput`, `scaling/usd` and `scaling/usd_per_million_tokens`, from the times of the run.

    Args:
        usd_per_gpu_hour (`float`, *optional*): price of one device; None: the price in the price list.
    """

    def __init__(self, usd_per_gpu_hour: float | None) -> None:
        self._usd_per_gpu_hour = usd_per_gpu_hour
        self.goodput_tracker: GoodputTracker | None = None
        """The tracker of the run's times, which the callback sets; None before training begins."""
        self.rate: Rate | None = None
        """The price of a GPU-hour; None if it is unknown."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """Look up the price of the device, and log it if it comes from the price list."""
        self.rate = rate(device_name(trainer.args.device), self._usd_per_gpu_hour)
        if self.rate is not None and self._usd_per_gpu_hour is None:
            logger.info(
                "scaling/usd assumes %.4g USD per GPU and hour: %s (give usd_per_gpu_hour for your own price)",
                self.rate.usd_per_gpu_hour,
                self.rate.source,
            )

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the ratio and the costs; without a price, only the ratio."""
        keys: dict[str, float] = {}
        if self.goodput_tracker is None:
            return keys
        goodput = self.goodput_tracker.goodput()
        if goodput is not None:
            keys["scaling/goodput"] = goodput
        if self.rate is not None:
            keys["scaling/usd"] = self.goodput_tracker.gpu_hours() * self.rate.usd_per_gpu_hour
            if window.tokens_seen:
                keys["scaling/usd_per_million_tokens"] = (
                    keys["scaling/usd"] / window.tokens_seen * 1e6
                )
        return keys
