"""Makes the sections that show a run: the report is made of them, and so is the live page."""

import datetime
import statistics
from collections.abc import Sequence
from html import escape
from typing import TypeVar

from hfscale.core.alarms import KINDS
from hfscale.core.counts import counted
from hfscale.core.findings import Finding
from hfscale.core.lives import DOWN, LOST, PAUSED
from hfscale.metrics.goodput import START_UP, USEFUL_PHASE
from hfscale.report.formatting import count, duration, percent, size
from hfscale.report.html import (
    Part,
    Series,
    Span,
    heat_map,
    line_chart,
    pair,
    stacked_bar,
    table,
    thin_columns,
    timeline,
)
from hfscale.report.prediction import Prediction, comparison
from hfscale.report.run_data import Attempt, Checkpoint, Run
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

_Row = TypeVar("_Row")
_MINUTE = "%Y-%m-%d %H:%M UTC"
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
    PAUSED: "gray",
    "other": "gray",
    "since the last checkpoint": "gray",
}
MAX_ALARMS = 20
"""Number of alarms that are shown, the newest."""
_MIN_SPREAD = 0.05
"""The report draws a number per rank if the ranks differ by more than this share of the largest."""


def sections(
    run: Run,
    plan: Prediction | str,
    *,
    more_tiles: Sequence[Tile] = (),
    most_rows: int | None = None,
    all_ranks: bool = False,
) -> dict[str, str]:
    """Return the sections of a run as HTML, by name, in the order of the report; without data they are empty.

    Args:
        run (`Run`): the data of the run.
        plan (`Prediction` or `str`): the planner's estimate of the run, or why there is none.
        more_tiles (`Sequence[Tile]`): numbers that are shown after the headline numbers.
        most_rows (`int`, *optional*): how many launches, recoveries and checkpoints are listed, the newest; None: all.
        all_ranks (`bool`): whether numbers per rank are drawn even if the ranks hardly differ.
    """
    return {
        "tiles": _tiles([*headline(run), *more_tiles]),
        "alarms": _alarms(run),
        "bottlenecks": _bottlenecks(run),
        "prediction": _prediction(plan),
        "split": _split(run),
        "timeline": _timeline(run, most_rows),
        "charts": _charts(run, plan),
        "ranks": _ranks(run, all_ranks=all_ranks),
        "islands": _islands(run),
        "recoveries": _recoveries(run, most_rows),
        "checkpoints": _checkpoints(run, most_rows),
    }


def header(run: Run, more: str = "") -> str:
    """Return the header of a run.

    Args:
        run (`Run`): the data of the run.
        more (`str`): HTML at its end.
    """
    reason = f"<p>{escape(run.reason)}</p>" if run.reason else ""
    return (
        f'<header><h1>{escape(run.name)}<span class="pill {escape(run.status)}">{escape(run.status)}</span></h1>'
        f"<p>{escape(subtitle(run))}</p>{reason}{more}</header>"
    )


def alarms_of(run: Run) -> list[dict[str, str]]:
    """Return the newest alarms of a run as texts, the newest first: `kind`, `level`, `text`, `step`, `time`."""
    found = []
    for alarm in reversed(run.alarms[-MAX_ALARMS:]):
        if alarm.get("kind") not in KINDS:
            continue
        moment = datetime.datetime.fromtimestamp(alarm["time"], tz=datetime.UTC)
        level = "error" if alarm.get("level") == "error" else "warning"
        found.append(
            {
                "kind": str(alarm.get("kind", "")),
                "level": level,
                "text": str(alarm.get("text", "")),
                "step": f"{alarm['step']:.0f}",
                "time": moment.strftime(_MINUTE),
            }
        )
    return found


def _newest(rows: Sequence[_Row], most: int | None) -> Sequence[_Row]:
    return rows if most is None else rows[-most:]


def _sentence(text: str) -> str:
    return escape(f"{text[:1].upper()}{text[1:]}.")


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _tiles(tiles: Sequence[Tile]) -> str:
    cells = "".join(
        f"<div{'' if tile.is_known else ' class=unknown'}><span>{escape(tile.name)}</span>"
        f"<strong>{escape(tile.value)}</strong><small>{escape(tile.note)}</small></div>"
        for tile in tiles
    )
    return f'<section class="tiles of-{len(tiles)}">{cells}</section>'


