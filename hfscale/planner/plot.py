"""Draws a plan: memory against the device's limit, parts of the step, cost against time, and the first choice's
pipeline. Needs matplotlib."""

from pathlib import Path
from typing import Any

from hfscale.core.disk_errors import writing
from hfscale.core.spelling import spelled
from hfscale.core.versions import require
from hfscale.errors import ParameterError, UsageError
from hfscale.facts.schedules import one_f_one_b
from hfscale.planner.job import strategy_of
from hfscale.planner.plan import Choice, Plan
from hfscale.planner.search import USABLE_MEMORY_FRACTION

SUFFIXES = (".svg", ".png", ".pdf")


def draw(plan: Plan, path: Path) -> None:
    """Draw a plan's choices into a file.

    Args:
        plan (`Plan`): the plan.
        path (`Path`): the file; its suffix, one of `SUFFIXES`, gives the format.

    Raises:
        UsageError: the suffix is another one, or there are no choices to draw.
        MissingDependencyError: matplotlib is not installed.
        StorageError: the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise ParameterError("plot", str(path), f"use a name that ends in {', '.join(SUFFIXES)}")
    if not plan.choices:
        raise UsageError(
            f"{spelled('plot')}: no layout fits, so there is nothing to draw; plan for more GPUs"
        )
    require("hfscale plan --plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    (memory, time), (cost, pipeline) = figure.subplots(2, 2)
    labels = labels_of(plan)
    _stacked_bars(
        memory,
        labels,
        [choice.estimate.memory.needed_parts for choice in plan.choices],
        "GiB per GPU at the peak",
    )
    limit = plan.request.gpu.memory_gib
    memory.axvline(limit, color="black", linewidth=1)
    memory.axvline(USABLE_MEMORY_FRACTION * limit, color="black", linewidth=1, linestyle=":")
    numbers = [str(number) for number in range(1, len(labels) + 1)]
    _stacked_bars(
        time, numbers, [vars(choice.estimate.time) for choice in plan.choices], "seconds per step"
    )
    _draw_cost(cost, plan)
    _draw_pipeline(pipeline, plan.choices[0])
    figure.suptitle(f"{plan.model} on {plan.request.gpus} {plan.request.gpu.name}")
    with writing(f"--plot {path}", "give another file"):
        # What a PNG file shows can be read back, so that a test finds a picture that is out of date.
        figure.savefig(
            path, metadata={"Description": "; ".join(labels)} if path.suffix == ".png" else None
        )


def labels_of(plan: Plan) -> list[str]:
    """Return the names of a plan's choices in the drawing.

    Args:
        plan (`Plan`): the plan.
    """
    return [f"{number} {_label(choice)}" for number, choice in enumerate(plan.choices, 1)]


def _label(choice: Choice) -> str:
    job = choice.estimate.job
    layout = job.layout
    axes = {
        "dp": layout.dp_replicate * layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "pp": layout.pp,
    }
    sizes = " ".join(f"{name}{size}" for name, size in axes.items() if size > 1)
    more = [f"{job.offload} offload"] if job.offload != "none" else []
    more += ["fused loss"] if job.liger else []
    return ", ".join([f"{strategy_of(job)} {sizes}".strip(), *more])


def _stacked_bars(axes: Any, labels: list[str], rows: list[dict[str, float]], title: str) -> None:
    left = [0.0] * len(rows)
    for name in rows[0]:
        widths = [row[name] for row in rows]
        axes.barh(labels, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_title(title)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_pipeline(axes: Any, choice: Choice) -> None:
    """Draw a part of a choice's micro-batches in its pipeline, as 1F1B; an empty panel without a pipeline."""
    job = choice.estimate.job
    stages = job.layout.pp
    micro_batches = min(job.micro_batches, 2 * job.layout.pp + 2)
    if stages == 1:
        axes.set_axis_off()
        return
    for slot in one_f_one_b(stages, micro_batches):
        colour = "tab:blue" if slot.is_forward else "tab:orange"
        axes.barh(
            slot.rank,
            slot.end - slot.start,
            left=slot.start,
            color=colour,
            edgecolor="white",
            height=0.9,
        )
    axes.invert_yaxis()
    axes.set_ylabel("pipeline rank")
    axes.set_xlabel("forward (blue) = 1, backward (orange) = 2")
    flag = job.schedule_name
    note = "" if flag == "1F1B" else f", drawn as 1F1B although the schedule is {flag}"
    axes.set_title(f"first choice, {micro_batches} of {job.micro_batches} micro-batches{note}")


def _draw_cost(axes: Any, plan: Plan) -> None:
    """Draw duration and cost of every choice at its cheapest offers; where no cost is known, tokens/s/GPU."""
    points = []
    # Costs are in ascending order, so that the first of a kind is the cheapest.
    for number, choice in enumerate(plan.choices, 1):
        for kind in ("on-demand", "spot"):
            offers = [cost for cost in choice.costs if cost.kind == kind]
            points += [(number, cost) for cost in offers[:1]]
    if not points or plan.choices[0].usd is None:
        speeds = [choice.estimate.tokens_per_s_per_gpu for choice in plan.choices]
        axes.barh([str(number + 1) for number in range(len(speeds))], speeds)
        axes.invert_yaxis()
        axes.set_title("tokens/s/GPU")
        return
    for kind, marker in (("on-demand", "o"), ("spot", "x")):
        chosen = [(cost.hours / 24, cost.usd) for _, cost in points if cost.kind == kind]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), marker=marker, label=kind)
    for number, cost in points:
        axes.annotate(f"{number} {cost.provider}", (cost.hours / 24, cost.usd), fontsize="xx-small")
    axes.set_xlabel("days")
    axes.set_ylabel("USD")
    axes.set_title("cost against time")
    axes.legend(fontsize="x-small")
