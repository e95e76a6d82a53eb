"""Makes the HTML reports of a run, of two runs and of a sweep. Each is one file that needs no network."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hfscale.core.counts import counted
from hfscale.report.formatting import count, percent
from hfscale.report.html import (
    Part,
    Series,
    document,
    line_chart,
    pair,
    save_page,
    stacked_bar,
    table,
)
from hfscale.report.prediction import predict
from hfscale.report.run_data import Run
from hfscale.report.sections import header, sections
from hfscale.report.two_runs import (
    MEAN_OF_LOGS,
    TwoRuns,
    answer,
    hours_of,
    loss_curve,
    rows,
)

_LOSS_COLOURS = {
    "data wait": "amber",
    "exposed communication": "violet",
    "straggler": "red",
    "uneven batches": "rust",
    "bubble": "teal",
    "not measured": "gray",
}


def write_page(run: Run, path: Path) -> None:
    """Write the report of a run to an HTML file.

    Args:
        run (`Run`): the data of the run (`load_run`).
        path (`Path`): the file; missing folders are created.

    Raises:
        StorageError: the file cannot be written.
    """
    save_page(page(run), path)


def page(run: Run) -> str:
    """Return the report of a run as an HTML document."""
    return document(run.name, [header(run), *sections(run, predict(run)).values()])


def write_sweep_page(answer: Mapping[str, Any], path: Path) -> None:
    """Write the report of a sweep to an HTML file.

    Args:
        answer (`Mapping[str, Any]`): the object that `hfscale sweep --json` prints.
        path (`Path`): the file; missing folders are created.

    Raises:
        StorageError: the file cannot be written.
    """
    save_page(sweep_page(answer), path)


def sweep_page(answer: Mapping[str, Any]) -> str:
    """Return the report of a sweep as an HTML document: speed and efficiency by number of GPUs, and the causes.

    Args:
        answer (`Mapping[str, Any]`): the object that `hfscale sweep --json` prints.
    """
    rows = answer["rows"]
    meaning = "equal work per process" if answer["mode"] == "weak" else "equal work in total"
    largest = rows[-1]
    header = (
        f"<header><h1>Scaling from {rows[0]['gpus']:d} to {largest['gpus']:d} GPUs</h1>"
        f"<p>{escape(str(answer['mode']))} scaling ({meaning}), {escape(str(answer.get('strategy') or ''))}: "
        f"{percent(largest['efficiency'])} efficiency on {largest['gpus']:d}</p></header>"
    )
    per_gpu = rows[0]["tokens_per_s_per_gpu"]
    measured = Series(
        name="measured", points=[(r["gpus"], r["tokens_per_s"]) for r in rows], colour="blue"
    )
    ideal = Series(
        name="ideal", points=[(r["gpus"], per_gpu * r["gpus"]) for r in rows], colour="gray"
    )
    chart = line_chart([measured, ideal], label="Tokens per second", x_name="GPUs", from_zero=True)
    bars = "".join(_sweep_row(row) for row in rows)
    return document("Scaling sweep", [header, f"<section>{chart}</section>", bars])


def _sweep_row(row: Mapping[str, Any]) -> str:
    kept = Part(
        name="efficiency", value=row["efficiency"], text=percent(row["efficiency"]), colour="blue"
    )
    lost = [
        Part(name=cause, value=share, text=percent(share), colour=_LOSS_COLOURS.get(cause, "gray"))
        for cause, share in row["losses"].items()
    ]
    finding = row["finding"]
    finding_text = ""
    if finding is not None:
        finding_text = (
            f'<p class="note"><b>{escape(finding["cause"])}</b>: {escape(finding["numbers"])}; '
            f"{escape(finding['fix'])}.</p>"
        )
    title = f"{counted(row['gpus'], 'GPU')}: {count(row['tokens_per_s_per_gpu'])} tokens/s/GPU"
    return (
        f"<section><h2>{escape(title)}</h2>{stacked_bar([kept, *lost], label=title)}{finding_text}"
        f'<p class="note">Repeats differ by {percent(row["spread"])}.</p></section>'
    )


def write_comparison(found: TwoRuns, path: Path) -> None:
    """Write the comparison of two runs to an HTML file.

    Args:
        found (`TwoRuns`): the comparison (`compare_two`).
        path (`Path`): the file; missing folders are created.

    Raises:
        StorageError: the file cannot be written.
    """
    save_page(comparison_page(found), path)


def comparison_page(found: TwoRuns) -> str:
    """Return the comparison of two runs as an HTML document: its answer, a table, the losses, and the settings.

    Args:
        found (`TwoRuns`): the comparison (`compare_two`).
    """
    head, *body = rows(found)
    names = head[1:3]
    settings = [(one.name, one.first, one.second) for one in found.settings]
    parts = [
        f"<header><h1>{escape(names[0])} and {escape(names[1])}</h1><p>{escape(answer(found))}.</p></header>",
        f"<section><h2>Compared</h2>{table(head, body)}</section>",
        pair(*_loss_charts(found, names)),
        f"<section><h2>Settings that differ</h2>{table(('setting', *names), settings)}</section>"
        if settings
        else "",
    ]
    return document(" and ".join(names), parts)


def _loss_charts(found: TwoRuns, names: Sequence[str]) -> list[str]:
    """Return the losses by step and by hours."""
    key = found.loss_key
    if key is None:
        return []
    label = (
        "Evaluation loss" if key == "eval_loss" else f"Training loss, mean of {MEAN_OF_LOGS} logs"
    )
    by_step = [loss_curve(run, key) for run in found.runs]
    by_hour = [hours_of(run, curve) for run, curve in zip(found.runs, by_step, strict=True)]
    return [
        line_chart(
            [
                Series(name=name, points=curve, colour=colour)
                for name, curve, colour in zip(names, curves, ("blue", "amber"), strict=True)
            ],
            label=label,
            x_name=x_name,
        )
        for curves, x_name in ((by_step, "step"), (by_hour, "hours since the first launch"))
    ]
