"""Builds HTML pages: the document with its style sheet, and charts.

A page loads nothing and runs no script. Lines and cells of a chart are SVG that stretches with the page; all text is
HTML on top of it, so that it keeps its size on a phone. Colours are variables of the style sheet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hfscale import __version__
from hfscale.errors import StorageError
from hfscale.report.formatting import count

Point = tuple[float, float]
MAX_POINTS = 300
HEAT_MAP_ROWS = 64
HEAT_MAP_COLUMNS = 80
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, parts: Sequence[str]) -> str:
    """Return a complete HTML document.

    Args:
        title (`str`): The title, as plain text.
        parts (`Sequence[str]`): The sections of the page, as HTML; empty strings are allowed.

    Returns:
        `str`: The document.
    """
    footer = f"<footer>hfscale {escape(__version__)}. Unknown numbers are left out.</footer>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · hfscale</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}{footer}</main></body></html>\n"
    )


def save_page(text: str, path: Path) -> None:
    """Write a page to a file.

    Args:
        text (`str`): The HTML document.
        path (`Path`): The file; missing folders are created.

    Raises:
        StorageError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--html {path} cannot be written: {error.strerror}; give another file") from None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Describes one line of a line chart."""

    name: str
    """Name in the legend."""
    points: Sequence[Point]
    """Points (x, y) with rising x."""
    colour: str
    """A variable of the style sheet: `blue`, `teal` and so on."""


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
        low (`float`): The lower end of the axis.
        high (`float`): The upper end of the axis.
        most (`int`): About how many numbers to return.

    Returns:
        `list[float]`: The numbers in rising order; only `low` if `high` is not above it.
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
        points (`Sequence[Point]`): The points (x, y), in order.
        most (`int`): The largest number of points to return.
    """
    if len(points) <= most:
        return list(points)
    return [(_mean([x for x, _ in piece]), _mean([y for _, y in piece])) for piece in _pieces(points, most)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _pieces(items: Sequence[Point], number: int) -> list[Sequence[Point]]:
    """Divide a sequence into so many consecutive pieces of nearly equal length."""
    return [items[i * len(items) // number : (i + 1) * len(items) // number] for i in range(number)]


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
        series (`Sequence[Series]`): The lines; those without points are left out.
        label (`str`): The caption.
        x_name (`str`): The name of the x-axis.
        from_zero (`bool`): Whether the y-axis includes zero.
        form (`str`): Format of the labels of the y-axis.
        marks (`Sequence[float]`): Steps at which the run was resumed, drawn as vertical lines.

    Returns:
        `str`: The chart as HTML; empty if there are no points.
    """
    drawn = [(one, thin(one.points)) for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    left, right = min(xs), max(xs)
    low = min(0.0, min(ys)) if from_zero else min(ys)
    high = max(ys)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low -= 0.0 if from_zero else margin
    high += margin
    width = (right - left) or 1.0
    height = high - low

    def to_svg(x: float, y: float) -> Point:
        return (x - left) / width * 1000, (high - y) / height * 1000

    grid = []
    labels = []
    for tick in ticks(low, high):
        y = to_svg(left, tick)[1]
        grid.append(f'<path class="grid" d="M0 {y:.1f}H1000"/>')
        labels.append(f'<span class="y" style="top:{y / 10:.2f}%">{escape(form.format(_short(tick)))}</span>')
    for tick in ticks(left, right):
        x = to_svg(tick, low)[0]
        labels.append(f'<span class="x" style="left:{x / 10:.2f}%">{escape(_short(tick))}</span>')
    for mark in marks:
        x = to_svg(min(max(mark, left), right), low)[0]
        grid.append(f'<path class="mark" d="M{x:.1f} 0V1000"><title>resumed at step {mark:.0f}</title></path>')
    lines = []
    for one, points in drawn:
        positions = " ".join(f"{x:.1f} {y:.1f}" for x, y in (to_svg(*point) for point in points))
        path = f"M{positions}" if len(points) > 1 else f"M{positions}h0.01"
        lines.append(f'<path class="line" style="stroke:var(--{one.colour})" d="{path}"/>')
    legend = _legend([(one.name, one.colour, "") for one, _ in drawn]) if len(drawn) > 1 else ""
    return (
        f'<figure class="chart"><figcaption>{escape(label)}</figcaption>{legend}<div class="plot">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(grid)}{''.join(lines)}</svg>{''.join(labels)}"
        f'<span class="x-name">{escape(x_name)}</span></div></figure>'
    )


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return count(value) if abs(value) >= 1000 else f"{value:.4g}"


def stacked_bar(parts: Sequence[Part], *, label: str) -> str:
    """Draw one bar of several parts, with a legend that names each; parts too thin to see are in the legend too.

    Args:
        parts (`Sequence[Part]`): The parts from left to right; those without length are left out.
        label (`str`): The description of the bar for screen readers.

    Returns:
        `str`: The bar as HTML; empty if no part has a length.
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


def timeline(rows: Sequence[tuple[str, Sequence[Span], Sequence[float]]], *, begin: float, end: float) -> str:
    """Draw a timeline.

    Args:
        rows (`Sequence[tuple[str, Sequence[Span], Sequence[float]]]`): For each row its name, its stretches of time,
            and the times of its saves in Unix seconds.
        begin (`float`): Unix seconds at the left edge.
        end (`float`): Unix seconds at the right edge.

    Returns:
        `str`: The timeline as HTML.
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
        marks = "".join(f'<span class="save" style="left:{position(t):.3f}%" title="a save"></span>' for t in saves)
        lanes.append(f'<div class="lane"><b>{escape(name)}</b><div>{pieces}{marks}</div></div>')
    return f'<div class="timeline">{"".join(lanes)}</div>'


def heat_map(samples: Sequence[tuple[float, Sequence[float]]], *, label: str, form: str) -> str:
    """Draw ranks from top to bottom and steps from left to right; darker cells are larger.

    Args:
        samples (`Sequence[tuple[float, Sequence[float]]]`): For each log its step and one number per rank, (ranks,);
            at least one log. Logs with another number of ranks than the last one are left out. If there are more
            ranks than rows, a row shows its largest number.
        label (`str`): The caption.
        form (`str`): Format of a number.

    Returns:
        `str`: The heat map as HTML.
    """
    samples = [sample for sample in samples if len(sample[1]) == len(samples[-1][1])]
    ranks = len(samples[-1][1])
    columns = min(len(samples), HEAT_MAP_COLUMNS)
    rows = min(ranks, HEAT_MAP_ROWS)
    cells = []
    for column in range(columns):
        piece = samples[column * len(samples) // columns : (column + 1) * len(samples) // columns]
        means = [_mean([values[rank] for _, values in piece]) for rank in range(ranks)]
        cells.append([max(means[row * ranks // rows : (row + 1) * ranks // rows]) for row in range(rows)])
    largest = max(max(column) for column in cells) or 1.0
    squares = []
    for x, column_cells in enumerate(cells):
        for y, value in enumerate(column_cells):
            step = samples[x * len(samples) // columns][0]
            title = f"rank {y * ranks // rows}, step {step:.0f}: {form.format(value)}"
            squares.append(
                f'<rect x="{x}" y="{y}" width="1.02" height="1.02" '
                f'style="fill-opacity:{0.04 + 0.96 * value / largest:.3f}"><title>{escape(title)}</title></rect>'
            )
    height = max(48, min(16 * rows, 320))
    labelled = sorted({0, rows - 1, rows // 2} if rows > 4 else set(range(rows)))
    labels = "".join(
        f'<span class="y" style="top:{(row + 0.5) / rows * 100:.2f}%">{row * ranks // rows}</span>' for row in labelled
    )
    return (
        f'<figure class="chart heat"><figcaption>{escape(label)}<small>darkest: {escape(form.format(largest))}</small>'
        f'</figcaption><div class="plot" style="height:{height}px"><svg viewBox="0 0 {columns} {rows}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(squares)}</svg>{labels}'
        f'<span class="x first" style="left:0%">{samples[0][0]:.0f}</span>'
        f'<span class="x last" style="left:100%">{samples[-1][0]:.0f}</span>'
        '<span class="x-name">step; one row per rank</span></div></figure>'
    )


STYLE = """
:root {
  color-scheme: light dark;
  --rust: #8f5546; --page: #f6f5f2; --card: #ffffff; --ink: #1c1b19; --soft: #6b6861; --line: #e4e1d9;
  --blue: #2b6cd4; --teal: #12877b; --amber: #c77d0a; --red: #c8402f; --violet: #7a56c2; --gray: #a5a199;
  --good: #19764b; --warn: #a8620a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --rust: #a06a5a; --page: #161513; --card: #201f1c; --ink: #edebe5; --soft: #a19d94; --line: #35332e;
    --blue: #6ea1f5; --teal: #3fbfae; --amber: #e3a542; --red: #ee7867; --violet: #a98be8; --gray: #6f6b64;
    --good: #5cc492; --warn: #e3a542;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: clamp(16px, 4vw, 48px) 16px 48px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: break-word;
}
main { max-width: 1040px; margin: 0 auto; display: grid; gap: 20px; }
main > * { min-width: 0; }
h1 { margin: 0; font-size: clamp(24px, 4vw, 34px); line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; }
h2 { margin: 0 0 14px; font-size: 17px; font-weight: 650; }
header p { margin: 6px 0 0; color: var(--soft); }
.pill {
  display: inline-block; vertical-align: middle; margin-left: 10px; padding: 2px 12px; border-radius: 99px;
  font-size: 14px; font-weight: 600; letter-spacing: 0; color: var(--card); background: var(--gray);
}
.pill.completed { background: var(--good); } .pill.running { background: var(--blue); }
.pill.failed { background: var(--red); } .pill.preempted { background: var(--warn); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1px; padding: 0;
  overflow: hidden; background: var(--line); }
.tiles > div { background: var(--card); padding: 16px 20px; }
.tiles span { display: block; font-size: 14px; color: var(--soft); }
.tiles strong { display: block; font-size: 28px; line-height: 1.25; font-weight: 640; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tiles small { display: block; font-size: 13px; line-height: 1.4; color: var(--soft); }
.tiles .unknown strong { font-size: 17px; line-height: 35px; color: var(--soft); font-weight: 500; letter-spacing: 0; }
.bottlenecks { border-left: 5px solid var(--amber); }
.bottlenecks.none { border-left-color: var(--good); }
.bottlenecks ol { margin: 0; padding: 0; list-style: none; display: grid; gap: 14px; }
.bottlenecks b { text-transform: capitalize; } .bottlenecks em { font-style: normal; color: var(--soft); }
.bottlenecks p { margin: 2px 0 0; } .bottlenecks .share { font-variant-numeric: tabular-nums; }
.bar { display: flex; gap: 2px; height: 34px; border-radius: 7px; overflow: hidden; }
.bar span { min-width: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 10px 0 0; padding: 0; list-style: none;
  font-size: 14px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 7px; border-radius: 3px; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 20px; }
.pair > section { min-width: 0; }
.chart { margin: 0; }
.chart figcaption { font-weight: 650; font-size: 17px; }
.chart figcaption small { float: right; font-weight: 400; font-size: 13px; line-height: 26px; color: var(--soft); }
.chart .legend { margin: 4px 0 0; }
.plot { position: relative; height: 210px; margin: 14px 10px 44px 56px; font-size: 13px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.plot .mark { stroke: var(--gray); stroke-width: 1; stroke-dasharray: 3 4; }
.plot .line { stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.plot .y { position: absolute; right: 100%; margin-right: 8px; transform: translateY(-50%); white-space: nowrap; }
.plot .x { position: absolute; top: 100%; margin-top: 5px; white-space: nowrap; transform: translateX(-50%); }
.plot .x.first { transform: none; } .plot .x.last { transform: translateX(-100%); }
.plot .x-name { position: absolute; top: 100%; right: 0; margin-top: 24px; }
.heat + .heat { margin-top: 8px; }
.heat .plot { margin-left: 34px; }
.heat rect { fill: var(--blue); }
.timeline { display: grid; gap: 8px; }
.lane { display: grid; grid-template-columns: minmax(130px, 15%) 1fr; gap: 12px; align-items: center;
  font-size: 14px; }
.lane b { font-weight: 500; color: var(--soft); line-height: 1.25; }
.lane > div { position: relative; height: 24px; border-radius: 5px; background: var(--page); }
.lane .span { position: absolute; top: 0; bottom: 0; border-radius: 4px; }
.lane .save { position: absolute; top: 3px; bottom: 3px; width: 2px; margin-left: -1px; background: var(--card); }
table { width: 100%; border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; font-size: 14px; color: var(--soft); }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.wide { overflow-x: auto; }
td, th { white-space: nowrap; }
.bad { color: var(--red); font-weight: 600; }
.note { margin: 10px 0 0; font-size: 14px; color: var(--soft); }
footer { color: var(--soft); font-size: 14px; }
@media (max-width: 640px) { .tiles { grid-template-columns: 1fr 1fr; } }
@media (max-width: 480px) {
  section { padding: 16px; } .tiles > div { padding: 12px 14px; }
  .tiles strong { font-size: 23px; } .plot { margin-left: 50px; }
  .lane { grid-template-columns: 1fr; gap: 3px; }
}
"""
"""The style sheet: light and dark, from a phone to a wide screen."""
