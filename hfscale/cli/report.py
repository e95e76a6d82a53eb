"""`hfscale report`: where the time and the money of a run went, and what to change first."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hfscale.cli import COMMANDS
from hfscale.report.headline import headline
from hfscale.report.page import write_page
from hfscale.report.priorities import priorities
from hfscale.report.run_data import load_run


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("report", help=COMMANDS["report"])(run)


def run(
    output_dir: Annotated[Path, typer.Argument(metavar="OUTPUT_DIR", help="The --output_dir of a run.")],
    html: Annotated[Path | None, typer.Option(help="Write a page: one file, no network.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Report on a run, finished or not, from the files in its output directory."""
    found = load_run(output_dir)
    if html is not None:
        write_page(found, html)
    if as_json:
        print(
            json.dumps(
                {
                    "name": found.name,
                    "status": found.status,
                    "reason": found.reason,
                    "headline": {tile.name: tile.value if tile.is_known else None for tile in headline(found)},
                    "metrics": dict(found.records[-1]) if found.records else {},
                    "priorities": [asdict(one) for one in priorities(found)],
                    "seconds": dict(found.split),
                    "attempts": [asdict(attempt) for attempt in found.attempts],
                    "checkpoints": [asdict(checkpoint) for checkpoint in found.checkpoints],
                    "html": str(html) if html is not None else None,
                }
            )
        )
        return
    from hfscale.report.text import show

    show(found)
    if html is not None:
        print(f"\nWritten: {html}")
