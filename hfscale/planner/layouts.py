"""Layouts of a number of GPUs that a search tries."""

from collections.abc import Iterator

from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import TENSOR_PARALLEL_PLAN_MISSING, Combination
from hfscale.facts.support import why_not as explain
from hfscale.planner.launchable import engine_of
from hfscale.planner.options import Offload
from hfscale.planner.request import PlanRequest

MIN_TOKENS_PER_CP_RANK = 4096
"""Tokens of a sequence per rank below which context parallelism is not tried."""
MAX_UNEVENNESS = 1.15
"""Highest ratio, of the layers on the fullest pipeline rank to the average, that is tried. 61 layers on 16 ranks are
four on the fullest and a ratio of 1.05, 126 layers on 16 ranks eight and 1.02."""
MAX_STAGES = 64
"""Largest number of pipeline ranks that is tried; Llama 3 405B was trained with 16."""

Candidate = tuple[ParallelLayout, int, Offload]
"""A layout, its ZeRO stage and what it offloads."""


def layouts(request: PlanRequest, gpus: int) -> Iterator[Candidate]:
    """Yield the layouts without offload that the framework can run, the simplest first.

    Args:
        request (`PlanRequest`): what is planned for; its own number of GPUs is not used.
        gpus (`int`): number of GPUs that every layout uses.
    """
    shape = request.shape
    node = request.gpus_per_node
    for tp in _powers_of_two(min(node, gpus)):
        heads = shape.attention.heads
        kv_heads = shape.common_kv_heads
        # Of Hugging Face's stack only `ParallelTrainer` copies key-value heads, and the estimates do not count that.
        if heads % tp or (kv_heads % tp and (request.stack == "hf" or tp % kv_heads)) or gpus % tp:
            continue
        for pp in _pipeline_sizes(shape.layers, gpus // tp):
            for cp in _powers_of_two(request.seq_len // MIN_TOKENS_PER_CP_RANK):
                if _why_not_split(request, tp=tp, pp=pp, cp=cp) is not None:
                    continue
                if (gpus // tp // pp) % cp or request.seq_len % (2 * cp):
                    continue
                yield from _data_parallel(request, tp=tp, pp=pp, cp=cp, dp=gpus // tp // pp // cp)


def layouts_with_experts(request: PlanRequest, gpus: int) -> Iterator[Candidate]:
    """Yield the layouts without a pipeline in which `ParallelTrainer` may spread experts as transformers does not.

    Args:
        request (`PlanRequest`): what is planned for; its own number of GPUs is not used.
        gpus (`int`): number of GPUs that every layout uses.
    """
    for tp in _powers_of_two(min(request.gpus_per_node, gpus)):
        shape = request.shape
        if shape.attention.heads % tp or shape.common_kv_heads % tp or gpus % tp:
            continue
        for cp in _powers_of_two(request.seq_len // MIN_TOKENS_PER_CP_RANK):
            if (gpus // tp) % cp or request.seq_len % (2 * cp):
                continue
            if _why_not_split(request, tp=tp, pp=1, cp=cp, spreads_experts=True) is None:
                yield from _spread_data_parallel(request, tp=tp, cp=cp, dp=gpus // tp // cp)


def _spread_data_parallel(
    request: PlanRequest, *, tp: int, cp: int, dp: int
) -> Iterator[Candidate]:
    """Ways to replicate or shard what is not an expert over `dp` data-parallel ranks."""
    if cp == 1:
        yield ParallelLayout(dp_replicate=dp, tp=tp), 0, "none"
    inside = max(1, request.gpus_per_node // (tp * cp))
    shards = {
        dp,
        *(shard for shard in (inside, 4 * inside, 16 * inside) if shard < dp and dp % shard == 0),
    }
    for shard in sorted(shards, reverse=True):
        if shard * cp > 1:
            yield ParallelLayout(dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp), 3, "none"


def _why_not_split(
    request: PlanRequest, *, tp: int, pp: int, cp: int, spreads_experts: bool = False
) -> str | None:
    """Why no layout of the request can have these sizes, whatever its data-parallel ranks shard; None if one can.

    Rules that depend on what the ranks shard, or that concern pipelines alone, are applied to each layout (`_try`).
    """
    engine = "parallel_trainer" if spreads_experts else engine_of(request.stack, pp=pp)
    split = Combination(
        planned=True,
        engine=engine,
        trl=request.task != "text",
        method=request.method,
        strategy="parallel" if engine == "trainer" and tp > 1 else None,
        tp=tp,
        pp=pp,
        cp=cp,
        family=request.shape.model_type,
        tp_plan=request.shape.model_type not in TENSOR_PARALLEL_PLAN_MISSING,
    )
    return explain(split, "tp", "model_parallel", "ranks_per_replica", "strategy_family")


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _pipeline_sizes(layers: int, ranks: int) -> list[int]:
    """Pipeline sizes whose fullest rank, which limits the speed, has little more than its share of the layers."""
    possible = range(2, min(layers, ranks, MAX_STAGES) + 1)
    return [
        1,
        *(
            pp
            for pp in possible
            if ranks % pp == 0 and -(-layers // pp) * pp <= MAX_UNEVENNESS * layers
        ),
    ]


def _data_parallel(
    request: PlanRequest, *, tp: int, pp: int, cp: int, dp: int
) -> Iterator[Candidate]:
    """Ways to replicate or shard the states over `dp` data-parallel ranks."""

    def layout(shard: int) -> ParallelLayout:
        return ParallelLayout(dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, pp=pp)

    if dp * cp == 1:
        yield layout(1), 0, "none"
        return
    if tp == pp == cp == 1:
        yield layout(1), 0, "none"
        yield layout(1), 1, "none"
        yield layout(1), 2, "none"
    elif request.stack == "megatron":
        yield layout(1), 1, "none"
    elif pp > 1 and cp == 1:
        yield layout(1), 0, "none"  # replicated stages: FSDP2 whose shard axis has one rank
    if pp > 1 and request.stack == "megatron":
        return
    yield layout(dp), 3, "none"
    inside = max(1, request.gpus_per_node // (tp * cp))
    for shard in (inside, 4 * inside, 16 * inside):
        if 1 < shard < dp and dp % shard == 0:
            yield layout(shard), 3, "none"
