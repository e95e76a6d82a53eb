"""`hfscale check`: is this node, and under a launcher every rank and link, fit to train on?"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from hfscale.cli import COMMANDS
from hfscale.errors import UsageError

DEFAULT_DEADLINE_S = 120.0


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("check", help=COMMANDS["check"])(run)


def run(
    deadline: Annotated[float, typer.Option(help="Seconds until every rank knows the verdict.")] = DEFAULT_DEADLINE_S,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where checkpoints will go: room and speed are checked.")
    ] = None,
    checkpoint_gib: Annotated[
        float | None, typer.Option(help="Size of one (default: the largest that is there).")
    ] = None,
    notice: Annotated[float, typer.Option(help="Seconds between a preemption's notice and the end.")] = 30.0,
    backend: Annotated[str | None, typer.Option(help="nccl or gloo (default: nccl where there is a GPU).")] = None,
    short: Annotated[bool, typer.Option("--short", help="Small buffers only: no bandwidth.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Check this node; under `accelerate launch -m hfscale check` all ranks and the links between them too."""
    begun = time.monotonic()
    if deadline < 5:
        raise UsageError(f"--deadline {deadline:g} is below 5 s: starting the processes alone takes longer")
    if backend not in (None, "nccl", "gloo"):
        raise UsageError(f"--backend {backend} is neither nccl nor gloo")
    if notice <= 0 or (checkpoint_gib is not None and checkpoint_gib <= 0):
        raise UsageError("--notice and --checkpoint-gib must be above 0")
    from hfscale.health.check import Request, check_all, leave

    report = check_all(
        Request(
            deadline_s=deadline,
            output_dir=output_dir,
            checkpoint_bytes=None if checkpoint_gib is None else int(checkpoint_gib * 2**30),
            notice_s=notice,
            backend=backend,
            short=short,
        ),
        begun=begun,
    )
    if report.speaks:
        print(json.dumps(report.to_dict()) if as_json else report.text(), flush=True)
    return leave(report)
