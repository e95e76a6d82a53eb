"""Rules of the family table: values that are neither a literal nor the value of one config key.

Each rule follows the config and model classes of transformers 5.23 (`models/<family>/configuration_<family>.py`).
"""

from collections.abc import Callable

from hfscale.errors import UnsupportedModelError
from hfscale.facts.config_reader import ModelConfig

Windows = tuple[int | None, ...]

# -- key-value heads --------------------------------------------------------------------------------------------------


def multi_head(config: ModelConfig) -> int:
    """Each query head has its own key-value head."""
    return config.count("num_attention_heads")


def grouped_query(config: ModelConfig) -> int:
    """The config's number; `null` means one per query head."""
    return config.optional_count("num_key_value_heads") or multi_head(config)


def multi_query_if_set(config: ModelConfig) -> int:
    """One for all query heads with `multi_query`, else one per query head."""
    return 1 if config.flag("multi_query") else multi_head(config)


def falcon_kv_heads(config: ModelConfig) -> int:
    """Falcon's newer decoder groups query heads; the older one has a single key-value head or one per query head."""
    return grouped_query(config) if config.flag("new_decoder_architecture") else multi_query_if_set(config)


# -- sliding windows --------------------------------------------------------------------------------------------------


def full_attention(config: ModelConfig) -> Windows:
    """No layer has a window."""
    return (None,) * config.count("num_hidden_layers")


def same_window(config: ModelConfig) -> Windows:
    """Every layer has the config's `sliding_window`; `null` means no window."""
    return (config.optional_count("sliding_window"),) * config.count("num_hidden_layers")


def sliding_layers(
    slides: Callable[[ModelConfig, int], bool], *, enabled_by: str | None = None
) -> Callable[[ModelConfig], Windows]:
    """A rule for the layers with the config's `sliding_window`: those in `layer_types`, or without it those of
    `slides`.

    Args:
        slides (`Callable`): Whether a layer of the config, counted from 0, has the window.
        enabled_by (`str`, *optional*): Config key; if it is false, no layer has the window.
    """

    def windows(config: ModelConfig) -> Windows:
        if enabled_by is not None and not config.flag(enabled_by):
            return full_attention(config)
        layers = range(config.count("num_hidden_layers"))
        types = config.items("layer_types")
        if types is None:
            types = ["sliding_attention" if slides(config, layer) else "full_attention" for layer in layers]
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown or len(types) != len(layers):
            raise UnsupportedModelError(
                f"config of model_type {config.model_type!r}: layer_types must have sliding_attention or "
                f"full_attention for each of its {len(layers)} layers, but has {len(types)} entries"
                + (f" and contains {', '.join(sorted(map(str, unknown)))}" if unknown else "")
            )
        window = config.optional_count("sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    return windows


def each_layer(config: ModelConfig, layer: int) -> bool:
    """Every layer has the window."""
    return True


def all_but_last_of_pattern(config: ModelConfig, layer: int) -> bool:
    """Every layer but the last of each `sliding_window_pattern` layers has the window."""
    return (layer + 1) % config.count("sliding_window_pattern") != 0


def upper_layers(config: ModelConfig, layer: int) -> bool:
    """The layers from `max_window_layers` on have the window."""
    return layer >= (config.optional_count("max_window_layers") or 0)


def even_lower_layers(config: ModelConfig, layer: int) -> bool:
    """Every second layer below `max_window_layers`, from the first on, has the window."""
    return layer % 2 == 0 and layer < (config.optional_count("max_window_layers") or 0)


def layers_without_rope(config: ModelConfig, layer: int) -> bool:
    """SmolLM3: the layers without rotary positions have the window."""
    has_rope = config.items("no_rope_layers")
    if has_rope is None:
        return (layer + 1) % config.count("no_rope_layer_interval") == 0
    return not has_rope[layer]


def gpt_neo_windows(config: ModelConfig) -> Windows:
    """GPT-Neo repeats groups of `global` and `local` layers: `attention_types = [[["global", "local"], 12]]`."""
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


def ffn_from(key: str) -> Callable[[ModelConfig], int]:
    """A rule: the width is the value of `key`."""
    return lambda config: config.count(key)


stated_ffn = ffn_from("intermediate_size")


def ffn_from_or_four_hidden(key: str) -> Callable[[ModelConfig], int]:
    """A rule: the width is the value of `key`; if it is missing or `null`, four times the hidden size."""
    return lambda config: config.optional_count(key) or four_hidden(config)


def four_hidden(config: ModelConfig) -> int:
    """Four times the hidden size, independent of the config."""
    return 4 * config.count("hidden_size")


# -- mixtures of experts ----------------------------------------------------------------------------------------------


def every_layer(config: ModelConfig) -> tuple[bool, ...]:
    """Every layer is a mixture of experts."""
    return (True,) * config.count("num_hidden_layers")


def every_sparse_step(config: ModelConfig) -> tuple[bool, ...]:
    """Qwen: each `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    dense = config.items("mlp_only_layers") or []
    step = config.count("decoder_sparse_step")
    layers = config.count("num_hidden_layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def after_first_dense(config: ModelConfig) -> tuple[bool, ...]:
    """DeepSeek: all but the first `first_k_dense_replace` layers."""
    dense = config.optional_count("first_k_dense_replace") or 0
    return tuple(layer >= dense for layer in range(config.count("num_hidden_layers")))


def shared_experts(config: ModelConfig) -> int:
    """DeepSeek: `n_shared_experts` times the routed experts' width, in one MLP."""
    return (config.optional_count("n_shared_experts") or 0) * config.count("moe_intermediate_size")


def stated_shared_width(key: str) -> Callable[[ModelConfig], int]:
    """A rule: the shared expert's width is the value of `key`; 0 or `null` means no shared expert."""
    return lambda config: config.optional_count(key) or 0


# -- norms ------------------------------------------------------------------------------------------------------------


def falcon_norms(config: ModelConfig) -> int:
    """Falcon: two, unless attention and MLP are parallel and share one."""
    if not config.flag("parallel_attn"):
        return 2
    stated = config.optional_count("num_ln_in_parallel_attn")
    if stated is None:
        return 2 if config.flag("new_decoder_architecture") else 1
    return 2 if stated == 2 else 1


def falcon_parallel_residual(config: ModelConfig) -> bool:
    """Falcon: the newer decoder always has parallel attention and MLP, the older one if `parallel_attn` is set."""
    return config.flag("new_decoder_architecture") or config.flag("parallel_attn")


def one_if_parallel(config: ModelConfig) -> int:
    """StableLM: attention and MLP share a norm where they are parallel."""
    return 1 if config.flag("use_parallel_residual") else 2


def opt_norm_vectors(config: ModelConfig) -> int:
    """OPT: weight and bias, or neither."""
    return 2 if config.flag("layer_norm_elementwise_affine") else 0


def opt_final_norm(config: ModelConfig) -> bool:
    """OPT: only where norms come before attention and MLP, and the config does not remove it."""
    return config.flag("do_layer_norm_before") and not config.flag("_remove_final_layer_norm")
