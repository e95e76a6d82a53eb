"""A model's layers, grouped by what they cost, and other numbers of a model that every estimate needs."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from hfscale.facts.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Describes a weight matrix of a layer, or one such matrix per expert."""

    inputs: int
    """Width of its input."""
    outputs: int
    """Width of its output."""
    experts: int = 1
    """Number of experts; 1 for a matrix that every token passes."""
    used: int = 1
    """Number of these matrices that one token passes."""
    row_split: bool = False
    """Whether tensor parallelism splits its inputs (the second matrix of a pair) and not its outputs."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Describes a kind of layers that cost the same."""

    share: float
    """Fraction of the model's layers that are of this kind."""
    matrices: tuple[Matrix, ...]
    """The matrices that a token is multiplied by."""
    window: int | None
    """Sliding window in tokens; None where the layer attends to all tokens."""
    mlp_width: int
    """Sum of the inner widths of the MLPs that one token passes."""


class ModelView:
    """Computes once the numbers of a model that every estimate needs. Use `view_of`, which caches it.

    Args:
        shape (`ModelShape`): The model.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.layers = shape.layers
        self.hidden = shape.hidden
        attention = shape.attention
        self.heads = attention.heads
        self.kv_heads = attention.kv_heads
        self.head_dim = attention.head_dim
        self.value_head_dim = attention.value_head_dim
        self.query_width = self.heads * self.value_head_dim
        self.kv_width = self.kv_heads * (self.head_dim + self.value_head_dim)
        self.gated = shape.mlp.gated if shape.mlp else shape.moe is not None and shape.moe.gated
        moe = shape.moe
        self.experts = moe.experts if moe else 1
        self.top_k = moe.top_k if moe else 1
        self.expert_groups, self.top_groups = (moe.groups, moe.top_groups) if moe else (1, 1)
        self.expert_ffn = moe.expert_ffn if moe else 0
        self.moe_share = sum(shape.moe_layers) / shape.layers
        self._lora: dict[int, float] = {}
        self.kinds = self._kinds()
        self.mlp_width = sum(kind.share * kind.mlp_width for kind in self.kinds)

    def _kinds(self) -> tuple[LayerKind, ...]:
        shape = self.shape
        groups: dict[tuple[bool, int | None], int] = {}
        for key in zip(shape.moe_layers, shape.windows, strict=True):
            groups[key] = groups.get(key, 0) + 1
        kinds = []
        for (is_moe, window), number in groups.items():
            mlp = shape.moe if is_moe else shape.mlp
            assert mlp is not None
            linears = shape.attention.linears + (mlp.router if is_moe and shape.moe else ()) + mlp.linears  # type: ignore[union-attr]
            matrices = tuple(
                Matrix(
                    inputs=linear.inputs,
                    outputs=linear.outputs,
                    experts=linear.copies,
                    used=linear.used,
                    row_split=linear.outputs == shape.hidden,
                )
                for linear in linears
            )
            width = shape.moe.top_k * shape.moe.expert_ffn + shape.moe.shared_ffn if is_moe and shape.moe else 0
            width = width or (shape.mlp.ffn if shape.mlp else 0)
            kinds.append(LayerKind(share=number / shape.layers, matrices=matrices, window=window, mlp_width=width))
        return tuple(kinds)

    def lora_parameters(self, rank: int) -> float:
        """Counts the parameters of adapters on every linear layer.

        In a mixture of experts they are counted on the attention's output projection alone, because adapters of
        experts cannot be counted.

        Args:
            rank (`int`): Rank of the adapters.

        Raises:
            `UsageError`: The rank is below 1.
        """
        if rank not in self._lora:
            modules = "all-linear" if self.shape.moe is None else [self.shape.attention.linears[-1].path]
            self._lora[rank] = float(self.shape.lora_parameters(rank, modules))
        return self._lora[rank]

    @cached_property
    def latent_width(self) -> int:
        """Width of the latents that queries, keys and values are expanded from; 0 without latent attention."""
        return sum(linear.inputs for linear in self.shape.attention.linears if linear.path.endswith("_b_proj"))

    @cached_property
    def expanding_share(self) -> float:
        """Fraction of an average layer's matrix products that expands these latents."""
        linears = self.shape.attention.linears
        expanding = sum(linear.matmul_parameters for linear in linears if linear.path.endswith("_b_proj"))
        return expanding / self._layer_products

    @cached_property
    def _layer_products(self) -> float:
        """Multiply-accumulates of an average layer for a token."""
        return sum(k.share * sum(m.inputs * m.outputs * m.used for m in k.matrices) for k in self.kinds)

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters of an average layer."""
        return self.shape.layers_parameters / self.layers

    @cached_property
    def expert_parameters(self) -> float:
        """Parameters of an average layer's routed experts."""
        moe = self.shape.moe
        if moe is None:
            return 0.0
        return self.moe_share * sum(linear.parameters for linear in moe.linears if linear.copies > 1)

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        return self.shape.embedding_parameters

    @cached_property
    def head_parameters(self) -> int:
        """Parameters after the last layer; those that a tied head shares with the embedding are not counted."""
        return self.shape.lm_head_parameters + self.shape.final_norm_parameters

    @cached_property
    def head_layers(self) -> float:
        """Multiply-accumulates of the head relative to those of an average layer."""
        return self.shape.vocab * self.shape.embedding_width / self._layer_products

    @cached_property
    def total_parameters(self) -> int:
        """All parameters, with tied weights counted once."""
        return self.shape.total_parameters


@lru_cache(maxsize=512)
def view_of(shape: ModelShape) -> ModelView:
    """Returns the cached view of a shape."""
    return ModelView(shape)
