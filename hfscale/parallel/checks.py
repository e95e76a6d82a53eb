"""Whether a model, a batch and a world go with a layout, said before anything is built or any group is made."""

import math

from transformers import PreTrainedConfig

from hfscale.errors import LayoutError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.parallel.context import check_kernel
from hfscale.parallel.families import check_contexts, check_family, check_matrices, check_sequences
from hfscale.parallel.stages import StagePlan


def decide_layout(
    world_size: int,
    *,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    dp_shard: int | None = None,
    dp_replicate: int | None = None,
) -> ParallelLayout:
    """The layout of these sizes; what is left open of the data parallel ranks becomes shards of one replica.

    Raises:
        LayoutError: the sizes do not make up the world; the message names the nearest that do.
    """
    tp, pp, cp, dp_replicate = tp or 1, pp or 1, cp or 1, dp_replicate or 1
    if dp_shard is None:
        sizes = {"pp_size": pp, "tp_size": tp, "cp_size": cp, "dp_replicate_size": dp_replicate}
        replica = math.prod(sizes.values())
        if world_size % replica:
            shared = f"cp_size {cp} x " if cp > 1 else ""
            raise LayoutError(
                f"tp_size {tp} x pp_size {pp} x {shared}dp_replicate_size {dp_replicate} = {replica} does not divide "
                f"the {world_size} processes: {_nearest_sizes(world_size, sizes)}, or start "
                f"{max(1, round(world_size / replica)) * replica}"
            )
        dp_shard = world_size // replica
    layout = ParallelLayout(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp)
    layout.check_world_size(world_size)
    return layout


def _nearest_sizes(world_size: int, sizes: dict[str, int]) -> str:
    """The first flag of which another value makes the product of all divide the world."""
    for flag, size in sizes.items():
        others = math.prod(sizes.values()) // size
        legal = [n for n in range(1, world_size + 1) if world_size % (n * others) == 0]
        if legal:
            return f"set --{flag} {min(legal, key=lambda n: abs(n - size))}"
    return "set --tp_size 1 and --pp_size 1"


def check_config(
    config: PreTrainedConfig, layout: ParallelLayout, plan: StagePlan, *, sequence_parallel: bool = False
) -> None:
    """Make sure that a model's shape divides over the axes.

    Raises:
        LayoutError: heads, vocabulary or layers do not; the message names the nearest sizes that do.
        UsageError: quantised weights, which cannot be cut, a model without tensor-parallel plan, or one whose
            sequences cannot be.
    """
    if plan.stages > 1:
        check_family(config.model_type)
    text = config.get_text_config()
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"the {config.model_type} checkpoint has quantised weights, which cannot be cut over ranks: give one in "
            "bf16 or fp32, or train it with recipes/sharded and --load_in_4bit"
        )
    if text.num_hidden_layers < plan.stages:
        possible = text.num_hidden_layers // plan.per_rank
        raise LayoutError(
            f"pp_size {plan.pp} with {plan.per_rank} stages per rank makes {plan.stages} stages, and the model has "
            f"{text.num_hidden_layers} layers: set --pp_size {max(1, possible)}"
        )
    check_matrices(config.model_type, layout.tp)
    if layout.cp > 1:
        check_contexts(config, layout.cp)
        if config._attn_implementation is not None:  # of a model, not of a bare config
            check_kernel(config._attn_implementation, layout.cp)
    if sequence_parallel:
        check_sequences(config.model_type, layout.tp)
    if layout.tp == 1:
        return
    if not text.base_model_tp_plan:
        raise UsageError(
            f"tp_size {layout.tp}: transformers has no tensor-parallel plan for {config.model_type}; set --tp_size 1"
        )
    heads = text.num_attention_heads
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(text, "num_key_value_heads", None) or heads,
        "tokens of vocabulary": text.vocab_size,
    }
    for what, count in counts.items():
        if count % layout.tp:
            common = math.gcd(*counts.values())
            legal = [n for n in range(1, common + 1) if common % n == 0]
            nearest = min(legal, key=lambda n: abs(n - layout.tp))
            raise LayoutError(
                f"tp_size {layout.tp} does not divide the model's {count} {what}: set --tp_size {nearest} "
                f"(one of {', '.join(map(str, legal[:12]))})"
            )
