"""Compares two runs: what each needed to reach the same loss, their headline numbers, and the settings that differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfscale.report.formatting import count, duration, usd
from hfscale.report.run_data import Run, load_run
from hfscale.report.summary import headline, subtitle
from hfscale.why.settings import compare_settings

MEAN_OF_LOGS = 5
"""Number of logs whose training losses are averaged, because the loss of one log is noisy."""
_MAX_SETTING_LENGTH = 60
_UNITS = {"usd": "cost", "seconds": "time", "tokens": "tokens"}
"""What the sentence names, the first of them that both runs know."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Says what a run had needed when it reached a loss; unknown numbers are None."""

    step: int
    """The first logged step with that loss."""
    tokens: float | None
    """Tokens that it had trained on."""
    seconds: float | None
    """Wall-clock seconds since its first launch, with restarts and the time between launches."""
    usd: float | None
    """Cost in USD."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describes a setting that differs between the runs."""

    name: str
    """Its name, such as `learning_rate`."""
    first: str
    """Its value in the first run, as text."""
    second: str
    """Its value in the second run, as text."""


@dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """Holds the comparison of two runs."""

    first: Run
    """The first run."""
    second: Run
    """The second run."""
    loss_key: str | None
    """The loss that is compared, `eval_loss` or `loss`; None if the runs have none in common."""
    loss: float | None
    """The lowest loss that both have reached; None if the runs have no loss in common."""
    reached: tuple[Reached, Reached] | None
    """What each run had needed at that loss; None without such a loss."""
    settings: Sequence[Setting]
    """The settings that differ, without those that decide nothing, such as names of folders."""

    @property
    def runs(self) -> tuple[Run, Run]:
        """Both runs."""
        return self.first, self.second

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison for `--json`, without the reports of the runs."""
        return {
            "loss_key": self.loss_key,
            "loss": self.loss,
            "reached": [vars(one) for one in self.reached] if self.reached is not None else None,
            "settings": [
                {"name": one.name, "a": one.first, "b": one.second} for one in self.settings
            ],
        }


def compare_two(first: Path, second: Path) -> TwoRuns:
    """Read and compare two runs, finished or not.

    Args:
        first (`Path`): the output directory of the first run.
        second (`Path`): that of the second run.

    Returns:
        `TwoRuns`: the comparison.

    Raises:
        UsageError: one of them is not a directory, or has no measurements.
    """
    runs = load_run(first), load_run(second)
    key, curves = _loss_curves(*runs)
    loss = max(min(value for _, value in curve) for curve in curves) if key is not None else None
    reached = (
        (_reached(runs[0], curves[0], loss), _reached(runs[1], curves[1], loss))
        if loss is not None
        else None
    )
    settings = [
        Setting(name=one.name, first=_short(one.a), second=_short(one.b))
        for one in compare_settings(first, second)
    ]
    return TwoRuns(
        first=runs[0], second=runs[1], loss_key=key, loss=loss, reached=reached, settings=settings
    )


def loss_curve(run: Run, key: str) -> list[tuple[float, float]]:
    """Return (step, loss) at each log of a run; a training loss is the mean of the last `MEAN_OF_LOGS` logs.

    Args:
        run (`Run`): the run.
        key (`str`): `eval_loss`, or `loss` for the training loss.
    """
    series = run.series(key)
    if key != "loss":
        return series
    window = min(MEAN_OF_LOGS, len(series))
    losses = [value for _, value in series]
    return [
        (series[end - 1][0], sum(losses[end - window : end]) / window)
        for end in range(max(window, 1), len(series) + 1)
    ]


def hours_of(run: Run, curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a curve by hours since the first launch instead of steps; points of unknown time are left out.

    Args:
        run (`Run`): the run.
        curve (`Sequence[tuple[float, float]]`): (step, value) in order of the steps.
    """
    if not run.attempts:
        return []
    times = [(_at(run, step, "time"), value) for step, value in curve]
    return [
        ((time - run.attempts[0].begun) / 3600, value) for time, value in times if time is not None
    ]


