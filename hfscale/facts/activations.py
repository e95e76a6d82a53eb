"""Bytes that a layer of Hugging Face's models keeps for its backward pass, per token, by family and regime.

The bytes are a sum of widths times factors. The factors are in `activations.csv`: `python -m benchmarks activations
--write` measures them with autograd on small models of every family, as transformers 5.23 builds them.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import and_
from pathlib import Path
from typing import Literal, NamedTuple

from hfscale.errors import UnsupportedModelError
from hfscale.facts.layer_shape import AttentionShape, LinearAttentionShape, MambaShape
from hfscale.facts.model_shape import ModelShape

Regime = Literal["fp32", "autocast", "bf16", "mixed", "lora", "lora_bf16"]
"""Formats in which a layer computes: `fp32`; fp32 weights under autocast (DDP); bf16 weights without autocast
(DeepSpeed, pure bf16) or with it (FSDP2 with Accelerate); a frozen bf16 model with adapters in fp32 under autocast
(DDP), or in bf16 (FSDP2, DeepSpeed)."""
REGIMES: tuple[Regime, ...] = ("fp32", "autocast", "bf16", "mixed", "lora", "lora_bf16")


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Holds bytes per unit of each width."""

    layer: Mapping[str, float]
    """For the widths of `layer_widths`."""
    ends: Mapping[str, float]
    """For the widths of `end_widths`."""


def layer_widths(shape: ModelShape, seq_len: int, *, rank: int = 0) -> dict[str, float]:
    """Compute the widths of an average layer that its activations are proportional to.

    Args:
        shape (`ModelShape`): the model.
        seq_len (`int`): tokens per sequence.
        rank (`int`): rank of the LoRA adapters; 0 without adapters.
    """
    attention = shape.attention
    share = shape.moe_share
    widths = {
        "hidden": shape.hidden,
        **_attention_widths(shape, seq_len, rank),
        "value": attention.query_width if attention.latent_width else 0,
        "mlp": shape.dense_share * shape.mlp.ffn if shape.mlp else 0,
        "latent": attention.latent_width,
        **_expert_widths(shape),
        "rank": rank,
        "constant": 1,
        "moe_constant": share,
        "parallel": shape.hidden * shape.parallel_residual,
        "norms": shape.hidden * shape.norms_per_layer,
        **_widths_of_mlp_layers(shape, rank),
        "moe_rank": share * rank if shape.other_layers else 0,
        **_recurrent_widths(shape, seq_len, rank),
    }
    return {name: float(width) for name, width in widths.items()}


def _expert_widths(shape: ModelShape) -> dict[str, float]:
    """The widths of the experts in an average layer, each 0 for a dense model."""
    moe = shape.moe
    share = shape.moe_share
    if moe is None:
        names = ("moe_hidden", "routed", "experts", "shared", "router", "choices")
        return dict.fromkeys(names, 0)
    return {
        "moe_hidden": share * shape.hidden,
        "routed": share * moe.top_k * shape.hidden,
        "experts": share * moe.top_k * moe.expert_ffn,
        "shared": share * moe.shared_ffn,
        "router": share * moe.experts,
        "choices": share * moe.top_k,
    }


def _widths_of_mlp_layers(shape: ModelShape, rank: int) -> dict[str, float]:
    """The widths of the layers that are an MLP only, of the models that have such layers."""
    share = shape.dense_share if shape.mlp_only else 0
    return {
        "mlp_hidden": share * shape.hidden,
        "mlp_constant": share,
        "mlp_rank": share * rank,
    }


DELTA_CHUNK = 64
"""Tokens that transformers' gated delta rule computes at once (transformers 5.23, `torch_chunk_gated_delta_rule`)."""


