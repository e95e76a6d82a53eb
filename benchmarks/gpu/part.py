"""The process of one part, and how it reports: `python -m benchmarks.gpu.part MODULE:FUNCTION [ARGUMENT …]`."""

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hfscale.recovery.children import adopt_orphans

PREFIX = "gpu result: "
"""How the line of a result begins."""
MAX_REASON = 300
"""Characters of an error that a result keeps."""


class CannotRunError(Exception):
    """What a part needs is not there; the message is the reason that is printed."""


def report(**result: Any) -> None:
    """Print a result of the part.

    Args:
        result (`Any`): Its values, which JSON can hold.
    """
    print(PREFIX + json.dumps(result, default=str), flush=True)


@contextmanager
def reported(**what: Any) -> Iterator[None]:
    """Turn an error of the block into a result, so that the next measurement of the part runs.

    Args:
        what (`Any`): What is measured, for the result.
    """
    begun = time.monotonic()
    try:
        yield
    except CannotRunError as reason:
        report(**what, not_run=str(reason))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        message = f"{type(error).__name__}: {lines[-1][:MAX_REASON]}"
        report(**what, failed=message, seconds=round(time.monotonic() - begun, 1))


def main(function: str, *arguments: str) -> None:
    """Run one part.

    Args:
        function (`str`): Module and function, as `Part.function`.
        arguments (`str`): Its arguments.
    """
    adopt_orphans()  # what a killed launcher leaves behind is then found among this process's children
    module, _, name = function.partition(":")
    # Imports are inside: a package that is missing or too old is a result as well.
    with reported():
        getattr(import_module(module), name)(*arguments)


if __name__ == "__main__":
    # The modules of the parts import this one by its name: its exception must be the same class there.
    import_module("benchmarks.gpu.part").main(*sys.argv[1:])
