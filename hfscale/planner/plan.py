"""`plan`: the best layouts for a model, what they cost, and why the others do not work; `estimate`: one layout."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from hfscale.errors import LayoutError, UsageError
from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.local_hardware import find_accelerator
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.facts.prices import STALE_DAYS, Egress, Price, all_egress, all_prices, prices_of
from hfscale.planner.advice import advice, simplicity
from hfscale.planner.answer import Choice, Plan
from hfscale.planner.assumptions import assumptions
from hfscale.planner.cost import compare, cost, reliability
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.frameworks import stack as find_stack
from hfscale.planner.job import Job
from hfscale.planner.layouts import splits_logits, splits_sequences
from hfscale.planner.request import PlanRequest, Rejected, strategy_of
from hfscale.planner.search import HEADROOM, TIE_TOLERANCE, search

Objective = Literal["time", "cost", "gpus"]
"""What the ranking puts first."""
MOST_GPUS = 16_384
"""Largest number of GPUs that is searched."""


def estimate(
    model: str | ModelShape,
    *,
    gpu: str | Accelerator,
    layout: ParallelLayout | Mapping[str, int],
    seq_len: int,
    micro_batch: int = 1,
    global_batch: int | None = None,
    hardware: Path | None = None,
    **options: Any,
) -> Estimate:
    """Memory and time of one layout.

    Args:
        model (`str` or `ModelShape`): A built-in name, a hub id, a `config.json` or its folder; or a shape.
        gpu (`str` or `Accelerator`): A name of `hardware.toml` or of the user's file, or a row.
        layout (`ParallelLayout` or `Mapping`): Ranks along each axis.
        seq_len (`int`): Tokens per sequence.
        micro_batch (`int`): Sequences per data-parallel rank and micro-batch.
        global_batch (`int`, *optional*): Sequences per step; by default one micro-batch per rank.
        hardware (`Path`, *optional*): A file of `hfscale plan --calibrate`; by default the user's own.
        options: Other fields of `hfscale.planner.job.Job`, such as `zero`, `recompute`, `precision`, `stack`.

    Raises:
        `UsageError`: A name, a word or a size is wrong.
    """
    known = {field.name for field in fields(Job)} - {"shape", "gpu", "layout"}
    if unknown := sorted(set(options) - known):
        raise UsageError(f"{unknown[0]!r} is no option of an estimate: use {', '.join(sorted(known))}")
    axes = layout if isinstance(layout, ParallelLayout) else ParallelLayout(**layout)
    stack = options.get("stack", "hf")
    options.setdefault("sequence_parallel", splits_sequences(stack, axes))
    options.setdefault("loss_parallel", splits_logits(stack, axes))
    job = Job(
        shape=find_model(model) if isinstance(model, str) else model,
        gpu=find_accelerator(gpu, hardware) if isinstance(gpu, str) else gpu,
        layout=axes,
        seq_len=seq_len,
        micro_batch=micro_batch,
        global_batch=global_batch or micro_batch * axes.data_parallel_size,
        **options,
    )
    find_stack(job.stack)
    job.check()
    return estimate_job(job)


def plan(
    model: str | ModelShape,
    *,
    gpu: str | Accelerator,
    gpus: int,
    tokens: float | None = None,
    objective: Objective = "time",
    top: int = 5,
    min_gpus: bool = False,
    deadline_hours: float | None = None,
    budget_usd: float | None = None,
    usd_per_gpu_hour: float | None = None,
    spot_interruptions: float | None = None,
    prices: Path | None = None,
    hardware: Path | None = None,
    **options: Any,
) -> Plan:
    """The best layouts for training `model` on `gpus` GPUs.

    Args:
        model (`str` or `ModelShape`): As in `estimate`.
        gpu (`str` or `Accelerator`): As in `estimate`.
        gpus (`int`): How many there are, up to 16,384; with `objective` `cost` or `gpus`, at most so many.
        tokens (`float`, *optional*): Tokens to train on; without it there are no hours and no dollars.
        objective (`str`): `time`, `cost` or `gpus` (fewest).
        top (`int`): Number of choices.
        min_gpus (`bool`): Also find the fewest GPUs that do.
        deadline_hours, budget_usd (`float`, *optional*): Drop choices that take longer or cost more.
        usd_per_gpu_hour (`float`, *optional*): Your price, instead of the providers'.
        spot_interruptions (`float`, *optional*): Preemptions per node and hour.
        prices (`Path`, *optional*): A price list of your own.
        hardware (`Path`, *optional*): As in `estimate`.
        options: Other fields of `hfscale.planner.request.PlanRequest`.

    Raises:
        `UsageError`: A name, a word or a size is wrong.
    """
    known = {field.name for field in fields(PlanRequest)} - {"shape", "gpu", "gpus"}
    if unknown := sorted(set(options) - known):
        raise UsageError(f"{unknown[0]!r} is no option of a plan: use {', '.join(sorted(known))}")
    if objective not in get_args(Objective):
        raise UsageError(f"objective {objective!r} is not known: use one of {', '.join(get_args(Objective))}")
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= MOST_GPUS:
        raise LayoutError(f"{gpus} GPUs cannot be planned for: give a number from 1 to {MOST_GPUS:,}")
    for name, value in (
        ("tokens", tokens),
        ("deadline", deadline_hours),
        ("budget", budget_usd),
        ("price", usd_per_gpu_hour),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} {value} is not a number above 0: give one")
    if tokens is None and (objective == "cost" or deadline_hours or budget_usd):
        raise UsageError("hours and dollars need the number of tokens to train on: give --tokens, such as 1T or 500M")
    request = PlanRequest(
        shape=find_model(model) if isinstance(model, str) else model,
        gpu=find_accelerator(gpu, hardware) if isinstance(gpu, str) else gpu,
        gpus=gpus,
        **options,
    )
    find_stack(request.stack)
    _check_question(request)
    rows, warnings = _offers(request, all_prices(prices))
    egress = all_egress(prices)

    def priced(estimates: Sequence[Estimate]) -> list[Choice]:
        found = [_priced(item, rows, egress, tokens, usd_per_gpu_hour, spot_interruptions) for item in estimates]
        return [choice for choice in found if _holds(choice, deadline_hours, budget_usd)]

    estimates, rejected = search(request, gpus)
    choices = priced(estimates)
    if not choices and estimates:
        rejected = [*rejected, *_missed(estimates, deadline_hours, budget_usd)]
    fewest = None
    if objective != "time" or min_gpus:
        for number in _numbers(gpus, request.gpus_per_node):
            fitting = priced(search(request, number)[0])
            if fitting and fewest is None:
                fewest = number
                if objective == "time":
                    break
            choices += fitting
    choices = _ranked(choices, objective)[:top]
    return Plan(
        model=model if isinstance(model, str) else model.model_type,
        request=request,
        tokens=tokens,
        choices=tuple(choices),
        rejected=tuple(rejected),
        min_gpus=fewest if fewest is not None else (gpus if min_gpus and choices else None),
        advice=tuple(advice(choices[0].estimate, [choice.estimate for choice in choices])) if choices else (),
        assumptions=tuple(assumptions(request, choices[0].estimate.job if choices else None, tokens, HEADROOM)),
        warnings=tuple(warnings if tokens is not None and usd_per_gpu_hour is None else ()),
    )


def _check_question(request: PlanRequest) -> None:
    """Sizes that a search would only find wrong one layout at a time."""
    batch = request.global_batch
    trial = Job(
        shape=request.shape,
        gpu=request.gpu,
        layout=ParallelLayout(),
        seq_len=request.seq_len,
        micro_batch=1,
        global_batch=1 if batch is None else batch,
        precision=request.precision,
        method=request.method,
        optimizer=request.optimizer,
        gpus_per_node=request.gpus_per_node,
    )
    trial.check()
    if request.method != "full" and request.lora_rank < 1:
        raise UsageError(f"LoRA rank {request.lora_rank} is below 1: give a rank such as 16")


def _priced(
    item: Estimate,
    rows: Sequence[Price],
    egress: Mapping[str, Egress],
    tokens: float | None,
    usd: float | None,
    interruptions: float | None,
) -> Choice:
    if tokens is None:
        return Choice(estimate=item)
    job = item.job
    rate = item.tokens_per_s_per_gpu * job.layout.world_size
    if usd is not None:
        given = cost(job, tokens=tokens, tokens_per_s=rate, usd_per_gpu_hour=usd, provider="your price")
        return Choice(estimate=item, hours=given.hours, costs=(given,))
    costs = compare(
        job, rows, tokens=tokens, tokens_per_s=rate, interruptions_per_node_hour=interruptions, egress=egress
    )
    hours = costs[0].hours if costs else tokens / rate / 3600 / reliability(job, spot=False).goodput
    return Choice(estimate=item, hours=hours, costs=tuple(costs))


def _holds(choice: Choice, deadline_hours: float | None, budget_usd: float | None) -> bool:
    if deadline_hours is not None and (choice.hours or 0.0) > deadline_hours:
        return False
    return budget_usd is None or (choice.usd is not None and choice.usd <= budget_usd)


def _missed(estimates: Sequence[Estimate], deadline: float | None, budget: float | None) -> list[Rejected]:
    limits = [f"the deadline of {deadline:g} hours"] if deadline is not None else []
    limits += [f"the budget of {budget:,.0f} USD"] if budget is not None else []
    best = estimates[0].job
    reason = f"fits in memory, but misses {' or '.join(limits)}, as do all {len(estimates)} that fit"
    return [Rejected(layout=best.layout, strategy=strategy_of(best), reason=reason)]


def _numbers(gpus: int, node: int) -> list[int]:
    """Fewer GPUs to try: powers of two in a node, then whole nodes doubling, below `gpus`."""
    inside = [1 << power for power in range(node.bit_length()) if 1 << power < min(node, gpus)]
    nodes = [node << power for power in range(16) if node << power < gpus]
    return inside + nodes


def _ranked(choices: Sequence[Choice], objective: str) -> list[Choice]:
    """Best first; the simplest of those that the estimate cannot tell from the best comes before them."""

    def by_time(choice: Choice) -> float:
        job = choice.estimate.job
        return choice.estimate.time.total / (job.global_batch * job.seq_len)

    def by_usd(choice: Choice) -> float:
        return choice.usd if choice.usd is not None else float("inf")

    if objective == "gpus":
        return sorted(choices, key=lambda choice: (choice.estimate.job.layout.world_size, by_time(choice)))
    measure = by_time if objective == "time" else by_usd
    ranked = sorted(choices, key=lambda choice: (measure(choice), by_time(choice)))
    if ranked:
        close = [choice for choice in ranked if measure(choice) <= measure(ranked[0]) * (1 + TIE_TOLERANCE)]
        first = min(close, key=lambda choice: (simplicity(choice.estimate), measure(choice), by_time(choice)))
        ranked = [first, *(choice for choice in ranked if choice is not first)]
    return ranked


def _offers(request: PlanRequest, prices: tuple[Price, ...]) -> tuple[tuple[Price, ...], list[str]]:
    """Prices of the GPU for a run of this size, and what to know about them."""
    rows = prices_of(request.gpu, prices)
    warnings = []
    if request.gpus > request.gpus_per_node:
        joined = tuple(row for row in rows if not row.one_node)
        if rows and not joined:
            warnings.append(
                f"prices of {request.gpu.name} are of single nodes: several with a fast network may cost more"
            )
        rows = joined or rows
    if not rows:
        warnings.append(f"no price of {request.gpu.name} is known: give --usd-per-gpu-hour")
    today = date.today()
    for row in rows:
        if row.age_days(today) > STALE_DAYS:
            warnings.append(f"price of {row.provider} for {row.gpu} was read {row.age_days(today)} days ago: check it")
    return rows, warnings