def _recurrent_widths(shape: ModelShape, seq_len: int, rank: int) -> dict[str, float]:
    """The widths of what carries a state along the sequence in an average layer, and of layers that are one part
    only.

    transformers computes both kinds in chunks: `states` are those of all chunks, per token, and `decay` the weights
    between the states of any two chunks.
    """
    recurrent = shape.recurrent
    share = shape.recurrent_share
    names = (
        "hidden",
        "inner",
        "keys",
        "expanded",
        "heads",
        "scores",
        "states",
        "decay",
        "rank",
        "constant",
    )
    widths = dict.fromkeys(
        (f"recurrent_{name}" for name in (*names, "mlp", "shared", "router")), 0.0
    )
    if isinstance(recurrent, LinearAttentionShape):
        heads = recurrent.value_heads
        own = {
            "inner": recurrent.value_width,
            "keys": recurrent.key_width,
            "expanded": heads * recurrent.head_dim,
            "heads": heads,
            "states": heads * recurrent.head_dim * recurrent.value_head_dim / DELTA_CHUNK,
        }
    elif isinstance(recurrent, MambaShape):
        heads = recurrent.heads
        own = {
            "inner": recurrent.inner_width,
            "keys": recurrent.groups * recurrent.state,
            "expanded": heads * recurrent.state,
            "heads": heads,
            "scores": heads * recurrent.chunk,
            "states": recurrent.inner_width * recurrent.state / recurrent.chunk,
            "decay": heads * (seq_len / recurrent.chunk + 1) ** 2 / seq_len,
        }
    else:
        return widths
    for name, width in {**own, "hidden": shape.hidden, "rank": rank, "constant": 1}.items():
        widths[f"recurrent_{name}"] = share * width
    if not shape.mlp_only:
        # Which matrix products of an MLP selective recomputation keeps depends on how many are before them.
        with_experts = sum(map(and_, shape.other_layers, shape.moe_layers)) / shape.layers
        if shape.mlp:
            widths["recurrent_mlp"] = (share - with_experts) * shape.mlp.ffn
        if shape.moe:
            widths["recurrent_shared"] = with_experts * shape.moe.shared_ffn
            widths["recurrent_router"] = with_experts * shape.moe.experts
    return widths


def _attention_widths(shape: ModelShape, seq_len: int, rank: int) -> dict[str, float]:
    """The widths of attention in an average layer."""
    names = (
        "query",
        "kv",
        "heads",
        "kv_heads",
        "scores",
        "masked_query",
        "masked_kv",
        "broadcast_query",
    )
    joined = ("joined", "joined_keys", "joined_rank", "joined_router", "joined_moe_rank")
    widths = dict.fromkeys((*names, "broadcast_kv", "mask", "normed", "normed_heads", *joined), 0.0)
    for kind in shape.layer_kinds:
        attention = kind.mixer
        if not isinstance(attention, AttentionShape):
            continue
        queries = attention.heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        is_masked = kind.window is not None and kind.window <= seq_len
        # Under a mask SDPA gets a copy of keys and values for each query head; those of a single head are broadcast,
        # and copied only where autocast changes their format.
        is_expanded = is_masked and 1 < attention.kv_heads < attention.heads
        is_broadcast = is_masked and 1 == attention.kv_heads < attention.heads
        own = {
            "query": queries,
            "kv": attention.kv_width,
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "scores": attention.heads * seq_len,
            "masked_query": is_expanded * queries,
            "masked_kv": is_expanded * attention.kv_width,
            "broadcast_query": is_broadcast * queries,
            "broadcast_kv": is_broadcast * attention.kv_width,
            "mask": is_masked * seq_len,
            "normed": (queries + keys) * attention.qk_norm,
            "normed_heads": (attention.heads + attention.kv_heads) * attention.qk_norm,
        }
        if attention.values_are_keys:
            own |= {"joined_keys": keys, "joined": shape.hidden, "joined_rank": rank}
        if attention.values_are_keys and shape.moe:
            own |= {"joined_router": shape.moe.experts, "joined_moe_rank": rank}
        for name, width in own.items():
            widths[name] += kind.share * width
    return widths


