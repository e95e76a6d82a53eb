"""Printing of a plan as tables for a terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hfscale.cli.terminal import make_console, make_table
from hfscale.planner.job import strategy_of
from hfscale.planner.plan import Choice, Plan

REJECTED_SHOWN = 5
"""Number of rejected layouts that are printed."""
COSTS_SHOWN = 6
"""Number of offers that are printed."""
_COST_TITLE = "Cost of the first choice (goodput: share of the time that is training, without failures and saves)"


def show(plan: Plan, written: Sequence[Path]) -> None:
    """Print a plan: its choices with memory, time and cost, then rejected layouts, advice and warnings.

    Args:
        plan (`Plan`): the plan.
        written (`Sequence[Path]`): files that were written, to be listed.
    """
    console = make_console()
    shape = plan.request.shape
    request = plan.request
    console.print(
        f"{plan.model}: {shape.total_parameters / 1e9:.2f}B parameters, {request.gpus} x {request.gpu.name}, "
        f"sequences of {request.seq_len}, {request.method}, framework {request.framework}"
        + ("" if request.task == "text" else f", task {request.task}")
    )
    if plan.choices:
        console.print(_choices(plan))
        if plan.order is not None:
            console.print(f"Order: {plan.order}.")
        memory = [{**vars(choice.estimate.memory), "total": choice.estimate.memory.total} for choice in plan.choices]
        console.print(_parts("GiB per GPU at the peak", memory, "{:.1f}"))
        times = [choice.estimate.time for choice in plan.choices]
        shares = [{name: part / time.total for name, part in vars(time).items()} for time in times]
        console.print(_parts("Share of the step (bubble: waiting stages)", shares, "{:.1%}"))
        if plan.choices[0].costs and plan.choices[0].usd is not None:
            console.print(_costs(plan.choices[0]))
    else:
        console.print("Nothing fits.")
    if plan.min_gpus is not None:
        console.print(f"Fewest GPUs that suffice: {plan.min_gpus}")
    _list(console, "Estimated, but no recipe of hfscale can launch", plan.unlaunchable)
    _list(console, "Rejected", _reasons(plan))
    _list(console, "Advice", [f"{item.text} ({item.source})" for item in plan.advice])
    _list(console, "Warnings", plan.warnings)
    _list(console, "Assumptions", plan.assumptions)
    _list(console, "Files written", [str(path) for path in written])


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{title}:")
        for line in lines:
            console.print(f"  - {line}")


def _layout(choice: Choice) -> str:
    job = choice.estimate.job
    layout = job.layout
    axes = {
        "replicate": layout.dp_replicate,
        "shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": job.expert_parallel,  # a part of the data-parallel ranks, not an axis of its own
    }
    text = " ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "1"
    return f"{text} overlapped" if job.overlapped_experts else text


def _choices(plan: Plan) -> Table:
    has_hours = plan.tokens is not None
    has_usd = any(choice.usd is not None for choice in plan.choices)
    numbers = ["batch", "recompute", "GiB", "step s", "tokens/s/GPU", "MFU"]
    numbers += ["days"] * has_hours + ["USD"] * has_usd
    table = make_table("#", "strategy", "layout", "ZeRO", *numbers, right=numbers)
    for number, choice in enumerate(plan.choices, 1):
        estimate = choice.estimate
        job = choice.estimate.job
        stages = f" x{job.virtual_stages}" if job.virtual_stages > 1 else ""
        stages += f" {job.schedule_name}" if job.layout.pp > 1 else ""
        offload = f", {job.offload} offload" if job.offload != "none" else ""
        rounds = f" in {job.generation_rounds} rounds" if job.generation_rounds > 1 else ""
        row = [
            str(number),
            strategy_of(job) + offload,
            _layout(choice) + stages,
            str(job.zero),
            f"{job.micro_batch} x {job.micro_batches}{rounds}",
            job.recompute,
            f"{estimate.memory.total:.0f}",
            f"{estimate.time.total:.2f}",
            f"{estimate.tokens_per_s_per_gpu:,.0f}",
            "" if estimate.mfu is None else f"{estimate.mfu:.0%}",
        ]
        if has_hours:
            row.append("" if choice.hours is None else f"{choice.hours / 24:,.1f}")
        if has_usd:
            row.append("" if choice.usd is None else f"{choice.usd:,.0f}")
        table.add_row(*row)
    return table


def _parts(title: str, rows: Sequence[Mapping[str, float]], form: str) -> Table:
    """Return a table with a row for each choice and a column for each part."""
    columns = ("#", *rows[0])
    table = make_table(*columns, right=columns, title=title)
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *(form.format(value) for value in row.values()))
    return table


def _costs(choice: Choice) -> Table:
    numbers = ("USD/GPU-hour", "goodput", "days", "GPU-hours", "USD", "USD/M tokens", "read")
    table = make_table("provider", "kind", "region", *numbers, right=numbers, title=_COST_TITLE)
    for cost in choice.costs[:COSTS_SHOWN]:
        table.add_row(
            cost.provider,
            cost.kind,
            cost.region or "",
            f"{cost.usd_per_gpu_hour:.2f}",
            f"{cost.goodput:.1%}",
            f"{cost.hours / 24:,.1f}",
            f"{cost.gpu_hours:,.0f}",
            f"{cost.usd:,.0f}",
            f"{cost.usd_per_million_tokens:.3f}",
            cost.date or "",
        )
    return table


def _reasons(plan: Plan) -> list[str]:
    """Return each reason once, in ascending order of the memory that the layout needs."""
    rows = sorted(plan.rejected, key=lambda row: row.needed_gib or 0.0)
    lines = list(dict.fromkeys(f"{row.layout}: {row.reason}" for row in rows))
    rest = len(lines) - REJECTED_SHOWN
    return lines[:REJECTED_SHOWN] + ([f"and {rest} more (--json lists them all)"] if rest > 0 else [])
