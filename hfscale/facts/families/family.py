"""The columns of `families.toml`: properties of a model family that its `config.json` does not contain.

Most columns are a literal or the name of a config key. The others are a rule, a small function of the config in
`rules.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hfscale.facts.config_reader import ModelConfig
from hfscale.facts.families import rules

COMMON_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "qk_layernorm": False,
}
"""Defaults of most config classes for keys that a `config.json` may omit."""

Flag = bool | str | Callable[[ModelConfig], bool]
"""A literal, the config key with the value, or a rule."""

Count = int | Callable[[ModelConfig], int]
"""A literal or a rule."""


def decide(flag: Flag, config: ModelConfig) -> bool:
    """Return the value of a `Flag` for one config.

    Args:
        flag (`Flag`): a literal, the config key with the value, or a rule.
        config (`ModelConfig`): the model's config.

    Raises:
        UnsupportedModelError: a key that the flag reads is missing or wrong.
    """
    if callable(flag):
        return flag(config)
    return config.flag(flag) if isinstance(flag, str) else flag


def count(number: Count, config: ModelConfig) -> int:
    """Return the value of a `Count` for one config.

    Args:
        number (`Count`): a literal or a rule.
        config (`ModelConfig`): the model's config.

    Raises:
        UnsupportedModelError: a key that the rule reads is missing or wrong.
    """
    return number(config) if callable(number) else number


@dataclass(frozen=True, kw_only=True)
class ExpertFamily:
    """Describes the MLPs of a family's mixture-of-experts layers.

    transformers 5 stores the experts of a layer in two parameters: gate and up in one, down in the other.
    """

    width: str = "moe_intermediate_size"
    """Config key of one expert's inner width."""
    layers: Callable[[ModelConfig], tuple[bool, ...]] = rules.every_layer
    """Which layers are mixtures of experts; the others are dense."""
    stacked: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """Paths inside a layer of the two parameters with all experts."""
    gated: bool = True
    """Whether the activation of experts is gated."""
    bias: bool = False
    """Whether experts have biases."""
    router: str = "mlp.gate"
    """Path of the matrix that scores the experts."""
    router_bias: bool = False
    """Whether the router has a bias that is a parameter; a buffer is not counted."""
    router_scales: bool = False
    """Whether the router has a scale for each element of the hidden size and for each expert."""
    router_adapted: bool = False
    """Whether LoRA on all linear layers adapts the router although it leaves the routed experts out."""
    shared: tuple[str, ...] = ()
    """Paths of the matrices of the expert that every token passes, as in `Family.mlp`."""
    shared_width: Count = 0
    """Inner width of the shared expert; 0 if the config turns it off."""
    shared_bias: Flag = False
    """Whether the shared expert has biases."""
    shared_gate: str | None = None
    """Path of the matrix that weighs the shared expert, with one output per token."""
    adapted: bool = False
    """Whether LoRA on all linear layers adapts the routed experts and their router, but neither the shared expert nor
    dense MLPs (PEFT 0.21, utils/transformers_weight_conversion.py). Otherwise it is the other way round."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes one family, a row of the table. The defaults are those of Llama, and most rows change only a few."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the config class for keys that a `config.json` may omit, in addition to `COMMON_DEFAULTS`."""

    kv_heads: Callable[[ModelConfig], int] = rules.grouped_query
    """Number of key-value heads."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Paths inside a layer of the query, key and value projections, or of one projection for all three."""
    attention_out: str = "self_attn.o_proj"
    """Path of the attention's output projection."""
    qkv_bias: Flag = "attention_bias"
    """Whether the projections of `qkv` have biases."""
    attention_out_bias: Flag = "attention_bias"
    """Whether the output projection has a bias."""
    latent: bool = False
    """Multi-head latent attention (DeepSeek): low-rank queries, keys and values; `qkv` is then not used."""
    qk_norm: Literal["shared", "per_head"] | None = None
    """Norms of queries and keys: one weight of the head's width for all heads, or a weight for each head."""
    qk_norm_when: Flag = True
    """Whether the model has the norms of `qk_norm`."""
    qk_norm_bias: bool = False
    """Whether the norms of `qk_norm` have biases."""
    gated_attention: bool = False
    """Whether the query projection also makes a gate of the attention's output."""
    linear_attention: tuple[str, ...] = ()
    """Paths of the projections into the linear attention of the layers that have it instead, such as
    `linear_attn.in_proj_qkvz`; empty if none has. Their last letters say what they make: queries, keys and values, the
    gate z of the output, and for each head how much it writes (b) and keeps (a)."""
    linear_layers: Callable[[ModelConfig], tuple[bool, ...]] = rules.no_layer
    """Which layers have linear attention."""
    mamba: bool = False
    """Whether the layers of `linear_layers` are Mamba-2 layers."""
    is_either: bool = False
    """Whether a layer is either attention, a Mamba-2 layer, an MLP or a mixture of experts, by `layers_block_type`."""
    global_heads: bool = False
    """Whether the layers without a sliding window have key and query heads of another width and number."""
    refused: Callable[[ModelConfig], str | None] = rules.nothing
    """Why a config of the family cannot be sized, as a clause; None if it can."""
    sinks: bool = False
    """Whether each head has a learned attention sink, one parameter."""
    windows: Callable[[ModelConfig], tuple[int | None, ...]] = rules.full_attention
    """The sliding window of each layer in tokens, or None where it attends to all tokens."""

    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    """Paths of the dense MLP's matrices, with the projection back to the hidden size last. If a gated MLP has two
    paths, the first is of gate and up together."""
    gated: bool = True
    """Whether the activation is gated (SwiGLU, GeGLU)."""
    mlp_bias: Flag = False
    """Whether the dense MLP has biases."""
    ffn: str | Callable[[ModelConfig], int] = "intermediate_size"
    """Inner width of the dense MLP: a config key, or a rule."""
    activation_parameters: int = 0
    """Number of parameters of the MLP's activation function."""
    experts: ExpertFamily | None = None
    """The mixture of experts, in families that have one."""

    norms: Count = 2
    """Number of norms with the hidden size's width per layer."""
    norm_vectors: Count = 1
    """Number of parameter vectors of a norm: 0 for none, 1 for a weight, 2 for a weight and a bias."""
    final_norm: Flag = True
    """Whether a norm follows the last layer."""
    embedding_norm: bool = False
    """Whether a norm follows the embedding."""

    extra_positions: int | None = None
    """Rows of the learned position table in addition to `max_position_embeddings`; None if positions are not
    learned."""
    embedding_width: str = "hidden_size"
    """Config key of the token embedding's width."""
    head_bias: Flag = False
    """Whether the language-model head has a bias."""
    parallel_residual: Flag = False
    """Whether attention and MLP of a layer read the same input and are added together."""
