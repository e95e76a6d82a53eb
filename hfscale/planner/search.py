"""Every layout worth trying for a model on so many GPUs, and which of them fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from hfscale.errors import LayoutError
from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.job import Job, Method, Offload, Optimizer, Precision, Recompute
from hfscale.planner.memory import GIB, memory_of
from hfscale.planner.model_view import view_of
from hfscale.planner.stacks import stack as find_stack
from hfscale.planner.states import trained_parameters

HEADROOM = 0.94
"""Part of a device's memory that a plan may use; the rest is for what the estimate misses (benchmarks/results)."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches that are tried, sequences."""
LEAST_TOKENS_PER_CP_RANK = 4096
"""Tokens of a sequence below which context parallelism is not tried."""
HOST_GIB_PER_GPU, HOST_GIB_PER_CARD = 256.0, 64.0
"""Memory of the CPU per GPU of a server (2 TB for eight, DGX H100 datasheet) and of a machine of PCIe cards,
assumed."""
WITHOUT_TENSOR_PLAN = ("gpt2", "bloom")
"""Model types of the catalogue whose transformers config has no `base_model_tp_plan` (5.23)."""
MOST_STAGES = 64
"""Pipeline stages up to which is searched; Llama 3 405B was trained with 16."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is for."""

    shape: ModelShape
    """The model."""
    gpu: Accelerator
    """The device."""
    gpus: int
    """How many there are."""
    gpus_per_node: int = 8
    """How many NVLink or PCIe joins."""
    seq_len: int = 4096
    """Tokens per sequence."""
    global_batch: int | None = None
    """Sequences per step; None takes `usual_batch`."""
    method: Method = "full"
    """Which parameters train."""
    lora_rank: int = 16
    """Rank of the adapters."""
    stack: str = "hf"
    """Software whose constants hold."""
    precision: Precision = "bf16"
    """Format of the matrix products."""
    optimizer: Optimizer = "adamw"
    """The optimizer."""
    compile: bool = False
    """Whether torch.compile is on."""
    fused_loss: bool = False
    """Whether logits are never held whole."""
    network_gb_s: float | None = None
    """Bandwidth between nodes per GPU; None takes the reference node's."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A kind of layout that does not work."""

    layout: ParallelLayout
    """The layout."""
    strategy: str
    """Its strategy."""
    reason: str
    """Why, in words."""
    needed_gib: float | None = None
    """Least memory it was found to need; None where memory is not the reason."""


def strategy_of(job: Job) -> str:
    """The strategy's name, as checkpoints and configs use it."""
    layout = job.layout
    if job.offload != "none":
        return f"zero{max(1, job.zero)}"
    if layout.world_size == 1:
        return "single"
    if layout.tp > 1 or layout.pp > 1:
        return "parallel"
    if job.zero == 3:
        return "fsdp2"
    return ("ddp", "zero1", "zero2")[job.zero]


def usual_batch(question: Question, gpus: int) -> int:
    """Sequences per step where none are given: 4M tokens as for Llama 2, 16M from 4,096 GPUs on as for Llama 3 405B
    (arXiv 2407.21783, section 3.4.1), 128 sequences for LoRA; a multiple of the GPUs where there are enough of
    them."""
    wanted = 128 if question.method != "full" else (16 if gpus >= 4096 else 4) * 2**20 // question.seq_len
    if wanted < gpus:
        return 1 << max(0, wanted.bit_length() - 1)
    return round(wanted / gpus) * gpus


def offloads(question: Question, gpus: int) -> Iterator[tuple[ParallelLayout, int, Offload]]:
    """Layouts that keep states in the CPU's memory, the last resort: ZeRO-2 and ZeRO-3 with offload."""
    if question.stack == "hf":
        yield ParallelLayout(dp_replicate=gpus), 2 if gpus > 1 else 0, "optimizer"
        yield ParallelLayout(dp_shard=gpus), 3, "full"


