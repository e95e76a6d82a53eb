"""Computes what a report says about a run: its headline numbers, its description, and what to change first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hfscale.core.counts import counted
from hfscale.core.findings import Finding
from hfscale.core.lives import DOWN, LOST, PAUSED
from hfscale.core.recovery_times import RECOVERY_PARTS
from hfscale.metrics.goodput import START_UP, USEFUL_PHASE
from hfscale.metrics.triage import NEWEST_KEYS, TRIAGE_KEYS, TriageInput, triage
from hfscale.report.formatting import count, duration, percent, usd
from hfscale.report.run_data import Run

PHASES = {
    USEFUL_PHASE: "training steps",
    "exposed communication": "exposed communication",
    "bubble": "pipeline bubble",
    "data_wait": "waiting for data",
    "save": "saving",
    "evaluate": "evaluation",
    START_UP: "start-up",
    LOST: "lost after a checkpoint",
    DOWN: "down between launches",
    PAUSED: "paused between launches",
    "other": "logging and other work",
    "since the last checkpoint": "since the last checkpoint",
}
"""The name of each phase of a run's time, in the order in which reports show them."""
NOTHING_LOGGED = "nothing is logged yet"
"""Why the numbers of a run without a log are not known."""
MAX_BOTTLENECKS = 3
"""Number of bottlenecks that a report shows."""
_MIN_OVERHEAD = 0.05
"""Share of the wall-clock time from which work outside the steps is reported."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Holds one headline number."""

    name: str
    """The name of the number."""
    value: str
    """The number as text."""
    note: str
    """A short note that is shown below the number."""
    number: float | None = None
    """The number itself; None if it is not known, and then the note says how to get it."""

    @property
    def is_known(self) -> bool:
        """Whether the number is known."""
        return self.number is not None


@dataclass(frozen=True, kw_only=True)
class RankMeasure:
    """Describes a number per rank of `hfscale_ranks.jsonl`."""

    key: str
    """Its key in the file."""
    label: str
    """The caption of its heat map."""
    form: str
    """Format of a number."""


_RANK_MEASURES = (
    RankMeasure(key="data_wait_fraction", label="Waiting for data, by rank", form="{:.0%}"),
    RankMeasure(
        key="comm_fraction",
        label="Communicating or waiting for others, by rank: a slow rank is the pale one",
        form="{:.0%}",
    ),
    RankMeasure(
        key="compute_s",
        label="Compute time of each rank, without waiting for others",
        form="{:.3g} s",
    ),
    RankMeasure(
        key="stage_s",
        label="Compute time of the pipeline stages per step, by rank: the slowest stage sets the pace",
        form="{:.3g} s",
    ),
    RankMeasure(key="temperature_c", label="Temperature of the GPU, by rank", form="{:.0f} °C"),
    RankMeasure(key="memory_peak_gib", label="Peak memory, by rank", form="{:.3g} GiB"),
)


def rank_measures(run: Run) -> list[tuple[RankMeasure, Sequence[tuple[float, Sequence[float]]]]]:
    """Return the numbers per rank that the run has recorded: for each measure its step and numbers at each log."""
    return [
        (measure, run.ranks[measure.key])
        for measure in _RANK_MEASURES
        if run.ranks.get(measure.key)
    ]


def headline(run: Run) -> list[Tile]:
    """Return the headline numbers: tokens (or steps), cost, goodput, MFU, speed and time."""
    return [_tokens(run), _cost(run), _goodput(run), _mfu(run), _speed(run), _time(run)]


def subtitle(run: Run) -> str:
    """Return one line that describes the run: model, strategy, device and batch."""
    facts = run.facts
    parts = []
    if facts.get("model_type") and facts.get("parameters"):
        parts.append(f"{facts['model_type']}, {count(facts['parameters'])} parameters")
    parts += filter(None, [layout_of(run)])
    parts += [str(facts[key]) for key in ("device", "precision") if facts.get(key)]
    if facts.get("sequence_length") and facts.get("global_batch_size"):
        parts.append(
            f"{count(facts['global_batch_size'])} x {count(facts['sequence_length'])} tokens per step"
        )
    elif facts.get("global_batch_size"):
        parts.append(f"{count(facts['global_batch_size'])} samples per step")
    return " · ".join(parts) or "the run has not recorded what it trains"


def layout_of(run: Run) -> str | None:
    """Return strategy and number of processes, such as `fsdp2 on 8 processes`; None if they are not known."""
    if not run.facts.get("strategy") or not run.facts.get("world_size"):
        return None
    number = int(run.facts["world_size"])
    return f"{run.facts['strategy']} on {counted(number, 'process')}"


def failures(run: Run) -> str | None:
    """Return one line about the work that failed without ending the run; None if nothing did."""
    found = [f"{name} ({counted(number, 'time')})" for name, number in sorted(run.failures.items())]
    return f"failed without ending the run: {', '.join(found)}" if found else None


