"""Printing of a plan as tables for a terminal."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hfscale.core.terminal import make_console, make_table
from hfscale.planner.estimate import fits_word
from hfscale.planner.improvements import Improvement
from hfscale.planner.islands import IslandsVerdict
from hfscale.planner.job import Job, strategy_of
from hfscale.planner.plan import Choice, Plan
from hfscale.planner.request import PlanRequest
from hfscale.planner.tasks import BATCH_UNITS

REJECTED_SHOWN = 5
"""Number of rejected layouts that are printed."""
COSTS_SHOWN = 6
"""Number of offers that are printed."""
IMPROVEMENTS_SHOWN = 4
"""Number of changes of the first choice that are printed without `--details`."""
WIDTH = 80
"""Columns without `--details` if the output is not a terminal."""
_COST_TITLE = "Cost of the first choice (goodput: share of the time that is training, without failures and saves)"


def show(
    plan: Plan,
    written: Sequence[Path],
    islands: IslandsVerdict | None = None,
    *,
    command: Sequence[str] = (),
) -> None:
    """Print a plan: the first choice in a sentence, how to start it, the other choices, and where it goes on.

    Args:
        plan (`Plan`): the plan.
        written (`Sequence[Path]`): files that were written, to be listed.
        islands (`IslandsVerdict`, *optional*): whether several islands pay.
        command (`Sequence[str]`): the command that plans this, which is printed with the flags that write the files.
    """
    console = make_console(width=WIDTH)
    console.print(_heading(plan))
    if plan.choices:
        console.print(f"\n{_answer(plan)}")
        for line in _starting(plan, written, command):
            console.print(line, soft_wrap=True)
        console.print()
        console.print(_short_choices(plan))
        if plan.order is not None:
            console.print(f"\nOrder: {plan.order}.")
    else:
        console.print("Nothing fits.")
    _print_alternatives(console, plan, islands)
    _print_improvements(console, plan)
    if not plan.choices:
        _list(console, "Rejected", _reasons(plan))
    _list(console, "Warnings", plan.warnings)
    _list(console, "Files written", [str(path) for path in written])
    console.print(
        "\n--details: memory, time and cost of each choice, what was rejected, assumptions."
    )


def _print_improvements(console: Console, plan: Plan) -> None:
    """Print a line for each change that would make the first choice faster or smaller, or something fit."""
    shown = plan.improvements[:IMPROVEMENTS_SHOWN]
    title = "Changes of choice 1"
    if not plan.choices:
        title = "What would make it fit"
    if any(item.changes_results for item in shown):
        title += " (*: changes the training's results)"
    _list(console, title, [_improvement(item) for item in shown])


def _print_alternatives(console: Console, plan: Plan, islands: IslandsVerdict | None) -> None:
    """Print what else there is than the choices: fewer GPUs, layouts without a recipe, islands."""
    if plan.min_gpus is not None:
        console.print(f"Fewest GPUs that suffice: {plan.min_gpus}")
    _list(console, "Estimated, but no recipe of hfscale can launch", plan.unlaunchable)
    if islands is not None:
        console.print(_islands(islands))
        verdict = "It pays" if islands.pays else "It does not pay"
        console.print(f"{verdict}: {islands.reason}.")


def _heading(plan: Plan) -> str:
    request = plan.request
    parts = [
        f"{plan.model}: {request.shape.total_parameters / 1e9:.2f}B parameters",
        f"{request.gpus} x {request.gpu.name}",
        f"sequences of {request.seq_len}",
        request.method,
    ]
    if request.stack != "hf":
        parts.append(f"framework {request.stack}")
    if request.task != "text":
        parts.append(f"task {request.task}")
    return ", ".join(parts)


def _answer(plan: Plan) -> str:
    """Return the first choice as a sentence, and the batch where it was not given."""
    choice = plan.choices[0]
    estimate = choice.estimate
    job = estimate.job
    rate = estimate.tokens_per_s_per_gpu * job.layout.world_size
    batch = f"micro-batch {job.micro_batch} x {job.micro_batches}"
    recomputed = _recomputed(job, "recomputation")
    parts = [f"{rate:,.0f} tokens/s"]
    if choice.hours is not None:
        parts.append(f"{_days(choice)} days ({_range_of_days(choice)})")
    if choice.usd is not None:
        cheapest = choice.costs[0]
        usd = _range(choice.scaled(choice.usd), ",.0f")
        parts.append(f"{choice.usd:,.0f} USD ({usd}) at {cheapest.provider}, {cheapest.kind}")
    memory = f"{estimate.memory.needed:.0f} of {job.gpu.memory_gib:.0f} GiB per GPU, fits: {estimate.fits_word}"
    layout = f"{_strategy(job, plan.request)}, {_layout(choice)}, {batch}{recomputed}"
    answer = f"Choice 1: {layout}: {', '.join(parts)}; {memory}."
    if plan.growing is not None:
        answer += f"\nGlobal batch: {plan.growing.text}, {choice.steps:,} optimizer steps."
    elif plan.request.global_batch is None:
        unit = BATCH_UNITS.get(plan.request.task, "sequences")
        answer += (
            f"\nGlobal batch: {job.global_batch} {unit}, {job.tokens_per_step:,} tokens per step, assumed: give "
            "--global-batch."
        )
    if plan.start is not None:
        start = plan.start
        answer += f"\nStart: {start.bytes / 2**30:,.0f} GiB of weights, read "
        if start.read_s is not None:
            answer += f"in {start.read_s:,.0f} s, "
        answer += f"with --load-once in {start.read_once_s:,.0f} s, at least."
    return answer


def _starting(plan: Plan, written: Sequence[Path], command: Sequence[str]) -> list[str]:
    """Return lines with the commands that start the first choice that can be started."""
    launchable = plan.next_launchable
    if plan.request.stack != "hf" or launchable is None or not command:
        return []
    launch = next((path for path in written if path.name == "launch.sh"), None)
    lines = ["Start it:"]
    number, choice = launchable
    if launch is None:
        folder = Path("runs/plan")
        words = list(command)
        if number > 1:
            words += ["--choice", str(number)]
        words += ["--emit", str(folder)]
        lines += _wrapped(words)
        launch = folder / "launch.sh"
    job = choice.estimate.job
    nodes = -(-job.layout.world_size // job.gpus_per_node)
    if nodes > 1:
        lines.append(f"  # on each of the {nodes} nodes, with its MACHINE_RANK and with MAIN_IP:")
    return [*lines, f"  bash {shlex.quote(str(launch))}"]


def _wrapped(words: Sequence[str]) -> list[str]:
    """Return a command for a shell, broken before options into lines of at most 80 columns where these fit."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    lines = [f"  {shlex.join(parts[0])}"]
    for part in map(shlex.join, parts[1:]):
        if len(lines[-1]) + len(part) + len("  \\") > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {part}"
    return lines


