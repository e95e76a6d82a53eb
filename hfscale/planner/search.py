"""Which layouts of a model on a number of GPUs fit, and how fast the best of each is."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.schedules import SPLIT_BACKWARD, schedule_name
from hfscale.facts.support import Combination
from hfscale.facts.support import why_not as explain
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import (
    Job,
    can_overlap_experts,
    check_memory_is_known,
    expert_groups,
    is_fine_grained,
    layout_sizes,
    layout_summary,
    needs_parallel_trainer,
    splits_activations,
    strategy_of,
)
from hfscale.planner.launchable import can_fuse_loss, engine_of, why_not
from hfscale.planner.layouts import Candidate, layouts, layouts_with_experts
from hfscale.planner.memory import GIB, assumed_host_gib, host_gib, memory_of, state_bytes
from hfscale.planner.options import ActivationCheckpointing, Schedule
from hfscale.planner.request import PlanRequest
from hfscale.planner.tasks import GENERATION_ROUNDS

USABLE_MEMORY_FRACTION = 0.94
"""Part of a device's memory that a plan may use; the rest is for what the estimate misses (benchmarks/results)."""
TIE_TOLERANCE = 0.03
"""Relative difference in time up to which the simpler of two ways to run one layout is preferred. Their errors are
nearly the same; those of two layouts are not, and differ by `Framework.time_error`."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batch sizes that are tried, in sequences."""
MAX_VIRTUAL_STAGES = 8
"""Largest number of stages per pipeline rank that is tried: NVIDIA's recipes for Llama 3.1 405B use 7 and 8."""
GRPO_BATCH = 1024
"""Completions per step that are used for the task `grpo` where the request has no global batch."""
NO_PIPELINES = "no pipelines"
"""How a reason begins that holds for all pipelines and is reported once."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Describes a layout, or a kind of layouts, that does not work, and why."""

    layout: ParallelLayout
    """The layout, or an example of the kind."""
    strategy: str
    """Its strategy."""
    expert_parallel: int = 1
    """Ranks that share the experts of a layer, or an example of them."""
    reason: str
    """Why it does not work."""
    needed_gib: float | None = None
    """Least memory per device that it needs, GiB; None where memory is not the reason."""

    @property
    def summary(self) -> str:
        """The layout in short."""
        return layout_summary(self.layout, self.expert_parallel)

    def to_dict(self) -> dict[str, Any]:
        """Return an element of `rejected` in the JSON of `hfscale plan --json`, as a dictionary."""
        return {"layout": layout_sizes(self.layout, self.expert_parallel), "reason": self.reason}