def _alarms(run: Run) -> str:
    items = "".join(
        f'<li><b class="{one["level"]}">{escape(one["kind"])}</b> at step {escape(one["step"])}, '
        f"{escape(one['time'])}: {escape(one['text'])}</li>"
        for one in alarms_of(run)
    )
    return f'<section class="alarms"><h2>Alarms</h2><ul>{items}</ul></section>' if items else ""


def _bottlenecks(run: Run) -> str:
    found = bottlenecks(run)
    lines = [*run.notes[-1:], *filter(None, [failures(run), left_out(run)])]
    notes = "".join(f'<p class="note">{_sentence(line)}</p>' for line in lines)
    if not found:
        return (
            '<section class="bottlenecks none"><h2>What to change first</h2>'
            f"<p>No bottleneck found: no measured share is above its limit.</p>{notes}</section>"
        )
    items = "".join(_bottleneck(one) for one in found[:MAX_BOTTLENECKS])
    return f'<section class="bottlenecks"><h2>What to change first</h2><ol>{items}</ol>{notes}</section>'


def _bottleneck(found: Finding) -> str:
    share = ""
    if found.share is not None:
        share = f' <span class="share">{percent(found.share)} of the time</span>'
    measured = f"<em>Measured: {escape(found.problem)}.</em>"
    return f"<li><b>{escape(found.check)}</b>{share}<p>{_sentence(found.fix)} {measured}</p></li>"


def _prediction(plan: Prediction | str) -> str:
    lines = [f"not compared: {plan}"]
    if isinstance(plan, Prediction):
        lines = [*comparison(plan), *plan.assumptions]
    text = "".join(f"<p>{_sentence(line)}</p>" for line in lines)
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


def _timeline(run: Run, most: int | None) -> str:
    if not run.attempts:
        return ""
    numbered = _newest(list(enumerate(run.attempts, run.lost_launches + 1)), most)
    begin = numbered[0][1].begun
    end = numbered[-1][1].ended
    sizes = {attempt.world_size for attempt in run.attempts}
    rows = [_lane(number, attempt, with_size=len(sizes) > 1) for number, attempt in numbered]
    began = datetime.datetime.fromtimestamp(begin, tz=datetime.UTC).strftime(_MINUTE)
    saves = sum(len(attempt.saves) for attempt in run.attempts)
    restarts = run.restarts
    summary = f"{duration(end - begin)} from {began}; {counted(restarts, 'restart')}, {counted(saves, 'save')}."
    legend = ""
    if saves or restarts:
        legend = _note("Blue work was kept, red work was repeated; the light marks are saves.")
    drawn = timeline(rows, begin=begin, end=end)
    return f"<section><h2>Timeline</h2>{drawn}{_note(summary)}{legend}</section>"


def _lane(
    number: int, attempt: Attempt, *, with_size: bool
) -> tuple[str, list[Span], Sequence[float]]:
    """Return one launch of the timeline: its name, what was kept and lost of it, and the times of its saves."""
    kept_s = attempt.kept_until - attempt.begun
    lost_s = attempt.ended - attempt.kept_until
    name = f"{number}. from step {attempt.first_step}"
    if attempt.world_size and with_size:
        name += f" on {attempt.world_size}"
    spans = []
    if kept_s > 0:
        title = f"{duration(kept_s)} kept"
        spans.append(Span(start=attempt.begun, end=attempt.kept_until, colour="blue", title=title))
    if lost_s > 0:
        name += f", {duration(lost_s)} lost"
        title = f"{duration(lost_s)} lost"
        spans.append(Span(start=attempt.kept_until, end=attempt.ended, colour="red", title=title))
    return name, spans, attempt.saves


def _charts(run: Run, plan: Prediction | str) -> str:
    planned_speed, planned_mfu = None, None
    if isinstance(plan, Prediction):
        planned_speed, planned_mfu = plan.predicted_tokens_per_s, plan.estimate.mfu
    resumes = [float(attempt.first_step) for attempt in run.attempts[1:]]
    losses = [_line(run, "loss", "loss", "blue"), _line(run, "eval_loss", "evaluation", "amber")]
    loss = line_chart(losses, label="Loss", x_name="step", marks=resumes)
    rate = _one_line(run, "learning_rate", "Learning rate", "blue", marks=resumes)
    cost = _one_line(run, "scaling/usd", "Cost, USD", "amber", from_zero=True)
    temperature = _one_line(run, "gpu/temperature_c_max", "Hottest GPU, °C", "red")
    memory = _one_line(
        run,
        "gpu/memory_peak_gib",
        "Peak memory of the fullest GPU",
        "violet",
        from_zero=True,
        form="{} GiB",
    )
    speed = _throughput(run, planned_speed, resumes)
    shares = _shares(run, planned_mfu, resumes)
    return pair(loss, speed, shares, memory, rate, cost, temperature)


