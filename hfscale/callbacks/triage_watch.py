"""Looks at each log for a cause of lost time, and says it once."""

from collections import deque
from collections.abc import Mapping

from hfscale.metrics.triage import Measured, triage
from hfscale.utils.findings import Finding
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

WINDOWS = 3
"""Logs whose mean is judged: one slow window is no diagnosis."""


class TriageWatch:
    """Names a cause when it holds for some logs, and again only when it becomes another one."""

    def begin(self) -> None:
        """A new training. Its first log, with start-up and warm-up in it, is not judged."""
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOWS)
        self._is_first = True
        self._named: str | None = None

    def look(self, logs: Mapping[str, float], *, hides: float | None, tokens_per_gpu: int | None) -> Finding | None:
        """Take in one log; the finding, where there is a new one."""
        if self._is_first:
            self._is_first = False
            return None
        self._recent.append({key: value for key, value in logs.items() if key.startswith(("scaling/", "gpu/"))})
        if len(self._recent) < WINDOWS:
            return None
        everywhere = set.intersection(*(set(keys) for keys in self._recent))
        mean = {key: sum(keys[key] for keys in self._recent) / WINDOWS for key in everywhere}
        finding = triage(Measured.of(mean, hides=hides, tokens_per_gpu=tokens_per_gpu))
        if finding is None or finding.check == self._named:
            return None
        self._named = finding.check
        logger.info("triage: %s: %s", finding.check, finding)
        return finding
