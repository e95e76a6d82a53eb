"""The options of `WeightAveragingCallback`."""

from dataclasses import dataclass
from typing import Any, Literal

from hfscale.core.options import Options, option, positive
from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError


def below_1(name: str, value: Any) -> None:
    """Check that a decay is above 0 and below 1."""
    if not 0 < value < 1:
        raise ParameterError(name, value, "it must be above 0 and below 1, such as 0.999")


def at_least_2(name: str, value: Any) -> None:
    """Check that a mean is of several snapshots."""
    if not value >= 2:
        raise ParameterError(name, value, "it must be at least 2")


@dataclass(frozen=True, kw_only=True)
class AverageOptions(Options):
    """The options of `WeightAveragingCallback`."""

    ema_decay: float | None = option(
        None,
        check=below_1,
        help="Decay of an exponential moving average of the trained weights, such as 0.999",
        unset="no such average",
    )
    average_last: int | None = option(
        None,
        check=at_least_2,
        help="Number of snapshots of the trained weights, the last ones, of which the mean is kept",
        unset="no such mean",
    )
    average_every_steps: int | None = option(
        None,
        unit="steps",
        check=positive,
        help="Steps between two updates of the average, or between two snapshots",
        unset="1 with a decay; a mean of snapshots needs it",
    )
    evaluate_average: bool = option(
        False,
        help="Evaluations during training use the averaged weights, under the usual names of their metrics",
    )
    average_device: Literal["device", "cpu"] = option(
        "device",
        help="Where the average is kept: with the weights (device), or in the memory of the host (cpu)",
    )

    @property
    def is_given(self) -> bool:
        """Whether an average is asked for."""
        return self.ema_decay is not None or self.average_last is not None

    @property
    def every_steps(self) -> int:
        """The steps between two updates."""
        return self.average_every_steps or 1

    def check(self) -> None:
        """Check what concerns several options.

        Raises:
            ParameterError: two kinds of averages are asked for, or an option has no effect.
        """
        if self.ema_decay is not None and self.average_last is not None:
            other = spelled("ema_decay", self.ema_decay)
            raise self.error("average_last", f"it excludes {other}: give one of them")
        if self.average_last is not None and self.average_every_steps is None:
            raise self.error(
                "average_last",
                f"give {spelled('average_every_steps')} too: steps between snapshots",
            )
        if self.is_given:
            return
        needed = f"give {spelled('ema_decay')} or {spelled('average_last')} too"
        if self.average_every_steps is not None:
            raise self.error("average_every_steps", needed)
        if self.evaluate_average:
            raise self.error("evaluate_average", needed)
        if self.average_device != "device":
            raise self.error("average_device", needed)
