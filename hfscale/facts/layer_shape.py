"""The shape of one transformer layer: its matrices, attention heads, MLP and experts."""

from dataclasses import dataclass

from hfscale.errors import UnsupportedModelError
from hfscale.facts.config_reader import ModelConfig
from hfscale.facts.families.family import ExpertFamily, Family, count, decide


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Describes a weight matrix that tokens are multiplied by, or one such matrix per expert."""

    path: str
    """Its path inside the layer in transformers, such as `self_attn.q_proj`."""
    inputs: int
    """Width of its input."""
    outputs: int
    """Width of its output."""
    bias: bool = False
    """Whether it has a bias of `outputs` numbers."""
    copies: int = 1
    """Number of such matrices: the number of experts, or 1."""
    used: int = 1
    """Number of these matrices that one token passes: `top_k`, or 1."""

    @property
    def parameters(self) -> int:
        """Number of parameters of all copies."""
        return self.copies * self._parameters_of_one

    @property
    def idle_parameters(self) -> int:
        """Number of parameters of the copies that one token does not pass."""
        return (self.copies - self.used) * self._parameters_of_one

    @property
    def matmul_parameters(self) -> int:
        """Number of weights that one token is multiplied by, without biases."""
        return self.used * self.inputs * self.outputs

    @property
    def _parameters_of_one(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Describes the attention of a layer, which is the same in all layers of a model."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads; fewer than `heads` in grouped-query and multi-query attention."""
    head_dim: int
    """Width of a query or key head."""
    value_head_dim: int
    """Width of a value head; it differs from `head_dim` only in latent attention."""
    linears: tuple[Linear, ...]
    """Its projections."""
    qk_norm: bool
    """Whether queries and keys are normalised."""
    other_parameters: int
    """Parameters outside the projections: norms of queries, keys and latents, attention sinks."""

    @property
    def parameters(self) -> int:
        """Parameters of one layer's attention."""
        return sum(linear.parameters for linear in self.linears) + self.other_parameters

    @property
    def query_width(self) -> int:
        """Width of the attention's output, before its projection."""
        return self.heads * self.value_head_dim

    @property
    def kv_width(self) -> int:
        """Width of keys and values together."""
        return self.kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def expanding(self) -> tuple[Linear, ...]:
        """The projections that expand queries, keys and values from latents; empty without latent attention."""
        return tuple(linear for linear in self.linears if linear.path.endswith("_b_proj"))

    @property
    def latent_width(self) -> int:
        """Width of these latents."""
        return sum(linear.inputs for linear in self.expanding)


@dataclass(frozen=True, kw_only=True)
class MlpShape:
    """Describes the MLP of a dense layer."""

    ffn: int
    """Inner width."""
    gated: bool
    """Whether the activation is gated, so that two matrices project to the inner width."""
    linears: tuple[Linear, ...]
    """Its matrices."""
    other_parameters: int
    """Number of parameters of the activation function."""

    @property
    def parameters(self) -> int:
        """Parameters of one dense layer's MLP."""
        return sum(linear.parameters for linear in self.linears) + self.other_parameters


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Describes the MLP of a mixture-of-experts layer."""

    experts: int
    """Number of routed experts."""
    top_k: int
    """Number of routed experts that a token passes."""
    expert_ffn: int
    """Inner width of one routed expert."""
    shared_ffn: int
    """Inner width of all shared experts together, which every token passes; 0 without shared experts."""
    gated: bool
    """Whether the activation is gated."""
    groups: int
    """Number of groups of routed experts; 1 if the router does not use groups."""
    top_groups: int
    """Most groups that a token's experts come from (in DeepSeek-V3, arXiv 2412.19437, section 2.1.2, each group is on
    one node)."""
    router: tuple[Linear, ...]
    """The matrix that scores the experts, and the one that weighs the shared expert, if any."""
    linears: tuple[Linear, ...]
    """Matrices of the routed experts and of the shared expert."""
    adapted: bool = False
    """Whether LoRA on all linear layers adapts the routed experts (`ExpertFamily.adapted`)."""

    @property
    def parameters(self) -> int:
        """Parameters of one layer's experts including the shared expert, without the router."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router and shared-expert gate."""
        return sum(linear.parameters for linear in self.router)


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Holds the numbers of parameters of one layer, by part."""

    attention: int
    """Projections with their biases, norms of queries and keys, attention sinks."""
    mlp: int
    """The dense MLP, or all experts including the shared one."""
    router: int
    """Router and shared-expert gate; 0 in a dense layer."""
    norms: int
    """Norms with the width of the hidden size."""

    @property
    def total(self) -> int:
        """All of the layer's parameters."""
        return self.attention + self.mlp + self.router + self.norms


def attention_shape(config: ModelConfig, family: Family) -> AttentionShape:
    """Read the attention of a config.

    Args:
        config (`ModelConfig`): the model's config.
        family (`Family`): the row of its family.

    Raises:
        UnsupportedModelError: a key is missing or wrong, or the hidden size is not a multiple of the number of
            heads.
    """
    if family.latent:
        return _latent_attention(config)
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    kv_heads = family.kv_heads(config)
    head_dim = config.optional_count("head_dim") or _even_head_dim(config, hidden, heads)
    queries = heads * head_dim
    keys = kv_heads * head_dim
    widths = (queries, keys, keys) if len(family.qkv) == 3 else (queries + 2 * keys,)
    bias = decide(family.qkv_bias, config)
    out_bias = decide(family.attention_out_bias, config)
    projections = [
        Linear(path=path, inputs=hidden, outputs=width, bias=bias)
        for path, width in zip(family.qkv, widths, strict=True)
    ]
    projections.append(Linear(path=family.attention_out, inputs=queries, outputs=hidden, bias=out_bias))

    qk_norm = family.qk_norm is not None and decide(family.qk_norm_when, config)
    norm_width = 2 * head_dim if family.qk_norm == "shared" else queries + keys
    norm_vectors = 2 if family.qk_norm_bias else 1
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        linears=tuple(projections),
        qk_norm=qk_norm,
        other_parameters=(norm_width * norm_vectors if qk_norm else 0) + (heads if family.sinks else 0),
    )


