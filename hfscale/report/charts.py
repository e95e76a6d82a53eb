"""Charts as HTML: lines and cells are SVG that stretches, every word is HTML beside it and keeps its size on a phone.

Nothing is drawn by a script and nothing is loaded; colours are variables of the page's style sheet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hfscale.report.formatting import count

Point = tuple[float, float]
MOST_POINTS = 300
HEAT_ROWS, HEAT_COLUMNS = 64, 80


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line."""

    name: str
    """For the legend."""
    points: Sequence[Point]
    """x rising."""
    colour: str
    """A variable of the style sheet: `blue`, `teal`, …"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One piece of a bar."""

    name: str
    """For the legend."""
    value: float
    """Its length, in any unit."""
    text: str
    """The value in words."""
    colour: str
    """A variable of the style sheet."""


def ticks(low: float, high: float, *, most: int = 4) -> list[float]:
    """Round numbers between `low` and `high`, both included where they are round."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points: the mean of each stretch."""
    if len(points) <= most:
        return list(points)
    out = []
    for part in range(most):
        piece = points[part * len(points) // most : (part + 1) * len(points) // most]
        out.append((sum(x for x, _ in piece) / len(piece), sum(y for _, y in piece) / len(piece)))
    return out


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str,
    from_zero: bool = False,
    form: str = "{}",
    marks: Sequence[float] = (),
) -> str:
    """Lines over one x; `form` is what becomes of a y tick, `marks` are x where the run was resumed."""
    drawn = [(one, thin(one.points)) for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    left, right = min(xs), max(xs)
    low, high = (min(0.0, min(ys)) if from_zero else min(ys)), max(ys)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = (low if from_zero else low - margin), high + margin
    width, height = (right - left) or 1.0, high - low

    def at(x: float, y: float) -> tuple[float, float]:
        return (x - left) / width * 1000, (high - y) / height * 1000

    grid, words = [], []
    for tick in ticks(low, high):
        y = at(left, tick)[1]
        grid.append(f'<path class="grid" d="M0 {y:.1f}H1000"/>')
        words.append(f'<span class="y" style="top:{y / 10:.2f}%">{escape(form.format(_short(tick)))}</span>')
    for tick in ticks(left, right):
        x = at(tick, low)[0]
        words.append(f'<span class="x" style="left:{x / 10:.2f}%">{escape(_short(tick))}</span>')
    for mark in marks:
        x = at(min(max(mark, left), right), low)[0]
        grid.append(f'<path class="mark" d="M{x:.1f} 0V1000"><title>resumed at step {mark:.0f}</title></path>')
    lines = []
    for one, points in drawn:
        places = " ".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in points))
        path = f"M{places}" if len(points) > 1 else f"M{places}h0.01"
        lines.append(f'<path class="line" style="stroke:var(--{one.colour})" d="{path}"/>')
    legend = _legend([(one.name, one.colour, "") for one, _ in drawn]) if len(drawn) > 1 else ""
    return (
        f'<figure class="chart"><figcaption>{escape(label)}</figcaption>{legend}<div class="plot">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(grid)}{''.join(lines)}</svg>{''.join(words)}"
        f'<span class="x-name">{escape(x_name)}</span></div></figure>'
    )


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return count(value) if abs(value) >= 1000 else f"{value:.4g}"


def stacked_bar(parts: Sequence[Part], *, label: str) -> str:
    """One bar of pieces with a legend that says each; pieces too thin to see still have their line there."""
    total = sum(part.value for part in parts)
    if total <= 0:
        return ""
    cells = "".join(
        f'<span style="flex-grow:{part.value / total:.5f};background:var(--{part.colour})" '
        f'title="{escape(part.name)}: {escape(part.text)}"></span>'
        for part in parts
        if part.value > 0
    )
    legend = _legend([(part.name, part.colour, part.text) for part in parts if part.value > 0])
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{cells}</div>{legend}'


def _legend(rows: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(
        f'<li><i style="background:var(--{colour})"></i>{escape(name)}{f" <b>{escape(text)}</b>" if text else ""}</li>'
        for name, colour, text in rows
    )
    return f'<ul class="legend">{items}</ul>'


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a timeline."""

    start: float
    """Seconds."""
    end: float
    """Seconds."""
    colour: str
    """A variable of the style sheet."""
    title: str
    """Said on hover."""


def timeline(rows: Sequence[tuple[str, Sequence[Span], Sequence[float]]], *, begin: float, end: float) -> str:
    """Rows of a name, spans and ticks (saves)."""
    length = (end - begin) or 1.0

    def place(t: float) -> float:
        return min(max((t - begin) / length * 100, 0.0), 100.0)

    out = []
    for name, spans, saves in rows:
        pieces = "".join(
            f'<span class="span" style="left:{place(s.start):.3f}%;background:var(--{s.colour});'
            f'width:{max(place(s.end) - place(s.start), 0.15):.3f}%" title="{escape(s.title)}"></span>'
            for s in spans
        )
        marks = "".join(f'<span class="save" style="left:{place(t):.3f}%" title="a save"></span>' for t in saves)
        out.append(f'<div class="lane"><b>{escape(name)}</b><div>{pieces}{marks}</div></div>')
    return f'<div class="timeline">{"".join(out)}</div>'


def heat_map(samples: Sequence[tuple[float, Sequence[float]]], *, label: str, form: str) -> str:
    """Ranks from top to bottom, steps from left to right; of more ranks than rows, each row is its worst rank."""
    samples = [sample for sample in samples if len(sample[1]) == len(samples[-1][1])]
    ranks = len(samples[-1][1])
    columns = min(len(samples), HEAT_COLUMNS)
    rows = min(ranks, HEAT_ROWS)
    cells = []
    for column in range(columns):
        piece = samples[column * len(samples) // columns : (column + 1) * len(samples) // columns]
        means = [sum(values[rank] for _, values in piece) / len(piece) for rank in range(ranks)]
        cells.append([max(means[row * ranks // rows : (row + 1) * ranks // rows]) for row in range(rows)])
    top = max(max(column) for column in cells) or 1.0
    squares = []
    for x, shares in enumerate(cells):
        for y, value in enumerate(shares):
            first = y * ranks // rows
            title = f"rank {first}, step {samples[x * len(samples) // columns][0]:.0f}: {form.format(value)}"
            squares.append(
                f'<rect x="{x}" y="{y}" width="1.02" height="1.02" '
                f'style="fill-opacity:{0.04 + 0.96 * value / top:.3f}"><title>{escape(title)}</title></rect>'
            )
    height = max(48, min(16 * rows, 320))
    names = sorted({0, rows - 1, rows // 2} if rows > 4 else set(range(rows)))
    words = "".join(
        f'<span class="y" style="top:{(row + 0.5) / rows * 100:.2f}%">{row * ranks // rows}</span>' for row in names
    )
    return (
        f'<figure class="chart heat"><figcaption>{escape(label)}<small>darkest: {escape(form.format(top))}</small>'
        f'</figcaption><div class="plot" style="height:{height}px"><svg viewBox="0 0 {columns} {rows}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(squares)}</svg>{words}'
        f'<span class="x first" style="left:0%">{samples[0][0]:.0f}</span>'
        f'<span class="x last" style="left:100%">{samples[-1][0]:.0f}</span>'
        '<span class="x-name">step; a row per rank</span></div></figure>'
    )