def usual_batch(request: PlanRequest, gpus: int) -> int:
    """Return the sequences per step that are used where the request has no global batch.

    It is a multiple of the number of GPUs if there are at least as many sequences as GPUs, and otherwise a power of
    two. For full training it is about 4M tokens as for Llama 2; 16M from 4,096 GPUs on as for Llama 3 405B (arXiv
    2407.21783, section 3.4.1), and beyond its 16,384 GPUs as many tokens per GPU; 64M from 1,024 GPUs on for mixtures
    of many small experts as for DeepSeek-V3 (15,360 x 4,096; arXiv 2412.19437, section 4.2). For adapters it is about
    128 sequences. For the tasks `sft` and `dpo` it is about 128 as for Tulu 3 (allenai/open-instruct, docs/tulu3.md),
    and for `grpo` about 1,024 completions as for DeepSeekMath (arXiv 2402.03300, section 4.2), in complete groups.

    Args:
        request (`PlanRequest`): what is planned for, of which the method, the model and the sequence length are used.
        gpus (`int`): number of GPUs.
    """
    if request.task == "grpo":
        multiple = math.lcm(gpus, request.num_generations)
        return max(1, round(GRPO_BATCH / multiple)) * multiple
    if request.method != "full" or request.task != "text":
        wanted = 128
    else:
        millions = 4
        if gpus >= 4096:
            millions = 16
        if gpus >= 1024 and is_fine_grained(request.shape):
            millions = 64
        if gpus > 16_384:
            millions = max(millions, gpus // 1024)
        wanted = millions * 2**20 // request.seq_len
    if wanted < gpus:
        return 1 << max(0, wanted.bit_length() - 1)
    return round(wanted / gpus) * gpus


def search(request: PlanRequest, gpus: int) -> tuple[list[Estimate], list[Rejected]]:
    """Estimate every layout of `gpus` devices, with and without offload.

    If none fits, formats that change the training's results are tried too: an optimizer with states in 8 bits, and
    parameters and states in bf16 (`lower_precision`).

    Args:
        request (`PlanRequest`): what is planned for; its own number of GPUs is not used.
        gpus (`int`): number of GPUs that every layout uses.

    Returns:
        `tuple[list[Estimate], list[Rejected]]`: the best estimate of every layout that fits, fastest first, and the
            layouts that do not work.

    Raises:
        LayoutError: the number of GPUs is not a multiple of the GPUs per node.
        UsageError: the bandwidth between nodes is not above 0, or no peak of the device is known for the precision.
        UnsupportedModelError: the memory of the model is not known.
    """
    check_memory_is_known(request.shape, request.stack)
    if gpus > request.gpus_per_node and gpus % request.gpus_per_node:
        down = gpus // request.gpus_per_node * request.gpus_per_node
        raise LayoutError(
            f"{spelled('gpus')} is {gpus}, which is not a multiple of {request.gpus_per_node} GPUs per node: use "
            f"{down} "
            f"or {down + request.gpus_per_node}, or set {spelled('gpus_per_node')}"
        )
    batch = request.global_batch or usual_batch(request, gpus)
    fitting: list[Estimate] = []
    rejected: list[Rejected] = []
    for job in (*_jobs(request, gpus, batch), *_offloaded_jobs(request, gpus, batch)):
        found = _try(request, job)
        if isinstance(found, Estimate):
            fitting.append(found)
        elif not (
            found.reason.startswith(NO_PIPELINES)
            and any(row.reason == found.reason for row in rejected)
        ):
            rejected.append(found)
    if not fitting:
        fitting = _with_lower_precision(request, gpus, batch)
    rejected += _unsupported_kinds(request, gpus)
    return sorted(fitting, key=lambda estimate: estimate.time.total), rejected


def can_hold_states(request: PlanRequest, gpus: int) -> bool:
    """Return whether the states fit if they are spread over all devices, or over their share of the CPU's memory.

    No layout needs less memory, so that a search can be left out where the states alone are too large.

    Args:
        request (`PlanRequest`): what is planned for; its own number of GPUs is not used.
        gpus (`int`): number of GPUs.
    """
    framework = find_framework(request.stack)
    limit = request.gpu.memory_gib * USABLE_MEMORY_FRACTION
    spread: Candidate = (ParallelLayout(dp_shard=gpus), 3, "none")
    tried = [(changed, spread) for changed in (request, *lower_precision(request))]
    tried += [(request, offloaded) for offloaded in _offloads(request, gpus)]
    for changed, (layout, zero, offload) in tried:
        job = changed.job(layout, global_batch=gpus, zero=zero, offload=offload)
        states = state_bytes(job, framework)
        on_device = (states.parameters + states.gradients + states.optimizer) / GIB
        if on_device <= limit and _states_on_host_gib(job) <= assumed_host_gib(request.gpu):
            return True
    return False


def lower_precision(request: PlanRequest) -> list[PlanRequest]:
    """Return the requests that need less memory because states have fewer bits, the least change first.

    These change the training's results, so that a plan takes them only where nothing else fits. The list is empty for
    adapters, whose states are small, for another optimizer than AdamW, and for Megatron, whose states are its own.

    Args:
        request (`PlanRequest`): what is planned for.
    """
    if (
        request.method != "full"
        or request.optimizer != "adamw"
        or request.pure_bf16
        or request.stack == "megatron"
    ):
        return []
    eight_bits = replace(request, optimizer="adamw_8bit")
    if request.precision not in ("bf16", "fp8"):
        return [eight_bits]
    return [eight_bits, replace(request, pure_bf16=True), replace(eight_bits, pure_bf16=True)]


def _with_lower_precision(request: PlanRequest, gpus: int, batch: int) -> list[Estimate]:
    """The estimates that fit with the least change of `lower_precision` with which any fits."""
    for changed in lower_precision(request):
        jobs = _jobs(changed, gpus, batch)
        found = [estimate for job in jobs if isinstance(estimate := _try(changed, job), Estimate)]
        if found:
            return found
    return []


# -- layouts to try ---------------------------------------------------------------------------------------------------


def _jobs(request: PlanRequest, gpus: int, batch: int) -> Iterator[Job]:
    """Runs without offload of all layouts, and those of transformers' expert parallelism."""
    tried = list(layouts(request, gpus))
    if request.activation_offload:  # no pipeline runs it
        tried = [candidate for candidate in tried if candidate[0].pp == 1]
    for layout, zero, _ in tried:
        yield request.job(layout, global_batch=batch, zero=zero)
    if request.activation_offload or request.stack != "hf" or _why_no_experts(request) is not None:
        return
    for layout, zero, _ in tried:
        sizes = _native_groups(request.shape, layout)
        if zero == 3 and layout.ranks_per_replica == 1 and sizes:
            job = request.job(layout, global_batch=batch, zero=zero)
            yield replace(
                job, expert_parallel=sizes[-1], liger=bool(request.liger), chunked_loss=False
            )
    for layout, zero, _ in layouts_with_experts(request, gpus):
        spread = _with_spread_experts(request, request.job(layout, global_batch=batch, zero=zero))
        if spread is not None:
            yield spread


def _native_groups(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """Numbers of ranks over which transformers itself spreads the experts of a layer."""
    return [
        size for size in expert_groups(shape, layout) if not needs_parallel_trainer(layout, size)
    ]


def _spread_groups(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """Numbers of ranks over which `ParallelTrainer` alone spreads the experts of a layer."""
    return [size for size in expert_groups(shape, layout) if needs_parallel_trainer(layout, size)]


def _with_spread_experts(request: PlanRequest, job: Job) -> Job | None:
    """The job with experts that `ParallelTrainer` spreads, of those of a single stage; None if it does not run it."""
    sizes = _spread_groups(job.shape, job.layout)
    if not sizes:
        return None
    split = splits_activations(job.stack, job.layout, sizes[-1])
    spread = replace(
        job,
        expert_parallel=sizes[-1],
        sequence_parallel=split,
        loss_parallel=split,
        compile=bool(request.compile),
        liger=bool(request.liger),
        chunked_loss=False,
    )
    return spread if why_not(spread, "engine", "expert_parallel") is None else None


def _offloaded_jobs(request: PlanRequest, gpus: int, batch: int) -> Iterator[Job]:
    for layout, zero, offload in _offloads(request, gpus):
        yield request.job(layout, global_batch=batch, zero=zero, offload=offload)


def _why_no_experts(request: PlanRequest) -> str | None:
    """Why no layout of Hugging Face's stack can spread experts over data-parallel ranks; None if one can."""
    spread = Combination(
        planned=True,
        engine=engine_of(request.stack, pp=1),
        trl=request.task != "text",
        task=request.task,
        method=request.method,
        zero=3,
        expert_parallel=2,
    )
    return explain(spread, "expert_parallel")


def _offloads(request: PlanRequest, gpus: int) -> Iterator[Candidate]:
    """Layouts that keep states in the CPU's memory: ZeRO-2 and ZeRO-3 with offload, where that is planned."""
    engine = engine_of(request.stack, pp=1)
    offloaded = Combination(planned=True, engine=engine, task=request.task, offload="full")
    if explain(offloaded, "offload") is None:
        yield ParallelLayout(dp_replicate=gpus), 2 if gpus > 1 else 0, "optimizer"
        yield ParallelLayout(dp_shard=gpus), 3, "full"


# -- the best way to run one layout -----------------------------------------------------------------------------------


def _try(request: PlanRequest, job: Job) -> Estimate | Rejected:
    """The best estimate of a layout, or why it does not work."""

    def because(reason: str) -> Rejected:
        return Rejected(
            layout=job.layout,
            strategy=strategy_of(job),
            reason=reason,
            expert_parallel=job.expert_parallel,
        )

    if job.layout.pp > 1 and job.stack == "hf":
        # Not what only keeps a recipe from running it: it is estimated all the same
        reason = why_not(job, "engine")
        if reason is not None:
            return because(f"{NO_PIPELINES}: {reason}")
    if job.global_batch % job.data_parallel:
        return because(
            f"global batch {job.global_batch} is not a multiple of its {job.data_parallel} data-parallel ranks: give "
            f"--global-batch {max(1, round(job.global_batch / job.data_parallel)) * job.data_parallel}"
        )
    host_memory = assumed_host_gib(job.gpu)
    if (needed := _states_on_host_gib(job)) > host_memory:
        return because(
            f"offload needs {needed:.0f} GiB of CPU memory per GPU, and {host_memory:.0f} are assumed"
        )
    best, least_gib = best_of_layout(job, fused=request.liger is None and can_fuse_loss(job))
    if best is not None and not best.fits_host:
        return because(
            f"what is offloaded and loaded needs {best.host_gib_per_node:,.0f} GiB of CPU memory per node, and "
            f"{best.host_gib_assumed:,.0f} are assumed"
        )
    if best is not None:
        return best
    if least_gib is None:
        return because(
            f"{job.global_batch // job.data_parallel} sequences per data-parallel rank and step are too few micro-"
            f"batches for {job.layout.pp} pipeline stages: give --global-batch {job.layout.pp * job.data_parallel} or "
            "more"
        )
    return _too_large(job, least_gib)


def _states_on_host_gib(job: Job) -> float:
    """CPU memory per device of offloaded states alone: how much activations need is decided with the micro-batch."""
    return host_gib(replace(job, activation_offload=False))


def best_of_layout(job: Job, *, fused: bool) -> tuple[Estimate | None, float | None]:
    """Search schedules, recomputation, expert parallelism, micro-batches and the fused loss of a layout.

    Args:
        job (`Job`): the layout.
        fused (`bool`): whether to try the fused loss too.

    Returns:
        `tuple`: the fastest estimate whose memory fits, or a simpler one which is hardly slower; None if nothing fits.
        And the least memory that any variant needs, GiB; None if no schedule runs with the micro-batches there are.
    """
    fastest: list[Estimate] = []
    """The best estimate of each loss and schedule, the simplest first."""
    least_gib: float | None = None
    is_limited = True
    for liger in (job.liger, True) if fused and not job.liger else (job.liger,):
        if not is_limited:
            break  # all micro-batches fit without recomputation
        is_limited = False
        for schedule, stages in _schedules(job):
            best: Estimate | None = None
            for variants in _variants(job, schedule, stages, liger):
                is_too_large = True
                for variant in variants:
                    fitting, needed, is_cut = _fitting_micro_batches(variant)
                    is_limited = is_limited or is_cut
                    is_too_large = is_too_large and is_cut and not fitting
                    if needed is not None:
                        least_gib = needed if least_gib is None else min(least_gib, needed)
                    # Without a pipeline larger micro-batches are faster; with one they lengthen the bubble.
                    for trial in fitting if job.layout.pp > 1 else fitting[-2:]:
                        estimate = estimate_job(trial)
                        if best is None or estimate.time.total <= best.time.total:
                            best = estimate
                if is_too_large:
                    break  # less recomputation needs more memory
            if best is not None:
                fastest.append(best)
                if (
                    best.time.bubble < TIE_TOLERANCE * best.time.total
                    and best.job.activation_checkpointing == "none"
                ):
                    break  # another schedule can only shorten the bubble
    if not fastest:
        return None, least_gib
    limit = min(estimate.time.total for estimate in fastest) * (1 + TIE_TOLERANCE)
    return next(estimate for estimate in fastest if estimate.time.total <= limit), least_gib


def _fitting_micro_batches(variant: Job) -> tuple[list[Job], float | None, bool]:
    """The jobs with each of `MICRO_BATCHES` whose memory fits; the least memory that any needs, GiB, which is None if
    the schedule runs with no number of micro-batches; and whether memory rules out a larger micro-batch."""
    framework = find_framework(variant.stack)
    limit = variant.gpu.memory_gib * USABLE_MEMORY_FRACTION
    fitting: list[Job] = []
    least_gib: float | None = None
    for micro_batch in MICRO_BATCHES:
        if (variant.global_batch // variant.data_parallel) % micro_batch:
            break
        # What rules a job out by its number of micro-batches comes first: most are, and a job takes long to make
        micro_batches = max(1, variant.global_batch // (variant.data_parallel * micro_batch))
        if micro_batches % variant.generation_rounds:
            break
        if variant.stack == "hf" and not variant.schedule_runs(micro_batches):
            continue
        trial = (
            variant
            if variant.micro_batch == micro_batch
            else replace(variant, micro_batch=micro_batch)
        )
        # Only one micro-batch is left
        if trial.overlapped_experts and not can_overlap_experts(trial):
            trial = replace(trial, overlapped_experts=False)
        needed = memory_of(trial, framework).needed
        least_gib = needed if least_gib is None else min(least_gib, needed)
        if needed > limit or (trial.activation_offload and not _fits_host(trial)):
            return fitting, least_gib, True
        fitting.append(trial)
    return fitting, least_gib, False


def _fits_host(job: Job) -> bool:
    return host_gib(job) <= assumed_host_gib(job.gpu)


def _variants(job: Job, schedule: Schedule, stages: int, liger: bool) -> Iterator[list[Job]]:
    """The job with a schedule and a loss: for each recomputation, that with the least memory first, its variants."""
    groups = _expert_groups(job)
    for checkpointing in reversed(get_args(ActivationCheckpointing)):
        # A schedule that delays the weights' gradients keeps what they need, so recomputation saves nothing.
        if checkpointing != "none" and schedule_name(schedule, stages) in SPLIT_BACKWARD:
            continue
        if checkpointing == "selective" and job.activation_offload:
            continue
        variant = replace(
            job,
            liger=liger,
            activation_checkpointing=checkpointing,
            schedule=schedule,
            virtual_stages=stages,
        )
        if job.task == "grpo":
            yield list(_generation_rounds(variant))
        else:
            yield [_with_experts(variant, experts) for experts in reversed(groups)]


def _with_experts(job: Job, experts: int) -> Job:
    """The job with a number of ranks that share the experts of a layer."""
    if experts == 1:
        return job
    shared = replace(job, expert_parallel=experts)
    return replace(shared, overlapped_experts=True) if can_overlap_experts(shared) else shared


def _generation_rounds(job: Job) -> Iterator[Job]:
    """The job with each number of rounds in which whole groups of completions can be generated."""
    for rounds in GENERATION_ROUNDS:
        if (
            job.micro_batches % rounds == 0
            and job.global_batch // rounds % job.num_generations == 0
        ):
            yield replace(job, generation_rounds=rounds)


def _schedules(job: Job) -> list[tuple[Schedule, int]]:
    """Schedules with their stages per rank: those of `ParallelTrainer`, or 1F1B as other frameworks interleave it."""
    pp = job.layout.pp
    layers = job.shape.layers
    if pp == 1 or job.stack != "hf":
        return [("1f1b", stages) for stages in _interleavings(job)]
    looped: list[tuple[Schedule, int]] = [
        ("1f1b", 2),
        ("zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    ]
    looped += [("1f1b", stages) for stages in (3, 4, 6, 8)]
    return [("1f1b", 1), *(found for found in looped if pp * found[1] <= layers)]


def _interleavings(job: Job) -> list[int]:
    """Numbers of stages per rank that divide the layers of the fullest rank."""
    pp = job.layout.pp
    if pp == 1:
        return [1]
    each = -(-job.stage_units // pp)
    return [
        v for v in range(1, MAX_VIRTUAL_STAGES + 1) if each % v == 0 and pp * v <= job.stage_units
    ]


def _expert_groups(job: Job) -> list[int]:
    """Numbers of ranks that may share the experts of a layer, the fewest first.

    Under transformers' expert parallelism there are at least two: without it other software shards the model, which
    is a run of its own. `ParallelTrainer` may spread them over a node, and as far as possible.
    """
    if job.is_native:
        return _native_groups(job.shape, job.layout)
    if job.stack == "hf":
        groups = _spread_groups(job.shape, job.layout)
        if not job.runs_parallel_trainer or not groups:
            return [1]
        if why_not(replace(job, expert_parallel=groups[-1]), "expert_parallel") is not None:
            return [1]
        layout = job.layout
        ranks_of_replica = layout.dp_shard * layout.cp * layout.tp
        # The largest group holds the fewest experts; smaller ones exchange over faster links, or within a replica.
        in_a_node = [size for size in groups if size <= job.gpus_per_node]
        in_a_replica = [size for size in groups if size <= ranks_of_replica]
        tried = {groups[-1], *in_a_node[-1:], *in_a_replica[-1:]}
        if layout.pp > 1:
            tried.add(1)
        return sorted(tried)
    if job.shape.moe is None:
        return [1]
    ranks = job.data_parallel * job.layout.cp
    return [size for size in (1, 8, 64) if job.shape.moe.experts % size == 0 and ranks % size == 0]


# -- why a layout does not work ---------------------------------------------------------------------------------------


def _too_large(job: Job, needed_gib: float) -> Rejected:
    memory = job.gpu.memory_gib
    name = "expert parallelism" if job.is_native else strategy_of(job)
    name += " with offload" if job.offload != "none" else ""
    reason = (
        f"{name} needs {needed_gib:.0f} GiB per GPU even with full recomputation and micro-batch 1; {job.gpu.name} "
        f"has {memory:.0f}, of which a plan uses {100 * USABLE_MEMORY_FRACTION:.0f}%"
    )
    return Rejected(
        layout=job.layout,
        strategy=name,
        reason=reason,
        needed_gib=needed_gib,
        expert_parallel=job.expert_parallel,
    )


def _unsupported_kinds(request: PlanRequest, gpus: int) -> Iterator[Rejected]:
    """The kinds of layouts of which none is tried, each as one row with an example."""
    split = Combination(
        planned=True, trl=request.task != "text", method=request.method, tp=gpus, pp=1, cp=1
    )
    reason = explain(split, "model_parallel", "ranks_per_replica")
    if reason is not None:
        yield Rejected(layout=ParallelLayout(tp=gpus), strategy="parallel", reason=reason)
    if request.shape.moe is None or request.stack != "hf":
        return
    everything = ParallelLayout(dp_shard=gpus)
    reason = _why_no_experts(request)
    if reason is None and gpus > 1 and not expert_groups(request.shape, everything):
        reason = (
            f"expert parallelism: no number of ranks divides both the {gpus} GPUs and the {request.shape.moe.experts} "
            "experts of a layer"
        )
    if reason is not None:
        yield Rejected(layout=everything, strategy="native", reason=reason)