def _short_choices(plan: Plan) -> Table:
    """Return the choices as a table that fits 80 columns."""
    time_and_cost = _columns_of_time_and_cost(plan)
    numbers = ["batch", "GiB", "fits", "tokens/s", *time_and_cost]
    table = make_table("#", "strategy", "layout", *numbers, right=numbers)
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header not in ("strategy", "layout")
    for number, choice in enumerate(plan.choices, 1):
        estimate = choice.estimate
        job = estimate.job
        table.add_row(
            str(number),
            _strategy(job, plan.request) + _recomputed(job, "recompute"),
            _layout(choice),
            f"{job.micro_batch} x {job.micro_batches}",
            f"{estimate.memory.needed:.0f}",
            estimate.fits_word,
            f"{estimate.tokens_per_s_per_gpu * job.layout.world_size:,.0f}",
            *(_DAYS_AND_USD[name](choice) for name in time_and_cost),
        )
    return table


def _columns_of_time_and_cost(plan: Plan) -> list[str]:
    """Return `days` and `USD`, as far as they are known: of the tokens, and of a price for one choice at least."""
    names = []
    if plan.tokens is not None:
        names.append("days")
    if any(choice.usd is not None for choice in plan.choices):
        names.append("USD")
    return names


def _days(choice: Choice) -> str:
    return "" if choice.hours is None else f"{choice.hours / 24:,.1f}"


