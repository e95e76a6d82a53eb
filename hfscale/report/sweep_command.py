"""`hfscale sweep`: measures scaling efficiency and its causes, and records a baseline for later runs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hfscale.core.durable_files import write_atomically
from hfscale.core.shipped import find_config
from hfscale.errors import ParameterError, StorageError
from hfscale.metrics.baseline import FORMAT, Baseline, read_baselines, user_file
from hfscale.report.sweep import Measurement, Sweep, run_sweep

_BAR_LENGTH = 40
_LETTERS = {
    "data wait": "d",
    "exposed communication": "c",
    "straggler": "s",
    "uneven batches": "u",
    "bubble": "b",
    "not measured": "·",
}


def run(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- RECIPE …", help="The recipe's script and its flags."),
    ] = None,
    gpus: Annotated[str, typer.Option(help="Numbers of processes, such as 1,2,4,8.")] = "1,2",
    mode: Annotated[
        str, typer.Option(help="weak: equal work per process; strong: equal work in total.")
    ] = "weak",
    repeats: Annotated[int, typer.Option(help="How often each number of processes runs.")] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 40,
    config_file: Annotated[
        str, typer.Option(help="Config for accelerate launch: a shipped name or a file.")
    ] = "ddp",
    output_dir: Annotated[Path, typer.Option(help="Where the measurements are kept.")] = Path(
        "runs/sweep"
    ),
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="File that the baseline is recorded in (default: ~/.config/hfscale/baselines.json)."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one run may take.")] = 3600.0,
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page (one file, needs no network).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Run a recipe on 1, 2, 4 … processes, compare their speeds and record the smallest as a baseline."""
    if mode not in ("weak", "strong"):
        raise ParameterError("mode", mode, "it must be weak or strong")
    sweep = Sweep(
        recipe=recipe or [],
        gpus=parse_gpus(gpus),
        mode=mode,  # type: ignore[arg-type]
        repeats=repeats,
        steps=steps,
        config_file=Path(config_file)
        if Path(config_file).is_file()
        else find_config(config_file).path,
        output_dir=output_dir,
        timeout_s=timeout,
    )
    _check_gpus(sweep.gpus)
    found = run_sweep(sweep, log=lambda line: print(f"hfscale: {line}", file=sys.stderr))
    path = baseline or user_file()
    recorded = found[0].baseline()
    record_baseline(path, recorded)
    answer = to_dict(found, mode) | {"baseline": {"file": str(path), **asdict(recorded)}}
    (output_dir / "sweep.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    if html is not None:
        from hfscale.report.page import write_sweep_page

        write_sweep_page(answer, html)
    if as_json:
        print(json.dumps(answer))
    else:
        _show(answer, path, html)
    return 0


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parse numbers of processes such as `1,2,4`, and return them in ascending order.

    Args:
        text (`str`): the value of `--gpus`.

    Raises:
        UsageError: the text is not a list of different positive integers.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words) or len(set(words)) < len(
        words
    ):
        raise ParameterError(
            "gpus", text, "it must be a list of different positive integers, such as 1,2,4,8"
        )
    return tuple(sorted(int(word) for word in words))


def _check_gpus(gpus: Sequence[int]) -> None:
    import torch

    available = torch.cuda.device_count()
    if 0 < available < max(gpus):
        raise ParameterError(
            "gpus", max(gpus), f"this machine has {available}; give at most that many"
        )


def to_dict(found: Sequence[Measurement], mode: str) -> dict[str, Any]:
    """Convert measurements to what `--json` prints.

    Args:
        found (`Sequence[Measurement]`): one for each number of processes; the first is the base of the efficiency.
        mode (`str`): `weak` or `strong`.

    Returns:
        `mode`, `strategy` and `rows`. In a row `efficiency`, `spread` and the values of `losses` are ratios, and
        `rates` are the tokens per second and GPU of each repeat.
    """
    base = found[0]
    rows = []
    for one in found:
        bottleneck = one.bottleneck(base)
        rows.append(
            {
                "gpus": one.gpus,
                "global_batch_size": one.facts.get("global_batch_size"),
                "tokens_per_gpu": one.facts.get("tokens_per_gpu"),
                "tokens_per_s": one.tokens_per_s_per_gpu * one.gpus,
                "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
                "efficiency": one.efficiency(base),
                "spread": one.spread(),
                "losses": one.losses(base),
                "finding": bottleneck.to_cause() if bottleneck is not None else None,
                "rates": one.rates,
            }
        )
    return {"mode": mode, "strategy": base.facts.get("strategy"), "rows": rows}


def _show(answer: dict[str, Any], path: Path, html: Path | None) -> None:
    from hfscale.core.terminal import make_console, make_table

    console = make_console()
    meaning = "equal work per process" if answer["mode"] == "weak" else "equal work in total"
    console.print(f"{answer['mode']} scaling ({meaning})")
    numbers = ("GPUs", "batch", "tokens/s", "tokens/s/GPU", "spread", "efficiency")
    table = make_table(*numbers, "", right=numbers)
    for row in answer["rows"]:
        full = round(_BAR_LENGTH * min(row["efficiency"], 1.0))
        lost = "".join(
            _LETTERS[cause] * round(_BAR_LENGTH * share) for cause, share in row["losses"].items()
        )
        table.add_row(
            str(row["gpus"]),
            str(row["global_batch_size"] or ""),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['spread']:.0%}",
            f"{row['efficiency']:.0%}",
            "█" * full + lost,
        )
    console.print(table)
    causes = {cause for row in answer["rows"] for cause in row["losses"]}
    if causes:
        console.print(
            "lost: "
            + ", ".join(
                f"{letter} {cause}" for cause, letter in _LETTERS.items() if cause in causes
            )
        )
    for row in answer["rows"]:
        if row["finding"] is not None:
            found = row["finding"]
            console.print(
                f"{row['gpus']} GPUs, {found['cause']}: {found['numbers']}; {found['fix']}",
                markup=False,
            )
    console.print(f"Baseline: {path}", markup=False)
    if html is not None:
        console.print(f"Written: {html}", markup=False)


COMMAND = run


def record_baseline(path: Path, baseline: Baseline) -> None:
    """Add a baseline to a file, and replace an earlier one of the same work on the same number of GPUs.

    Args:
        path (`Path`): the file; it is created if it does not exist.
        baseline (`Baseline`): the measured speed.

    Raises:
        ConfigFileError: the file exists, and is not a file that `hfscale sweep` writes.
        StorageError: the file cannot be written.
    """
    rows = read_baselines(path) if path.exists() else []
    key = (baseline.workload, baseline.world_size)
    kept = [row for row in rows if (row.workload, row.world_size) != key]
    content = {"format": FORMAT, "baselines": [asdict(row) for row in [*kept, baseline]]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise StorageError(
            f"baseline {path} cannot be written: {error.strerror}; give another file with --baseline"
        ) from None
