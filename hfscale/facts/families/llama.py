"""Rows of the dense families that follow Llama: norms without bias, rotary positions, mostly gated MLPs."""

from collections.abc import Mapping

from hfscale.facts.families import rules
from hfscale.facts.families.family import Family

LLAMA_FAMILIES: Mapping[str, Family] = {
    # -- Llama and similar families: RMSNorm, rotary positions, gated MLP ---------------------------------------------
    "llama": Family(mlp_bias="mlp_bias"),
    "arcee": Family(mlp=("mlp.up_proj", "mlp.down_proj"), gated=False, mlp_bias="mlp_bias"),
    "apertus": Family(
        qk_norm="shared",
        mlp=("mlp.up_proj", "mlp.down_proj"),
        gated=False,
        activation_parameters=2,  # xIELU learns a slope on each side of 0
    ),
    "ernie4_5": Family(
        defaults={"num_key_value_heads": 2, "head_dim": 128, "use_bias": False, "tie_word_embeddings": True},
        qkv_bias="use_bias",
        attention_out_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "exaone4": Family(
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        qkv_bias=False,
        attention_out_bias=False,
        qk_norm="shared",
        windows=rules.sliding_layers(rules.all_but_last_of_pattern),
    ),
    "granite": Family(mlp_bias="mlp_bias"),
    "helium": Family(
        defaults={"num_key_value_heads": 20, "head_dim": 128}, attention_out_bias=False, mlp_bias="mlp_bias"
    ),
    "hunyuan_v1_dense": Family(qk_norm="shared"),
    "ministral": Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False,
        attention_out_bias=False,
        windows=rules.sliding_layers(rules.each_layer),
    ),
    "ministral3": Family(
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        qkv_bias=False,
        attention_out_bias=False,
        windows=rules.same_window,
    ),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False,
        attention_out_bias=False,
        windows=rules.same_window,
    ),
    "phi3": Family(
        qkv=("self_attn.qkv_proj",),
        qkv_bias=False,
        attention_out_bias=False,
        mlp=("mlp.gate_up_proj", "mlp.down_proj"),
        windows=rules.same_window,
    ),
    "qwen2": Family(
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias=True,
        attention_out_bias=False,
        windows=rules.sliding_layers(rules.upper_layers, enabled_by="use_sliding_window"),
    ),
    "qwen3": Family(
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        qk_norm="shared",
        windows=rules.sliding_layers(rules.upper_layers, enabled_by="use_sliding_window"),
    ),
    "seed_oss": Family(
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False},
        attention_out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "smollm3": Family(
        defaults={"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        mlp_bias="mlp_bias",
        windows=rules.sliding_layers(rules.layers_without_rope, enabled_by="use_sliding_window"),
    ),
    # -- GLM: biases on queries, keys and values only -----------------------------------------------------------------
    "glm": Family(
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        attention_out_bias=False,
        mlp=("mlp.gate_up_proj", "mlp.down_proj"),
    ),
    "glm4": Family(
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        attention_out_bias=False,
        mlp=("mlp.gate_up_proj", "mlp.down_proj"),
        norms=4,
    ),
    # -- Gemma: wide heads, tied embeddings ---------------------------------------------------------------------------
    "gemma": Family(defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": Family(
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
        norms=4,
        windows=rules.sliding_layers(rules.all_but_last_of_pattern),
    ),
    "gemma3_text": Family(
        # The text_config of an image-and-text Gemma 3 leaves out every key that equals the class default.
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        qk_norm="shared",
        norms=4,
        windows=rules.sliding_layers(rules.all_but_last_of_pattern),
    ),
    # -- OLMo: norms without parameters, later norms after attention and MLP ------------------------------------------
    "olmo": Family(norm_vectors=0),
    "olmo2": Family(qk_norm="per_head"),
    "olmo3": Family(
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        qk_norm="per_head",
        windows=rules.sliding_layers(rules.all_but_last_of_pattern),
    ),
    # -- Cohere: attention and MLP in parallel, one norm without bias -------------------------------------------------
    "cohere": Family(
        defaults={"tie_word_embeddings": True, "use_qk_norm": False},
        qk_norm="per_head",
        qk_norm_when="use_qk_norm",
        norms=1,
        parallel_residual=True,
    ),
    "cohere2": Family(
        defaults={"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
        norms=1,
        parallel_residual=True,
        windows=rules.sliding_layers(rules.all_but_last_of_pattern),
    ),
}
"""model_type -> its row."""
