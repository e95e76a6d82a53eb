"""Answers why two runs differ, from the files of both."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfscale.errors import UsageError
from hfscale.why.curves import Curves, compare_curves
from hfscale.why.difference import Answer, Difference, Earlier
from hfscale.why.run_folder import RunFolder, elements_on_cpu, read_run
from hfscale.why.settings import cause_of, has_same_arithmetic, lowest_of_both, settings_differences
from hfscale.why.trace_files import read_trace
from hfscale.why.traces import TraceDifference, compare_exactly, compare_within_rounding, growth

_STAGES = {
    "config": "their settings",
    "data": "the data that they read",
    "rng": "the random numbers that they draw",
    "weights": "the weights with which the step begins",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "gradient": "the gradients after their reduction over ranks",
    "clipping": "the clipping of the gradients",
    "optimizer": "the update by the optimizer",
}
_SEEN_AS = {
    "forward": ("forward", "weights", "rng"),
    "backward": ("backward", "gradient", "forward"),
    "optimizer": ("optimizer", "clipping", "gradient"),
}
"""The kinds that a difference between logs may be, which do not show more than loss and gradient norm."""
_UNSTABLE_GROWTH = 0.1
"""Share of the norm of all weights. A step that changes it by more amplifies rounding without a bound; an assumption
of ours: a step of a training that learns changes it by some thousandths."""


def compare_runs(first: Path, second: Path) -> Answer:
    """Find the first difference between two runs, and what differed before it.

    Args:
        first (`Path`): the output directory of a run.
        second (`Path`): that of another one.

    Returns:
        `Answer`: the first difference, with `kind` `none` if there is none.

    Raises:
        UsageError: one of them is not the output directory of a run, or they have no step in common.
    """
    a, b = read_run(first), read_run(second)
    exact, reason = has_same_arithmetic(a, b)
    settings = settings_differences(a, b)
    if not a.numbers.keys() & b.numbers.keys() and not a.traces.keys() & b.traces.keys():
        raise UsageError(
            f"{first} and {second} have no logged or traced step in common ({_steps(a)} and {_steps(b)}): run both "
            "with the same logging_steps, or trace the same steps (--trace_steps)"
        )
    curves = compare_curves(a, b, exact=exact)
    traces = _compare_traces(a, b, exact=exact)
    earliest, is_traced = _first(curves.difference, traces)
    found = _explained(earliest, settings, is_traced=is_traced)
    named = (found.kind, found.operation)
    of_traces = traces.before if traces is not None else ()
    of_logs = () if is_traced else curves.before
    before = [one for one in (*of_logs, *of_traces, *settings) if (one.kind, one.name) != named]
    compared: dict[str, Any] = {
        "how": "bits" if exact else "tolerance",
        "reason": reason,
        "logged_steps": curves.steps,
        "last_step": curves.last_step,
        "traced_steps": sorted(a.traces.keys() & b.traces.keys()),
    }
    how = (
        f"compared bit by bit ({reason})"
        if exact
        else f"compared within the tolerance of rounding ({reason})"
    )
    hint = "" if is_traced or not earliest.is_one else _hint(earliest, a, b)
    return Answer(
        first_difference=found,
        before=before,
        explanation=_explanation(
            found,
            before,
            curves,
            traces if is_traced or not found.is_one else None,
            how=how,
            hint=hint,
        ),
        compared=compared,
    )


def _steps(run: RunFolder) -> str:
    steps = sorted(run.numbers)
    return f"{steps[0]} to {steps[-1]}" if steps else "none"


def _explained(found: Difference, settings: Sequence[Earlier], *, is_traced: bool) -> Difference:
    """Return a difference that a setting explains as one of kind `config`, with the setting and its values."""
    kinds = (found.kind,) if is_traced else _SEEN_AS.get(found.kind, (found.kind,))
    cause = cause_of(kinds, settings) if found.is_one else None
    if cause is None:
        return found
    return replace(found, kind="config", operation=cause.name, a=cause.a, b=cause.b)


def _compare_traces(a: RunFolder, b: RunFolder, *, exact: bool) -> TraceDifference | None:
    """Return the first difference in the steps that both runs have traced; None if there are no such steps."""
    last = None
    for step in sorted(a.traces.keys() & b.traces.keys()):
        traces = [read_trace(run.traces[step]) for run in (a, b)]
        if exact and len(traces[0]) == len(traces[1]):
            last = compare_exactly(step, *traces)
        else:
            elements = elements_on_cpu(a, b)
            last = compare_within_rounding(
                step, *traces, dtype=lowest_of_both(a, b), elements_on_cpu=elements
            )
        if last.difference.is_one:
            return last
        if not exact and growth(traces[0]) > _UNSTABLE_GROWTH:
            return replace(last, unstable_step=step)
    return last


def _first(of_logs: Difference, traces: TraceDifference | None) -> tuple[Difference, bool]:
    """Return the earlier one of two differences, and whether it is that of the traces, which name more."""
    if traces is None or not traces.difference.is_one:
        return of_logs, False
    if not of_logs.is_one or (traces.difference.step or 0) <= (of_logs.step or 0):
        return traces.difference, True
    return of_logs, False


def _hint(found: Difference, a: RunFolder, b: RunFolder) -> str:
    """Say what to log or trace in order to find more."""
    if found.kind == "data":
        return ""
    step = found.step or 1
    begun = max(run.begins.get(step, step - 1) for run in (a, b))
    if step - begun > 1:
        return f"The log covers steps {begun + 1} to {step}: run both again with --logging_steps 1 for the exact step."
    traced = a.traces.keys() & b.traces.keys()
    steps = [number for number in (step - 1, step) if number >= 1 and number not in traced]
    if not steps:
        return ""
    asked = ",".join(map(str, steps))
    return f"To find the module and the operation, run both again with --trace_steps {asked} or TraceCallback."


def _explanation(
    found: Difference,
    before: Sequence[Earlier],
    curves: Curves,
    traces: TraceDifference | None,
    *,
    how: str,
    hint: str,
) -> str:
    if not found.is_one:
        text = f"No difference over {curves.steps} logged steps, {how}."
        if curves.drifts_from is not None:
            text += (
                f" From step {curves.drifts_from} on they drift apart slowly, as rounding does that a training "
                f"amplifies; the losses differ by {curves.largest:.1e} at most. Trace a step before to be sure."
            )
        if traces is not None and traces.unstable_step is not None:
            text += (
                f" Step {traces.unstable_step} changes the norm of the weights by more than a tenth, which amplifies "
                "rounding without a bound: the traces of later steps were not compared. Use a smaller learning rate."
            )
        return text
    where = f" in {found.module}" if found.module else ""
    what = (
        f" ({found.operation}: {_short(found.a)} and {_short(found.b)})" if found.operation else ""
    )
    rank = f" on rank {found.rank}" if found.rank is not None else ""
    stage = _STAGES[found.kind]
    if traces is None and found.kind == "optimizer" and found.operation == "loss":
        stage = "the loss, after an update in the step before (clipping, optimizer) that must have differed"
    place = f"{stage}{where}{what}"
    if found.kind == "config" and found.module:  # the module shows it, and does not have it
        place = f"{stage}{what}, which show first in {found.module}"
    sentences = [f"The runs differ first at step {found.step}{rank}, in {place}, {how}."]
    if traces is not None and traces.detail:
        sentences.append(f"{traces.detail[0].upper()}{traces.detail[1:]}.")
    if before:
        names = ", ".join(f"{one.name} ({_short(one.a)} and {_short(one.b)})" for one in before[:3])
        sentences.append(f"Before it these differ: {names}.")
    return " ".join([*sentences, *([hint] if hint else [])])


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
