"""The report as one HTML page that needs nothing else: no script, no font, no network."""

import datetime
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hfscale import __version__
from hfscale.errors import StorageError
from hfscale.metrics.goodput import DOWN, LOST, START_UP, USEFUL_PHASE
from hfscale.report.charts import Part, Series, Span, heat_map, line_chart, stacked_bar, timeline
from hfscale.report.formatting import duration, percent, size
from hfscale.report.headline import Tile, headline, subtitle
from hfscale.report.priorities import priorities
from hfscale.report.run_data import Run
from hfscale.report.style import STYLE

PHASES = {
    USEFUL_PHASE: ("training steps", "blue"),
    "exposed communication": ("exposed communication", "violet"),
    "bubble": ("pipeline bubble", "violet"),
    "data_wait": ("waiting for data", "amber"),
    "save": ("saving", "teal"),
    "evaluate": ("evaluation", "teal"),
    START_UP: ("start-up", "gray"),
    LOST: ("lost after a checkpoint", "red"),
    DOWN: ("down between launches", "rust"),
    "other": ("logging and the rest", "gray"),
    "since the last checkpoint": ("since the last checkpoint", "gray"),
}
"""How each phase of the ledger is called and drawn, in the order of the bar."""

_SPREAD_WORTH_DRAWING = 0.05
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_page(run: Run, path: Path) -> None:
    """Write the report of a run to a file.

    Raises:
        StorageError: it cannot be written.
    """
    save(page(run), path)


def save(text: str, path: Path) -> None:
    """Write a page.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; give --html another file") from None


def page(run: Run) -> str:
    """The whole document."""
    parts = [
        _header(run),
        _tiles(headline(run)),
        _first(run),
        _split(run),
        _timeline(run),
        _pair(_loss(run), _throughput(run)),
        _pair(_shares(run), _memory(run)),
        _ranks(run),
        _checkpoints(run),
    ]
    return document(run.name, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A page of these parts, which are HTML."""
    footer = f"<footer>hfscale {escape(__version__)}. Numbers that are not known are left out.</footer>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · hfscale</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}{footer}</main></body></html>\n"
    )


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


def _first(run: Run) -> str:
    found = priorities(run)
    notes = "".join(f'<p class="note">{escape(note[:1].upper() + note[1:])}.</p>' for note in run.notes[-1:])
    if not found:
        return (
            '<section class="first none"><h2>What to change first</h2>'
            f"<p>Nothing stands out: no measured share is over its limit.</p>{notes}</section>"
        )
    items = "".join(
        f"<li><b>{escape(one.title)}</b>"
        + (f' <span class="share">{percent(one.share)} of the time</span>' if one.share is not None else "")
        + f"<p>{escape(one.mend[:1].upper() + one.mend[1:])}. <em>Measured: {escape(one.numbers)}.</em></p></li>"
        for one in found[:3]
    )
    return f'<section class="first"><h2>What to change first</h2><ol>{items}</ol>{notes}</section>'


def _split(run: Run) -> str:
    total = sum(run.split.values())
    parts = [
        Part(
            name=name,
            value=run.split[phase],
            colour=colour,
            text=f"{percent(run.split[phase] / total)}, {duration(run.split[phase])}",
        )
        for phase, (name, colour) in PHASES.items()
        if run.split.get(phase, 0.0) > 0
    ]
    drawn = stacked_bar(parts, label="where the time went")
    return f"<section><h2>Where the time went</h2>{drawn}</section>" if drawn else ""


def _timeline(run: Run) -> str:
    if not run.attempts:
        return ""
    begin, end = run.attempts[0].begun, run.attempts[-1].ended
    rows, sizes = [], {attempt.world_size for attempt in run.attempts}
    for number, attempt in enumerate(run.attempts, 1):
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
    restarts = len(run.attempts) - 1
    words = f"{duration(end - begin)} from {began}; {restarts} restart{'s' if restarts != 1 else ''}, {saves} saves"
    legend = '<p class="note">Blue was kept, red was done again; the light marks are saves.</p>'
    return (
        f"<section><h2>Timeline</h2>{timeline(rows, begin=begin, end=end)}"
        f'<p class="note">{escape(words)}.</p>{legend if saves or restarts else ""}</section>'
    )


def _resumes(run: Run) -> list[float]:
    return [float(attempt.first_step) for attempt in run.attempts[1:]]


def _loss(run: Run) -> str:
    series = [Series(name="loss", points=run.series("loss"), colour="blue")]
    return line_chart(series, label="Loss", x_name="step", marks=_resumes(run))


def _throughput(run: Run) -> str:
    series = [Series(name="tokens/s", points=run.series("scaling/tokens_per_s"), colour="teal")]
    chart = line_chart(series, label="Tokens per second", x_name="step", from_zero=True, marks=_resumes(run))
    baseline = run.facts.get("baseline")
    note = f'<p class="note">Scaling efficiency is against {escape(baseline)}.</p>' if baseline else ""
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
    return line_chart(series, label="Memory of the fullest GPU", x_name="step", from_zero=True, form="{} GiB")


def _pair(*charts: str) -> str:
    drawn = [f"<section>{chart}</section>" for chart in charts if chart]
    return f'<div class="pair">{"".join(drawn)}</div>' if drawn else ""


def _ranks(run: Run) -> str:
    named = {
        "data_wait_fraction": ("Waiting for data, by rank", "{:.0%}"),
        "comm_fraction": ("Exchanging or waiting for others, by rank: a slow rank is the pale one", "{:.0%}"),
        "compute_s": ("Own compute time, by rank", "{:.3g} s"),
        "stage_s": (
            "Own time of a rank's pipeline stages per step, by rank: the slowest stage sets the pace",
            "{:.3g} s",
        ),
        "memory_peak_gib": ("Peak memory, by rank", "{:.3g} GiB"),
    }
    maps = "".join(
        heat_map(samples, label=label, form=form)
        for key, (label, form) in named.items()
        if (samples := run.ranks.get(key)) and _spread(samples) > _SPREAD_WORTH_DRAWING
    )
    return f"<section>{maps}</section>" if maps else ""


def _spread(samples: Sequence[tuple[float, Sequence[float]]]) -> float:
    values = [value for _, row in samples for value in row]
    return (max(values) - min(values)) / (max(values) or 1.0)


def _checkpoints(run: Run) -> str:
    if not run.checkpoints:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.step}</td>"
        f"<td>{escape(size(one.bytes)) if one.bytes is not None else ''}</td><td>{one.world_size or ''}</td>"
        f"<td>{'committed' if one.is_committed else '<span class=bad>incomplete</span>'}</td></tr>"
        for one in run.checkpoints
    )
    stall = run.median("checkpoint/stall_s")
    note = f'<p class="note">Training stands still for {duration(stall)} per save.</p>' if stall is not None else ""
    return (
        '<section><h2>Checkpoints</h2><div class="wide"><table><thead><tr><th>folder</th><th>step</th><th>size</th>'
        f"<th>processes</th><th>state</th></tr></thead><tbody>{rows}</tbody></table></div>{note}</section>"
    )
