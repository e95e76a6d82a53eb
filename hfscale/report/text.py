"""The report in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfscale.report.formatting import duration, percent, size
from hfscale.report.headline import headline, subtitle
from hfscale.report.page import PHASES
from hfscale.report.priorities import priorities
from hfscale.report.run_data import Run

TERMINAL = 110
"""Columns where the output is no terminal."""
_BAR = 30


def show(run: Run) -> None:
    """Print the report."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TERMINAL)
    console.print(Text(f"{run.name}: {run.status}" + (f" ({run.reason})" if run.reason else ""), style="bold"))
    console.print(Text(subtitle(run)))
    console.print()
    console.print(_tiles(run))
    console.print(Text("\nWhat to change first", style="bold"))
    found = priorities(run)
    for number, one in enumerate(found[:3], 1):
        share = f", {percent(one.share)} of the time" if one.share is not None else ""
        console.print(Text(f"  {number}. {one.title}{share}: {one.mend}. Measured: {one.numbers}."))
    if not found:
        console.print(Text("  Nothing stands out: no measured share is over its limit."))
    for note in run.notes[-1:]:
        console.print(Text(f"  {note[:1].upper() + note[1:]}."))
    if run.split:
        console.print(Text("\nWhere the time went", style="bold"))
        console.print(_split(run))
    if run.attempts:
        console.print(Text("\nLaunches", style="bold"))
        console.print(_attempts(run))
    if run.checkpoints:
        console.print(Text("\nCheckpoints", style="bold"))
        console.print(_checkpoints(run))


def _tiles(run: Run) -> Table:
    table = Table.grid(padding=(0, 3))
    for tile in headline(run):
        table.add_row(
            Text(tile.name, style="dim"), Text(tile.value, style="bold" if tile.is_known else "dim"), Text(tile.note)
        )
    return table


def _split(run: Run) -> Table:
    table, total = Table.grid(padding=(0, 2)), sum(run.split.values())
    for phase, (name, _) in PHASES.items():
        seconds = run.split.get(phase, 0.0)
        if seconds > 0:
            bar = "█" * max(1, round(_BAR * seconds / total))
            table.add_row(f"  {name}", percent(seconds / total), duration(seconds), bar)
    return table


def _attempts(run: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    for number, attempt in enumerate(run.attempts, 1):
        lost = attempt.ended - attempt.kept_until
        table.add_row(
            f"  {number}.",
            f"from step {attempt.first_step}",
            f"{attempt.world_size} processes" if attempt.world_size else "",
            f"up {duration(attempt.ended - attempt.begun)}",
            f"lost {duration(lost)}" if lost > 0 else "",
            f"{len(attempt.saves)} save{'s' if len(attempt.saves) != 1 else ''}",
        )
    return table


def _checkpoints(run: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    for one in run.checkpoints:
        state = "committed" if one.is_committed else "incomplete"
        table.add_row(Text(f"  {one.name}"), size(one.bytes) if one.bytes is not None else "", state)
    return table
