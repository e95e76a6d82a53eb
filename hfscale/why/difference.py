"""The answer to why two runs differ."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = (
    "config",
    "data",
    "rng",
    "weights",
    "forward",
    "backward",
    "gradient",
    "clipping",
    "optimizer",
)
"""Kinds of a difference, in the order in which a step meets them. `weights` are those at the start of the step."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two runs, or the statement that there is none."""

    kind: str
    """One of `KINDS`, or `none`."""
    step: int | None = None
    """The optimizer step, counted from 1."""
    rank: int | None = None
    """The rank of the second run that differs first; None: all, or unknown."""
    module: str | None = None
    """The module or parameter."""
    operation: str | None = None
    """The operation, such as `aten.mm`, or the name of the value, such as `learning_rate`."""
    a: Any = None
    """The value in the first run."""
    b: Any = None
    """The value in the second run."""

    @property
    def is_one(self) -> bool:
        """Whether the runs differ."""
        return self.kind != "none"

    def order(self) -> tuple[int, int]:
        """Return what sorts differences by the moment at which they occur."""
        return (self.step or 0, KINDS.index(self.kind) if self.kind in KINDS else len(KINDS))


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Something that differed before, and may be the cause."""

    kind: str
    """`config`, `versions`, `layout`, `numerics`, `model` or another kind of difference."""
    name: str
    """What differs, such as `max_grad_norm` or `model.norm.variance_epsilon`."""
    a: Any
    """The value in the first run; None: it has none."""
    b: Any
    """The value in the second run."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `hfscale why` prints."""

    first_difference: Difference
    """The first difference."""
    before: Sequence[Earlier] = ()
    """What differed before it, the most important first."""
    explanation: str = ""
    """The same in sentences, with what to do next."""
    compared: dict[str, Any] = field(default_factory=dict)
    """What was compared: steps, traced steps, and how (`bits` or `tolerance`)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the answer for `--json`."""
        return {
            "first_difference": asdict(self.first_difference),
            "before": [asdict(one) for one in self.before],
            "explanation": self.explanation,
            "compared": self.compared,
        }