def _even_head_dim(config: ModelConfig, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise UnsupportedModelError(
            f"config of model_type {config.model_type!r}: hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}; change one of them or set head_dim"
        )
    return hidden // heads


def _latent_attention(config: ModelConfig) -> AttentionShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) as it is computed in training.

    Keys and values are expanded from the latent, so that each query head has its own. Without `q_lora_rank` queries
    are projected directly.
    """
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    rotary = config.count("qk_rope_head_dim")
    value_dim = config.count("v_head_dim")
    plain = config.count("qk_nope_head_dim")
    q_rank = config.optional_count("q_lora_rank")
    kv_rank = config.count("kv_lora_rank")
    bias = config.flag("attention_bias")
    queries = heads * (plain + rotary)
    if q_rank:
        query_linears = [
            Linear(path="self_attn.q_a_proj", inputs=hidden, outputs=q_rank, bias=bias),
            Linear(path="self_attn.q_b_proj", inputs=q_rank, outputs=queries),
        ]
    else:
        query_linears = [Linear(path="self_attn.q_proj", inputs=hidden, outputs=queries)]
    return AttentionShape(
        heads=heads,
        kv_heads=heads,
        head_dim=plain + rotary,
        value_head_dim=value_dim,
        linears=(
            *query_linears,
            Linear(path="self_attn.kv_a_proj_with_mqa", inputs=hidden, outputs=kv_rank + rotary, bias=bias),
            Linear(path="self_attn.kv_b_proj", inputs=kv_rank, outputs=heads * (plain + value_dim)),
            Linear(path="self_attn.o_proj", inputs=heads * value_dim, outputs=hidden, bias=bias),
        ),
        qk_norm=False,
        other_parameters=(q_rank or 0) + kv_rank,
    )


def mlp_shape(config: ModelConfig, family: Family) -> MlpShape:
    """Read the MLP of a dense layer from a config.

    Args:
        config (`ModelConfig`): the model's config.
        family (`Family`): the row of its family.

    Raises:
        UnsupportedModelError: a key is missing or wrong.
    """
    ffn = config.count(family.ffn) if isinstance(family.ffn, str) else family.ffn(config)
    bias = decide(family.mlp_bias, config)
    return MlpShape(
        ffn=ffn,
        gated=family.gated,
        linears=_mlp_linears(family.mlp, config.count("hidden_size"), ffn, gated=family.gated, bias=bias),
        other_parameters=family.activation_parameters,
    )


def moe_shape(config: ModelConfig, family: ExpertFamily) -> MoeShape:
    """Read the MLP of a mixture-of-experts layer from a config.

    Args:
        config (`ModelConfig`): the model's config.
        family (`ExpertFamily`): the experts of its family, `Family.experts`.

    Raises:
        UnsupportedModelError: a key is missing or wrong, or a token passes more experts than there are.
    """
    hidden = config.count("hidden_size")
    experts = config.count("num_experts")
    top_k = config.count("num_experts_per_tok")
    width = config.count(family.width)
    if top_k > experts:
        raise UnsupportedModelError(
            f"config of model_type {config.model_type!r}: num_experts_per_tok {top_k} is more than the {experts} "
            "experts of a layer; set it to at most that"
        )
    groups = config.optional_count("n_group") or 1
    stacked = _mlp_linears(family.stacked, hidden, width, gated=True, bias=family.bias, copies=experts, used=top_k)
    router = [Linear(path=family.router, inputs=hidden, outputs=experts, bias=family.router_bias)]
    shared_width = count(family.shared_width, config)
    shared_bias = decide(family.shared_bias, config)
    shared = _mlp_linears(family.shared, hidden, shared_width, gated=True, bias=shared_bias) if shared_width else ()
    if family.shared_gate is not None:
        router.append(Linear(path=family.shared_gate, inputs=hidden, outputs=1))
    return MoeShape(
        experts=experts,
        top_k=top_k,
        expert_ffn=width,
        shared_ffn=shared_width,
        gated=True,
        groups=groups,
        top_groups=min(groups, config.optional_count("topk_group") or groups),
        router=tuple(router),
        linears=stacked + shared,
        adapted=family.adapted,
    )


def _mlp_linears(
    paths: tuple[str, ...], hidden: int, ffn: int, *, gated: bool, bias: bool, copies: int = 1, used: int = 1
) -> tuple[Linear, ...]:
    """The matrices of an MLP. If a gated MLP has two paths, the first is of gate and up together."""
    *upward, down = paths
    width = 2 * ffn if gated and len(upward) == 1 else ffn
    return (
        *(Linear(path=up, inputs=hidden, outputs=width, bias=bias, copies=copies, used=used) for up in upward),
        Linear(path=down, inputs=ffn, outputs=hidden, bias=bias, copies=copies, used=used),
    )