def _usd(choice: Choice) -> str:
    return "" if choice.usd is None else f"{choice.usd:,.0f}"


def _range_of_days(choice: Choice) -> str:
    if choice.hours is None:
        return ""
    return _range([hours / 24 for hours in choice.hours_range], ",.1f")


def _range_of_usd(choice: Choice) -> str:
    if choice.usd is None:
        return ""
    return _range(choice.scaled(choice.usd), ",.0f")


_DAYS_AND_USD = {"days": _days, "USD": _usd}
_RANGES = {"days": _range_of_days, "USD": _range_of_usd}
"""What stands in the columns of time and cost, of which there may be none."""


def _recomputed(job: Job, word: str) -> str:
    """Return what is added to the name of a strategy that recomputes activations."""
    if job.activation_checkpointing == "none":
        return ""
    return f", {word} {job.activation_checkpointing}"


def _improvement(item: Improvement) -> str:
    speed = ""
    if item.speedup is not None:
        speed = f", {_change_of_speed(item)} per GPU"
    fits = fits_word(item.fits_probability)
    return f"{_marked(item)}: {item.memory_gib:.0f} GiB, fits: {fits}{speed}"


def _marked(item: Improvement) -> str:
    """Return the change, with a star if it changes the training's results."""
    return f"{item.change}*" if item.changes_results else item.change


def _change_of_speed(item: Improvement) -> str:
    return "" if item.speedup is None else f"{item.speedup - 1:+.0%}"


def show_details(
    plan: Plan, written: Sequence[Path], islands: IslandsVerdict | None = None
) -> None:
    """Print a plan: its choices with memory, time and cost, then rejected layouts, advice and warnings.

    Args:
        plan (`Plan`): the plan.
        written (`Sequence[Path]`): files that were written, to be listed.
        islands (`IslandsVerdict`, *optional*): whether several islands pay.
    """
    console = make_console()
    console.print(_heading(plan))
    if plan.choices:
        console.print(_choices(plan))
        if plan.order is not None:
            console.print(f"Order: {plan.order}.")
        console.print(_ranges(plan))
        memory = [choice.estimate.memory for choice in plan.choices]
        parts = [one.needed_parts | {"total": one.needed} for one in memory]
        peaks = [choice.estimate.peak.description for choice in plan.choices]
        console.print(_parts("GiB per GPU at the peak", parts, "{:.1f}", {"at": peaks}))
        times = [choice.estimate.time for choice in plan.choices]
        shares = [{name: part / time.total for name, part in vars(time).items()} for time in times]
        console.print(_parts("Share of the step (bubble: waiting stages)", shares, "{:.1%}"))
        if plan.choices[0].costs and plan.choices[0].usd is not None:
            console.print(_costs(plan.choices[0]))
    else:
        # Then the reasons and the changes below are the answer, so they are printed in both cases.
        console.print("Nothing fits.")
    _print_alternatives(console, plan, islands)
    if plan.improvements:
        console.print(_improvements(plan))
    _list(console, "Rejected", _reasons(plan))
    _list(console, "Advice", [f"{item.text} ({item.source})" for item in plan.advice])
    _list(console, "Warnings", plan.warnings)
    _list(console, "Assumptions", plan.assumptions)
    _list(console, "Files written", [str(path) for path in written])


