"""Builds HTML pages: the document with its style sheet, and charts.

A page loads nothing and runs no script. Lines and cells of a chart are SVG that stretches with the page; all text is
HTML on top of it, so that it keeps its size on a phone. Colours are variables of the style sheet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from hfscale import __version__
from hfscale.core.disk_errors import writing
from hfscale.report.formatting import count

Point = tuple[float, float]
MAX_POINTS = 300
HEAT_MAP_ROWS = 64
HEAT_MAP_COLUMNS = 80
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
"""The style sheet of the reports."""
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, parts: Sequence[str]) -> str:
    """Return a complete HTML document.

    Args:
        title (`str`): the title, as plain text.
        parts (`Sequence[str]`): the sections of the page, as HTML; empty strings are allowed.

    Returns:
        `str`: the document.
    """
    footer = f"<footer>hfscale {escape(__version__)}. Unknown numbers are left out.</footer>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · hfscale</title><style>\n{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}{footer}</main></body></html>\n"
    )


def save_page(text: str, path: Path) -> None:
    """Write a page to a file.

    Args:
        text (`str`): the HTML document.
        path (`Path`): the file; missing folders are created.

    Raises:
        StorageError: the file cannot be written.
    """
    with writing(f"--html {path}", "give another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Series:
    """Describes one line of a line chart."""

    name: str
    """Name in the legend."""
    points: Sequence[Point]
    """Points (x, y) with rising x."""
    colour: str
    """A variable of the style sheet: `blue`, `teal` and so on."""
    plan: float | None = None
    """What the planner estimates, drawn as a dashed line; None without an estimate."""
    newest: float | None = None
    """The newest value, where the points are means; None: that of the last point."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Describes one part of a stacked bar."""

    name: str
    """Name in the legend."""
    value: float
    """Length, in any unit."""
    text: str
    """The value as text, for the legend."""
    colour: str
    """A variable of the style sheet."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Describes a stretch of time in a timeline."""

    start: float
    """Its start in Unix seconds."""
    end: float
    """Its end in Unix seconds."""
    colour: str
    """A variable of the style sheet."""
    title: str
    """Text that is shown on hover."""


