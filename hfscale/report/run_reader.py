"""What a training uses of its report: `hfscale.core.run_reader.RunReader`, as functions of this module."""

from collections.abc import Sequence
from pathlib import Path

from hfscale.report.card import card_facts
from hfscale.report.page import write_page
from hfscale.report.run_data import load_run
from hfscale.report.summary import bottlenecks

__all__ = ["card_facts", "write_report"]


def write_report(output_dir: Path, path: Path, keys: Sequence[str]) -> dict[str, float | str]:
    """Write the report of a run as a page, and return its last numbers; see `RunReader.write_report`."""
    run = load_run(output_dir)
    write_page(run, path)
    numbers: dict[str, float | str] = {}
    for key in keys:
        value = run.last(key)
        if value is not None:
            numbers[key] = value
    first = next(iter(bottlenecks(run)), None)
    if first is not None:
        numbers["change_first"] = f"{first.check}: {first}"
    return numbers