def layouts(question: Question, gpus: int) -> Iterator[tuple[ParallelLayout, int, Offload]]:
    """Layouts with their ZeRO stage and offload, the simplest first."""
    shape, node = question.shape, question.gpus_per_node
    for tp in _sizes(min(node, gpus)):
        heads, kv_heads = shape.attention.heads, shape.attention.kv_heads
        if heads % tp or (kv_heads % tp and tp % kv_heads) or gpus % tp:
            continue
        for pp in _stages(shape.layers, gpus // tp):
            if (tp > 1 or pp > 1) and question.method != "full":
                continue  # adapters are trained with data parallelism
            if tp > 1 and pp == 1 and question.stack == "hf" and not _transformers_cuts(shape, tp):
                continue
            for cp in _sizes(question.seq_len // LEAST_TOKENS_PER_CP_RANK):
                if cp > 1 and question.stack == "hf" and (tp > 1 or pp > 1):
                    continue  # Accelerate joins context parallelism with FSDP2 alone
                if (gpus // tp // pp) % cp or question.seq_len % (2 * cp):
                    continue
                yield from _data_parallel(question, tp=tp, pp=pp, cp=cp, dp=gpus // tp // pp // cp)


def _transformers_cuts(shape: ModelShape, tp: int) -> bool:
    """Whether transformers' tensor parallelism takes the model: it has no plan for some, and copies no key-value
    heads."""
    return shape.model_type not in WITHOUT_TENSOR_PLAN and shape.attention.kv_heads % tp == 0


def _sizes(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _stages(layers: int, ranks: int) -> list[int]:
    """Pipeline sizes that cut the layers evenly, counting embedding and head as one each where that helps."""
    possible = range(2, min(layers, ranks, MOST_STAGES) + 1)
    return [1, *(pp for pp in possible if ranks % pp == 0 and (layers % pp == 0 or (layers + 2) % pp == 0))]


def _data_parallel(
    question: Question, *, tp: int, pp: int, cp: int, dp: int
) -> Iterator[tuple[ParallelLayout, int, Offload]]:
    def layout(shard: int) -> ParallelLayout:
        return ParallelLayout(dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp)

    if dp * cp == 1:
        yield layout(1), 0, "none"
        return
    if tp == pp == cp == 1:
        yield layout(1), 0, "none"
        yield layout(1), 1, "none"
        yield layout(1), 2, "none"
    elif question.stack == "megatron" or pp > 1:
        yield layout(1), 1, "none"
    if pp > 1 and question.stack != "titan":
        return
    yield layout(dp), 3, "none"
    inside = max(1, question.gpus_per_node // (tp * cp))
    for shard in (inside, 4 * inside, 16 * inside):
        if 1 < shard < dp and dp % shard == 0:
            yield layout(shard), 3, "none"


def search(question: Question, gpus: int) -> tuple[list[Estimate], list[Rejected]]:
    """The best estimate of every layout that fits, fastest first, and the layouts that do not.

    Raises:
        `LayoutError`: The number of GPUs is not a whole number of nodes.
    """
    if gpus > question.gpus_per_node and gpus % question.gpus_per_node:
        down = gpus // question.gpus_per_node * question.gpus_per_node
        raise LayoutError(
            f"{gpus} GPUs are no whole number of nodes of {question.gpus_per_node}: use {down} or "
            f"{down + question.gpus_per_node}, or say --gpus-per-node"
        )
    batch = question.global_batch or usual_batch(question, gpus)
    chosen: list[Estimate] = []
    rejected: list[Rejected] = []
    for candidates in (layouts(question, gpus), offloads(question, gpus)):
        for layout, zero, offload in candidates:
            job = _job(question, layout, zero, offload, batch)
            if batch % job.data_parallel:
                reason = f"global batch {batch} is not a multiple of its {job.data_parallel} data-parallel ranks"
                rejected.append(Rejected(layout=layout, strategy=strategy_of(job), reason=reason))
                continue
            on_host = host_gib(job)
            if on_host > _host_memory(question):
                has = _host_memory(question)
                reason = f"offload needs {on_host:.0f} GiB of the CPU's memory per GPU, {has:.0f} are assumed"
                rejected.append(Rejected(layout=layout, strategy=strategy_of(job), reason=reason))
                continue
            best, needed = _best(job)
            if best is None:
                rejected.append(_too_large(job, needed))
            else:
                chosen.append(best)
        if chosen:
            break
    return sorted(chosen, key=lambda estimate: estimate.time.total), rejected


def splits_sequences(stack: str) -> bool:
    """Whether a stack's tensor parallelism splits norms and residuals along the sequence: transformers' plans reduce
    the whole activation instead."""
    return stack != "hf"


def host_gib(job: Job) -> float:
    """States that offload keeps in the CPU's memory per GPU: 12 bytes per trained parameter, or 16 with parameters and
    gradients (Ren et al., ZeRO-Offload, arXiv 2101.06840)."""
    if job.offload == "none":
        return 0.0
    each = 12.0 if job.offload == "optimizer" else 16.0
    return each * trained_parameters(view_of(job.shape), job) / job.layout.world_size / GIB


def _host_memory(question: Question) -> float:
    return HOST_GIB_PER_GPU if question.gpu.link_gb_s else HOST_GIB_PER_CARD


def _job(question: Question, layout: ParallelLayout, zero: int, offload: Offload, batch: int) -> Job:
    return Job(
        shape=question.shape,
        gpu=question.gpu,
        layout=layout,
        seq_len=question.seq_len,
        micro_batch=1,
        global_batch=batch,
        stack=question.stack,
        zero=zero,
        precision=question.precision,
        compile=question.compile,
        method=question.method,
        lora_rank=question.lora_rank,
        optimizer=question.optimizer,
        offload=offload,
        fused_loss=question.fused_loss,
        gpus_per_node=question.gpus_per_node,
        network_gb_s=question.network_gb_s,
        sequence_parallel=splits_sequences(question.stack),
    )


def _best(job: Job) -> tuple[Estimate | None, float]:
    """The fastest recomputation, micro-batch and interleaving of a layout that fits, and the least memory it needs."""
    view, constants = view_of(job.shape), find_stack(job.stack)
    limit = job.gpu.memory_gib * HEADROOM
    per_rank = job.global_batch // job.data_parallel
    best: Estimate | None = None
    least = float("inf")
    for recompute, stages, experts in product(get_args(Recompute), _interleavings(job), _expert_groups(job)):
        fitting: list[Job] = []
        for micro in MICRO_BATCHES:
            if per_rank % micro:
                break
            trial = replace(
                job, recompute=recompute, micro_batch=micro, virtual_stages=stages, expert_parallel=experts
            )
            needed = memory_of(view, trial, constants).total
            least = min(least, needed)
            if needed > limit:
                break
            fitting.append(trial)
        # Without a pipeline larger micro-batches are faster; with one they lengthen the bubble.
        for trial in fitting if job.layout.pp > 1 else fitting[-2:]:
            estimate = estimate_job(trial)
            if best is None or estimate.time.total < best.time.total:
                best = estimate
    return best, least


def _expert_groups(job: Job) -> list[int]:
    """Ranks that may share the experts of a layer; Trainer has no expert parallelism."""
    if job.shape.moe is None or job.stack == "hf":
        return [1]
    ranks = job.data_parallel * job.layout.cp
    return [size for size in (1, 8, 64) if job.shape.moe.experts % size == 0 and ranks % size == 0]


def _interleavings(job: Job) -> list[int]:
    """Virtual stages that cut a stage's layers evenly, embedding and head counted where the split counts them."""
    pp, layers = job.layout.pp, job.shape.layers
    if pp == 1:
        return [1]
    each = next((total // pp for total in (layers, layers + 2) if total % pp == 0), 1)
    return [v for v in (1, 2, 4) if each % v == 0 and pp * v <= layers]


def _too_large(job: Job, needed: float) -> Rejected:
    memory = job.gpu.memory_gib
    name = strategy_of(job) + (" with offload" if job.offload != "none" else "")
    reason = (
        f"{name} needs {needed:.0f} GiB per GPU even with full recomputation and micro-batch 1; {job.gpu.name} has "
        f"{memory:.0f}, of which a plan uses {100 * HEADROOM:.0f}%"
    )
    return Rejected(layout=job.layout, strategy=name, reason=reason, needed_gib=needed)
