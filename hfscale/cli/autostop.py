"""`hfscale autostop`: run a command once when training has ended or nothing goes on any more."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hfscale.autostop import files_sign, gpu_sign, parse_duration, process_sign, run_pid, wait_until_idle
from hfscale.cli import COMMANDS
from hfscale.errors import HfScaleError, UsageError
from hfscale.redact import redact_argv


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("autostop", help=COMMANDS["autostop"])(run)


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND …", help="Run as it is, by no shell.")
    ] = None,
    idle: Annotated[str, typer.Option(help="How long nothing must go on: 90s, 15m, 2h.")] = "15m",
    output_dir: Annotated[Path | None, typer.Option(help="Of a run: its status file and measurements.")] = None,
    pid: Annotated[int | None, typer.Option(help="A process to watch, with its children.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Watch the status file, the GPUs and the processes of a training; when it has ended, run COMMAND once."""
    if not command:
        raise UsageError("give the command behind --, such as: hfscale autostop --idle 15m -- sudo poweroff")
    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]} is not found: give a program of this machine, by its path if need be")
    idle_s = parse_duration(idle)
    names, signs = [], []
    gpu = gpu_sign()
    if gpu is not None:
        names.append("GPUs")
        signs.append(gpu)
    if output_dir is not None:
        names.append(str(output_dir))
        signs.append(files_sign(output_dir))
        pid = pid if pid is not None else run_pid(output_dir)
    if pid is not None:
        names.append(f"process {pid}")
        signs.append(process_sign(pid))
    if not signs:
        raise UsageError("there is nothing to watch on a machine without GPUs: give --output-dir or --pid")
    print(f"hfscale: watching {', '.join(names)}; idle after {idle_s:.0f} s", file=sys.stderr)
    reason = wait_until_idle(signs, idle_s=idle_s, output_dir=output_dir)
    shown = redact_argv(command)
    print(f"hfscale: {reason}: running {shown[0]}", file=sys.stderr)
    try:
        # With --json standard output is for the one object, so the command's own goes to standard error.
        done = subprocess.run(command, check=False, stdout=sys.stderr if as_json else None)  # noqa: S603
    except OSError as error:
        raise HfScaleError(f"command {command[0]} cannot be run: {error.strerror}") from None
    if as_json:
        print(json.dumps({"reason": reason, "command": shown, "returncode": done.returncode}))
    if done.returncode:
        print(f"hfscale: error: {command[0]} ended with exit code {done.returncode}", file=sys.stderr)
    return 1 if done.returncode else 0
