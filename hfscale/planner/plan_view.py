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
    if plan.improvements:
        has_changes = any(item.changes_results for item in plan.improvements[:IMPROVEMENTS_SHOWN])
        note = " (*: changes the training's results)" if has_changes else ""
        lines = [_improvement(item) for item in plan.improvements[:IMPROVEMENTS_SHOWN]]
        _list(
            console,
            ("Changes of choice 1" if plan.choices else "What would make it fit") + note,
            lines,
        )
    if not plan.choices:
        _list(console, "Rejected", _reasons(plan))
    _list(console, "Warnings", plan.warnings)
    _list(console, "Files written", [str(path) for path in written])
    console.print(
        "\n--details: memory, time and cost of each choice, what was rejected, assumptions."
    )


def _print_alternatives(console: Console, plan: Plan, islands: IslandsVerdict | None) -> None:
    """Print what else there is than the choices: fewer GPUs, layouts without a recipe, islands."""
    if plan.min_gpus is not None:
        console.print(f"Fewest GPUs that suffice: {plan.min_gpus}")
    _list(console, "Estimated, but no recipe of hfscale can launch", plan.unlaunchable)
    if islands is not None:
        console.print(_islands(islands))
        console.print(f"It {'pays' if islands.pays else 'does not pay'}: {islands.reason}.")


def _heading(plan: Plan) -> str:
    request = plan.request
    more = [f"framework {request.stack}"] if request.stack != "hf" else []
    more += [f"task {request.task}"] if request.task != "text" else []
    return ", ".join(
        [
            f"{plan.model}: {request.shape.total_parameters / 1e9:.2f}B parameters",
            f"{request.gpus} x {request.gpu.name}",
            f"sequences of {request.seq_len}",
            request.method,
            *more,
        ]
    )


def _answer(plan: Plan) -> str:
    """Return the first choice as a sentence, and the batch where it was not given."""
    choice = plan.choices[0]
    estimate = choice.estimate
    job = estimate.job
    rate = estimate.tokens_per_s_per_gpu * job.layout.world_size
    batch = f"micro-batch {job.micro_batch} x {job.micro_batches}"
    recomputed = (
        ""
        if job.activation_checkpointing == "none"
        else f", recomputation {job.activation_checkpointing}"
    )
    parts = [f"{rate:,.0f} tokens/s"]
    if choice.hours is not None:
        days = _range([hours / 24 for hours in choice.hours_range], ",.1f")
        parts.append(f"{choice.hours / 24:,.1f} days ({days})")
    if choice.usd is not None:
        cheapest = choice.costs[0]
        usd = _range(choice.scaled(choice.usd), ",.0f")
        parts.append(f"{choice.usd:,.0f} USD ({usd}) at {cheapest.provider}, {cheapest.kind}")
    memory = f"{estimate.memory.total:.0f} of {job.gpu.memory_gib:.0f} GiB per GPU, fits: {estimate.fits_word}"
    layout = f"{_strategy(job, plan.request)}, {_layout(choice)}, {batch}{recomputed}"
    answer = f"Choice 1: {layout}: {', '.join(parts)}; {memory}."
    if plan.request.global_batch is None:
        unit = {"dpo": "pairs", "grpo": "completions"}.get(plan.request.task, "sequences")
        answer += (
            f"\nGlobal batch: {job.global_batch} {unit}, {job.tokens_per_step:,} tokens per step, assumed: give "
            "--global-batch."
        )
    return answer


