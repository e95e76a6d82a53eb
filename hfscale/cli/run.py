"""`hfscale run`: start a training, and start it again from its snapshot in host memory after a failure."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from hfscale.errors import UsageError
from hfscale.recovery.run_memory import DEFAULT_ROOT


def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND …", help="Run without a shell.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts in any 24 hours, after which it gives up.")] = 10,
    memory_dir: Annotated[
        Path, typer.Option(help="Folder of a file system in memory, for the snapshots of this node.")
    ] = DEFAULT_ROOT,
    memory_interval_steps: Annotated[
        int | None, typer.Option(help="Steps between snapshots (default: as many as keep their cost below 1%).")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Append one JSON line per failure and recovery to a file.")] = None,
) -> int:
    """Start COMMAND, a launcher such as accelerate launch, and start it again when a process of it dies."""
    if not command:
        raise UsageError("there is no command: give it after --, such as hfscale run -- accelerate launch train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]} is not found: give a program in PATH, or its path")
    if max_restarts < 0:
        raise UsageError(f"--max-restarts is {max_restarts}: it must be 0 or greater")
    if memory_interval_steps is not None and memory_interval_steps < 1:
        raise UsageError(f"--memory-interval-steps is {memory_interval_steps}: it must be 1 or greater")
    from hfscale.recovery.supervisor import RunSettings, Supervisor

    settings = RunSettings(
        command=command,
        max_restarts=max_restarts,
        root=memory_dir,
        memory_interval_steps=memory_interval_steps,
        log=log,
    )
    return Supervisor(settings).run()


COMMAND = run
