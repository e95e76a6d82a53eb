"""Says which number of a step, its loss or the norm of its gradients, is far outside of what the steps before had.

It is made for decisions that nobody looks at, so that rare but ordinary steps are to pass: noisy small batches, a
warm-up, losses near 0 with a hard sample now and then. A number is an outlier if all of this holds:

- its distance from the median of the last `WINDOW` steps is more than `REACH` times that of the greatest of them;
- it is more than `Z_SCORE` robust standard deviations (1.4826 x MAD) above the median: of the logarithms, since losses
  and norms are spread by factors; of the numbers themselves where some are not positive;
- it is more than `MIN_RISE` above the median, relative to it.

The first compares with the tail that this training has, the second with its usual spread. An outlier joins the window
as the limit that it was above. So the limit rises where outliers recur, which are then how this training is, and one
that is far out hides no other.
"""

import math
import statistics

WINDOW = 1000
"""Steps with which a number is compared."""
MIN_STEPS = 100
"""Steps below which no finite number is called an outlier."""
REACH = 5.0
"""How many times as far above the median as the greatest of the window."""
Z_SCORE = 8.0
"""Robust standard deviations: a chance of 1e-15 under a normal distribution."""
MIN_RISE = 0.5
"""An outlier is at least this far above the median, relative to it: flat numbers have hardly any spread."""


class Outliers:
    """Compares numbers with those of earlier steps.

    Args:
        seen (`list[float]`): the numbers of the last steps, the newest last, which a checkpoint keeps; changed in
            place.
    """

    def __init__(self, seen: list[float]) -> None:
        self._seen = seen

    def add(self, number: float) -> None:
        """Add the number of a step, or the limit that it is above.

        Args:
            number (`float`): finite.
        """
        self._seen.append(number)
        del self._seen[:-WINDOW]

    def limit_below(self, number: float) -> float | None:
        """Return the limit that a number is above, which makes it an outlier; None if it is none.

        Args:
            number (`float`): the number of the next step, finite.
        """
        seen = self._seen
        if len(seen) < MIN_STEPS:
            return None
        greatest = max(seen)
        if number <= greatest:
            return None
        median = statistics.median(seen)
        if greatest == median:
            return None  # nothing is known of how the numbers are spread
        by_tail = median + REACH * (greatest - median)
        limit = max(by_tail, _by_spread(seen, median), median + MIN_RISE * abs(median))
        return limit if number > limit else None

    def median(self) -> float:
        """Return the median of the numbers; there must be one."""
        return statistics.median(self._seen)


def _by_spread(seen: list[float], median: float) -> float:
    """Return the number that is `Z_SCORE` robust standard deviations above the median."""
    if min(seen) <= 0:
        return median + Z_SCORE * _deviation(seen, median)
    logarithms = [math.log(number) for number in seen]
    center = math.log(median)
    exponent = center + Z_SCORE * _deviation(logarithms, center)
    return math.exp(min(exponent, 700.0))  # of more, there is no float


def _deviation(numbers: list[float], median: float) -> float:
    return 1.4826 * statistics.median(abs(number - median) for number in numbers)
