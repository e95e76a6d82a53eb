"""Makes the HTML reports of a run, of two runs and of a sweep. Each is one file that needs no network."""

import datetime
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hfscale.metrics.goodput import DOWN, LOST, START_UP, USEFUL_PHASE
from hfscale.report.formatting import count, duration, percent, size
from hfscale.report.html import (
    Part,
    Series,
    Span,
    document,
    heat_map,
    line_chart,
    save_page,
    stacked_bar,
    timeline,
)
from hfscale.report.prediction import comparison, predict
from hfscale.report.run_data import Run
from hfscale.report.summary import (
    MAX_BOTTLENECKS,
    PHASES,
    Tile,
    bottlenecks,
    failures,
    headline,
    left_out,
    rank_measures,
    recoveries,
    subtitle,
)
from hfscale.report.two_runs import (
    MEAN_OF_LOGS,
    TwoRuns,
    answer,
    hours_of,
    loss_curve,
    rows,
)

_PHASE_COLOURS = {
    USEFUL_PHASE: "blue",
    "exposed communication": "violet",
    "bubble": "violet",
    "data_wait": "amber",
    "save": "teal",
    "evaluate": "teal",
    START_UP: "gray",
    LOST: "red",
    DOWN: "rust",
    "other": "gray",
    "since the last checkpoint": "gray",
}
_LOSS_COLOURS = {
    "data wait": "amber",
    "exposed communication": "violet",
    "straggler": "red",
    "bubble": "teal",
    "not measured": "gray",
}
_MIN_SPREAD = 0.05
"""A number per rank is drawn if the ranks differ by more than this share of the largest."""


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
    parts = [
        _header(run),
        _tiles(headline(run)),
        _bottlenecks(run),
        _prediction(run),
        _split(run),
        _timeline(run),
        _pair(_loss(run), _throughput(run)),
        _pair(_shares(run), _memory(run)),
        _ranks(run),
        _islands(run),
        _recoveries(run),
        _checkpoints(run),
    ]
    return document(run.name, parts)


def _header(run: Run) -> str:
    reason = f"<p>{escape(run.reason)}</p>" if run.reason else ""
    return (
        f'<header><h1>{escape(run.name)}<span class="pill {escape(run.status)}">{escape(run.status)}</span></h1>'
        f"<p>{escape(subtitle(run))}</p>{reason}</header>"
    )