def _starting(plan: Plan, written: Sequence[Path], command: Sequence[str]) -> list[str]:
    """Return lines with the commands that start the first choice that can be started."""
    launchable = plan.next_launchable
    if plan.request.stack != "hf" or launchable is None or not command:
        return []
    launch = next((path for path in written if path.name == "launch.sh"), None)
    lines = ["Start it:"]
    if launch is None:
        folder = Path("runs/plan")
        words = [
            *command,
            *(["--choice", str(launchable[0])] if launchable[0] > 1 else []),
            "--emit",
            str(folder),
        ]
        lines += _wrapped(words)
        launch = folder / "launch.sh"
    job = launchable[1].estimate.job
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
    has_hours = plan.tokens is not None
    has_usd = any(choice.usd is not None for choice in plan.choices)
    numbers = [
        "batch",
        "GiB",
        "fits",
        "tokens/s",
        *(["days"] if has_hours else []),
        *(["USD"] if has_usd else []),
    ]
    table = make_table("#", "strategy", "layout", *numbers, right=numbers)
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header not in ("strategy", "layout")
    for number, choice in enumerate(plan.choices, 1):
        estimate = choice.estimate
        job = estimate.job
        recompute = (
            ""
            if job.activation_checkpointing == "none"
            else f", recompute {job.activation_checkpointing}"
        )
        row = [
            str(number),
            _strategy(job, plan.request) + recompute,
            _layout(choice),
            f"{job.micro_batch} x {job.micro_batches}",
            f"{estimate.memory.total:.0f}",
            estimate.fits_word,
            f"{estimate.tokens_per_s_per_gpu * job.layout.world_size:,.0f}",
        ]
        if has_hours:
            row.append("" if choice.hours is None else f"{choice.hours / 24:,.1f}")
        if has_usd:
            row.append("" if choice.usd is None else f"{choice.usd:,.0f}")
        table.add_row(*row)
    return table


def _improvement(item: Improvement) -> str:
    speed = "" if item.speedup is None else f", {item.speedup - 1:+.0%} per GPU"
    mark = "*" if item.changes_results else ""
    return f"{item.change}{mark}: {item.memory_gib:.0f} GiB, fits: {fits_word(item.fits_probability)}{speed}"


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
        memory = [
            {**vars(choice.estimate.memory), "total": choice.estimate.memory.total}
            for choice in plan.choices
        ]
        peaks = [choice.estimate.peak.description for choice in plan.choices]
        console.print(_parts("GiB per GPU at the peak", memory, "{:.1f}", {"at": peaks}))
        times = [choice.estimate.time for choice in plan.choices]
        shares = [{name: part / time.total for name, part in vars(time).items()} for time in times]
        console.print(_parts("Share of the step (bubble: waiting stages)", shares, "{:.1%}"))
        if plan.choices[0].costs and plan.choices[0].usd is not None:
            console.print(_costs(plan.choices[0]))
    else:
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
    numbers = [
        "batch",
        "recompute",
        "GiB",
        "fits",
        "tokens/s/GPU",
        *(["days", "USD"] if has_hours else []),
    ]
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
            f"{estimate.memory.total:.0f} of {job.gpu.memory_gib:.0f}",
            estimate.fits_word,
            f"{estimate.tokens_per_s_per_gpu:,.0f}",
        ]
        if has_hours:
            row.append(
                ""
                if choice.hours is None
                else _range([hours / 24 for hours in choice.hours_range], ",.1f")
            )
            row.append(
                "no price" if choice.usd is None else _range(choice.scaled(choice.usd), ",.0f")
            )
        gpus = str(job.layout.world_size)
        table.add_row(job.gpu.name, gpus, _strategy(job, plan.request), _layout(choice), *row)
    console.print(table)
    warnings = [line for plan in plans for line in plan.warnings]
    _list(console, "No plan", [f"{name}: {reason}" for name, reason in failed.items()])
    _list(console, "Warnings", warnings)
    console.print("\nThe whole plan for one of them: the same command with this --gpu alone.")


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{title}:")
        for line in lines:
            console.print(f"  - {line}")


def _layout(choice: Choice) -> str:
    job = choice.estimate.job
    return f"{job.layout_summary} overlapped" if job.overlapped_experts else job.layout_summary


def _strategy(job: Job, request: PlanRequest) -> str:
    """The strategy, and what the run uses in addition to what was asked for."""
    more = [f"{job.offload} offload"] if job.offload != "none" else []
    more += ["fused loss"] if job.liger and not job.chunked_loss and not request.liger else []
    more += [job.optimizer] if job.optimizer != request.optimizer else []
    more += ["bf16 states"] if job.pure_bf16 and not request.pure_bf16 else []
    return ", ".join([strategy_of(job), *more])


