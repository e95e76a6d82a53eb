"""A sweep as one HTML page: efficiency by number of GPUs, with what it lacks by cause."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from hfscale.report.charts import Part, Series, line_chart, stacked_bar
from hfscale.report.formatting import count, percent
from hfscale.report.page import document, save

_COLOURS = {
    "data wait": "amber",
    "exposed communication": "violet",
    "straggler": "red",
    "bubble": "teal",
    "not measured": "gray",
}


def write_sweep_page(answer: Mapping[str, Any], path: Path) -> None:
    """Draw what `hfscale sweep --json` prints.

    Raises:
        StorageError: the file cannot be written.
    """
    save(sweep_page(answer), path)


def sweep_page(answer: Mapping[str, Any]) -> str:
    """The whole document."""
    rows = answer["rows"]
    held = "equal work per process" if answer["mode"] == "weak" else "equal work in total"
    best = rows[-1]
    header = (
        f"<header><h1>Scaling from {rows[0]['gpus']} to {best['gpus']} GPUs</h1>"
        f"<p>{escape(str(answer['mode']))} scaling ({held}), {escape(str(answer.get('strategy') or ''))}: "
        f"{percent(best['efficiency'])} efficiency on {best['gpus']}</p></header>"
    )
    lines = [Series(name="measured", points=[(r["gpus"], r["tokens_per_s"]) for r in rows], colour="blue")]
    perfect = rows[0]["tokens_per_s_per_gpu"]
    lines.append(Series(name="perfect", points=[(r["gpus"], perfect * r["gpus"]) for r in rows], colour="gray"))
    chart = line_chart(lines, label="Tokens per second", x_name="GPUs", from_zero=True)
    bars = "".join(_bar(row) for row in rows)
    return document("Scaling sweep", [header, f"<section>{chart}</section>", bars])


def _bar(row: Mapping[str, Any]) -> str:
    kept = Part(name="efficiency", value=row["efficiency"], text=percent(row["efficiency"]), colour="blue")
    lost = [
        Part(name=cause, value=share, text=percent(share), colour=_COLOURS.get(cause, "gray"))
        for cause, share in row["losses"].items()
    ]
    finding = row["finding"]
    words = ""
    if finding is not None:
        words = (
            f'<p class="note"><b>{escape(finding["cause"])}</b>: {escape(finding["numbers"])}; '
            f"{escape(finding['mend'])}.</p>"
        )
    title = f"{row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}: {count(row['tokens_per_s_per_gpu'])} tokens/s/GPU"
    return (
        f"<section><h2>{escape(title)}</h2>{stacked_bar([kept, *lost], label=title)}{words}"
        f'<p class="note">Repeats differ by {percent(row["spread"])}.</p></section>'
    )