def show_gpu_types(plans: Sequence[Plan], failed: Mapping[str, str]) -> None:
    """Print the first choice of each plan in one table.

    Args:
        plans (`Sequence[Plan]`): the plans, best first.
        failed (`Mapping[str, str]`): why a GPU has no plan, by its name.
    """
    console = make_console()
    first = plans[0].request
    console.print(
        f"{plans[0].model}: {first.shape.total_parameters / 1e9:.2f}B parameters, {first.gpus} GPUs, sequences of "
        f"{first.seq_len}, {first.method}, framework {first.stack}"
    )
    has_hours = plans[0].tokens is not None
    numbers = ["batch", "recompute", "GiB", "fits", "tokens/s/GPU"]
    if has_hours:
        numbers += ["days", "USD"]
    table = make_table("GPU", "GPUs", "strategy", "layout", *numbers, right=numbers)
    for plan in plans:
        if not plan.choices:
            table.add_row(plan.request.gpu.name, str(plan.request.gpus), "nothing fits")
            continue
        choice = plan.choices[0]
        estimate = choice.estimate
        job = estimate.job
        row = [
            f"{job.micro_batch} x {job.micro_batches}",
            job.activation_checkpointing,
            f"{estimate.memory.needed:.0f} of {job.gpu.memory_gib:.0f}",
            estimate.fits_word,
            f"{estimate.tokens_per_s_per_gpu:,.0f}",
        ]
        if has_hours:
            row += [_range_of_days(choice), _range_of_usd(choice) or "no price"]
        gpus = str(job.layout.world_size)
        table.add_row(job.gpu.name, gpus, _strategy(job, plan.request), _layout(choice), *row)
    console.print(table)
    warnings = [line for plan in plans for line in plan.warnings]
    _list(console, "No plan", [f"{name}: {reason}" for name, reason in failed.items()])
    _list(console, "Warnings", warnings)
    console.print("\nEach type is planned alone: one job on two types of GPU is not planned.")
    console.print("The whole plan for one of them: the same command with this --gpu alone.")


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{title}:")
        for line in lines:
            console.print(f"  - {line}")


def _layout(choice: Choice) -> str:
    job = choice.estimate.job
    if job.overlapped_experts:
        return f"{job.layout_summary} overlapped"
    return job.layout_summary


def _strategy(job: Job, request: PlanRequest) -> str:
    """The strategy, and what the run uses in addition to what was asked for."""
    parts = [strategy_of(job)]
    if job.offload != "none":
        parts.append(f"{job.offload} offload")
    # A chunked loss is fused too, but it is what the recipes compute by default.
    if job.liger and not job.chunked_loss and not request.liger:
        parts.append("fused loss")
    if job.optimizer != request.optimizer:
        parts.append(job.optimizer)
    if job.pure_bf16 and not request.pure_bf16:
        parts.append("bf16 states")
    return ", ".join(parts)


def _choices(plan: Plan) -> Table:
    time_and_cost = _columns_of_time_and_cost(plan)
    numbers = ["batch", "recompute", "GiB", "fits", "step s", "tokens/s/GPU", "MFU", *time_and_cost]
    table = make_table("#", "strategy", "layout", "ZeRO", *numbers, right=numbers)
    for number, choice in enumerate(plan.choices, 1):
        estimate = choice.estimate
        job = estimate.job
        table.add_row(
            str(number),
            _strategy(job, plan.request),
            _layout(choice) + _stages(job),
            str(job.zero),
            _batch(job),
            job.activation_checkpointing,
            f"{estimate.memory.needed:.0f}",
            estimate.fits_word,
            f"{estimate.time.total:.2f}",
            f"{estimate.tokens_per_s_per_gpu:,.0f}",
            "" if estimate.mfu is None else f"{estimate.mfu:.0%}",
            *(_DAYS_AND_USD[name](choice) for name in time_and_cost),
        )
    return table


def _stages(job: Job) -> str:
    """Return what is added to the layout of a pipeline."""
    stages = ""
    if job.virtual_stages > 1:
        stages += f" x{job.virtual_stages}"
    if job.layout.pp > 1:
        stages += f" {job.schedule_name}"
    return stages


def _batch(job: Job) -> str:
    batch = f"{job.micro_batch} x {job.micro_batches}"
    if job.generation_rounds > 1:
        batch += f" in {job.generation_rounds} rounds"
    return batch