def _choices(plan: Plan) -> Table:
    has_hours = plan.tokens is not None
    has_usd = any(choice.usd is not None for choice in plan.choices)
    numbers = ["batch", "recompute", "GiB", "fits", "step s", "tokens/s/GPU", "MFU"]
    numbers += ["days"] * has_hours + ["USD"] * has_usd
    table = make_table("#", "strategy", "layout", "ZeRO", *numbers, right=numbers)
    for number, choice in enumerate(plan.choices, 1):
        estimate = choice.estimate
        job = choice.estimate.job
        stages = f" x{job.virtual_stages}" if job.virtual_stages > 1 else ""
        stages += f" {job.schedule_name}" if job.layout.pp > 1 else ""
        rounds = f" in {job.generation_rounds} rounds" if job.generation_rounds > 1 else ""
        row = [
            str(number),
            _strategy(job, plan.request),
            _layout(choice) + stages,
            str(job.zero),
            f"{job.micro_batch} x {job.micro_batches}{rounds}",
            job.activation_checkpointing,
            f"{estimate.memory.total:.0f}",
            estimate.fits_word,
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


def _ranges(plan: Plan) -> Table:
    """Return a table of the ranges that hold for 80% of the published runs, and of the CPU memory."""
    numbers = ["GiB", "step s", "tokens/s/GPU"]
    has_hours = plan.tokens is not None
    has_usd = any(choice.usd is not None for choice in plan.choices)
    numbers += ["days"] * has_hours + ["USD"] * has_usd + ["CPU GiB/node"]
    table = make_table(
        "#", *numbers, right=numbers, title="Ranges that 80% of the published runs were in"
    )
    for number, choice in enumerate(plan.choices, 1):
        estimate = choice.estimate
        slow, quick = (
            estimate.job.tokens_per_step / time / estimate.job.layout.world_size
            for time in estimate.time_range[::-1]
        )
        row = [
            _range(estimate.memory_range, ".0f"),
            _range(estimate.time_range, ".2f"),
            _range((slow, quick), ",.0f"),
        ]
        if has_hours:
            row.append(
                ""
                if choice.hours is None
                else _range([hours / 24 for hours in choice.hours_range], ",.1f")
            )
        if has_usd:
            row.append("" if choice.usd is None else _range(choice.scaled(choice.usd), ",.0f"))
        row.append(f"{estimate.host_gib_per_node:,.0f}")
        table.add_row(str(number), *row)
    return table


def _range(ends: Sequence[float], form: str) -> str:
    return f"{ends[0]:{form}} to {ends[1]:{form}}"


def _islands(found: IslandsVerdict) -> Table:
    """Return a table of the ways to use several islands of the first choice."""
    numbers = ("tokens/s", "bytes sent/token", "waiting", "host GiB")
    title = f"\n{found.islands} islands of choice 1 each (tokens/s of all of them)"
    table = make_table("way", *numbers, right=numbers, title=title)
    sent = f"{found.bytes_per_round / 1e9:,.3g} GB in {found.round_s:,.1f} s"
    what = "exchange" if found.fragments == 1 else f"each of {found.fragments} fragments"
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
    title = (
        "What would make choice 1 faster or smaller" if plan.choices else "What would make it fit"
    )
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
            item.change + ("*" if item.changes_results else ""),
            item.run,
            f"{item.memory_gib:.0f}",
            fits_word(item.fits_probability),
            f"{item.tokens_per_s_per_gpu:,.0f}",
            "" if item.speedup is None else f"{item.speedup - 1:+.0%}",
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
    rest = len(lines) - REJECTED_SHOWN
    return lines[:REJECTED_SHOWN] + (
        [f"and {rest} more (--json lists them all)"] if rest > 0 else []
    )
