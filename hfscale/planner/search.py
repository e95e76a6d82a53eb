"""Which layouts for a model on so many GPUs fit, and how fast the best of each is."""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from hfscale.errors import LayoutError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.schedules import SPLIT_BACKWARD, schedule_name, supports
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.frameworks import stack as find_stack
from hfscale.planner.job import Job, Offload, Recompute, Schedule, can_overlap_experts
from hfscale.planner.launchable import why_no_stages
from hfscale.planner.layouts import layouts, offloads, splits_logits, splits_sequences
from hfscale.planner.memory import GIB, memory_of
from hfscale.planner.model_view import view_of
from hfscale.planner.request import PlanRequest, Rejected, strategy_of, usual_batch
from hfscale.planner.states import trained_parameters

HEADROOM = 0.94
"""Part of a device's memory that a plan may use; the rest is for what the estimate misses (benchmarks/results)."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches that are tried, sequences."""
HOST_GIB_PER_GPU, HOST_GIB_PER_CARD = 256.0, 64.0
"""Memory of the CPU per GPU of a server (2 TB for eight, DGX H100 datasheet) and of a machine of PCIe cards,
assumed."""
NO_STAGES = "no pipelines"
"""How the reason begins that holds for all pipelines, and is told once."""
TIE_TOLERANCE = 0.03
"""Difference in time below which the estimate cannot tell two plans apart, so that the simpler one goes first."""


def search(request: PlanRequest, gpus: int) -> tuple[list[Estimate], list[Rejected]]:
    """The best estimate of every layout that fits, fastest first, and the layouts that do not.

    Raises:
        `LayoutError`: The number of GPUs is not a whole number of nodes.
    """
    if gpus > request.gpus_per_node and gpus % request.gpus_per_node:
        down = gpus // request.gpus_per_node * request.gpus_per_node
        raise LayoutError(
            f"{gpus} GPUs are no whole number of nodes of {request.gpus_per_node}: use {down} or "
            f"{down + request.gpus_per_node}, or say --gpus-per-node"
        )
    batch = request.global_batch or usual_batch(request, gpus)
    chosen: list[Estimate] = []
    rejected: list[Rejected] = []
    for candidates in (layouts(request, gpus), offloads(request, gpus)):
        for layout, zero, offload in candidates:
            found = _try(request, _job(request, layout, zero, offload, batch))
            if isinstance(found, Estimate):
                chosen.append(found)
            elif not (found.reason.startswith(NO_STAGES) and any(row.reason == found.reason for row in rejected)):
                rejected.append(found)
        if chosen:
            break
    if request.method != "full" and gpus > 1:
        rejected.append(_without_cut_adapters(gpus))
    if request.shape.moe is not None and request.stack == "hf":
        rejected.append(_without_expert_parallelism(request, gpus))
    return sorted(chosen, key=lambda estimate: estimate.time.total), rejected


def _try(request: PlanRequest, job: Job) -> Estimate | Rejected:
    """The best estimate of a layout, or why there is none."""

    def because(reason: str) -> Rejected:
        return Rejected(layout=job.layout, strategy=strategy_of(job), reason=reason)

    if job.layout.pp > 1 and job.stack == "hf" and (reason := why_no_stages(job)) is not None:
        return because(f"{NO_STAGES}: {reason}")
    if job.global_batch % job.data_parallel:
        return because(
            f"global batch {job.global_batch} is not a multiple of its {job.data_parallel} data-parallel ranks"
        )
    if (on_host := host_gib(job)) > (has := _host_memory(request)):
        return because(f"offload needs {on_host:.0f} GiB of the CPU's memory per GPU, {has:.0f} are assumed")
    best, needed = _best(job)
    if best is not None:
        return best
    if needed is None:
        return because(
            f"{job.global_batch // job.data_parallel} sequences per data-parallel rank and step do not keep "
            f"{job.layout.pp} pipeline stages going: give --global-batch {job.layout.pp * job.data_parallel} or more"
        )
    return _too_large(job, needed)


def _without_cut_adapters(gpus: int) -> Rejected:
    """What adapters are not offered, and why."""
    return Rejected(
        layout=ParallelLayout(tp=gpus),
        strategy="parallel",
        reason="tensor and pipeline parallelism: adapters are planned with data parallelism alone, for peft puts them "
        "on whole matrices; --method qlora or more GPUs (FSDP2) make room",
    )


def _without_expert_parallelism(request: PlanRequest, gpus: int) -> Rejected:
    """What a mixture of experts is not offered, and why."""
    return Rejected(
        layout=ParallelLayout(dp_shard=gpus),
        strategy="expert parallel",
        reason="expert parallelism: no recipe spreads experts over data-parallel ranks; tensor parallelism cuts each "
        "of them, FSDP2 gathers them (--stack megatron says what spreading them would give)",
    )


def host_gib(job: Job) -> float:
    """States that offload keeps in the CPU's memory per GPU: 12 bytes per trained parameter, or 16 with parameters and
    gradients (Ren et al., ZeRO-Offload, arXiv 2101.06840)."""
    if job.offload == "none":
        return 0.0
    each = 12.0 if job.offload == "optimizer" else 16.0
    return each * trained_parameters(view_of(job.shape), job) / job.layout.world_size / GIB