def _line(
    run: Run, key: str, name: str, colour: str, *, scale: float = 1.0, plan: float | None = None
) -> Series:
    """Return a metric as a line of few points, so that a long run needs the memory of one metric at a time.

    Args:
        run (`Run`): the data of the run.
        key (`str`): the metric key.
        name (`str`): the name in the legend.
        colour (`str`): a variable of the style sheet.
        scale (`float`): what values and plan are multiplied by, such as 100 for percents.
        plan (`float`, *optional*): what the planner estimates.
    """
    steps, values = run.columns(key)
    newest = values[-1] * scale if values else None
    return Series(
        name=name,
        points=[(x, y * scale) for x, y in thin_columns(steps, values)],
        colour=colour,
        plan=plan * scale if plan is not None else None,
        newest=newest,
    )


def _one_line(
    run: Run,
    key: str,
    label: str,
    colour: str,
    *,
    from_zero: bool = False,
    form: str = "{}",
    marks: Sequence[float] = (),
) -> str:
    """Return the chart of a single metric; the other arguments are those of `line_chart`."""
    line = _line(run, key, label, colour)
    return line_chart(
        [line], label=label, x_name="step", from_zero=from_zero, form=form, marks=marks
    )


def _throughput(run: Run, planned: float | None, resumes: Sequence[float]) -> str:
    unit = "tokens"
    line = _line(run, "scaling/tokens_per_s", "tokens/s", "teal", plan=planned)
    if not line.points:
        unit = "samples"
        line = _line(run, "scaling/samples_per_s", "samples/s", "teal")
    label = f"{unit.capitalize()} per second"
    chart = line_chart([line], label=label, x_name="step", from_zero=True, marks=resumes)
    baseline = run.facts.get("baseline")
    if chart and baseline:
        chart += _note(f"Scaling efficiency is relative to {baseline}.")
    return chart


def _shares(run: Run, planned_mfu: float | None, resumes: Sequence[float]) -> str:
    named = (
        ("waiting for data", "scaling/data_wait_fraction", "amber"),
        ("exposed communication", "scaling/comm_fraction", "violet"),
        ("pipeline bubble", "scaling/bubble_fraction", "teal"),
        ("MFU", "scaling/mfu", "blue"),
        ("goodput", "scaling/goodput", "gray"),
    )
    plans = {"scaling/mfu": planned_mfu}
    lines = [
        _line(run, key, name, colour, scale=100, plan=plans.get(key)) for name, key, colour in named
    ]
    label = "Shares of the time"
    return line_chart(lines, label=label, x_name="step", from_zero=True, form="{}%", marks=resumes)


def _ranks(run: Run, *, all_ranks: bool) -> str:
    maps = "".join(
        heat_map(samples, label=measure.label, form=measure.form)
        for measure, samples in rank_measures(run)
        if all_ranks or _spread(samples) > _MIN_SPREAD
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
    charts = pair(
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


def _recoveries(run: Run, most: int | None) -> str:
    found = _newest(recoveries(run), most)
    if not found:
        return ""
    names = ("first step", "what failed", "steps repeated", "time", "parts of it")
    return f"<section><h2>Recoveries</h2>{table(names, found)}</section>"


def _checkpoints(run: Run, most: int | None) -> str:
    if not run.checkpoints:
        return ""
    rows = "".join(_checkpoint_row(one) for one in _newest(run.checkpoints, most))
    stall = run.median("checkpoint/stall_s")
    note = ""
    if stall is not None:
        note = _note(f"Training waits {duration(stall)} for each save.")
    return (
        '<section><h2>Checkpoints</h2><div class="wide"><table><thead><tr><th>folder</th><th>step</th><th>size</th>'
        f"<th>processes</th><th>state</th></tr></thead><tbody>{rows}</tbody></table></div>{note}</section>"
    )


def _checkpoint_row(one: Checkpoint) -> str:
    length = ""
    if one.bytes is not None:
        length = size(one.bytes)
    state = escape(one.state)
    if not one.is_committed and not one.is_plain:
        state = f"<span class=bad>{state}</span>"
    processes = escape(str(one.world_size or ""))
    return (
        f"<tr><td>{escape(one.name)}</td><td>{one.step}</td><td>{escape(length)}</td>"
        f"<td>{processes}</td><td>{state}</td></tr>"
    )
