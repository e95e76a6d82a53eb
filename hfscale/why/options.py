"""The options of `TraceCallback`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from hfscale.core.options import Options, as_option, option
from hfscale.errors import ParameterError

MAX_STEPS = 32
"""Steps that one callback traces at most, which bounds the files."""


def read_steps(text: str) -> list[int]:
    """Read numbers of steps that are separated by commas or spaces.

    Args:
        text (`str`): such as `5,6`.

    Raises:
        ParameterError: one of them is not a number.
    """
    words = text.replace(",", " ").split()
    if not words or not all(word.lstrip("-").isdecimal() for word in words):
        raise ParameterError("steps", text, "give numbers of steps, such as 5,6")
    return [int(word) for word in words]


def few_steps(name: str, value: Any) -> None:
    """Check that steps are counted from 1 and that there are not too many."""
    for step in value:
        if step < 1:
            rule = f"{step} is below 1, and steps are counted from 1"
            raise ParameterError(name, list(value), rule)
    number = len(set(value))
    if number > MAX_STEPS:
        raise ParameterError(
            name, f"a list of {number}", f"at most {MAX_STEPS} steps can be traced"
        )


@dataclass(frozen=True)
class TraceOptions(Options):
    """The options of `TraceCallback`."""

    steps: Sequence[int] = field(
        metadata=as_option(
            flag="trace_steps",
            flag_type=str,
            read=read_steps,
            check=few_steps,
            help="Optimizer steps to trace for `hfscale why`, counted from 1, at most 32, such as 5,6",
        )
    )
    _: KW_ONLY
    operations: bool = option(
        True,
        flag="trace_operations",
        help="Each operation (aten.mm, …) is traced too, which takes most of the time",
    )