def _loss_curves(first: Run, second: Run) -> tuple[str | None, list[list[tuple[float, float]]]]:
    """Return the loss that both runs have, the evaluation loss first, and its curve in each."""
    for key in ("eval_loss", "loss"):
        curves = [loss_curve(run, key) for run in (first, second)]
        if all(curves):
            return key, curves
    return None, []


def _reached(run: Run, curve: Sequence[tuple[float, float]], loss: float) -> Reached:
    step = next(step for step, value in curve if value <= loss)
    time = _at(run, step, "time")
    return Reached(
        step=int(step),
        tokens=_at(run, step, "scaling/tokens_seen"),
        seconds=time - run.attempts[0].begun if time is not None and run.attempts else None,
        usd=_at(run, step, "scaling/usd"),
    )


def _at(run: Run, step: float, key: str) -> float | None:
    """Return the newest value of a number at or before a step."""
    known = (
        record[key] for record in reversed(run.records) if record["step"] <= step and key in record
    )
    return next(known, None)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SETTING_LENGTH else f"{text[: _MAX_SETTING_LENGTH - 1]}…"


def answer(found: TwoRuns) -> str:
    """Return the comparison in one sentence.

    Args:
        found (`TwoRuns`): the comparison.
    """
    names = _names(found)
    if found.reached is None or found.loss is None:
        return "The runs have no loss in common, so that what they needed cannot be compared"
    loss = f"{'evaluation' if found.loss_key == 'eval_loss' else 'training'} loss {found.loss:.4g}"
    for unit, name in _UNITS.items():
        a, b = (getattr(one, unit) for one in found.reached)
        if a and b:
            return f"To reach {loss}, {names[1]} needed {b / a:.2f} times the {name} of {names[0]}"
    steps = [one.step for one in found.reached]
    return f"To reach {loss}, {names[0]} needed {steps[0]} steps and {names[1]} {steps[1]}"


def rows(found: TwoRuns) -> list[tuple[str, str, str, str]]:
    """Return the table of the comparison: a name, the value in each run, and their ratio, second to first.

    Args:
        found (`TwoRuns`): the comparison.

    Returns:
        `list[tuple[str, str, str, str]]`: the rows as text; the ratio is empty where there is none.
    """
    table = [("", *_names(found), "ratio"), ("Status", found.first.status, found.second.status, "")]
    table.append(("Run", subtitle(found.first), subtitle(found.second), ""))
    if found.reached is not None and found.loss is not None:
        at_loss = "evaluation loss" if found.loss_key == "eval_loss" else "loss"
        table += _rows_of_loss(f"to {at_loss} {found.loss:.4g}", *found.reached)
    tiles = [{tile.name: tile for tile in headline(run)} for run in found.runs]
    for name, tile in tiles[0].items():
        other = tiles[1].get(name)
        if other is not None and (tile.is_known or other.is_known):
            table.append((name, tile.value, other.value, _ratio(tile.number, other.number)))
    return table


def _rows_of_loss(suffix: str, first: Reached, second: Reached) -> list[tuple[str, str, str, str]]:
    found = [
        (f"Steps {suffix}", f"{first.step:,}", f"{second.step:,}", _ratio(first.step, second.step))
    ]
    forms = (("Tokens", "tokens", count), ("Time", "seconds", duration), ("Cost", "usd", usd))
    for name, field, form in forms:
        a, b = getattr(first, field), getattr(second, field)
        if a is not None or b is not None:
            texts = [form(value) if value is not None else "not known" for value in (a, b)]
            found.append((f"{name} {suffix}", texts[0], texts[1], _ratio(a, b)))
    return found


def _ratio(a: float | None, b: float | None) -> str:
    return f"{b / a:.2f}" if a and b is not None else ""


def _names(found: TwoRuns) -> tuple[str, str]:
    """Return the names of the runs; equal ones get `(A)` and `(B)`."""
    if found.first.name != found.second.name:
        return found.first.name, found.second.name
    return f"{found.first.name} (A)", f"{found.second.name} (B)"