def end_widths(shape: ModelShape, seq_len: int) -> dict[str, float]:
    """Compute the widths that activations outside the layers are proportional to: embedding, positions, final norm.

    Args:
        shape (`ModelShape`): the model.
        seq_len (`int`): tokens per sequence.
    """
    other = shape.other_attention
    # A window longer than the sequence needs no mask, and an embedding of the hidden width no projection.
    is_masked = any(window is not None and window <= seq_len for window in shape.windows)
    is_projected = shape.embedding_width != shape.hidden
    widths = {
        "hidden": shape.hidden,
        "head_dim": shape.attention.head_dim,
        "other_head_dim": other.head_dim if isinstance(other, AttentionShape) else 0,
        "embedding": is_projected * shape.embedding_width,
        "seq": seq_len,
        "mask": is_masked * seq_len,
        "constant": 1,
    }
    return {name: float(width) for name, width in widths.items()}


UNSPLIT = frozenset(
    (
        *("hidden", "moe_hidden", "mlp_hidden", "joined", "routed", "parallel", "norms"),
        *("constant", "moe_constant", "mlp_constant", "router", "joined_router", "choices", "mask"),
    )
)
"""Widths of `layer_widths` that tensor parallelism splits only together with the sequence."""


SCORE_COPIES: Mapping[str, int] = {"gpt_oss": 2}
"""Family -> tensors of the size of a layer's attention scores, in the format of its queries, that exist at the peak of
the attention's forward and backward pass beside those that are kept: 4.0 bytes per score with bf16 and 8.0 with fp32,
by the peak of the live bytes of layers with sequences of 1,024 to 4,096 tokens (transformers 5.23,
`eager_attention_forward`). Only of the families whose experts transformers spreads over ranks."""
_OF_THE_MLP = (
    "mlp",
    "moe_hidden",
    "routed",
    "experts",
    "shared",
    "router",
    "choices",
    "moe_constant",
)
"""Widths of `layer_widths` of what comes after the attention."""


class KeptBytes(NamedTuple):
    """Bytes per token that are kept for the backward pass."""

    unsplit: float
    """Of a layer, in widths that tensor parallelism splits only together with the sequence."""
    split: float
    """Of a layer, in widths that tensor parallelism splits."""
    dispatched: float
    """The part of a layer's bytes that the rank of a token's experts keeps under transformers' expert parallelism."""
    routed: float
    """The part of `unsplit` that is of the copies of a token that its experts get."""
    ends: float
    """Outside the layers, without logits and loss."""


@lru_cache(maxsize=512)
def kept_bytes(
    shape: ModelShape, regime: Regime, recompute: str, seq_len: int, rank: int = 0
) -> KeptBytes:
    """Compute the bytes that an average layer and the model's ends keep for their backward pass, per token.

    Args:
        shape (`ModelShape`): the model.
        regime (`Regime`): the formats in which the model computes.
        recompute (`str`): `none`, `selective` or `full`.
        seq_len (`int`): tokens per sequence.
        rank (`int`): rank of the LoRA adapters; 0 without adapters.
    """
    factors = factors_of(shape.model_type, regime, recompute)
    widths = layer_widths(shape, seq_len, rank=rank)
    parts = {name: factor * widths[name] for name, factor in factors.layer.items()}
    unsplit = sum(
        part for name, part in parts.items() if name in UNSPLIT or name.startswith("recurrent_")
    )
    ends = end_widths(shape, seq_len)
    # Their outputs are kept by the rank that has the token, which weighs them (transformers 5.23,
    # distributed/expert_parallel.py, `AllToAllEP`).
    outputs = routed_bytes(shape, regime) * shape.moe_share
    return KeptBytes(
        unsplit=unsplit,
        split=sum(parts.values()) - unsplit,
        routed=parts.get("routed", 0.0),
        dispatched=max(0.0, parts.get("experts", 0.0) + parts.get("routed", 0.0) - outputs),
        ends=sum(factor * ends[name] for name, factor in factors.ends.items()),
    )


@lru_cache(maxsize=512)
def layer_kinds(shape: ModelShape) -> tuple[ModelShape, ...]:
    """Return a model of one layer for each kind of layer, where layers have different mixers.

    Args:
        shape (`ModelShape`): the model; it is returned as it is if every layer has the same attention.
    """
    if not shape.other_layers:
        return (shape,)
    mlp_only = shape.mlp_only or (False,) * shape.layers
    kinds = dict.fromkeys(
        zip(shape.moe_layers, shape.windows, shape.other_layers, mlp_only, strict=True)
    )
    return tuple(
        replace(
            shape,
            layers=1,
            moe_layers=(is_moe,),
            windows=(window,),
            other_layers=(is_other,),
            mlp_only=(is_mlp,) if shape.mlp_only else (),
        )
        for is_moe, window, is_other, is_mlp in kinds
    )


