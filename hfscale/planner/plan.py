"""`plan`: the best layouts for a model, what they cost, and why the others do not work."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

from hfscale.core.options import options_of
from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError, UnknownHardwareError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.facts.own_hardware import find_accelerator
from hfscale.facts.prices import STALE_DAYS, Egress, Price, all_egress, all_prices, prices_of
from hfscale.facts.support import Combination, check_support
from hfscale.planner.advice import Advice, advice, assumptions, simplicity
from hfscale.planner.cost import Cost, compare, cost, reliability
from hfscale.planner.estimate import Estimate
from hfscale.planner.extras import Extras, Start, extras_of
from hfscale.planner.frameworks import find_framework
from hfscale.planner.growing_batch import GrowingPlan, growing_plan
from hfscale.planner.improvements import Improvement, improvements
from hfscale.planner.job import layout_sizes, strategy_of
from hfscale.planner.launchable import recipe_of, why_not
from hfscale.planner.network import with_link
from hfscale.planner.option_fields import python_options, with_options
from hfscale.planner.options import MAX_GPUS, Objective, PlanOptions, RunOptions, at_most
from hfscale.planner.request import PlanRequest, other_models
from hfscale.planner.search import Rejected, search


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Holds a layout that fits, with its cost where the number of tokens is known."""

    estimate: Estimate
    """Memory and time."""
    hours: float | None = None
    """Duration of the run at the cheapest offer, interruptions included; None where the number of tokens is not
    known."""
    costs: tuple[Cost, ...] = ()
    """Cost at every provider, cheapest first; empty where no price is known."""
    steps: int | None = None
    """Optimizer steps of the run; None where the number of tokens is not known."""

    def scaled(self, value: float) -> tuple[float, float]:
        """Return the range of a value that is proportional to the step's duration, such as hours or dollars."""
        total = self.estimate.time.total
        fastest, slowest = (value * seconds / total for seconds in self.estimate.time_range)
        return fastest, slowest

    @property
    def hours_range(self) -> tuple[float, float]:
        """Range of the run's hours that holds for 80% of the published runs."""
        return self.scaled(self.hours or 0.0)

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs together."""
        return None if self.hours is None else self.hours * self.estimate.job.layout.world_size

    @property
    def usd(self) -> float | None:
        """Cost at the cheapest provider, USD."""
        return self.costs[0].usd if self.costs else None

    def to_dict(self) -> dict[str, Any]:
        """Return one element of `choices` in the JSON of `hfscale plan --json`, as a dictionary."""
        job = self.estimate.job
        return {
            "strategy": strategy_of(job),
            "layout": layout_sizes(job.layout, job.expert_parallel),
            "gpus": job.layout.world_size,
            "zero_stage": job.zero,
            "micro_batch": job.micro_batch,
            "grad_accum": job.micro_batches,
            "global_batch": job.global_batch,
            "optimizer_steps": self.steps,
            "virtual_stages": job.virtual_stages,
            "pipeline_schedule": job.schedule_name if job.layout.pp > 1 else None,
            "expert_parallel": job.expert_parallel,
            "overlapped_experts": job.overlapped_experts,
            "offload": job.offload,
            "activation_checkpointing": job.activation_checkpointing,
            **({"generation_rounds": job.generation_rounds} if job.task == "grpo" else {}),
            "recipe": recipe_of(job),
            **self.estimate.to_dict(),
            "fused_loss": job.liger,
            "compile": job.compile,
            "optimizer": job.optimizer,
            "pure": job.pure_bf16,
            "hours": self.hours,
            "hours_range": None if self.hours is None else list(self.hours_range),
            "gpu_hours": self.gpu_hours,
            "cost_usd": self.usd,
            "cost_range_usd": None if self.usd is None else list(self.scaled(self.usd)),
            "costs": [asdict(item) for item in self.costs],
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds the result of `plan`."""

    model: str
    """The model's name as it was given."""
    request: PlanRequest
    """What was planned for."""
    tokens: float | None
    """Tokens to train on."""
    choices: tuple[Choice, ...]
    """Layouts that fit, best first."""
    order: str | None
    """Why the first choice stands before one that is faster or costs less; None where it does not."""
    rejected: tuple[Rejected, ...]
    """Layouts that do not work."""
    min_gpus: int | None
    """Fewest GPUs, of those searched, on which something fits and all limits hold; None where that was not asked."""
    improvements: tuple[Improvement, ...]
    """What would make the first choice faster or smaller, or, where nothing fits, what would make it fit."""
    advice: tuple[Advice, ...]
    """Advice on the first choice."""
    assumptions: tuple[str, ...]
    """What the numbers are based on."""
    warnings: tuple[str, ...]
    """What is doubtful about the prices."""
    extras: Extras
    """What the run does beside its steps."""
    growing: GrowingPlan | None = None
    """The schedule of a global batch that grows; the choices then have the batch that divides all of its batches."""

    @property
    def start(self) -> Start | None:
        """How long the nodes of the first choice read the weights; None where that is not known."""
        if not self.choices:
            return None
        first = self.choices[0].estimate.job
        return self.extras.start(first)

    @property
    def next_launchable(self) -> tuple[int, Choice] | None:
        """The first choice that a recipe can run, with its number, counted from 1."""
        numbered = enumerate(self.choices, 1)
        return next(
            (
                (number, choice)
                for number, choice in numbered
                if why_not(choice.estimate.job) is None
            ),
            None,
        )

    @property
    def unlaunchable(self) -> list[str]:
        """A line for each reason why no recipe can run some of the choices; empty for frameworks without recipes."""
        found: dict[str, list[str]] = {}
        if self.request.stack == "hf":
            for number, choice in enumerate(self.choices, 1):
                reason = why_not(choice.estimate.job)
                if reason is not None:
                    found.setdefault(reason, []).append(f"#{number}")
        return [f"{', '.join(numbers)}: {reason}" for reason, numbers in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the content that `hfscale plan --json` prints, as a dictionary."""
        shape = self.request.shape
        gpu = self.request.gpu
        start = {}
        if self.start is not None:
            start["start"] = self.start.to_dict()
        return {
            "model": {
                "name": self.model,
                "parameters": shape.total_parameters,
                "active_parameters": shape.active_parameters,
                "layers": shape.layers,
                "hidden": shape.hidden,
            },
            "hardware": {
                "gpu": gpu.name,
                "gpus": self.request.gpus,
                "gpus_per_node": self.request.gpus_per_node,
                "memory_gib": gpu.memory_gib,
            },
            **({} if self.request.task == "text" else {"task": task_options(self.request)}),
            "choices": [choice.to_dict() for choice in self.choices],
            **start,
            "order": self.order,
            "rejected": [row.to_dict() for row in self.rejected],
            "min_gpus": self.min_gpus,
            "improvements": [item.to_dict() for item in self.improvements],
            "advice": [asdict(item) for item in self.advice],
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }


def task_options(request: PlanRequest) -> dict[str, Any]:
    """Return the name of the request's task and the options that belong to it, as a dictionary."""
    names = {
        "dpo": ("precompute_ref_log_probs",),
        "grpo": ("num_generations", "max_completion_length", "beta"),
        "vision": ("images", "train_vision_tower", "frozen_projector"),
        "distillation": ("teacher", "teacher_dtype", "whole_teacher", "max_completion_length"),
    }.get(request.task, ())
    return {"name": request.task, **{name: getattr(request, name) for name in names}}


@with_options(PlanOptions)
def plan(model: str | ModelShape, **options: Any) -> Plan:
    """Rank the layouts for training `model` on a number of GPUs.

    Args:
        model (`str` or `ModelShape`): a built-in name, a hub id, a `config.json` or its folder; or a shape.
        **options: the options, see below.

    Raises:
        UsageError: an option is unknown or out of range, or belongs to another task, or the number of tokens is
            needed and missing.
        LayoutError: the number of GPUs or another size cannot be planned for.
        UnknownHardwareError: the GPU, or a GPU of the price list, is in no table.
        UnsupportedModelError: the model cannot be found, or its family or a key of its config is not supported.
        ConfigFileError: the model config, the price list or the hardware file cannot be read, or is wrong.
        MissingDependencyError: the model is on the hub, and huggingface_hub is not installed.
    """
    with python_options(PlanOptions, "plan", options) as chosen:
        return plan_with(model, chosen)


def plan_with(model: str | ModelShape, options: PlanOptions) -> Plan:
    """Rank the layouts as `plan`, whose options were checked (`make_options`)."""
    at_most(MAX_GPUS)("gpus", options.gpus)
    needs_tokens = options.objective == "cost" or options.deadline or options.budget
    if options.tokens is None and needs_tokens:
        raise UsageError(
            f"hours and costs need the number of tokens to train on: give {spelled('tokens')}, such as 1T or 500M"
        )
    # It depends on the method alone, so it is refused before the model is looked up.
    saved = Combination(
        planned=True,
        method=options.method,
        precompute_ref_log_probs=options.precompute_ref_log_probs,
    )
    check_support(saved, "precompute_ref_log_probs")
    growing = growing_plan(options)
    if growing is not None:
        options = replace(options, global_batch=growing.schedule.unit)
    request = _request_of(model, options)
    extras = extras_of(model, request.shape, options)
    offers, warnings = _offers(request, all_prices(options.prices), options)
    pricing = _Pricing(
        options=options,
        offers=offers,
        egress=all_egress(options.prices),
        growing=growing,
        extras=extras,
    )
    objective = options.objective

    estimates, rejected = search(request, options.gpus)
    estimates, unable = pricing.able(estimates)
    rejected += unable
    choices = pricing.choices(estimates)
    if estimates and not choices:
        rejected.append(pricing.over_the_limits(estimates))
    fewest = None
    if objective != "time" or options.min_gpus:
        fewest, on_fewer_gpus = _search_fewer_gpus(
            request, pricing, stop_at_first=objective == "time"
        )
        choices += on_fewer_gpus
        if fewest is None and options.min_gpus and choices:
            fewest = options.gpus
    error = find_framework(request.stack).time_error
    choices = _ranked(choices, objective, error)[: options.top]
    best = None
    advised = []
    if choices:
        best = choices[0].estimate
        advised = advice(best, [choice.estimate for choice in choices])
    # Where all that fits is over the limits, a change that makes a layout smaller does not help.
    changes = improvements(request, best) if best or not estimates else []
    uses_prices = options.tokens is not None and options.usd_per_gpu_hour is None
    return Plan(
        model=model if isinstance(model, str) else model.model_type,
        request=request,
        tokens=options.tokens,
        choices=tuple(choices),
        order=_order(choices, objective, error),
        rejected=tuple(rejected),
        min_gpus=fewest,
        improvements=tuple(changes),
        advice=tuple(advised),
        assumptions=(
            *assumptions(request, best.job if best else None, options.tokens),
            *extras.assumptions,
        ),
        warnings=tuple(warnings) if uses_prices else (),
        extras=extras,
        growing=growing,
    )


def _request_of(model: str | ModelShape, options: PlanOptions) -> PlanRequest:
    """Find the model and the GPU of the options, and check the sizes that every layout shares."""
    shape = model
    if isinstance(shape, str):
        shape = find_model(shape, counts_tower=options.task == "vision")
    gpu = options.gpu
    if isinstance(gpu, str):
        gpu = find_accelerator(gpu, options.hardware)
    shared = {name: getattr(options, name) for name in options_of(RunOptions)}
    gpu = with_link(gpu, options.link_gb_s)
    others = other_models(model, options)
    request = PlanRequest(**shared, **others, shape=shape, gpu=gpu, gpus=options.gpus)
    find_framework(request.stack)
    _check_request(request)
    return request


def plan_gpu_types(
    model: str | ModelShape, gpu_types: Sequence[str], options: PlanOptions
) -> tuple[list[Plan], dict[str, str]]:
    """Plan a training on each of several types of GPU.

    Args:
        model (`str` or `ModelShape`): as in `plan`.
        gpu_types (`Sequence[str]`): names of GPUs.
        options (`PlanOptions`): the options; their GPU is not used.

    Returns:
        `tuple[list[Plan], dict[str, str]]`: the plans, best first: by the cost of the first choice with the objective
            `cost`, else by its duration; those in which nothing fits come last. And the reason why a GPU has no plan,
            by its name, such as a precision that it does not support.

    Raises:
        HfScaleError: as in `plan`; of a `UsageError` only if it concerns all of the GPUs.
    """
    plans: list[Plan] = []
    failed: dict[str, str] = {}
    for name in gpu_types:
        try:
            plans.append(plan_with(model, replace(options, gpu=name)))
        except UnknownHardwareError:
            raise
        except UsageError as error:
            failed[name] = str(error)
            if len(failed) == len(gpu_types):
                raise

    def order(found: Plan) -> tuple[float, float]:
        if not found.choices:
            return math.inf, math.inf
        first = found.choices[0]
        usd = _usd(first)
        seconds = _time_per_token(first)
        if options.objective == "cost":
            return usd, seconds
        return seconds, usd

    return sorted(plans, key=order), failed


def _check_request(request: PlanRequest) -> None:
    """Check the sizes that every layout shares, which a search would otherwise report once for each layout."""
    positions = request.shape.max_positions
    if request.stack == "hf" and positions is not None and request.seq_len > positions:
        raise LayoutError(
            f"{spelled('seq_len')} is {request.seq_len}, and the model's config has {positions} positions, which the "
            "recipes keep to: lower it, or plan with a config.json that has more (max_position_embeddings, and rope "
            "parameters such as those of YaRN)"
        )
    batch = request.global_batch
    if batch is None:
        batch = request.num_generations if request.task == "grpo" else 1
    request.job(ParallelLayout(), global_batch=batch).check()


@dataclass(frozen=True, kw_only=True)
class _Pricing:
    """The cost of a choice, and the limits it must keep."""

    options: PlanOptions
    """What the caller of `plan` asked for."""
    offers: tuple[Price, ...]
    """Prices of the GPU."""
    egress: Mapping[str, Egress]
    """Prices of data that leaves a provider, by provider."""
    growing: GrowingPlan | None
    """The schedule of a global batch that grows."""
    extras: Extras
    """What the run does beside its steps."""

    def able(self, estimates: Sequence[Estimate]) -> tuple[list[Estimate], list[Rejected]]:
        """Split estimates into those that run with all that is asked for, and why the others do not."""
        able, unable = [], []
        for item in estimates:
            reason = self.extras.why_not(item.job)
            if reason is None and self.growing is not None:
                reason = self.growing.why_not(item.job)
            if reason is None:
                able.append(item)
                continue
            name = strategy_of(item.job)
            unable.append(Rejected(layout=item.job.layout, strategy=name, reason=reason))
        return able, unable

    def choices(self, estimates: Sequence[Estimate]) -> list[Choice]:
        """Compute the costs of the estimates, and leaves out those over the limits."""
        return [choice for choice in map(self._choice, estimates) if self._keeps_limits(choice)]

    def _choice(self, item: Estimate) -> Choice:
        tokens = self.options.tokens
        if tokens is None:
            return Choice(estimate=item)
        job = item.job
        rate = item.tokens_per_s_per_gpu * job.layout.world_size
        steps = math.ceil(tokens / job.tokens_per_step)
        if self.growing is not None:
            rate = self.growing.tokens_per_s(item)
            steps = self.growing.steps(job)
        if self.options.usd_per_gpu_hour is not None:
            own = cost(
                job,
                tokens=tokens,
                tokens_per_s=rate,
                usd_per_gpu_hour=self.options.usd_per_gpu_hour,
                provider="your price",
            )
            return Choice(estimate=item, hours=own.hours, costs=(own,), steps=steps)
        costs = compare(
            job,
            self.offers,
            tokens=tokens,
            tokens_per_s=rate,
            interruptions_per_node_hour=self.options.spot_interruptions,
            egress=self.egress,
            only_spot=self.options.spot,
        )
        if costs:
            hours = costs[0].hours
        else:
            hours = tokens / rate / 3600 / reliability(job, spot=False).goodput
        return Choice(estimate=item, hours=hours, costs=tuple(costs), steps=steps)

    def _keeps_limits(self, choice: Choice) -> bool:
        deadline = self.options.deadline
        budget = self.options.budget
        if deadline is not None and (choice.hours or 0.0) > deadline:
            return False
        if budget is None:
            return True
        return choice.usd is not None and choice.usd <= budget

    def over_the_limits(self, estimates: Sequence[Estimate]) -> Rejected:
        """Explain why none of the layouts that fit is a choice."""
        limits = []
        if self.options.deadline is not None:
            limits.append(f"the deadline of {self.options.deadline:g} hours")
        if self.options.budget is not None:
            limits.append(f"the budget of {self.options.budget:,.0f} USD")
        best = estimates[0].job
        reason = f"fits in memory, but exceeds {' or '.join(limits)}, as do all {len(estimates)} layouts that fit"
        return Rejected(layout=best.layout, strategy=strategy_of(best), reason=reason)


def _search_fewer_gpus(
    request: PlanRequest, pricing: _Pricing, *, stop_at_first: bool
) -> tuple[int | None, list[Choice]]:
    """Search smaller numbers of GPUs, in ascending order.

    Returns:
        `tuple`: the fewest GPUs with a choice, None if there are none, and the choices on all numbers searched; no
        choices with `stop_at_first`, which ends the search at the fewest.
    """
    fewest: int | None = None
    choices: list[Choice] = []
    for gpus in _fewer_gpus(request.gpus, request.gpus_per_node):
        able, _ = pricing.able(search(request, gpus)[0])
        found = pricing.choices(able)
        if found and stop_at_first:
            return gpus, []
        if found and fewest is None:
            fewest = gpus
        choices += found
    return fewest, choices


def _fewer_gpus(gpus: int, node: int) -> list[int]:
    """Numbers of GPUs below `gpus` to try: powers of two within a node, then 1, 2, 4, … nodes."""
    inside = [1 << power for power in range(node.bit_length()) if 1 << power < min(node, gpus)]
    nodes = [node << power for power in range(16) if node << power < gpus]
    return inside + nodes


def _ranked(choices: Sequence[Choice], objective: Objective, error: float) -> list[Choice]:
    """Choices with the best first.

    Of those that the estimate cannot tell from the best, the simplest comes first that surely fits without offload; if
    there is none, the simplest.
    """

    if objective == "gpus":
        return sorted(
            choices,
            key=lambda choice: (choice.estimate.job.layout.world_size, _time_per_token(choice)),
        )
    measure = _time_per_token if objective == "time" else _usd
    ranked = sorted(choices, key=lambda choice: (measure(choice), _time_per_token(choice)))
    if not ranked:
        return []
    # Within its error the estimate says nothing about which is faster, but which is simpler is known.
    as_good = measure(ranked[0]) * (1 + error)
    close = [choice for choice in ranked if measure(choice) <= as_good]
    sure = [choice for choice in close if not _is_uncertain(choice) and not _offloads(choice)]
    first = min(sure or close, key=lambda choice: (simplicity(choice.estimate), measure(choice)))
    return [first, *(choice for choice in ranked if choice is not first)]


def _offloads(choice: Choice) -> bool:
    return choice.estimate.job.offload != "none"


def _is_uncertain(choice: Choice) -> bool:
    return choice.estimate.fits_word != "yes"


def _time_per_token(choice: Choice) -> float:
    job = choice.estimate.job
    return choice.estimate.time.total / job.tokens_per_step


def _usd(choice: Choice) -> float:
    return math.inf if choice.usd is None else choice.usd


def _order(choices: Sequence[Choice], objective: Objective, error: float) -> str | None:
    """Why `_ranked` puts the first choice before one that is faster or costs less; None where it does not."""
    if objective == "gpus" or len(choices) < 2:
        return None
    measure, better = _time_per_token, "faster"
    if objective == "cost":
        measure, better = _usd, "cheaper"
    gain = 1 - measure(choices[1]) / measure(choices[0])
    if not gain > 0:
        return None
    why = "it is simpler (fewer kinds of parallelism, then no sharding, FSDP2, DeepSpeed, offload)"
    if _is_uncertain(choices[1]) and not _is_uncertain(choices[0]):
        why = "it fits more surely"
    return (
        f"choice 1 stands before choice 2, which is {gain:.1%} {better}, because {why} and the estimate, whose error "
        f"is about {error:.0%}, cannot tell their speeds apart"
    )


def _offers(
    request: PlanRequest, prices: tuple[Price, ...], options: PlanOptions
) -> tuple[tuple[Price, ...], list[str]]:
    """Prices of the GPU for a run of this size, of the provider and kind asked for, and warnings about them."""
    rows = _of_provider(prices_of(request.gpu, prices), prices, options.provider)
    what = "price"
    if options.spot:
        rows = tuple(row for row in rows if row.spot_usd is not None)
        what = "spot price"
    warnings = []
    # A node of a cluster costs more than the same node alone, because of its network.
    if request.gpus > request.gpus_per_node:
        of_clusters = tuple(row for row in rows if not row.one_node)
        if rows and not of_clusters:
            warnings.append(
                f"the prices known for {request.gpu.name} are of single nodes: several nodes with a fast network may "
                "cost more"
            )
        rows = of_clusters or rows
    if not rows:
        where = f" at {options.provider}" if options.provider else ""
        warnings.append(
            f"no {what} of {request.gpu.name}{where} is known: give {spelled('usd_per_gpu_hour')}"
        )
    today = date.today()
    for row in rows:
        if row.age_days(today) > STALE_DAYS:
            warnings.append(
                f"price of {row.provider} for {row.gpu} was read {row.age_days(today)} days ago: check it"
            )
    return rows, warnings


def _of_provider(
    rows: tuple[Price, ...], prices: tuple[Price, ...], provider: str | None
) -> tuple[Price, ...]:
    """Select the prices of the providers whose names begin with `provider`; None: of all.

    Raises:
        UsageError: no provider of the price list is called so.
    """
    if provider is None:
        return rows
    names = sorted({row.provider for row in prices})
    wanted = {name for name in names if name.casefold().startswith(provider.casefold())}
    if not wanted:
        raise UsageError(
            f"{spelled('provider')} is {provider!r}: the price list has {', '.join(names)}"
        )
    return tuple(row for row in rows if row.provider in wanted)