def ticks(low: float, high: float, *, most: int = 4) -> list[float]:
    """Return round numbers for the labels of an axis, including both ends if they are round.

    Args:
        low (`float`): the lower end of the axis.
        high (`float`): the upper end of the axis.
        most (`int`): about how many numbers to return.

    Returns:
        `list[float]`: the numbers in rising order; only `low` if `high` is not above it.
    """
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Reduce the number of points of a line; each new point is the mean of consecutive ones.

    Args:
        points (`Sequence[Point]`): the points (x, y), in order.
        most (`int`): the largest number of points to return.
    """
    return thin_columns([x for x, _ in points], [y for _, y in points], most)


def thin_columns(xs: Sequence[float], ys: Sequence[float], most: int = MAX_POINTS) -> list[Point]:
    """Do as `thin` with points that are given as two columns, which take a third of the memory.

    Args:
        xs (`Sequence[float]`): the first coordinates, in order.
        ys (`Sequence[float]`): the second ones, as many.
        most (`int`): the largest number of points to return.
    """
    if len(xs) <= most:
        return list(zip(xs, ys, strict=True))
    bounds = [number * len(xs) // most for number in range(most + 1)]
    return [(_mean(xs[first:end]), _mean(ys[first:end])) for first, end in pairwise(bounds)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_name: str,
    from_zero: bool = False,
    form: str = "{}",
    marks: Sequence[float] = (),
) -> str:
    """Draw lines over a common x-axis.

    Args:
        series (`Sequence[Series]`): the lines; those without points are left out.
        label (`str`): the caption.
        x_name (`str`): the name of the x-axis.
        from_zero (`bool`): whether the y-axis includes zero.
        form (`str`): format of the labels of the y-axis.
        marks (`Sequence[float]`): steps at which the run was resumed, drawn as vertical lines.

    Returns:
        `str`: the chart as HTML; empty if there are no points.
    """
    drawn = [(one, thin(one.points)) for one in series if one.points]
    if not drawn:
        return ""
    axes = _axes_of(drawn, from_zero=from_zero)
    shapes = []
    labels = []
    for tick in ticks(axes.low, axes.high):
        y = axes.down(tick)
        text = escape(form.format(short(tick)))
        shapes.append(f'<path class="grid" d="M0 {y:.1f}H1000"/>')
        labels.append(f'<span class="y" style="top:{y / 10:.2f}%">{text}</span>')
    for tick in ticks(axes.left, axes.right):
        x = axes.across(tick)
        labels.append(f'<span class="x" style="left:{x / 10:.2f}%">{escape(short(tick))}</span>')
    for mark in marks:
        x = min(max(axes.across(mark), 0.0), 1000.0)
        title = f"<title>resumed at step {mark:.0f}</title>"
        shapes.append(f'<path class="mark" d="M{x:.1f} 0V1000">{title}</path>')
    for one, points in drawn:
        if one.plan is not None:
            title = (
                f"<title>{escape(one.name)}, plan: {escape(form.format(short(one.plan)))}</title>"
            )
            shapes.append(
                f'<path class="plan" d="M0 {axes.down(one.plan):.1f}H1000">{title}</path>'
            )
        positions = " ".join(f"{axes.across(x):.1f} {axes.down(y):.1f}" for x, y in points)
        # A single point has a dot's length, or nothing would be drawn
        end = "" if len(points) > 1 else "h0.01"
        shapes.append(
            f'<path class="line" style="stroke:var(--{one.colour})" d="M{positions}{end}"/>'
        )
    newest = [_newest_of(one, form) for one, _ in drawn]
    legend = ""
    caption = f"<small>{escape(newest[0])}</small>"
    if len(drawn) > 1:
        rows = zip(drawn, newest, strict=True)
        legend = _legend([(one.name, one.colour, text) for (one, _), text in rows])
        caption = ""
    return (
        f'<figure class="chart"><figcaption>{escape(label)}{caption}</figcaption>{legend}<div class="plot">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg>{''.join(labels)}"
        f'<span class="x-name">{escape(x_name)}</span></div></figure>'
    )


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """Holds the ends of the axes of a line chart, whose plot is 1000 wide and 1000 high."""

    left: float
    right: float
    low: float
    high: float

    def across(self, x: float) -> float:
        """Return the distance of a value from the left edge."""
        return (x - self.left) / ((self.right - self.left) or 1.0) * 1000

    def down(self, y: float) -> float:
        """Return the distance of a value from the upper edge."""
        return (self.high - y) / (self.high - self.low) * 1000


def _axes_of(drawn: Sequence[tuple[Series, Sequence[Point]]], *, from_zero: bool) -> _Axes:
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    ys += [one.plan for one, _ in drawn if one.plan is not None]
    low = min(ys)
    high = max(ys)
    if from_zero:
        low = min(0.0, low)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    if not from_zero:
        low -= margin
    return _Axes(left=min(xs), right=max(xs), low=low, high=high + margin)


def _newest_of(one: Series, form: str) -> str:
    """Return the newest value of a line as text, and what was planned."""
    newest = one.points[-1][1]
    if one.newest is not None:
        newest = one.newest
    text = form.format(short(newest))
    if one.plan is not None:
        text += f", plan {form.format(short(one.plan))}"
    return text


def short(value: float) -> str:
    """Return a number as the charts show it: four digits, or three and a letter."""
    if value == 0:
        return "0"
    return count(value) if abs(value) >= 1000 else f"{value:.4g}"


def stacked_bar(parts: Sequence[Part], *, label: str) -> str:
    """Draw one bar of several parts, with a legend that names each; parts too thin to see are in the legend too.

    Args:
        parts (`Sequence[Part]`): the parts from left to right; those without length are left out.
        label (`str`): the description of the bar for screen readers.

    Returns:
        `str`: the bar as HTML; empty if no part has a length.
    """
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


def timeline(
    rows: Sequence[tuple[str, Sequence[Span], Sequence[float]]], *, begin: float, end: float
) -> str:
    """Draw a timeline.

    Args:
        rows (`Sequence[tuple[str, Sequence[Span], Sequence[float]]]`): for each row its name, its stretches of time,
            and the times of its saves in Unix seconds.
        begin (`float`): Unix seconds at the left edge.
        end (`float`): Unix seconds at the right edge.

    Returns:
        `str`: the timeline as HTML.
    """
    length = (end - begin) or 1.0

    def position(t: float) -> float:
        return min(max((t - begin) / length * 100, 0.0), 100.0)

    lanes = []
    for name, spans, saves in rows:
        pieces = "".join(
            f'<span class="span" style="left:{position(s.start):.3f}%;background:var(--{s.colour});'
            f'width:{max(position(s.end) - position(s.start), 0.15):.3f}%" title="{escape(s.title)}"></span>'
            for s in spans
        )
        # Saves that are closer to each other than a pixel are one mark: a long run has thousands
        places = dict.fromkeys(f"{position(t):.1f}" for t in saves)
        marks = "".join(
            f'<span class="save" style="left:{place}%" title="a save"></span>' for place in places
        )
        lanes.append(f'<div class="lane"><b>{escape(name)}</b><div>{pieces}{marks}</div></div>')
    return f'<div class="timeline">{"".join(lanes)}</div>'


@dataclass(frozen=True, kw_only=True)
class HeatCells:
    """Holds the cells of a heat map of ranks."""

    ranks: int
    """Number of ranks."""
    rows: int
    """Number of rows; with more ranks a row shows the largest number of its ranks."""
    steps: Sequence[float]
    """The first step of each column, (columns,)."""
    values: Sequence[Sequence[float]]
    """The numbers, (columns, rows)."""

    def first_rank(self, row: int) -> int:
        """Return the first rank of a row."""
        return row * self.ranks // self.rows


def heat_cells(samples: Sequence[tuple[float, Sequence[float]]]) -> HeatCells:
    """Reduce numbers per rank to the cells of a heat map.

    Args:
        samples (`Sequence[tuple[float, Sequence[float]]]`): as for `heat_map`.
    """
    samples = [sample for sample in samples if len(sample[1]) == len(samples[-1][1])]
    ranks = len(samples[-1][1])
    columns = min(len(samples), HEAT_MAP_COLUMNS)
    rows = min(ranks, HEAT_MAP_ROWS)
    cells = []
    for column in range(columns):
        piece = samples[column * len(samples) // columns : (column + 1) * len(samples) // columns]
        means = [_mean([values[rank] for _, values in piece]) for rank in range(ranks)]
        cells.append(
            [max(means[row * ranks // rows : (row + 1) * ranks // rows]) for row in range(rows)]
        )
    steps = [samples[column * len(samples) // columns][0] for column in range(columns)]
    return HeatCells(ranks=ranks, rows=rows, steps=steps, values=cells)


def heat_map(samples: Sequence[tuple[float, Sequence[float]]], *, label: str, form: str) -> str:
    """Draw ranks from top to bottom and steps from left to right; darker cells are larger.

    Args:
        samples (`Sequence[tuple[float, Sequence[float]]]`): for each log its step and one number per rank, (ranks,);
            at least one log. Logs with another number of ranks than the last one are left out. If there are more
            ranks than rows, a row shows its largest number.
        label (`str`): the caption.
        form (`str`): format of a number.

    Returns:
        `str`: the heat map as HTML.
    """
    cells = heat_cells(samples)
    rows = cells.rows
    columns = len(cells.steps)
    largest = max(max(column) for column in cells.values) or 1.0
    squares = []
    for x, column_cells in enumerate(cells.values):
        for y, value in enumerate(column_cells):
            title = f"rank {cells.first_rank(y)}, step {cells.steps[x]:.0f}: {form.format(value)}"
            squares.append(
                f'<rect x="{x}" y="{y}" width="1.02" height="1.02" '
                f'style="fill-opacity:{0.04 + 0.96 * value / largest:.3f}"><title>{escape(title)}</title></rect>'
            )
    height = max(48, min(16 * rows, 320))
    labelled = sorted({0, rows - 1, rows // 2} if rows > 4 else set(range(rows)))
    labels = "".join(
        f'<span class="y" style="top:{(row + 0.5) / rows * 100:.2f}%">{cells.first_rank(row)}</span>'
        for row in labelled
    )
    return (
        f'<figure class="chart heat"><figcaption>{escape(label)}<small>darkest: {escape(form.format(largest))}</small>'
        f'</figcaption><div class="plot" style="height:{height}px"><svg viewBox="0 0 {columns} {rows}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(squares)}</svg>{labels}'
        f'<span class="x first" style="left:0%">{samples[0][0]:.0f}</span>'
        f'<span class="x last" style="left:100%">{samples[-1][0]:.0f}</span>'
        '<span class="x-name">step; one row per rank</span></div></figure>'
    )


def pair(*charts: str) -> str:
    """Put charts side by side, each on a card of its own; those without points are empty."""
    drawn = [f"<section>{chart}</section>" for chart in charts if chart]
    return f'<div class="pair">{"".join(drawn)}</div>' if drawn else ""


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table of plain text.

    Args:
        head (`Sequence[str]`): the names of the columns.
        body (`Sequence[Sequence[str]]`): the cells of each row.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = "".join(row("td", cells) for cells in body)
    return f'<div class="wide"><table><thead>{row("th", head)}</thead><tbody>{lines}</tbody></table></div>'
