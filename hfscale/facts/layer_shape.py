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
    """Describes the attention of a layer."""

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
    def values_are_keys(self) -> bool:
        """Whether one projection makes keys and values (Gemma 4's layers without a window)."""
        return not any(linear.path.endswith("v_proj") for linear in self.linears) and any(
            linear.path.endswith("k_proj") for linear in self.linears
        )

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
class LinearAttentionShape:
    """Describes the gated delta rule of a layer (Yang et al., arXiv 2412.06464).

    A state of fixed size per head stands for all earlier tokens, so that neither memory nor time per token grow with
    the sequence. Queries, keys and values pass a short convolution first.
    """

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values, a multiple of `key_heads`; each has a state."""
    head_dim: int
    """Width of a query or key head."""
    value_head_dim: int
    """Width of a value head."""
    kernel: int
    """Tokens that the convolution reaches."""
    linears: tuple[Linear, ...]
    """Its projections."""

    @property
    def key_width(self) -> int:
        """Width of all keys."""
        return self.key_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all values, and of the output before its projection."""
        return self.value_heads * self.value_head_dim

    @property
    def convolved_width(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_width + self.value_width

    @property
    def parameters(self) -> int:
        """Parameters of one layer: projections, convolution, decay and its bias per head, norm of the output."""
        convolution = self.kernel * self.convolved_width
        return (
            sum(linear.parameters for linear in self.linears)
            + convolution
            + 2 * self.value_heads
            + self.value_head_dim
        )

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a forward pass per token outside of the projections.

        The state of a head takes four products of a matrix of `head_dim` x `value_head_dim`: two to correct it, one to
        decay it and one to read it; and the convolution (Megatron-LM, training/training.py,
        `num_floating_point_operations`, `gated_delta_net`).
        """
        states = 4 * self.value_heads * self.head_dim * self.value_head_dim
        return 2 * (states + self.kernel * self.convolved_width)


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """Describes a Mamba-2 layer (Dao and Gu, arXiv 2405.21060), whose state has a fixed size."""

    heads: int
    """Heads."""
    head_dim: int
    """Width of a head."""
    groups: int
    """Groups of heads that share B and C, which write and read the state."""
    state: int
    """Elements of the state for each element of a head."""
    kernel: int
    """Tokens that the convolution reaches."""
    has_conv_bias: bool
    """Whether the convolution has a bias."""
    chunk: int
    """Tokens that are computed at once."""
    linears: tuple[Linear, ...]
    """Its projections."""

    @property
    def inner_width(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved_width(self) -> int:
        """Width of the heads, B and C together."""
        return self.inner_width + 2 * self.groups * self.state

    @property
    def parameters(self) -> int:
        """Parameters of one layer: projections, convolution, three per head, norm of the output."""
        convolution = self.convolved_width * (self.kernel + self.has_conv_bias)
        return (
            sum(linear.parameters for linear in self.linears)
            + convolution
            + 3 * self.heads
            + self.inner_width
        )

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a forward pass per token outside of the projections (Megatron-LM, training/training.py,
        `mamba_layer_flops`)."""
        return 7 * self.inner_width * self.state


Recurrent = LinearAttentionShape | MambaShape
"""What carries a state along the sequence."""
Mixer = AttentionShape | Recurrent
"""What mixes the tokens of a layer."""


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
    router_scales: int = 0
    """Parameters of the router besides its matrix."""
    router_adapted: bool = False
    """Whether LoRA on all linear layers adapts the router too (`ExpertFamily.router_adapted`)."""

    @property
    def parameters(self) -> int:
        """Parameters of one layer's experts including the shared expert, without the router."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router and shared-expert gate."""
        return sum(linear.parameters for linear in self.router) + self.router_scales


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


def attention_shape(
    config: ModelConfig, family: Family, *, is_global: bool = False
) -> AttentionShape:
    """Read the attention of a config.

    Args:
        config (`ModelConfig`): the model's config.
        family (`Family`): the row of its family.
        is_global (`bool`): whether to read that of layers with `Family.global_heads`.

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
    has_values = True
    if is_global:
        head_dim, kv_heads, has_values = _global_heads(config, kv_heads)
    queries = heads * head_dim
    keys = kv_heads * head_dim
    gate = family.gated_attention * queries
    # One matrix may compute queries, keys and values: then it has the outputs of all three.
    widths: tuple[int, ...] = (queries + gate, keys, keys)
    if len(family.qkv) != 3:
        widths = (sum(widths),)
    bias = decide(family.qkv_bias, config)
    out_bias = decide(family.attention_out_bias, config)
    projections = [
        Linear(path=path, inputs=hidden, outputs=width, bias=bias)
        for path, width in zip(family.qkv, widths, strict=True)
        if has_values or path != family.qkv[-1]
    ]
    projections.append(
        Linear(path=family.attention_out, inputs=queries, outputs=hidden, bias=out_bias)
    )

    qk_norm = family.qk_norm is not None and decide(family.qk_norm_when, config)
    other_parameters = 0
    if qk_norm:
        norm_width = 2 * head_dim if family.qk_norm == "shared" else queries + keys
        norm_vectors = 2 if family.qk_norm_bias else 1
        other_parameters = norm_width * norm_vectors
    if family.sinks:
        other_parameters += heads
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        linears=tuple(projections),
        qk_norm=qk_norm,
        other_parameters=other_parameters,
    )


def _global_heads(config: ModelConfig, kv_heads: int) -> tuple[int, int, bool]:
    """Return width and number of the key heads of Gemma 4's layers that attend to all tokens, and whether they have a
    projection of values: with `attention_k_eq_v` the keys are the values, and their number is another one."""
    shares = config.flag("attention_k_eq_v")
    # transformers saves the two under the numbers of the layers
    saved = config.table("per_layer_config")
    if saved:
        values = next(iter(saved.values()))
        return values["head_dim"], values.get("num_key_value_heads", kv_heads), not shares
    stated = config.optional_count("num_global_key_value_heads") if shares else None
    return config.count("global_head_dim"), stated or kv_heads, not shares


def linear_attention_shape(config: ModelConfig, family: Family) -> LinearAttentionShape:
    """Read the linear attention of a config.

    Args:
        config (`ModelConfig`): the model's config.
        family (`Family`): the row of its family.

    Raises:
        UnsupportedModelError: a key is missing or wrong, or the number of value heads is not a multiple of that of key
            heads.
    """
    hidden = config.count("hidden_size")
    key_heads = config.count("linear_num_key_heads")
    value_heads = config.count("linear_num_value_heads")
    if value_heads % key_heads:
        raise UnsupportedModelError(
            f"config of model_type {config.model_type!r}: linear_num_value_heads {value_heads} is not a multiple of "
            f"linear_num_key_heads {key_heads}; change one of them"
        )
    head_dim = config.count("linear_key_head_dim")
    value_head_dim = config.count("linear_value_head_dim")
    keys = key_heads * head_dim
    values = value_heads * value_head_dim
    widths = {"q": keys, "k": keys, "v": values, "z": values, "b": value_heads, "a": value_heads}
    projections = [
        Linear(
            path=path,
            inputs=hidden,
            outputs=sum(widths[letter] for letter in path.rpartition("_")[2]),
        )
        for path in family.linear_attention
    ]
    return LinearAttentionShape(
        key_heads=key_heads,
        value_heads=value_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        kernel=config.count("linear_conv_kernel_dim"),
        linears=(*projections, Linear(path="linear_attn.out_proj", inputs=values, outputs=hidden)),
    )


def mamba_shape(config: ModelConfig) -> MambaShape:
    """Read the Mamba-2 layers of a config.

    Args:
        config (`ModelConfig`): the model's config.

    Raises:
        UnsupportedModelError: a key is missing or wrong.
    """
    hidden = config.count("hidden_size")
    heads = config.count("mamba_num_heads")
    inner = heads * config.count("mamba_head_dim")
    groups = config.count("n_groups")
    state = config.count("ssm_state_size")
    bias = config.flag("use_bias")
    width = 2 * inner + 2 * groups * state + heads
    return MambaShape(
        heads=heads,
        head_dim=config.count("mamba_head_dim"),
        groups=groups,
        state=state,
        kernel=config.count("conv_kernel"),
        has_conv_bias=config.flag("use_conv_bias"),
        chunk=config.count("chunk_size"),
        linears=(
            Linear(path="mixer.in_proj", inputs=hidden, outputs=width, bias=bias),
            Linear(path="mixer.out_proj", inputs=inner, outputs=hidden, bias=bias),
        ),
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
            Linear(
                path="self_attn.kv_a_proj_with_mqa",
                inputs=hidden,
                outputs=kv_rank + rotary,
                bias=bias,
            ),
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
        linears=_mlp_linears(
            family.mlp, config.count("hidden_size"), ffn, gated=family.gated, bias=bias
        ),
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
    gated = family.gated
    stacked = _mlp_linears(
        family.stacked, hidden, width, gated=gated, bias=family.bias, copies=experts, used=top_k
    )
    router = [Linear(path=family.router, inputs=hidden, outputs=experts, bias=family.router_bias)]
    shared_width = count(family.shared_width, config)
    shared_bias = decide(family.shared_bias, config)
    shared = (
        _mlp_linears(family.shared, hidden, shared_width, gated=gated, bias=shared_bias)
        if shared_width
        else ()
    )
    if family.shared_gate is not None:
        router.append(Linear(path=family.shared_gate, inputs=hidden, outputs=1))
    return MoeShape(
        experts=experts,
        top_k=top_k,
        expert_ffn=width,
        shared_ffn=shared_width,
        gated=gated,
        groups=groups,
        top_groups=min(groups, config.optional_count("topk_group") or groups),
        router=tuple(router),
        linears=stacked + shared,
        adapted=family.adapted,
        router_scales=hidden + experts if family.router_scales else 0,
        router_adapted=family.router_adapted,
    )


def _mlp_linears(
    paths: tuple[str, ...],
    hidden: int,
    ffn: int,
    *,
    gated: bool,
    bias: bool,
    copies: int = 1,
    used: int = 1,
) -> tuple[Linear, ...]:
    """The matrices of an MLP. If a gated MLP has two paths, the first is of gate and up together."""
    *upward, down = paths
    width = 2 * ffn if gated and len(upward) == 1 else ffn
    return (
        *(
            Linear(path=up, inputs=hidden, outputs=width, bias=bias, copies=copies, used=used)
            for up in upward
        ),
        Linear(path=down, inputs=ffn, outputs=hidden, bias=bias, copies=copies, used=used),
    )
