"""The shape of a language model, read from its `config.json`: parameters, FLOPs per token, LoRA parameters.

Numbers of parameters are exact: they equal those of `AutoModelForCausalLM.from_config` in transformers 5.23, with tied
weights counted once. Multi-token-prediction heads of a checkpoint are not counted, because transformers does not build
them.

FLOPs are those of the matrix products, where a multiply-add counts as 2. Norms, activation functions, softmax and
rotary positions are left out, as in PaLM (arXiv 2204.02311, appendix B), Megatron-LM and torchtitan.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.facts.config_reader import ModelConfig, load_config
from hfscale.facts.families import family_of
from hfscale.facts.families.family import COMMON_DEFAULTS, Family, count, decide
from hfscale.facts.families.rules import block_types
from hfscale.facts.layer_shape import (
    AttentionShape,
    LayerParameters,
    Linear,
    LinearAttentionShape,
    MambaShape,
    Mixer,
    MlpShape,
    MoeShape,
    Recurrent,
    attention_shape,
    linear_attention_shape,
    mamba_shape,
    mlp_shape,
    moe_shape,
)

AttentionCount = Literal["full", "causal"]
"""How the FLOPs of attention are counted: `full` includes the masked half (PaLM, torchtitan, nanotron, llm-foundry),
`causal` does not (Megatron-LM)."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Describes the layers of a model that cost the same."""

    share: float
    """Fraction of the model's layers that are of this kind."""
    linears: tuple[Linear, ...]
    """The matrices that a token is multiplied by."""
    mixer: Mixer | None
    """Its attention, or what it has instead; None if it has an MLP only."""
    window: int | None
    """Sliding window in tokens; None where the layer attends to all tokens."""
    mlp_width: int
    """Sum of the inner widths of the MLPs that one token passes."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Describes the properties of a language model that determine its memory and time.

    Create it with `ModelShape.from_config`.
    """

    model_type: str
    """The model family, as in `config.json`."""
    layers: int
    """Number of layers."""
    hidden: int
    """Width of the residual stream."""
    vocab: int
    """Rows of the token embedding, including padding."""
    tied: bool
    """Whether the language-model head shares the token embedding's weight."""

    attention: AttentionShape
    """Attention: heads, widths, projections. It is that of every layer but `other_layers`."""
    mlp: MlpShape | None
    """MLP of the dense layers; None if all layers are mixtures of experts."""
    moe: MoeShape | None
    """MLP of the mixture-of-experts layers; None in a dense model."""
    moe_layers: tuple[bool, ...]
    """For each layer, whether it is a mixture of experts."""
    windows: tuple[int | None, ...]
    """For each layer, the sliding window in tokens, including the token itself; None where it attends to all
    tokens."""
    parallel_residual: bool
    """Whether attention and MLP of a layer read the same input and are added together."""

    norms_per_layer: int
    """Number of norms with the hidden size's width per layer."""
    norm_parameters: int
    """Parameters of one such norm: 0, `hidden` (weight) or `2 x hidden` (weight and bias)."""
    embedding_norm: bool
    """Whether a norm follows the embedding."""
    final_norm: bool
    """Whether a norm follows the last layer."""
    embedding_width: int
    """Width of the token embedding; if it is not `hidden`, two matrices convert between them (OPT-350m)."""
    learned_positions: int
    """Rows of the learned position table; 0 if positions are computed."""
    max_positions: int | None
    """Longest sequence that the config allows, in tokens; None where it does not say."""
    head_bias: bool
    """Whether the language-model head has a bias, of `vocab` parameters."""
    other_attention: Mixer | None = None
    """What some layers have instead of `attention`: linear attention, a Mamba-2 layer, or other heads; None if none
    has."""
    other_layers: tuple[bool, ...] = ()
    """For each layer, whether it has `other_attention`; empty if none has."""
    mlp_only: tuple[bool, ...] = ()
    """For each layer, whether it has no attention; empty where each layer has both attention and an MLP. The others
    then have no MLP."""

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path) -> "ModelShape":
        """Read a model's shape from its config.

        Args:
            source (`Mapping`, `str` or `Path`): the parsed `config.json`, its path, or its folder. Missing optional
                keys have transformers' defaults; sizes must be present. If it is an image-and-text model whose
                `text_config` is known (`gemma3`), only the language model is read.

        Raises:
            ConfigFileError: there is no such file, or it is not a model config.
            UnsupportedModelError: the family is unknown, or a key is missing or wrong.
        """
        values = load_config(source)
        family = family_of(values["model_type"])
        config = ModelConfig(values, defaults={**COMMON_DEFAULTS, **family.defaults})
        layers = config.count("num_hidden_layers")
        hidden = config.count("hidden_size")
        moe = None
        moe_layers = (False,) * layers
        if family.experts:
            moe_layers = family.experts.layers(config)
        if family.experts and any(moe_layers):
            moe = moe_shape(config, family.experts)
        windows = family.windows(config)
        other_attention, other_layers = _other_attention(config, family, windows)
        blocks = block_types(config) if family.is_either else []
        has_dense = "mlp" in blocks if blocks else not all(moe_layers)
        # Families differ in which keys they have: what a config does not say is decided by its family's rules.
        positions = 0
        if family.extra_positions is not None:
            positions = config.count("max_position_embeddings") + family.extra_positions
        return cls(
            model_type=config.model_type,
            layers=layers,
            hidden=hidden,
            vocab=config.count("vocab_size"),
            tied=config.flag("tie_word_embeddings"),
            attention=attention_shape(config, family),
            mlp=mlp_shape(config, family) if has_dense else None,
            moe=moe,
            moe_layers=moe_layers,
            windows=windows,
            parallel_residual=decide(family.parallel_residual, config),
            norms_per_layer=count(family.norms, config),
            norm_parameters=hidden * count(family.norm_vectors, config),
            embedding_norm=family.embedding_norm,
            final_norm=decide(family.final_norm, config),
            embedding_width=config.optional_count(family.embedding_width) or hidden,
            learned_positions=positions,
            max_positions=config.optional_count("max_position_embeddings"),
            head_bias=decide(family.head_bias, config),
            other_attention=other_attention,
            other_layers=other_layers,
            mlp_only=tuple(kind in ("mlp", "moe") for kind in blocks),
        )

    @cached_property
    def mixers(self) -> tuple[Mixer | None, ...]:
        """For each layer, its attention, what it has instead, or None if it has an MLP only."""
        others = self.other_layers or (False,) * self.layers
        without = self.mlp_only or (False,) * self.layers
        found: list[Mixer | None] = []
        for is_other, is_mlp in zip(others, without, strict=True):
            if is_mlp:
                found.append(None)
            elif is_other:
                found.append(self.other_attention)
            else:
                found.append(self.attention)
        return tuple(found)

    @property
    def recurrent(self) -> Recurrent | None:
        """What carries a state along the sequence in some layers; None if nothing does."""
        other = self.other_attention
        return other if isinstance(other, LinearAttentionShape | MambaShape) else None

    @cached_property
    def recurrent_share(self) -> float:
        """Fraction of the layers that carry a state along the sequence."""
        if self.recurrent is None:
            return 0.0
        return sum(self.other_layers) / self.layers

    @cached_property
    def dense_share(self) -> float:
        """Fraction of the layers that have a dense MLP."""
        with_mlp = sum(self.mlp_only) if self.mlp_only else self.layers
        return (with_mlp - sum(self.moe_layers)) / self.layers

    # -- parameters ---------------------------------------------------------------------------------------------------

    def layer_parameters(self, layer: int) -> LayerParameters:
        """Count the parameters of one layer by part.

        Args:
            layer (`int`): index of the layer, from 0.

        Raises:
            IndexError: there is no such layer.
        """
        mlp = router = 0
        # Where layers have attention or an MLP, a mixture of experts is such an MLP too.
        if self.moe_layers[layer] and self.moe:
            mlp = self.moe.parameters
            router = self.moe.router_parameters
        elif (
            self.mlp and not self.moe_layers[layer] and (not self.mlp_only or self.mlp_only[layer])
        ):
            mlp = self.mlp.parameters
        mixer = self.mixers[layer]
        return LayerParameters(
            attention=mixer.parameters if mixer is not None else 0,
            mlp=mlp,
            router=router,
            norms=self.norms_per_layer * self.norm_parameters,
        )

    @cached_property
    def layers_parameters(self) -> int:
        """Parameters of all layers together."""
        return sum(self.layer_parameters(layer).total for layer in range(self.layers))

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer: token embedding, learned positions, norm and projection after them."""
        tokens = self.vocab * self.embedding_width
        positions = self.learned_positions * self.hidden
        norm = self.embedding_norm * self.norm_parameters
        projections = sum(linear.parameters for linear in self._embedding_linears)
        return tokens + positions + norm + projections

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm after the last layer."""
        return self.final_norm * self.norm_parameters

    @property
    def lm_head_parameters(self) -> int:
        """Parameters of the head that are not shared with the embedding: of a tied head only its bias, if any."""
        shared = self.tied * self.vocab * self.embedding_width
        return sum(linear.parameters for linear in self._head_linears) - shared

    @property
    def total_parameters(self) -> int:
        """All parameters, with tied weights counted once."""
        ends = self.embedding_parameters + self.final_norm_parameters + self.lm_head_parameters
        return self.layers_parameters + ends

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but those of the experts that it does not pass."""
        return self.total_parameters - sum(linear.idle_parameters for linear in self._layer_linears)

    @cached_property
    def quantized_parameters(self) -> int:
        """Parameters that bitsandbytes stores in 4 bits: the weights of linear layers outside the head.

        It replaces `nn.Linear` and `Conv1D` alone (transformers 5.23, integrations/bitsandbytes.py); the experts of a
        layer are one parameter each for all of them, and so are most routers.
        """
        return sum(
            one.inputs * one.outputs for one in self._layer_linears if self.is_quantized(one)
        )

    @cached_property
    def largest_quantized(self) -> int:
        """Weights of the largest matrix that bitsandbytes stores in 4 bits."""
        sizes = (one.inputs * one.outputs for one in self._layer_linears if self.is_quantized(one))
        return max(sizes, default=0)

    def is_quantized(self, linear: Linear) -> bool:
        """Return whether bitsandbytes stores a matrix in 4 bits.

        Args:
            linear (`Linear`): a matrix of a layer.
        """
        if linear.copies > 1:
            return False
        moe = self.moe
        return moe is None or linear.path != moe.router[0].path or moe.router_adapted

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer; those that a tied head shares with the embedding are not counted."""
        return self.lm_head_parameters + self.final_norm_parameters

    # -- the average layer --------------------------------------------------------------------------------------------

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers, grouped by what they cost."""
        kinds = []
        layers = zip(self.moe_layers, self.windows, self.mixers, strict=True)
        for (is_moe, window, mixer), number in Counter(layers).items():
            width = 0
            if is_moe and self.moe:
                width = self.moe.top_k * self.moe.expert_ffn + self.moe.shared_ffn
            elif not is_moe and self.mlp and (mixer is None or not self.mlp_only):
                width = self.mlp.ffn
            linears = self._linears_of(mixer, is_moe)
            share = number / self.layers
            kinds.append(
                LayerKind(share=share, linears=linears, mixer=mixer, window=window, mlp_width=width)
            )
        return tuple(kinds)

    @cached_property
    def mlp_width(self) -> float:
        """Sum of the inner widths of the MLPs that one token passes, in an average layer."""
        return sum(kind.share * kind.mlp_width for kind in self.layer_kinds)

    @cached_property
    def output_width(self) -> float:
        """Sum of the widths of the outputs of all matrix products that one token passes, in an average layer."""
        return sum(
            k.share * sum(linear.used * linear.outputs for linear in k.linears)
            for k in self.layer_kinds
        )

    @property
    def gated(self) -> bool:
        """Whether the activation of the MLPs is gated."""
        mlp = self.mlp or self.moe
        return mlp is not None and mlp.gated

    @property
    def top_k(self) -> int:
        """Number of routed experts that a token passes; 1 in a dense model."""
        return self.moe.top_k if self.moe else 1

    @cached_property
    def moe_share(self) -> float:
        """Fraction of the layers that are mixtures of experts."""
        return sum(self.moe_layers) / self.layers

    @cached_property
    def mean_layer_parameters(self) -> float:
        """Parameters of an average layer."""
        return self.layers_parameters / self.layers

    @cached_property
    def mean_expert_parameters(self) -> float:
        """Parameters of an average layer's routed experts."""
        experts = self.moe.linears if self.moe else ()
        return self.moe_share * sum(linear.parameters for linear in experts if linear.copies > 1)

    @cached_property
    def head_layers(self) -> float:
        """Multiply-accumulates of the head relative to those of an average layer."""
        return self.vocab * self.embedding_width / self._mean_products

    @cached_property
    def expanding_share(self) -> float:
        """Fraction of an average layer's matrix products that expands the latents of latent attention."""
        return (
            sum(linear.matmul_parameters for linear in self.attention.expanding)
            / self._mean_products
        )

    @cached_property
    def _mean_products(self) -> float:
        """Multiply-accumulates of an average layer for a token."""
        return sum(
            k.share * sum(linear.matmul_parameters for linear in k.linears)
            for k in self.layer_kinds
        )

    # -- FLOPs --------------------------------------------------------------------------------------------------------

    @cached_property
    def matmul_parameters(self) -> int:
        """Number of weights that one token is multiplied by, N_matmul.

        The head is counted even if it is tied, the embedding look-up is not. `top_k` experts and the shared one are
        counted.
        """
        ends = (*self._embedding_linears, *self._head_linears)
        return self._layer_matmul_parameters + sum(linear.matmul_parameters for linear in ends)

    def forward_flops_per_token(
        self, seq_len: float, *, attention: AttentionCount = "full"
    ) -> float:
        """Compute the FLOPs of a forward pass per token: 2 N_matmul + attention.

        Args:
            seq_len (`float`): tokens per sequence; for packed sequences of lengths l, their mean over tokens,
                sum(l^2) / sum(l).
            attention (`str`): how the FLOPs of attention are counted: `full` or `causal`, see `AttentionCount`.

        Raises:
            UsageError: `seq_len` or `attention` is out of range.
        """
        return 2 * self.matmul_parameters + self._attention_flops(seq_len, attention)

    def flops_per_token(
        self,
        seq_len: float,
        *,
        attention: AttentionCount = "full",
        lora_parameters: int | None = None,
    ) -> float:
        """Compute the model FLOPs of a training step per token, from which MFU is computed.

        Training all parameters takes 6 N_matmul + 12 c L H d S (PaLM, arXiv 2204.02311, appendix B), with c = 1 for
        `full` and 1/2 for `causal`. With LoRA the frozen weights need no gradient of their own: 4 N_matmul + 6 N_lora
        and the same attention.

        The attention term is the sum over layers of 3 x 2 H (d + d_v) S_layer, where d and d_v are the widths of a key
        and a value head (2d = d + d_v outside latent attention), and S_layer is the number of keys per query. With
        w = min(S, window of the layer), S_layer is w for `full` and w (1 - w / 2S) for `causal`: the mean over a
        sequence of min(i, w) keys, which is S/2 without a window.

        Args:
            seq_len (`float`): tokens per sequence; for packed sequences of lengths l, their mean over tokens,
                sum(l^2) / sum(l).
            attention (`str`): how the FLOPs of attention are counted: `full` or `causal`, see `AttentionCount`.
            lora_parameters (`int`, *optional*): number of trained LoRA parameters (`ModelShape.lora_parameters`) where
                all else is frozen; None where all parameters train.

        Raises:
            UsageError: `seq_len` or `attention` is out of range.
        """
        attention_flops = 3 * self._attention_flops(seq_len, attention)
        if lora_parameters is None:
            return 6 * self.matmul_parameters + attention_flops
        return 4 * self.matmul_parameters + 6 * lora_parameters + attention_flops

    def hardware_flops_per_token(
        self,
        seq_len: float,
        *,
        attention: AttentionCount = "full",
        lora_parameters: int | None = None,
    ) -> float:
        """Compute the FLOPs per token of a training step with full activation recomputation, for HFU.

        It adds to `flops_per_token` a second forward pass of the layers (8/6 of their FLOPs when all parameters train:
        Korthikanti et al., arXiv 2205.05198, appendix A), including attention and LoRA, but not the head. Without
        recomputation, HFU is MFU.

        Args:
            seq_len (`float`): tokens per sequence; for packed sequences of lengths l, their mean over tokens,
                sum(l^2) / sum(l).
            attention (`str`): how the FLOPs of attention are counted: `full` or `causal`, see `AttentionCount`.
            lora_parameters (`int`, *optional*): number of trained LoRA parameters (`ModelShape.lora_parameters`) where
                all else is frozen; None where all parameters train.

        Raises:
            UsageError: `seq_len` or `attention` is out of range.
        """
        again = 2 * (self._layer_matmul_parameters + (lora_parameters or 0))
        model_flops = self.flops_per_token(
            seq_len, attention=attention, lora_parameters=lora_parameters
        )
        return model_flops + again + self._attention_flops(seq_len, attention)

    def _attention_flops(self, seq_len: float, attention: AttentionCount) -> float:
        """FLOPs of one forward pass of attention scores, their sum of values and linear attention, of all layers, per
        token."""
        if not seq_len > 0:
            raise UsageError(f"seq_len is {seq_len}: it must be above 0")
        if attention not in ("full", "causal"):
            raise UsageError(f"attention is {attention!r}: use full or causal")
        flops = 0.0
        for window, mixer in zip(self.windows, self.mixers, strict=True):
            if mixer is None:
                continue
            if not isinstance(mixer, AttentionShape):
                flops += mixer.flops_per_token
                continue
            keys = seq_len if window is None else min(seq_len, window)
            if attention == "causal":
                keys *= 1 - keys / (2 * seq_len)
            flops += 2 * mixer.heads * (mixer.head_dim + mixer.value_head_dim) * keys
        return flops

    # -- LoRA ---------------------------------------------------------------------------------------------------------

    def lora_parameters(
        self,
        r: int,
        target_modules: Iterable[str] | Literal["all-linear"] = "all-linear",
        *,
        active: bool = False,
    ) -> int:
        """Count the parameters of rank-`r` LoRA adapters.

        Each adapted matrix has r x (inputs + outputs) of them (arXiv 2106.09685), and each expert's has its own. The
        number equals that of PEFT 0.21. With names of modules, adapters of the MLPs of a mixture of experts cannot be
        counted.

        Args:
            r (`int`): rank.
            target_modules (`Iterable[str]`): module names as in PEFT's `LoraConfig` (`q_proj`, `mlp.down_proj`), or
                `all-linear`: every linear layer but the head, and the experts where PEFT adapts them.
            active (`bool`): whether to count only the adapters that a token passes, for FLOPs.

        Raises:
            UsageError: `r` is below 1, or a name matches no module, experts or a router.
        """
        if r < 1:
            raise UsageError(f"LoRA rank is {r}: it must be at least 1, such as 16")
        inside = (*self._layer_linears, *self._embedding_linears, *self._head_linears)
        if target_modules == "all-linear":
            # For PEFT, all linear layers are those but the head.
            left_out = {"lm_head"} | self._paths_without_adapter
            adapted = [linear for linear in inside if linear.path not in left_out]
            return sum(self._adapter(linear, r, active=active) for linear in adapted)
        if isinstance(target_modules, str):
            raise UsageError(
                f"target_modules is {target_modules!r}: give a list of names, or all-linear"
            )
        chosen = {path for name in target_modules for path in self._paths_named(name)}
        experts = chosen & {linear.path for linear in self._mlp_linears(is_moe=True)}
        if experts:
            raise UsageError(
                f"LoRA on {', '.join(sorted(experts))} of a mixture of experts is not counted: "
                f"target attention, such as {self.attention.linears[0].path.rpartition('.')[2]}"
            )
        return sum(
            r * (linear.inputs + linear.outputs) for linear in inside if linear.path in chosen
        )

    def adapted_widths(
        self, target_modules: Iterable[str] | Literal["all-linear"] = "all-linear"
    ) -> tuple[float, float, float, int]:
        """Return the inputs, outputs and weights of an average layer's matrices with adapters, without the routed
        experts, and the weights of the largest of them.

        Args:
            target_modules (`Iterable[str]`): as in `lora_parameters`.
        """
        if target_modules == "all-linear":
            left_out = self._paths_without_adapter
            chosen = {linear.path for linear in self._layer_linears} - left_out
        else:
            chosen = {path for name in target_modules for path in self._paths_named(name)}
        adapted = [one for one in self._layer_linears if one.path in chosen and one.copies == 1]
        inputs = sum(one.inputs for one in adapted) / self.layers
        outputs = sum(one.outputs for one in adapted) / self.layers
        weights = [one.inputs * one.outputs for one in adapted]
        return inputs, outputs, sum(weights) / self.layers, max(weights, default=0)

    def unadapted(
        self, target_modules: Iterable[str], kind: LayerKind
    ) -> tuple[list[Linear], list[Linear]]:
        """Return the dense matrices of a kind of layers that adapters on all linear layers would have, by whether one
        of `target_modules` has an adapter too: first those that have, then those that have not.

        Args:
            target_modules (`Iterable[str]`): as in `lora_parameters`.
            kind (`LayerKind`): the layers.
        """
        chosen: set[str] = set()
        for name in target_modules:
            chosen.update(self._paths_named(name))
        left_out = set(self._paths_without_adapter)
        # A router that is a parameter, and no linear layer
        if self.moe is not None and not self.moe.router_adapted:
            left_out.add(self.moe.router[0].path)
        adapted: list[Linear] = []
        others: list[Linear] = []
        for one in kind.linears:
            if one.copies > 1 or one.path in left_out:
                continue
            if one.path in chosen:
                adapted.append(one)
            else:
                others.append(one)
        return adapted, others

    @property
    def _paths_without_adapter(self) -> set[str]:
        """Paths that LoRA on all linear layers leaves out: dense MLPs and shared experts where PEFT adapts the routed
        ones, otherwise routed experts and their router; the output of Mamba-2 layers, which PEFT refuses."""
        refused: set[str] = set()
        if isinstance(self.recurrent, MambaShape):
            refused.add("mixer.out_proj")
        if self.moe is None:
            return refused
        # PEFT adapts either the experts of such a model or what every token passes, by its family.
        if self.moe.adapted:
            left_out = [linear for linear in self.moe.linears if linear.copies == 1]
            left_out += self.mlp.linears if self.mlp else ()
        else:
            left_out = [linear for linear in self.moe.linears if linear.copies > 1]
            left_out += () if self.moe.router_adapted else self.moe.router[:1]
        return refused | {linear.path for linear in left_out}

    def _adapter(self, linear: Linear, r: int, *, active: bool) -> int:
        """Parameters of the adapters of all copies of a matrix, or of those that a token passes. Experts' gate and up,
        which are one matrix, have twice the rank (PEFT 0.21, `_MOE_FUSED_TARGETS`)."""
        is_expert = linear.copies > 1
        if is_expert and self.moe is not None and linear.outputs == 2 * self.moe.expert_ffn:
            r *= 2
        copies = linear.used if active else linear.copies
        return copies * r * (linear.inputs + linear.outputs)

    @property
    def common_kv_heads(self) -> int:
        """Greatest common divisor of the key-value heads of all layers, which tensor parallelism splits: Gemma 4 has
        fewer of them in its layers with global attention."""
        attentions = (mixer for mixer in self.mixers if isinstance(mixer, AttentionShape))
        return math.gcd(*(mixer.kv_heads for mixer in attentions)) or self.attention.kv_heads

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """Names of the matrices of the attention, as PEFT's `LoraConfig` takes them."""
        attentions = (mixer for mixer in self.mixers if isinstance(mixer, AttentionShape))
        return tuple(
            sorted({one.path.rpartition(".")[2] for mixer in attentions for one in mixer.linears})
        )

    def modules_here(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return those of the names that a matrix of these layers has: of a hybrid, some layers have others.

        Args:
            modules (`Iterable[str]`): names as PEFT's `LoraConfig` takes them.
        """
        paths = self._linear_paths
        return tuple(
            name
            for name in modules
            if any(path == name or path.endswith(f".{name}") for path in paths)
        )

    @property
    def _linear_paths(self) -> set[str]:
        linears = (*self._layer_linears, *self._embedding_linears, *self._head_linears)
        return {linear.path for linear in linears}

    def _paths_named(self, name: str) -> set[str]:
        """Paths that PEFT matches with a name: a path that is equal to it, or ends with it after a dot."""
        known = self._linear_paths
        matched = {path for path in known if path == name or path.endswith(f".{name}")}
        if not matched:
            raise UsageError(
                f"target_modules has {name!r}, which is not a linear layer of {self.model_type}: use some of "
                f"{', '.join(sorted({path.rpartition('.')[2] for path in known}))}"
            )
        return matched

    # -- matrices -----------------------------------------------------------------------------------------------------

    @cached_property
    def _layer_linears(self) -> tuple[Linear, ...]:
        """The matrices of all layers, one entry per layer and matrix."""
        layers = zip(self.mixers, self.moe_layers, strict=True)
        per_layer = (self._linears_of(mixer, is_moe) for mixer, is_moe in layers)
        return tuple(linear for linears in per_layer for linear in linears)

    def _linears_of(self, mixer: Mixer | None, is_moe: bool) -> tuple[Linear, ...]:
        """The matrices of a layer."""
        if mixer is None:
            return self._mlp_linears(is_moe)
        return mixer.linears if self.mlp_only else mixer.linears + self._mlp_linears(is_moe)

    def _mlp_linears(self, is_moe: bool) -> tuple[Linear, ...]:
        if is_moe and self.moe:
            return (*self.moe.router, *self.moe.linears)
        if not is_moe and self.mlp:
            return self.mlp.linears
        return ()

    @cached_property
    def _layer_matmul_parameters(self) -> int:
        return sum(linear.matmul_parameters for linear in self._layer_linears)

    @cached_property
    def newton_schulz_flops(self) -> float:
        """FLOPs of one Newton-Schulz iteration of Muon for the matrices of all layers.

        With m the smaller and n the larger size of a matrix: X X^T and the product with X take 2 m^2 n each, and the
        square of X X^T takes 2 m^3 (K. Jordan et al., 2024, "Runtime analysis").
        """
        total = 0.0
        for linear in self._layer_linears:
            m, n = sorted((linear.inputs, linear.outputs))
            total += linear.copies * (4.0 * m * m * n + 2.0 * m**3)
        return total

    @property
    def _embedding_linears(self) -> tuple[Linear, ...]:
        if self.embedding_width == self.hidden:
            return ()
        return (Linear(path="project_in", inputs=self.embedding_width, outputs=self.hidden),)

    @property
    def _head_linears(self) -> tuple[Linear, ...]:
        head = Linear(
            path="lm_head", inputs=self.embedding_width, outputs=self.vocab, bias=self.head_bias
        )
        if self.embedding_width == self.hidden:
            return (head,)
        return (Linear(path="project_out", inputs=self.hidden, outputs=self.embedding_width), head)


def _other_attention(
    config: ModelConfig, family: Family, windows: tuple[int | None, ...]
) -> tuple[Mixer | None, tuple[bool, ...]]:
    """Read what some layers have instead of the attention of the others, and which these are.

    Raises:
        UnsupportedModelError: a key is missing or wrong, or the config has something that is not sized.
    """
    refused = family.refused(config)
    if refused is not None:
        raise UnsupportedModelError(f"config of model_type {config.model_type!r}: {refused}")
    linear_layers = family.linear_layers(config)
    if any(linear_layers):
        return mamba_shape(config) if family.mamba else linear_attention_shape(
            config, family
        ), linear_layers
    wide_layers = tuple(window is None for window in windows)
    if family.global_heads and any(wide_layers):
        return attention_shape(config, family, is_global=True), wide_layers
    return None, ()
