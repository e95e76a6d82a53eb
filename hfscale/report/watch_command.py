"""`hfscale watch`: one page about runs while they go on."""

import os
from pathlib import Path
from typing import Annotated

import typer

from hfscale.report.watch.live import LiveRun, names_of
from hfscale.report.watch.open_metrics import Textfile
from hfscale.report.watch.server import TOKEN_VARIABLE, WatchServer

EXAMPLES = (
    "hfscale watch runs/train",
    "ssh -L 8700:localhost:8700 NODE    # on your machine, then open http://localhost:8700",
)


def run(
    output_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="The --output_dir of each run, finished or not."),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")
    ] = 8700,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
    ] = ("127.0.0.1"),
    token: Annotated[
        str | None, typer.Option(help=f"Secret that the page asks for; better in {TOKEN_VARIABLE}.")
    ] = None,
    textfile: Annotated[
        Path | None,
        typer.Option(
            help="Also write the metrics to this file NAME.prom, for node_exporter's textfile collector."
        ),
    ] = None,
    allow_save: Annotated[
        bool,
        typer.Option(
            "--allow-save",
            help="Show a button by which who sees the page asks a run for a checkpoint.",
        ),
    ] = False,
) -> None:
    """Show runs on a page that is updated while they go on, from the files in their output directories."""
    runs = [LiveRun(output_dir) for output_dir in output_dirs]
    by_name = dict(zip(names_of(runs), runs, strict=True))
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE) or None
    written = None
    if textfile is not None:
        written = Textfile(textfile, by_name)
    server = WatchServer(
        by_name, host=host, port=port, token=token, textfile=written, allows_save=allow_save
    )
    with server:
        if written is not None:
            written.write()
        print(f"hfscale watch: {server.url} (Ctrl+C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


COMMAND = run
