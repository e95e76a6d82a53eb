"""Lets a training use the report of its run without importing the package that makes it.

`hfscale.report` reads what the packages of a training write, and so stands above them; with it come the planner and
the comparison of runs. A training needs it once, at its end. `hfscale/__init__.py`, which is above both and is always
imported first, registers where the reader is; the module is loaded when `run_reader` is first called.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hfscale.core.late import late


class RunReader(Protocol):
    """What a training asks of the report of its run. `hfscale.report.run_reader` implements it as a module."""

    def write_report(
        self, output_dir: Path, path: Path, keys: Sequence[str]
    ) -> dict[str, float | str]:
        """Write the report of a run as a page, and return its last numbers.

        Args:
            output_dir (`Path`): the output directory of the run.
            path (`Path`): the HTML file to write.
            keys (`Sequence[str]`): metric keys.

        Returns:
            `dict[str, float | str]`: the last value of each key that the run has logged, and under `change_first`
            the first bottleneck, if there is one.

        Raises:
            HfScaleError: the run has no measurements.
            OSError: a file cannot be read or written.
        """
        ...

    def card_facts(self, output_dir: Path) -> list[tuple[str, str]]:
        """Return what is known of a run as (name, text), for the card of its model.

        Args:
            output_dir (`Path`): the output directory of the run.

        Raises:
            UsageError: it is not a directory, or it has no measurements.
        """
        ...


def run_reader() -> RunReader:
    """Return the reader, whose module is loaded where no one has loaded it (`hfscale.core.late`)."""
    reader: RunReader = late("run_reader")
    return reader
