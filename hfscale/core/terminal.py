"""Consoles and tables of the subcommands."""

from collections.abc import Collection

from rich.console import Console
from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 120
"""Columns used if the output is not a terminal."""


def make_console(*, width: int = WIDTH_WITHOUT_TERMINAL) -> Console:
    """Return a console for plain text.

    Args:
        width (`int`): its columns if the output is not a terminal.
    """
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=width)


def make_table(*columns: str, right: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table without borders.

    Args:
        columns (`str`): the names of the columns.
        right (`Collection[str]`): those that are aligned to the right.
        title (`str`, *optional*): the line above the table.
    """
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table
