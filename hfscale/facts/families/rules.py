"""Rules of the family table, which names them: values that are neither a literal nor the value of one config key.

Each rule follows the config and model classes of transformers 5.23 (`models/<family>/configuration_<family>.py`). It
takes the model's config, and raises `UnsupportedModelError` if a key that it reads is missing or wrong.
"""

from collections.abc import Callable

from hfscale.errors import UnsupportedModelError
from hfscale.facts.config_reader import ModelConfig

Windows = tuple[int | None, ...]

# -- key-value heads --------------------------------------------------------------------------------------------------


def multi_head(config: ModelConfig) -> int:
    """Count one key-value head for each query head."""
    return config.count("num_attention_heads")


def grouped_query(config: ModelConfig) -> int:
    """Read the number of key-value heads; `null` means one per query head."""
    return config.optional_count("num_key_value_heads") or multi_head(config)


def multi_query_if_set(config: ModelConfig) -> int:
    """Count one key-value head for all query heads with `multi_query`, else one per query head."""
    return 1 if config.flag("multi_query") else multi_head(config)


def falcon_kv_heads(config: ModelConfig) -> int:
    """Count Falcon's key-value heads.

    The newer decoder groups query heads; the older one has a single key-value head or one per query head.
    """
    return (
        grouped_query(config)
        if config.flag("new_decoder_architecture")
        else multi_query_if_set(config)
    )


# -- sliding windows --------------------------------------------------------------------------------------------------


def full_attention(config: ModelConfig) -> Windows:
    """Give no layer a window."""
    return (None,) * config.count("num_hidden_layers")


def same_window(config: ModelConfig) -> Windows:
    """Give every layer the config's `sliding_window`; `null` means no window."""
    return (config.optional_count("sliding_window"),) * config.count("num_hidden_layers")