def _ranges(plan: Plan) -> Table:
    """Return a table of the ranges that hold for 80% of the published runs, and of the CPU memory."""
    time_and_cost = _columns_of_time_and_cost(plan)
    numbers = ["GiB", "step s", "tokens/s/GPU", *time_and_cost, "CPU GiB/node"]
    table = make_table(
        "#", *numbers, right=numbers, title="Ranges that 80% of the published runs were in"
    )
    for number, choice in enumerate(plan.choices, 1):
        estimate = choice.estimate
        slow, quick = (
            estimate.job.tokens_per_step / time / estimate.job.layout.world_size
            for time in estimate.time_range[::-1]
        )
        table.add_row(
            str(number),
            _range(estimate.needed_range, ".0f"),
            _range(estimate.time_range, ".2f"),
            _range((slow, quick), ",.0f"),
            *(_RANGES[name](choice) for name in time_and_cost),
            f"{estimate.host_gib_per_node:,.0f}",
        )
    return table


def _range(ends: Sequence[float], form: str) -> str:
    return f"{ends[0]:{form}} to {ends[1]:{form}}"


def _islands(found: IslandsVerdict) -> Table:
    """Return a table of the ways to use several islands of the first choice."""
    numbers = ("tokens/s", "bytes sent/token", "waiting", "host GiB")
    title = f"\n{found.islands} islands of choice 1 each (tokens/s of all of them)"
    table = make_table("way", *numbers, right=numbers, title=title)
    sent = f"{found.bytes_per_round / 1e9:,.3g} GB in {found.round_s:,.1f} s"
    what = "exchange"
    if found.fragments > 1:
        what = f"each of {found.fragments} fragments"
    table.add_row(
        f"DiLoCo, {what} every {found.steps} steps ({sent})",
        f"{found.diloco:,.0f}",
        f"{found.bytes_per_token:,.3g}",
        f"{found.stall_fraction:.1%}",
        f"{found.host_gib:,.0f}",
    )
    table.add_row(
        "DDP or HSDP over the link",
        f"{found.ddp:,.0f}",
        f"{found.ddp_bytes_per_token:,.3g}",
        "",
        "",
    )
    table.add_row("FSDP2 over the link", f"{found.fsdp2:,.0f}", "", "", "")
    table.add_row("one island alone", f"{found.one_island:,.0f}", "0", "", "")
    return table


def _improvements(plan: Plan) -> Table:
    """Return a table of the changes that would make the first choice faster or smaller, or something fit."""
    title = "What would make choice 1 faster or smaller"
    if not plan.choices:
        title = "What would make it fit"
    numbers = ("GiB", "fits", "tokens/s/GPU", "speed")
    table = make_table(
        "change",
        "strategy, layout, batch, recompute",
        *numbers,
        right=numbers,
        title=f"\n{title} (*: changes the training's results)",
    )
    for item in plan.improvements:
        table.add_row(
            _marked(item),
            item.run,
            f"{item.memory_gib:.0f}",
            fits_word(item.fits_probability),
            f"{item.tokens_per_s_per_gpu:,.0f}",
            _change_of_speed(item),
        )
    return table


def _parts(
    title: str,
    rows: Sequence[Mapping[str, float]],
    form: str,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Return a table with a row for each choice, a column for each part, and columns of text."""
    columns = ("#", *rows[0])
    texts = texts or {}
    table = make_table(*columns, *texts, right=columns, title=title)
    for number, row in enumerate(rows, 1):
        shown = (form.format(value) for value in row.values())
        table.add_row(str(number), *shown, *(column[number - 1] for column in texts.values()))
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
    lines = list(dict.fromkeys(f"{row.summary}: {row.reason}" for row in rows))
    shown = lines[:REJECTED_SHOWN]
    rest = len(lines) - len(shown)
    if rest > 0:
        shown.append(f"and {rest} more (--json lists them all)")
    return shown
