"""What a model card says about the run that made the model, from the files of the run."""

from itertools import pairwise
from pathlib import Path

from hfscale.core.counts import counted
from hfscale.report.formatting import count, duration, usd
from hfscale.report.run_data import Run, load_run
from hfscale.report.summary import layout_of

_MAX_GAP_S = 3600.0
"""Two logs that are further apart than this, in seconds, say nothing about the power between them."""


def card_facts(output_dir: Path) -> list[tuple[str, str]]:
    """Return what is known of a run as (name, text), for its model card; unknown facts are left out.

    Args:
        output_dir (`Path`): the output directory of the run.

    Raises:
        UsageError: it is not a directory, or it has no measurements.
    """
    run = load_run(output_dir)
    facts = run.facts
    steps = run.last("step")
    tokens = run.last("scaling/tokens_seen")
    cost = run.last("scaling/usd")
    rows = [
        ("layout", layout_of(run)),
        ("hardware", _text(facts.get("device"))),
        ("precision", _text(facts.get("precision"))),
        ("batch", _batch(run)),
        ("steps", f"{steps:,.0f}" if steps is not None else None),
        ("tokens", count(tokens) if tokens is not None else None),
        ("time", _time(run)),
        ("cost", usd(cost) if cost is not None else None),
        ("energy", _energy(run)),
    ]
    return [(name, text) for name, text in rows if text is not None]


def _text(value: object) -> str | None:
    return str(value) if value else None


def _batch(run: Run) -> str | None:
    size = run.facts.get("global_batch_size")
    length = run.facts.get("sequence_length")
    if not size:
        return None
    return f"{size:,.0f} sequences of {length:,.0f} tokens" if length else f"{size:,.0f} samples"


def _time(run: Run) -> str | None:
    """Return the wall-clock time since the first launch, the GPU-hours of the launches, and the restarts."""
    if run.wall_s is None:
        return None
    restarts = run.restarts
    text = f"{duration(run.wall_s)}, {counted(restarts, 'restart')}"
    if all(attempt.world_size for attempt in run.attempts):
        hours = sum((one.ended - one.begun) * (one.world_size or 0) for one in run.attempts) / 3600
        text += f", {hours:,.3g} process-hours"
    return text


def _energy(run: Run) -> str | None:
    """Return the energy of the GPUs: their mean power at each log, over the time since the log before."""
    processes = run.facts.get("world_size")
    logs = [record for record in run.records if "gpu/power_w" in record and "time" in record]
    if not processes or len(logs) < 2:
        return None
    spans = [(b["time"] - a["time"], b["gpu/power_w"]) for a, b in pairwise(logs)]
    joules = sum(
        seconds * watts * processes for seconds, watts in spans if 0 < seconds < _MAX_GAP_S
    )
    return f"{joules / 3.6e6:,.3g} kWh of the GPUs, from their power at {len(logs)} logs"