def sliding_layers(
    slides: Callable[[ModelConfig, int], bool], *, enabled_by: str | None = None
) -> Callable[[ModelConfig], Windows]:
    """Create a rule that gives some layers the config's `sliding_window`.

    They are those in `layer_types`, or without it those of `slides`.

    Args:
        slides (`Callable`): whether a layer of the config, counted from 0, has the window.
        enabled_by (`str`, *optional*): config key; if it is false, no layer has the window.

    Returns:
        `Callable`: The rule. It raises `UnsupportedModelError` if `layer_types` has an unknown type or not one entry
            per layer.
    """

    def windows(config: ModelConfig) -> Windows:
        if enabled_by is not None and not config.flag(enabled_by):
            return full_attention(config)
        layers = range(config.count("num_hidden_layers"))
        window = config.optional_count("sliding_window")
        # Older configs have no list; transformers then applies the rule of the family.
        types = config.items("layer_types")
        if types is None:
            return tuple(window if slides(config, layer) else None for layer in layers)
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown or len(types) != len(layers):
            contained = ""
            if unknown:
                contained = f" and contains {', '.join(sorted(map(str, unknown)))}"
            raise UnsupportedModelError(
                f"config of model_type {config.model_type!r}: layer_types must have sliding_attention or "
                f"full_attention for each of its {len(layers)} layers, but has {len(types)} entries{contained}"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    return windows


_ENABLED_BY = "use_sliding_window"

sliding = sliding_layers(lambda config, layer: True)
sliding_if_enabled = sliding_layers(lambda config, layer: True, enabled_by=_ENABLED_BY)
"""The window of every layer."""

sliding_by_pattern = sliding_layers(
    lambda config, layer: (layer + 1) % config.count("sliding_window_pattern") != 0
)
"""The window of every layer but the last of each `sliding_window_pattern` layers."""

sliding_but_the_last = sliding_layers(
    lambda config, layer: (
        (layer + 1) % config.count("sliding_window_pattern") != 0
        and layer + 1 < config.count("num_hidden_layers")
    )
)
"""The window of every layer but the last of each `sliding_window_pattern` layers, and the last of all."""


def _is_upper(config: ModelConfig, layer: int) -> bool:
    return layer >= (config.optional_count("max_window_layers") or 0)


sliding_in_upper_layers = sliding_layers(_is_upper)
sliding_in_upper_layers_if_enabled = sliding_layers(_is_upper, enabled_by=_ENABLED_BY)
"""The window of the layers from `max_window_layers` on."""

sliding_in_even_lower_layers = sliding_layers(
    lambda config, layer: layer % 2 == 0 and not _is_upper(config, layer), enabled_by=_ENABLED_BY
)
"""The window of every second layer below `max_window_layers`, from the first on."""


def _has_no_rope(config: ModelConfig, layer: int) -> bool:
    has_rope = config.items("no_rope_layers")
    if has_rope is None:
        return (layer + 1) % config.count("no_rope_layer_interval") == 0
    return not has_rope[layer]


sliding_without_rope = sliding_layers(_has_no_rope, enabled_by=_ENABLED_BY)
"""The window of SmolLM3's layers without rotary positions."""


def gpt_neo_windows(config: ModelConfig) -> Windows:
    """Give GPT-Neo's `local` layers a window of `window_size` tokens.

    The config repeats groups of `global` and `local` layers: `attention_types = [[["global", "local"], 12]]`.

    Raises:
        UnsupportedModelError: `attention_types` is for another number of layers.
    """
    groups = config.items("attention_types") or []
    kinds = [kind for names, repeats in groups for _ in range(repeats) for kind in names]
    layers = config.count("num_hidden_layers")
    if len(kinds) != layers:
        raise UnsupportedModelError(
            f"config of model_type {config.model_type!r}: attention_types is for {len(kinds)} layers, and num_layers "
            f'is {layers}; set attention_types to [[["global", "local"], {layers // 2}]], for example'
        )
    return tuple(config.count("window_size") if kind == "local" else None for kind in kinds)


# -- MLP --------------------------------------------------------------------------------------------------------------


def ffn_or_four_hidden(key: str) -> Callable[[ModelConfig], int]:
    """Create a rule that reads the inner width of the MLP from `key`.

    If the key is missing or `null`, the width is four times the hidden size.
    """
    return lambda config: config.optional_count(key) or four_hidden(config)


n_inner_or_four_hidden = ffn_or_four_hidden("n_inner")
ffn_hidden_size_or_four_hidden = ffn_or_four_hidden("ffn_hidden_size")
intermediate_size_or_four_hidden = ffn_or_four_hidden("intermediate_size")


def four_hidden(config: ModelConfig) -> int:
    """Compute four times the hidden size; a width of the MLP in the config is not read."""
    return 4 * config.count("hidden_size")


# -- what cannot be sized ---------------------------------------------------------------------------------------------


def nothing(config: ModelConfig) -> str | None:
    """Refuse no config."""
    return None


def gemma4_extras(config: ModelConfig) -> str | None:
    """Refuse Gemma 4's small models, whose layers embed the tokens again or share keys and values (E2B, E4B)."""
    if config.optional_count("hidden_size_per_layer_input"):
        return "hidden_size_per_layer_input is above 0: layers that embed the tokens again are not sized"
    if config.optional_count("num_kv_shared_layers"):
        return "num_kv_shared_layers is above 0: layers that share keys and values are not sized"
    return None


def nemotron_h_extras(config: ModelConfig) -> str | None:
    """Refuse Nemotron-H configs whose experts work on latents, or with unknown layers."""
    if config.optional_count("moe_latent_size"):
        return "moe_latent_size is set: experts that work on latents are not sized"
    unknown = set(block_types(config)) - {"linear_attention", "full_attention", "moe", "mlp"}
    if unknown:
        return f"layers_block_type contains {', '.join(sorted(map(str, unknown)))}"
    return None


# -- layers that are either attention or MLP --------------------------------------------------------------------------


def block_types(config: ModelConfig) -> list[str]:
    """Read what each layer of Nemotron-H is."""
    return config.items("layers_block_type") or []


def mamba_blocks(config: ModelConfig) -> tuple[bool, ...]:
    """Return which layers are Mamba-2 layers (Nemotron-H)."""
    return tuple(kind == "linear_attention" for kind in block_types(config))


def expert_blocks(config: ModelConfig) -> tuple[bool, ...]:
    """Return which layers are mixtures of experts (Nemotron-H)."""
    return tuple(kind == "moe" for kind in block_types(config))


# -- linear attention -------------------------------------------------------------------------------------------------


def no_layer(config: ModelConfig) -> tuple[bool, ...]:
    """Give no layer linear attention."""
    return (False,) * config.count("num_hidden_layers")


def three_of_four(config: ModelConfig) -> tuple[bool, ...]:
    """Give the layers that `layer_types` calls `linear_attention` linear attention.

    Without it, these are all but each `full_attention_interval`-th layer, by default each fourth.

    Raises:
        UnsupportedModelError: the list has an unknown type, or not one entry per layer.
    """
    layers = config.count("num_hidden_layers")
    types = config.items("layer_types")
    if types is None:
        interval = config.optional_count("full_attention_interval") or 4
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if set(types) - {"linear_attention", "full_attention"} or len(types) != layers:
        raise UnsupportedModelError(
            f"config of model_type {config.model_type!r}: layer_types must have linear_attention or full_attention "
            f"for each of its {layers} layers, but has {len(types)} entries; correct it in config.json"
        )
    return tuple(kind == "linear_attention" for kind in types)


# -- mixtures of experts ----------------------------------------------------------------------------------------------


def every_layer(config: ModelConfig) -> tuple[bool, ...]:
    """Make every layer a mixture of experts."""
    return (True,) * config.count("num_hidden_layers")


def every_layer_if_enabled(config: ModelConfig) -> tuple[bool, ...]:
    """Make every layer a mixture of experts if `enable_moe_block` is set (Gemma 4)."""
    return (config.flag("enable_moe_block"),) * config.count("num_hidden_layers")


def dense_width(config: ModelConfig) -> int:
    """Read the width of the dense MLP that every token passes besides its experts (Gemma 4)."""
    return config.count("intermediate_size")


def gemma4_norms(config: ModelConfig) -> int:
    """Count Gemma 4's norms per layer: four, and three more around the experts."""
    return 7 if config.flag("enable_moe_block") else 4


def every_sparse_step(config: ModelConfig) -> tuple[bool, ...]:
    """Make each `decoder_sparse_step`-th layer a mixture of experts, except those in `mlp_only_layers` (Qwen)."""
    dense = config.items("mlp_only_layers") or []
    step = config.count("decoder_sparse_step")
    layers = config.count("num_hidden_layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def after_first_dense(config: ModelConfig) -> tuple[bool, ...]:
    """Make all but the first `first_k_dense_replace` layers a mixture of experts (DeepSeek)."""
    dense = config.optional_count("first_k_dense_replace") or 0
    return tuple(layer >= dense for layer in range(config.count("num_hidden_layers")))


def stated_or_all_but_the_first(config: ModelConfig) -> tuple[bool, ...]:
    """Make the layers that `mlp_layer_types` calls sparse a mixture of experts; without it, all but the first layer.

    Raises:
        UnsupportedModelError: the list has an unknown type, or not one entry per layer.
    """
    layers = config.count("num_hidden_layers")
    types = config.items("mlp_layer_types")
    if types is None:
        types = ["dense", *["sparse"] * (layers - 1)]
    if set(types) - {"dense", "sparse"} or len(types) != layers:
        raise UnsupportedModelError(
            f"config of model_type {config.model_type!r}: mlp_layer_types must have dense or sparse for each of its "
            f"{layers} layers, but has {len(types)} entries; correct it in config.json"
        )
    return tuple(kind == "sparse" for kind in types)


def shared_experts(config: ModelConfig) -> int:
    """Compute the width of DeepSeek's shared experts, one MLP: `n_shared_experts` times a routed expert's width."""
    return (config.optional_count("n_shared_experts") or 0) * config.count("moe_intermediate_size")


def stated_shared_width(key: str) -> Callable[[ModelConfig], int]:
    """Create a rule that reads the shared expert's width from `key`; 0 or `null` means no shared expert."""
    return lambda config: config.optional_count(key) or 0


nemotron_shared_width = stated_shared_width("moe_shared_expert_intermediate_size")
granite_shared_width = stated_shared_width("shared_intermediate_size")
qwen_shared_width = stated_shared_width("shared_expert_intermediate_size")


# -- norms ------------------------------------------------------------------------------------------------------------


def falcon_norms(config: ModelConfig) -> int:
    """Count Falcon's norms per layer: two, unless attention and MLP are parallel and share one."""
    if not config.flag("parallel_attn"):
        return 2
    stated = config.optional_count("num_ln_in_parallel_attn")
    if stated is None:
        return 2 if config.flag("new_decoder_architecture") else 1
    return 2 if stated == 2 else 1


def falcon_parallel_residual(config: ModelConfig) -> bool:
    """Return whether Falcon's attention and MLP are parallel.

    They always are in the newer decoder, and in the older one if `parallel_attn` is set.
    """
    return config.flag("new_decoder_architecture") or config.flag("parallel_attn")


def one_if_parallel(config: ModelConfig) -> int:
    """Count StableLM's norms per layer: one if attention and MLP are parallel and share it, otherwise two."""
    return 1 if config.flag("use_parallel_residual") else 2


def opt_norm_vectors(config: ModelConfig) -> int:
    """Count the parameter vectors of OPT's norms: weight and bias, or neither."""
    return 2 if config.flag("layer_norm_elementwise_affine") else 0


def opt_final_norm(config: ModelConfig) -> bool:
    """Return whether OPT has a norm after the last layer.

    It has one only if norms come before attention and MLP, and the config does not remove it.
    """
    return config.flag("do_layer_norm_before") and not config.flag("_remove_final_layer_norm")