def _host_memory(request: PlanRequest) -> float:
    return HOST_GIB_PER_GPU if request.gpu.link_gb_s else HOST_GIB_PER_CARD


def _job(request: PlanRequest, layout: ParallelLayout, zero: int, offload: Offload, batch: int) -> Job:
    return Job(
        shape=request.shape,
        gpu=request.gpu,
        layout=layout,
        seq_len=request.seq_len,
        micro_batch=1,
        global_batch=batch,
        stack=request.stack,
        zero=zero,
        precision=request.precision,
        compile=request.compile,
        method=request.method,
        lora_rank=request.lora_rank,
        optimizer=request.optimizer,
        offload=offload,
        fused_loss=request.fused_loss,
        gpus_per_node=request.gpus_per_node,
        network_gb_s=request.network_gb_s,
        sequence_parallel=splits_sequences(request.stack, layout),
        loss_parallel=splits_logits(request.stack, layout),
    )


def _best(job: Job) -> tuple[Estimate | None, float | None]:
    """The fastest way to run a layout that fits, and the least memory the layout needs; None where no schedule takes
    its micro-batches. A simpler schedule goes first where the estimate cannot tell."""
    view, constants = view_of(job.shape), find_stack(job.stack)
    limit = job.gpu.memory_gib * HEADROOM
    best: dict[Schedule, Estimate] = {}
    least: float | None = None
    for variant in _variants(job):
        fitting: list[Job] = []
        for micro in MICRO_BATCHES:
            if (job.global_batch // job.data_parallel) % micro:
                break
            trial = replace(variant, micro_batch=micro)
            if trial.overlapped_experts and not can_overlap_experts(trial):  # a single micro-batch is left
                trial = replace(trial, overlapped_experts=False)
            if job.stack == "hf" and not supports(
                trial.schedule_name,
                pp=trial.layout.pp,
                stages_per_rank=trial.virtual_stages,
                micro_batches=trial.micro_batches,
            ):
                continue
            needed = memory_of(view, trial, constants).total
            least = needed if least is None else min(least, needed)
            if needed > limit:
                break
            fitting.append(trial)
        # Without a pipeline larger micro-batches are faster; with one they lengthen the bubble.
        for trial in fitting if job.layout.pp > 1 else fitting[-2:]:
            estimate = estimate_job(trial)
            known = best.get(trial.schedule)
            if known is None or estimate.time.total < known.time.total:
                best[trial.schedule] = estimate
    if not best:
        return None, least
    fastest = min(estimate.time.total for estimate in best.values())
    close = (estimate for estimate in best.values() if estimate.time.total <= fastest * (1 + TIE_TOLERANCE))
    return next(close), least


def _variants(job: Job) -> Iterator[Job]:
    """Schedules, recomputation and experts to try, the simplest schedule first."""
    for schedule, stages in _schedules(job):
        for recompute in get_args(Recompute):
            # A pass for the weights that is put off holds what it needs, recomputed or not.
            if recompute == "none" or schedule_name(schedule, stages) not in SPLIT_BACKWARD:
                for experts in _expert_groups(job):
                    variant = replace(
                        job,
                        recompute=recompute,
                        schedule=schedule,
                        virtual_stages=stages,
                        expert_parallel=experts,
                    )
                    yield replace(variant, overlapped_experts=True) if can_overlap_experts(variant) else variant


def _schedules(job: Job) -> list[tuple[Schedule, int]]:
    """Schedules with their stages per rank: those of `ParallelTrainer`, or 1F1B as the other stacks interleave it."""
    pp, layers = job.layout.pp, job.shape.layers
    if pp == 1 or job.stack != "hf":
        return [("1f1b", stages) for stages in _interleavings(job)]
    looped: list[tuple[Schedule, int]] = [("1f1b", 2), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)]
    return [("1f1b", 1), *(found for found in looped if pp * found[1] <= layers)]


def _expert_groups(job: Job) -> list[int]:
    """Ranks that may share the experts of a layer; Trainer has no expert parallelism."""
    if job.shape.moe is None or job.stack == "hf":
        return [1]
    ranks = job.data_parallel * job.layout.cp
    return [size for size in (1, 8, 64) if job.shape.moe.experts % size == 0 and ranks % size == 0]


def _interleavings(job: Job) -> list[int]:
    """Virtual stages that cut the layers of the fullest rank evenly."""
    pp, layers = job.layout.pp, job.shape.layers
    if pp == 1:
        return [1]
    return [v for v in (1, 2, 4) if job.layer_split[0] % v == 0 and pp * v <= layers]


def _too_large(job: Job, needed: float) -> Rejected:
    memory = job.gpu.memory_gib
    name = strategy_of(job) + (" with offload" if job.offload != "none" else "")
    reason = (
        f"{name} needs {needed:.0f} GiB per GPU even with full recomputation and micro-batch 1; {job.gpu.name} has "
        f"{memory:.0f}, of which a plan uses {100 * HEADROOM:.0f}%"
    )
    return Rejected(layout=job.layout, strategy=name, reason=reason, needed_gib=needed)