def left_out(run: Run) -> str | None:
    """Return one line about values in the files of the run that cannot be right; None if there are none."""
    if not run.left_out:
        return None
    return f"left out: {counted(run.left_out, 'value')} in its files that cannot be right"


def _unknown(name: str, note: str) -> Tile:
    return Tile(name=name, value="not known", note=note)


def _hint(run: Run, fix: str) -> str:
    """Return why a number is not known: nothing was measured yet, or else what to give."""
    return fix if run.records else NOTHING_LOGGED


def _tokens(run: Run) -> Tile:
    tokens = run.last("scaling/tokens_seen")
    steps = int(run.last("step") or 0)
    if tokens is None and run.last("scaling/samples_per_s") is not None:
        return Tile(
            name="Steps", value=f"{steps:,}", note="the batches have no tokens", number=steps
        )
    if tokens is None:
        return _unknown("Tokens", f"{steps:,} steps")
    padding = run.median("scaling/padding_fraction")
    padded = f", {percent(padding)} padding" if padding else ""
    note = f"{steps:,} steps{padded}{_batches(run)}"
    return Tile(name="Tokens", value=count(tokens), note=note, number=tokens)


def _batches(run: Run) -> str:
    """Return how the global batch has grown; nothing where it is constant."""
    _, batches = run.columns("scaling/global_batch")
    if not batches:
        return ""
    return f", of {batches[0]:,.0f} to {batches[-1]:,.0f} sequences"


def _cost(run: Run) -> Tile:
    cost = run.last("scaling/usd")
    per_million = run.last("scaling/usd_per_million_tokens")
    if cost is None:
        return _unknown("Cost", _hint(run, "give usd_per_gpu_hour"))
    price = run.facts.get("usd_per_gpu_hour")
    notes = [f"{usd(per_million)} per million tokens"] if per_million is not None else []
    notes += [f"at {usd(price)} per GPU-hour"] if price is not None else []
    return Tile(name="Cost", value=usd(cost), note=", ".join(notes), number=cost)


def _goodput(run: Run) -> Tile:
    goodput = run.last("scaling/goodput")
    if goodput is None:
        return _unknown("Goodput", NOTHING_LOGGED)
    return Tile(
        name="Goodput",
        value=percent(goodput),
        note="of the time since the first launch"
        + (", without pauses" if PAUSED in run.split else ""),
        number=goodput,
    )


def _mfu(run: Run) -> Tile:
    mfu = run.median("scaling/mfu")
    hfu = run.median("scaling/hfu")
    if mfu is None:
        return _unknown("MFU", run.facts.get("mfu_absent") or _hint(run, "give peak_tflops"))
    peak_dtype = run.facts.get("peak_dtype")
    notes = [f"HFU {percent(hfu)}"] if hfu is not None and hfu > mfu * 1.005 else []
    notes += [f"of the dense {peak_dtype} peak" if peak_dtype else "of the dense peak"]
    notes += ["counted FLOPs"] if run.facts.get("flops_source") == "counted" else []
    return Tile(name="MFU", value=percent(mfu), note=", ".join(notes), number=mfu)


def _speed(run: Run) -> Tile:
    rate = run.median("scaling/tokens_per_s")
    per_gpu = run.median("scaling/tokens_per_s_per_gpu")
    samples = run.median("scaling/samples_per_s")
    if rate is None and samples is not None:
        processes = int(run.facts.get("world_size", 1))
        note = f"{count(samples / processes)} per GPU"
        return Tile(name="Samples per second", value=count(samples), note=note, number=samples)
    if rate is None or per_gpu is None:
        return _unknown("Tokens per second", NOTHING_LOGGED)
    efficiency = run.median("scaling/efficiency")
    note = f"{count(per_gpu)} per GPU"
    if efficiency is not None:
        note += f", scaling efficiency {percent(efficiency)}"
    return Tile(name="Tokens per second", value=count(rate), note=note, number=rate)


def _time(run: Run) -> Tile:
    if run.wall_s is None:
        return _unknown("Time", "no launch is recorded")
    number = run.launches
    note = counted(number, "launch")
    return Tile(name="Time", value=duration(run.wall_s), note=note, number=run.wall_s)


def bottlenecks(run: Run) -> list[Finding]:
    """Return what to change first: the triage's bottleneck and the overhead outside the steps, the largest first."""
    found = [*_inside_the_steps(run), *_outside_the_steps(run)]
    return sorted(found, key=lambda bottleneck: -(bottleneck.share or 0.0))


