"""Rows of the mixture-of-experts families."""

from collections.abc import Mapping

from hfscale.facts.families import rules
from hfscale.facts.families.family import ExpertFamily, Family

_SHARED_EXPERTS = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")

MOE_FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(
        defaults={
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 1407,
            "num_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
        latent=True,
        mlp_bias="mlp_bias",
        experts=ExpertFamily(
            layers=rules.after_first_dense,
            shared=_SHARED_EXPERTS,
            shared_width=rules.shared_experts,
            shared_bias="mlp_bias",
        ),
    ),
    "deepseek_v3": Family(
        defaults={
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
        },
        latent=True,
        experts=ExpertFamily(
            layers=rules.after_first_dense, shared=_SHARED_EXPERTS, shared_width=rules.shared_experts
        ),
    ),
    "dots1": Family(
        defaults={
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        qk_norm="shared",
        windows=rules.sliding_layers(rules.upper_layers),
        experts=ExpertFamily(
            layers=rules.after_first_dense, shared=_SHARED_EXPERTS, shared_width=rules.shared_experts
        ),
    ),
    "flex_olmo": Family(
        defaults={"num_experts": 7, "num_experts_per_tok": 5},
        qk_norm="per_head",
        experts=ExpertFamily(width="intermediate_size"),
    ),
    "glm4_moe": Family(
        defaults={
            "num_key_value_heads": 8,
            "moe_intermediate_size": 1408,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        attention_out_bias=False,
        qk_norm="shared",
        qk_norm_when="use_qk_norm",
        experts=ExpertFamily(
            layers=rules.after_first_dense, shared=_SHARED_EXPERTS, shared_width=rules.shared_experts
        ),
    ),
    "gpt_oss": Family(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        sinks=True,
        windows=rules.sliding_layers(rules.all_but_last_of_pattern),
        experts=ExpertFamily(width="intermediate_size", bias=True, router="mlp.router", router_bias=True),
    ),
    "granitemoe": Family(
        defaults={"num_experts": 8, "num_experts_per_tok": 2},
        experts=ExpertFamily(
            width="intermediate_size",
            stacked=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
            router="block_sparse_moe.router",
        ),
    ),
    "granitemoeshared": Family(
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
        experts=ExpertFamily(
            width="intermediate_size",
            stacked=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
            router="block_sparse_moe.router",
            shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
            shared_width=rules.stated_shared_width("shared_intermediate_size"),
        ),
    ),
    "minimax_m2": Family(
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8},
        qkv_bias=False,
        attention_out_bias=False,
        qk_norm="per_head",
        experts=ExpertFamily(width="intermediate_size"),
    ),
    "mixtral": Family(
        defaults={"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
        qkv_bias=False,
        attention_out_bias=False,
        windows=rules.same_window,
        experts=ExpertFamily(width="intermediate_size"),
    ),
    "olmoe": Family(
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
        qk_norm="per_head",
        experts=ExpertFamily(width="intermediate_size"),
    ),
    "phimoe": Family(
        defaults={"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2, "lm_head_bias": False},
        norm_vectors=2,
        head_bias="lm_head_bias",
        windows=rules.same_window,
        experts=ExpertFamily(width="intermediate_size", router="mlp.router"),
    ),
    "qwen2_moe": Family(
        defaults={
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 1,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qkv_bias="qkv_bias",
        attention_out_bias=False,
        windows=rules.sliding_layers(rules.even_lower_layers, enabled_by="use_sliding_window"),
        experts=ExpertFamily(
            layers=rules.every_sparse_step,
            shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
            shared_width=rules.stated_shared_width("shared_expert_intermediate_size"),
            shared_gate="mlp.shared_expert_gate",
        ),
    ),
    "qwen3_moe": Family(
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "sliding_window": 4096,
        },
        qk_norm="shared",
        windows=rules.sliding_layers(rules.each_layer, enabled_by="use_sliding_window"),
        experts=ExpertFamily(layers=rules.every_sparse_step),
    ),
}
"""model_type -> its row."""