def of_fullest_layer(shape: ModelShape, regime: Regime, seq_len: int, rank: int = 0) -> ModelShape:
    """Return a model of one layer, that which keeps most without recomputation, where layers have different mixers.

    Args:
        shape (`ModelShape`): the model; it is returned as it is if every layer has the same attention.
        regime (`Regime`): the formats in which the model computes.
        seq_len (`int`): tokens per sequence.
        rank (`int`): rank of the LoRA adapters; 0 without adapters.
    """
    kinds = layer_kinds(shape)
    if len(kinds) == 1:
        return kinds[0]
    return max(kinds, key=lambda layer: sum(kept_bytes(layer, regime, "none", seq_len, rank)[:2]))


def routed_bytes(shape: ModelShape, regime: Regime) -> float:
    """Compute the bytes per token of the copies of a token that its experts get in one layer.

    Args:
        shape (`ModelShape`): the model.
        regime (`Regime`): the formats in which the model computes.
    """
    if not shape.moe:
        return 0.0
    return _value_bytes(regime) * shape.top_k * shape.hidden


def _value_bytes(regime: Regime) -> float:
    """Bytes of a value in the format of the matrix products."""
    return 4.0 if regime == "fp32" else 2.0


def attention_bytes(shape: ModelShape, regime: Regime, seq_len: int) -> float:
    """Compute the bytes per token of a layer in use at the peak of its attention, where scores are written to memory.

    They are what the attention keeps, with half of the norms and residuals, and the further tensors of its scores.

    Args:
        shape (`ModelShape`): the model.
        regime (`Regime`): the formats in which the model computes.
        seq_len (`int`): tokens per sequence.

    Returns:
        `float`: 0 for a family that is not in `SCORE_COPIES`.
    """
    copies = SCORE_COPIES.get(shape.model_type, 0)
    if copies == 0:
        return 0.0
    widths = layer_widths(shape, seq_len)
    factors = factors_of(shape.model_type, regime, "none").layer
    kept = sum(factor * widths[name] for name, factor in factors.items() if name not in _OF_THE_MLP)
    kept -= factors["hidden"] * widths["hidden"] / 2
    return kept + copies * _value_bytes(regime) * widths["scores"]


def has_scores(model_type: str) -> bool:
    """Return whether transformers computes the attention of a family with scores that are written to memory."""
    return "scores" in factors_of(model_type, "bf16", "none").layer


@cache
def factors_of(model_type: str, regime: Regime, recompute: str) -> Factors:
    """Return the measured factors of a family.

    Full recomputation keeps the layer's input, whose format is that of the residuals.

    Raises:
        UnsupportedModelError: they have not been measured.
    """
    is_full = recompute == "full"
    measured = _table().get((model_type, regime, "selective" if is_full else recompute))
    if measured is None:
        raise UnsupportedModelError(
            f"the memory of {model_type} is not known, only its parameters and FLOPs are: plan for a model of another "
            "family of about its size"
        )
    if is_full:
        residual = 4.0 if regime in ("fp32", "autocast") else 2.0
        return Factors(layer={"hidden": residual}, ends=measured.ends)
    return measured


@cache
def _table() -> dict[tuple[str, str, str], Factors]:
    with (Path(__file__).parent / "activations.csv").open(encoding="utf-8", newline="") as file:
        return {
            (family, row["regime"], row["recompute"]): Factors(
                layer=_pairs(row["layer"]), ends=_pairs(row["ends"])
            )
            for row in csv.DictReader(file)
            for family in row["families"].split()
        }


def _pairs(text: str) -> dict[str, float]:
    """Factors by width, from a text such as `hidden=26 kv=2`."""
    return {
        name: float(factor) for name, _, factor in (pair.partition("=") for pair in text.split())
    }
