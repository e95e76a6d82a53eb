"""`hfscale why`: the first step and operation in which two runs differ, and what differed before."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hfscale.why.answer import compare_runs
from hfscale.why.difference import Answer

EXAMPLES = (
    "hfscale why runs/one-process runs/two-processes",
    "hfscale why runs/before runs/after --json",
)
_SHOWN = 12
"""Lines of what differed before that are printed."""


def run(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The --output_dir of a run.")],
    run_b: Annotated[
        Path, typer.Argument(metavar="RUN_B", help="The --output_dir of another run.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say why two runs differ: the first step, rank, module and operation. Exit code 1 if they do."""
    answer = compare_runs(run_a, run_b)
    print(json.dumps(answer.to_dict()) if as_json else _text(answer))
    return 1 if answer.first_difference.is_one else 0


def _text(answer: Answer) -> str:
    lines = [answer.explanation]
    found = answer.first_difference
    if found.is_one:
        values = (
            ("step", found.step),
            ("rank", found.rank),
            ("kind", found.kind),
            ("module", found.module),
        )
        named = (*values, ("operation", found.operation), ("a", found.a), ("b", found.b))
        lines += ["", *(f"  {name:<10} {value}" for name, value in named if value is not None)]
    if answer.before:
        lines += ["", "What differed before:"]
        lines += [f"  {one.kind}: {one.name}: {one.a} | {one.b}" for one in answer.before[:_SHOWN]]
        if len(answer.before) > _SHOWN:
            lines.append(f"  and {len(answer.before) - _SHOWN} more (--json lists all)")
    return "\n".join(lines)


COMMAND = run