def keys_of_run(
    typical: Callable[[str], float | None], newest: Callable[[str], float | None]
) -> dict[str, float]:
    """Return the metric keys of a run that the triage judges.

    Args:
        typical (`Callable[[str], float | None]`): returns the median of a key over the logs; None if no log has it.
        newest (`Callable[[str], float | None]`): returns its newest value.
    """
    keys = {}
    for key in TRIAGE_KEYS:
        read = newest if key in NEWEST_KEYS else typical
        value = read(key)
        if value is not None:
            keys[key] = value
    return keys


def _inside_the_steps(run: Run) -> Sequence[Finding]:
    measured = keys_of_run(run.median, run.last)
    tokens = run.facts.get("tokens_per_gpu")
    bottleneck = triage(
        TriageInput.from_keys(measured, tokens_per_gpu=int(tokens) if tokens else None)
    )
    if bottleneck is None:
        return []
    if bottleneck.check == "exposed communication":
        # Only the run itself could measure whether the backward can hide its communication: use its own finding.
        for finding in reversed(run.findings):
            if finding.get("cause") == "tokens per GPU too small":
                return [
                    Finding(
                        check=finding["cause"],
                        share=bottleneck.share,
                        problem=str(finding.get("numbers", bottleneck.problem)),
                        fix=str(finding.get("mend", bottleneck.fix)),
                    )
                ]
    return [bottleneck]


def _outside_the_steps(run: Run) -> Sequence[Finding]:
    total_s = sum(run.split.values()) - run.split.get(PAUSED, 0.0)
    if total_s <= 0:
        return []
    saves = sum(len(attempt.saves) for attempt in run.attempts)
    restarts = run.restarts
    if restarts:
        name = "restarts"
        measured = f"{counted(restarts, 'restart')}: repeated work, and time until the relaunch"
        fix = _how_to_lose_less(run)
    else:
        name = "repeated work"
        measured = (
            "no launch had failed, and the run went on from a checkpoint before its last step"
        )
        fix = "keep the last checkpoint: a larger save_total_limit, where the best one is kept too"
    overheads = (
        (name, run.split.get(LOST, 0.0) + run.split.get(DOWN, 0.0), measured, fix),
        (
            "start-up",
            run.split.get(START_UP, 0.0),
            "imports, loading and preparation before the first step",
            "the share shrinks as the run gets longer; if data is tokenized here, do it in advance and keep its cache",
        ),
        (
            "saves",
            run.split.get("save", 0.0),
            f"training waited for {counted(saves, 'save')}",
            "save less often, to a faster disk, or asynchronously",
        ),
        (
            "evaluation",
            run.split.get("evaluate", 0.0),
            "evaluations during the training",
            "evaluate less often, or on fewer sequences",
        ),
    )
    return [
        Finding(check=cause, share=seconds / total_s, problem=problem, fix=fix)
        for cause, seconds, problem, fix in overheads
        if seconds / total_s > _MIN_OVERHEAD
    ]


def recoveries(run: Run) -> list[tuple[str, str, str, str, str]]:
    """Return what `hfscale run` has recovered from, oldest first.

    Args:
        run (`Run`): the run.

    Returns:
        `list[tuple]`: for each, as text: the step that was completed first, what failed, the steps repeated, the time
        from the failure to that step, and the parts of it (docs/recovery.md).
    """
    rows = []
    for one in run.recoveries:
        parts = {part: one.get(part, 0.0) for part in RECOVERY_PARTS}
        rank = f"rank {one['rank']:.0f}: " if "rank" in one else ""
        rows.append(
            (
                f"{one['step']:.0f}",
                f"{rank}{one.get('reason') or 'unknown'}",
                f"{one.get('steps_lost', 0):.0f}",
                duration(sum(parts.values())),
                ", ".join(
                    f"{_part_name(part)} {duration(seconds)}" for part, seconds in parts.items()
                ),
            )
        )
    return rows


def _part_name(part: str) -> str:
    return part.removesuffix("_s").replace("_", " ")


def _how_to_lose_less(run: Run) -> str:
    if not run.recoveries:
        return f"{_save_interval(run)}start it with hfscale run"
    seconds = {part: sum(one.get(part, 0.0) for one in run.recoveries) for part in RECOVERY_PARTS}
    return f"shorten the longest part of the recoveries, {_part_name(max(seconds, key=lambda part: seconds[part]))}"


def _save_interval(run: Run) -> str:
    """Return Young's optimum sqrt(2 x save time x time between failures) for this run (CACM 17 (9), 1974)."""
    stall_s = run.median("checkpoint/stall_s")
    restarts = run.restarts - run.lost_launches  # of which the time is known
    if stall_s is None or restarts < 1:
        return ""
    up_s = sum(attempt.ended - attempt.begun for attempt in run.attempts)
    interval_s = math.sqrt(2 * stall_s * up_s / restarts)
    return (
        f"save about every {duration(interval_s)} (Young's optimum for a save of {duration(stall_s)} and this rate of "
        "failures), and "
    )