def _tiles(tiles: Sequence[Tile]) -> str:
    cells = "".join(
        f"<div{'' if tile.is_known else ' class=unknown'}><span>{escape(tile.name)}</span>"
        f"<strong>{escape(tile.value)}</strong><small>{escape(tile.note)}</small></div>"
        for tile in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _bottlenecks(run: Run) -> str:
    found = bottlenecks(run)
    lines = [*run.notes[-1:], *filter(None, [failures(run), left_out(run)])]
    notes = "".join(f'<p class="note">{escape(note[:1].upper() + note[1:])}.</p>' for note in lines)
    if not found:
        return (
            '<section class="bottlenecks none"><h2>What to change first</h2>'
            f"<p>No bottleneck found: no measured share is above its limit.</p>{notes}</section>"
        )
    items = "".join(
        f"<li><b>{escape(one.check)}</b>"
        + (
            f' <span class="share">{percent(one.share)} of the time</span>'
            if one.share is not None
            else ""
        )
        + f"<p>{escape(one.fix[:1].upper() + one.fix[1:])}. <em>Measured: {escape(one.problem)}.</em></p></li>"
        for one in found[:MAX_BOTTLENECKS]
    )
    return f'<section class="bottlenecks"><h2>What to change first</h2><ol>{items}</ol>{notes}</section>'


def _prediction(run: Run) -> str:
    found = predict(run)
    lines = (
        [f"not compared: {found}"]
        if isinstance(found, str)
        else [*comparison(found), *found.assumptions]
    )
    text = "".join(f"<p>{escape(line[:1].upper() + line[1:])}.</p>" for line in lines)
    return f"<section><h2>Predicted and measured</h2>{text}</section>"


def _split(run: Run) -> str:
    total = sum(run.split.values())
    parts = [
        Part(
            name=name,
            value=run.split[phase],
            colour=_PHASE_COLOURS[phase],
            text=f"{percent(run.split[phase] / total)}, {duration(run.split[phase])}",
        )
        for phase, name in PHASES.items()
        if run.split.get(phase, 0.0) > 0
    ]
    drawn = stacked_bar(parts, label="where the time went")
    return f"<section><h2>Where the time went</h2>{drawn}</section>" if drawn else ""


def _timeline(run: Run) -> str:
    if not run.attempts:
        return ""
    begin = run.attempts[0].begun
    end = run.attempts[-1].ended
    sizes = {attempt.world_size for attempt in run.attempts}
    rows = []
    for number, attempt in enumerate(run.attempts, run.lost_launches + 1):
        kept = Span(
            start=attempt.begun,
            end=attempt.kept_until,
            colour="blue",
            title=f"{duration(attempt.kept_until - attempt.begun)} kept",
        )
        lost = Span(
            start=attempt.kept_until,
            end=attempt.ended,
            colour="red",
            title=f"{duration(attempt.ended - attempt.kept_until)} lost",
        )
        spans = [span for span in (kept, lost) if span.end > span.start]
        on = f" on {attempt.world_size}" if attempt.world_size and len(sizes) > 1 else ""
        rows.append((f"{number}. from step {attempt.first_step}{on}", spans, attempt.saves))
    began = datetime.datetime.fromtimestamp(begin, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    saves = sum(len(attempt.saves) for attempt in run.attempts)
    restarts = run.restarts
    summary = f"{duration(end - begin)} from {began}; {restarts} restart{'s' if restarts != 1 else ''}, {saves} saves"
    legend = (
        '<p class="note">Blue work was kept, red work was repeated; the light marks are saves.</p>'
    )
    return (
        f"<section><h2>Timeline</h2>{timeline(rows, begin=begin, end=end)}"
        f'<p class="note">{escape(summary)}.</p>{legend if saves or restarts else ""}</section>'
    )


def _resumes(run: Run) -> list[float]:
    return [float(attempt.first_step) for attempt in run.attempts[1:]]


def _loss(run: Run) -> str:
    series = [
        Series(name="loss", points=run.series("loss"), colour="blue"),
        Series(name="evaluation", points=run.series("eval_loss"), colour="amber"),
    ]
    return line_chart(series, label="Loss", x_name="step", marks=_resumes(run))


def _throughput(run: Run) -> str:
    unit = "tokens" if run.series("scaling/tokens_per_s") else "samples"
    series = [Series(name=f"{unit}/s", points=run.series(f"scaling/{unit}_per_s"), colour="teal")]
    label = f"{unit.capitalize()} per second"
    chart = line_chart(series, label=label, x_name="step", from_zero=True, marks=_resumes(run))
    baseline = run.facts.get("baseline")
    note = (
        f'<p class="note">Scaling efficiency is relative to {escape(str(baseline))}.</p>'
        if baseline
        else ""
    )
    return chart + note if chart else ""


def _shares(run: Run) -> str:
    named = (
        ("waiting for data", "scaling/data_wait_fraction", "amber"),
        ("exposed communication", "scaling/comm_fraction", "violet"),
        ("pipeline bubble", "scaling/bubble_fraction", "teal"),
        ("MFU", "scaling/mfu", "blue"),
        ("goodput", "scaling/goodput", "gray"),
    )
    series = [
        Series(name=name, points=[(x, 100 * y) for x, y in run.series(key)], colour=colour)
        for name, key, colour in named
    ]
    return line_chart(series, label="Shares of the time", x_name="step", from_zero=True, form="{}%")


def _memory(run: Run) -> str:
    series = [Series(name="peak", points=run.series("gpu/memory_peak_gib"), colour="violet")]
    return line_chart(
        series, label="Peak memory of the fullest GPU", x_name="step", from_zero=True, form="{} GiB"
    )


def _pair(*charts: str) -> str:
    drawn = [f"<section>{chart}</section>" for chart in charts if chart]
    return f'<div class="pair">{"".join(drawn)}</div>' if drawn else ""


def _ranks(run: Run) -> str:
    maps = "".join(
        heat_map(samples, label=measure.label, form=measure.form)
        for measure, samples in rank_measures(run)
        if _spread(samples) > _MIN_SPREAD
    )
    return f"<section>{maps}</section>" if maps else ""


def _spread(samples: Sequence[tuple[float, Sequence[float]]]) -> float:
    values = [value for _, row in samples for value in row]
    return (max(values) - min(values)) / (max(values) or 1.0)


def _islands(run: Run) -> str:
    """Return the rounds of a training on several islands (docs/islands.md)."""
    rounds = run.series("islands/round_s")
    if not rounds:
        return ""
    drift = Series(
        name="drift", points=[(x, 100 * y) for x, y in run.series("islands/drift")], colour="violet"
    )
    wait = [(x, 100 * y) for x, y in run.series("islands/stall_fraction")]
    waiting = Series(name="waiting", points=wait, colour="amber")
    sent = sum(value for _, value in run.series("islands/bytes"))
    median = statistics.median(value for _, value in rounds)
    dropped = run.last("islands/dropped_samples") or 0.0
    note = (
        f"{len(rounds)} logs with a round; training waits {duration(median)} for a round (median). "
    )
    note += f"This process has sent {size(int(sent))}. " + (
        f"{count(dropped)} samples were dropped." if dropped else ""
    )
    charts = _pair(
        line_chart(
            [drift],
            label="Distance of the islands, of the parameters' norm",
            x_name="step",
            form="{}%",
        ),
        line_chart(
            [waiting],
            label="Share of the time in rounds",
            x_name="step",
            from_zero=True,
            form="{}%",
        ),
    )
    return f'<section><h2>Islands</h2><p class="note">{escape(note.strip())}</p>{charts}</section>'


def _recoveries(run: Run) -> str:
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in recovery)}</tr>"
        for recovery in recoveries(run)
    )
    if not rows:
        return ""
    names = ("first step", "what failed", "steps repeated", "time", "parts of it")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    return (
        f'<section><h2>Recoveries</h2><div class="wide"><table><thead>{head}</thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _checkpoints(run: Run) -> str:
    if not run.checkpoints:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.step}</td>"
        f"<td>{escape(size(one.bytes)) if one.bytes is not None else ''}</td>"
        f"<td>{escape(str(one.world_size or ''))}</td>"
        f"<td>{'committed' if one.is_committed else '<span class=bad>incomplete</span>'}</td></tr>"
        for one in run.checkpoints
    )
    stall = run.median("checkpoint/stall_s")
    note = (
        f'<p class="note">Training waits {duration(stall)} for each save.</p>'
        if stall is not None
        else ""
    )
    return (
        '<section><h2>Checkpoints</h2><div class="wide"><table><thead><tr><th>folder</th><th>step</th><th>size</th>'
        f"<th>processes</th><th>state</th></tr></thead><tbody>{rows}</tbody></table></div>{note}</section>"
    )


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
    title = f"{row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}: {count(row['tokens_per_s_per_gpu'])} tokens/s/GPU"
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
        f"<section><h2>Compared</h2>{_table(head, body)}</section>",
        _pair(*_loss_charts(found, names)),
        f"<section><h2>Settings that differ</h2>{_table(('setting', *names), settings)}</section>"
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


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = "".join(row("td", cells) for cells in body)
    return f'<div class="wide"><table><thead>{row("th", head)}</thead><tbody>{lines}</tbody></table></div>'
