"""`hfscale check`: whether this node, and under a launcher every rank and link, is fit to train."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError, UsageError

DEFAULT_DEADLINE_S = 120.0
EXAMPLES = (
    "accelerate launch -m hfscale check",
    "hfscale check --collectives -- torchrun --nproc-per-node 2 train.py",
)


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND …]", help="The launch command to check."),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="Run the command for a few steps on CPUs: will some rank wait for ever for another?",
        ),
    ] = False,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity",
            help="Train a small version of the model: does the command compute what one process computes?",
        ),
    ] = False,
    small_model: Annotated[
        bool,
        typer.Option(
            "--small-model", help="With --collectives: fewer and narrower layers, random weights."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the command.")] = 6,
    quiet: Annotated[
        float,
        typer.Option(
            help="Seconds without news of any rank after which ranks that wait are reported."
        ),
    ] = 300.0,
    deadline: Annotated[
        float, typer.Option(help="Seconds from the arrival of the last rank to the verdict.")
    ] = DEFAULT_DEADLINE_S,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints: free space and speed are checked.")
    ] = None,
    checkpoint_gib: Annotated[
        float | None,
        typer.Option(help="Size of a checkpoint (default: the largest in --output-dir)."),
    ] = None,
    notice: Annotated[
        float, typer.Option(help="Seconds between a preemption notice and the end.")
    ] = 30.0,
    backend: Annotated[
        str | None, typer.Option(help="nccl or gloo (default: nccl where there is a GPU).")
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="Use small buffers only: bandwidth is not measured.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Check this node; under `accelerate launch -m hfscale check` all ranks and the links between them too."""
    begun = time.monotonic()
    if collectives and parity:
        both = f"{spelled('collectives')} and {spelled('parity')}"
        raise UsageError(f"{both} are two checks: give one of them")
    if collectives or parity:
        _check_positive(steps, quiet)
        if parity:
            return _check_parity(command or [], steps, quiet, as_json)
        return _check_collectives(command or [], steps, quiet, small_model, as_json)
    if command:
        either = f"{spelled('collectives')} or {spelled('parity')}"
        raise UsageError(
            f"'{command[0]}' is not an option: a launch command is checked with {either}"
        )
    if deadline < 5:
        raise UsageError(
            f"{spelled('deadline')} is {deadline:g}: give at least 5 s, since starting the processes takes longer"
        )
    if backend not in (None, "nccl", "gloo"):
        raise ParameterError("backend", backend, "use nccl or gloo")
    for name, value in (("notice", notice), ("checkpoint_gib", checkpoint_gib)):
        if value is not None and value <= 0:
            raise UsageError(f"{spelled(name)} is {value:g}: it must be greater than 0")
    from hfscale.check.check import CheckRequest, check_all, leave

    report = check_all(
        CheckRequest(
            deadline_s=deadline,
            output_dir=output_dir,
            checkpoint_bytes=None if checkpoint_gib is None else int(checkpoint_gib * 2**30),
            notice_s=notice,
            backend=backend,
            short=short,
        ),
        begun=begun,
    )
    if report.is_reporter:
        print(json.dumps(report.to_dict()) if as_json else report.text(), flush=True)
    return leave(report)


def _check_positive(steps: int, quiet_s: float) -> None:
    for name, value in (("steps", steps), ("quiet", quiet_s)):
        if value < 1:
            raise UsageError(f"{spelled(name)} is {value:g}: it must be at least 1")


def _check_collectives(
    command: list[str], steps: int, quiet_s: float, small: bool, as_json: bool
) -> int:
    """Run the launch command, compare the collectives of its ranks, and return the exit code."""
    from hfscale.check.rehearsal.launch import rehearse
    from hfscale.check.rehearsal.view import text_of

    found = rehearse(command, steps=steps, quiet_s=quiet_s, small=small)
    print(json.dumps(found.to_dict()) if as_json else text_of(found), flush=True)
    return 0 if found.is_good else 1


def _check_parity(command: list[str], steps: int, quiet_s: float, as_json: bool) -> int:
    """Run the launch command and one process, compare what they compute, and return the exit code."""
    from hfscale.check.rehearsal.parity import check_parity

    found = check_parity(command, steps=steps, quiet_s=quiet_s)
    print(json.dumps(found.to_dict()) if as_json else found.text(), flush=True)
    return 0 if found.is_good else 1


COMMAND = run
