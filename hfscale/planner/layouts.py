"""Every layout worth trying for a model on so many GPUs, by what the stack's software can run."""

from collections.abc import Iterator

from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.parallel_families import TENSOR_PARALLEL_PLAN_MISSING, TENSOR_PARALLEL_UNSUPPORTED
from hfscale.planner.job import Offload
from hfscale.planner.request import PlanRequest

LEAST_TOKENS_PER_CP_RANK = 4096
"""Tokens of a sequence below which context parallelism is not tried."""
MOST_UNEVEN = 1.15
"""Layers of the fullest pipeline rank over the average, up to which is searched: 61 layers on 16 ranks are four and
1.05, 126 on 16 eight and 1.02."""
MOST_STAGES = 64
"""Pipeline stages up to which is searched; Llama 3 405B was trained with 16."""


def offloads(request: PlanRequest, gpus: int) -> Iterator[tuple[ParallelLayout, int, Offload]]:
    """Layouts that keep states in the CPU's memory, the last resort: ZeRO-2 and ZeRO-3 with offload."""
    if request.stack == "hf":
        yield ParallelLayout(dp_replicate=gpus), 2 if gpus > 1 else 0, "optimizer"
        yield ParallelLayout(dp_shard=gpus), 3, "full"


def layouts(request: PlanRequest, gpus: int) -> Iterator[tuple[ParallelLayout, int, Offload]]:
    """Layouts with their ZeRO stage and offload, the simplest first."""
    shape, node = request.shape, request.gpus_per_node
    for tp in _sizes(min(node, gpus)):
        heads, kv_heads = shape.attention.heads, shape.attention.kv_heads
        if heads % tp or (kv_heads % tp and tp % kv_heads) or gpus % tp:
            continue
        for pp in _stages(shape.layers, gpus // tp):
            if (tp > 1 or pp > 1) and request.method != "full":
                continue  # adapters are trained with data parallelism
            if tp > 1 and request.stack == "hf" and not _transformers_cuts(shape, tp, pp):
                continue
            for cp in _sizes(request.seq_len // LEAST_TOKENS_PER_CP_RANK):
                if cp > 1 and request.stack == "hf" and tp > 1 and pp == 1:
                    continue  # Accelerate joins context parallelism with FSDP2 alone, `ParallelTrainer` with all
                if (gpus // tp // pp) % cp or request.seq_len % (2 * cp):
                    continue
                yield from _data_parallel(request, tp=tp, pp=pp, cp=cp, dp=gpus // tp // pp // cp)


def _transformers_cuts(shape: ModelShape, tp: int, pp: int) -> bool:
    """Whether transformers' tensor parallelism takes the model: it has no plan for some, and copies no key-value
    heads; `ParallelTrainer` wants the vocabulary to divide too."""
    if shape.model_type in TENSOR_PARALLEL_UNSUPPORTED or shape.model_type in TENSOR_PARALLEL_PLAN_MISSING:
        return False
    if shape.attention.kv_heads % tp:
        return False
    return pp == 1 or shape.vocab % tp == 0


def _sizes(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _stages(layers: int, ranks: int) -> list[int]:
    """Pipeline sizes whose fullest rank has little more than its part of the layers: it sets the pace of all."""
    possible = range(2, min(layers, ranks, MOST_STAGES) + 1)
    return [1, *(pp for pp in possible if ranks % pp == 0 and -(-layers // pp) * pp <= MOST_UNEVEN * layers)]


def _data_parallel(
    request: PlanRequest, *, tp: int, pp: int, cp: int, dp: int
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
    elif request.stack == "megatron":
        yield layout(1), 1, "none"
    elif pp > 1 and cp == 1:
        yield layout(1), 0, "none"  # stages of replicas: FSDP2 whose shard axis has one rank
    if pp > 1 and request.stack == "megatron":
        return
    yield layout(dp), 3, "none"
    inside = max(1, request.gpus_per_node // (tp * cp))
    for shard in (inside, 4 * inside, 16 * inside):
        if 1 < shard < dp and dp % shard == 0:
            yield layout(shard), 3, "none"


def splits_sequences(stack: str, layout: ParallelLayout) -> bool:
    """Whether tensor parallelism also splits norms and residuals along the sequence: transformers' plans reduce the
    whole activation instead; `ParallelTrainer` can split it (`--sequence_parallel`), and its plans do."""
    return stack != "hf" or (layout.pp > 1 and layout.tp > 1)


def splits_logits(stack: str, layout: ParallelLayout) -> bool:
    """Whether the loss is computed on logits that stay split over the tensor-parallel ranks: transformers' plans
    gather them, `ParallelTrainer` does not."""
    return stack != "hf" or (layout.pp > 1 and layout.tp > 1)
