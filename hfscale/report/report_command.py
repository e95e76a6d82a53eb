"""`hfscale report`: where the time and the money of a run went, and what to change first."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfscale.core.counts import counted
from hfscale.report.formatting import duration, percent, size
from hfscale.report.page import write_comparison, write_page
from hfscale.report.prediction import Prediction, comparison, predict
from hfscale.report.run_data import Run, load_run
from hfscale.report.summary import (
    MAX_BOTTLENECKS,
    PHASES,
    bottlenecks,
    failures,
    headline,
    left_out,
    recoveries,
    subtitle,
)
from hfscale.report.two_runs import TwoRuns, answer, compare_two, rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 110
"""Columns of the output if it is not a terminal."""
_BAR_LENGTH = 30


EXAMPLES = (
    "hfscale report runs/train --html report.html",
    "hfscale report runs/adamw runs/muon",
)


def run(
    output_dir: Annotated[
        Path, typer.Argument(metavar="OUTPUT_DIR", help="The --output_dir of a run.")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="That of another run, to compare both.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page (one file, needs no network).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report on a run, finished or not, or compare two, from the files in their output directories."""
    if other is not None:
        _compare(compare_two(output_dir, other), html, as_json=as_json)
        return
    found = load_run(output_dir)
    if html is not None:
        write_page(found, html)
    if as_json:
        print(json.dumps(_to_dict(found) | {"html": str(html) if html is not None else None}))
        return
    _show(found)
    if html is not None:
        print(f"\nWritten: {html}")


def _compare(found: TwoRuns, html: Path | None, *, as_json: bool) -> None:
    if html is not None:
        write_comparison(found, html)
    if as_json:
        reports = [_to_dict(run) for run in found.runs]
        print(
            json.dumps(
                {
                    **found.to_dict(),
                    "runs": reports,
                    "html": str(html) if html is not None else None,
                }
            )
        )
        return
    _show_two(found)
    if html is not None:
        print(f"\nWritten: {html}")


def _show_two(found: TwoRuns) -> None:
    from rich.text import Text

    console = _console()
    console.print(Text(f"{answer(found)}.", style="bold"))
    console.print()
    console.print(_grid(rows(found)))
    settings = [(one.name, one.first, one.second) for one in found.settings]
    if settings:
        console.print(Text("\nSettings that differ", style="bold"))
        console.print(_grid(settings))


def _grid(lines: Sequence[Sequence[str]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3))
    for name, *cells in lines:
        table.add_row(Text(f"  {name}", style="dim"), *map(Text, cells))
    return table


def _to_dict(found: Run) -> dict[str, object]:
    """Return the report for `--json`. `mend` is the older name of `fix`."""
    return {
        "name": found.name,
        "status": found.status,
        "reason": found.reason,
        "headline": {tile.name: tile.value if tile.is_known else None for tile in headline(found)},
        "metrics": dict(found.records[-1]) if found.records else {},
        "priorities": [
            {
                "title": one.check,
                "share": one.share,
                "numbers": one.problem,
                "mend": one.fix,
                "fix": one.fix,
            }
            for one in bottlenecks(found)
        ],
        "prediction": predicted.to_dict()
        if isinstance(predicted := predict(found), Prediction)
        else {"absent": predicted},
        "failures": dict(found.failures),
        "recoveries": [dict(recovery) for recovery in found.recoveries],
        "seconds": dict(found.split),
        "attempts": [asdict(attempt) for attempt in found.attempts],
        "checkpoints": [asdict(checkpoint) for checkpoint in found.checkpoints],
    }


def _show(found: Run) -> None:
    from rich.text import Text

    console = _console()
    reason = f" ({found.reason})" if found.reason else ""
    console.print(Text(f"{found.name}: {found.status}{reason}", style="bold"))
    console.print(Text(subtitle(found)))
    console.print()
    console.print(_headline(found))
    console.print(Text("\nWhat to change first", style="bold"))
    causes = bottlenecks(found)[:MAX_BOTTLENECKS]
    for number, one in enumerate(causes, 1):
        share = f", {percent(one.share)} of the time" if one.share is not None else ""
        console.print(Text(f"  {number}. {one.check}{share}: {one.fix}. Measured: {one.problem}."))
    if not causes:
        console.print(Text("  No bottleneck found: no measured share is above its limit."))
    for note in (*found.notes[-1:], failures(found), left_out(found)):
        if note is not None:
            console.print(Text(f"  {note[:1].upper() + note[1:]}."))
    console.print(Text("\nPredicted and measured", style="bold"))
    _show_prediction(console, predict(found))
    for title, table in (
        ("Where the time went", _split(found)),
        ("Launches", _launches(found)),
        ("Recoveries", _recoveries(found)),
        ("Checkpoints", _checkpoints(found)),
    ):
        if table.row_count:
            console.print(Text(f"\n{title}", style="bold"))
            console.print(table)


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _show_prediction(console: "Console", found: Prediction | str) -> None:
    from rich.text import Text

    lines = (
        [f"not compared: {found}"]
        if isinstance(found, str)
        else [*comparison(found), *found.assumptions]
    )
    for line in lines:
        console.print(Text(f"  {line[:1].upper() + line[1:]}."))


def _headline(found: Run) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3))
    for tile in headline(found):
        style = "bold" if tile.is_known else "dim"
        table.add_row(Text(tile.name, style="dim"), Text(tile.value, style=style), Text(tile.note))
    return table


def _split(found: Run) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    total = sum(found.split.values())
    for phase, name in PHASES.items():
        seconds = found.split.get(phase, 0.0)
        if seconds > 0:
            bar = "█" * max(1, round(_BAR_LENGTH * seconds / total))
            table.add_row(f"  {name}", percent(seconds / total), duration(seconds), bar)
    return table


def _launches(found: Run) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for number, attempt in enumerate(found.attempts, found.lost_launches + 1):
        lost_s = attempt.ended - attempt.kept_until
        table.add_row(
            f"  {number}.",
            f"from step {attempt.first_step}",
            counted(attempt.world_size, "process") if attempt.world_size else "",
            f"up {duration(attempt.ended - attempt.begun)}",
            f"lost {duration(lost_s)}" if lost_s > 0 else "",
            counted(len(attempt.saves), "save"),
        )
    return table


def _recoveries(found: Run) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for step, failed, lost, time, parts in recoveries(found):
        table.add_row(f"  step {step}", Text(failed), f"steps repeated: {lost}", time, Text(parts))
    return table


def _checkpoints(found: Run) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for one in found.checkpoints:
        table.add_row(
            Text(f"  {one.name}"), size(one.bytes) if one.bytes is not None else "", one.state
        )
    return table


COMMAND = run
