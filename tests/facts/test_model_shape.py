"""Every family's parameters, FLOPs and LoRA parameters, compared with models that transformers and PEFT build.

A row of `CASES` is small and asymmetric on purpose: no two widths are equal, so that swapping any two shows.
"""

import dataclasses
import json
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hfscale.errors import ConfigFileError, HfScaleError, UnsupportedModelError, UsageError
from hfscale.facts.config_reader import ALIASES
from hfscale.facts.families import FAMILIES, rules
from hfscale.facts.families.family import COMMON_DEFAULTS
from hfscale.facts.layer_shape import AttentionShape, MambaShape
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.facts.tower_shape import tower_parameters
from hfscale.recipe.model_arguments import ModelArguments

LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
GQA = {"num_key_value_heads": 2}
WIDE_HEADS = {"num_key_value_heads": 2, "head_dim": 20}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
ATTENTION_BIAS, MLP_BIAS = {"attention_bias": True}, {"mlp_bias": True}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}
MOE_WIDTH = {"moe_intermediate_size": 36}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, **MOE_WIDTH}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 22,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 6}
GPT_NEO = {"vocab_size": 101, "hidden_size": 48, "num_layers": 4, "num_heads": 6}
OPT = {"vocab_size": 101, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3, "num_attention_heads": 6}
MPT = {"vocab_size": 101, "d_model": 48, "n_layers": 3, "n_heads": 6}
SLIDING = {"sliding_window": 7}
LINEAR = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}
NEMOTRON_H = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 8,
    "n_routed_experts": 5,
    "moe_intermediate_size": 36,
    "moe_shared_expert_intermediate_size": 28,
}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 28}

CASES: dict[str, list[dict[str, Any]]] = {
    "llama": [LLAMA, LLAMA | WIDE_HEADS | TIED | ATTENTION_BIAS | MLP_BIAS, LLAMA | GQA],
    "arcee": [LLAMA, LLAMA | WIDE_HEADS | TIED | ATTENTION_BIAS | MLP_BIAS],
    "apertus": [LLAMA, LLAMA | GQA | TIED | ATTENTION_BIAS],
    "ernie4_5": [LLAMA, LLAMA | WIDE_HEADS | UNTIED | {"use_bias": True}],
    "exaone4": [LLAMA, LLAMA | GQA | TIED | {"num_hidden_layers": 9, "sliding_window_pattern": 3} | SLIDING],
    "granite": [LLAMA, LLAMA | GQA | TIED | ATTENTION_BIAS | MLP_BIAS],
    "helium": [LLAMA | {"head_dim": 8}, LLAMA | GQA | {"head_dim": 8} | TIED | ATTENTION_BIAS | MLP_BIAS],
    "hunyuan_v1_dense": [LLAMA | {"head_dim": 8}, LLAMA | WIDE_HEADS | TIED | ATTENTION_BIAS],
    "ministral": [
        LLAMA | {"head_dim": 10},
        LLAMA | WIDE_HEADS | TIED | SLIDING,
        LLAMA | WIDE_HEADS | {"sliding_window": None},
    ],
    "ministral3": [LLAMA, LLAMA | WIDE_HEADS | TIED | SLIDING],
    "mistral": [LLAMA, LLAMA | WIDE_HEADS | TIED | SLIDING, LLAMA | {"sliding_window": None}],
    "phi3": [LLAMA, LLAMA | GQA | TIED | SLIDING],
    "qwen2": [LLAMA, LLAMA | GQA | TIED | {"use_sliding_window": True, "max_window_layers": 1} | SLIDING],
    "qwen3": [
        LLAMA,
        LLAMA | WIDE_HEADS | TIED | ATTENTION_BIAS | {"use_sliding_window": True, "max_window_layers": 2},
    ],
    "seed_oss": [LLAMA, LLAMA | WIDE_HEADS | TIED | {"attention_bias": False, "attention_out_bias": True} | MLP_BIAS],
    "smollm3": [
        LLAMA,
        LLAMA | GQA | UNTIED | ATTENTION_BIAS | MLP_BIAS,
        LLAMA | SLIDING | {"use_sliding_window": True, "no_rope_layer_interval": 2},
        LLAMA | SLIDING | {"use_sliding_window": True, "no_rope_layers": [0, 1, 0]},
    ],
    "glm": [LLAMA, LLAMA | WIDE_HEADS | TIED | {"attention_bias": False}],
    "glm4": [LLAMA, LLAMA | WIDE_HEADS | TIED | {"attention_bias": False}],
    "gemma": [LLAMA, LLAMA | WIDE_HEADS | UNTIED | ATTENTION_BIAS],
    "gemma2": [LLAMA, LLAMA | WIDE_HEADS | UNTIED | ATTENTION_BIAS | SLIDING],
    "gemma3_text": [
        LLAMA | {"num_hidden_layers": 8},
        LLAMA | WIDE_HEADS | UNTIED | ATTENTION_BIAS | SLIDING | {"sliding_window_pattern": 2},
        {"num_hidden_layers": 2, "vocab_size": 101},
    ],
    "gemma4_text": [
        LLAMA | SLIDING | {"hidden_size_per_layer_input": 0, "num_hidden_layers": 8},
        LLAMA
        | WIDE_HEADS
        | SLIDING
        | MOE_WIDTH
        | UNTIED
        | {"global_head_dim": 28, "num_global_key_value_heads": 3, "attention_k_eq_v": True}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "hidden_size_per_layer_input": 0}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ],
    "olmo": [LLAMA, LLAMA | GQA | TIED | ATTENTION_BIAS],
    "olmo2": [LLAMA, LLAMA | GQA | TIED | ATTENTION_BIAS],
    "olmo3": [LLAMA | {"num_hidden_layers": 5}, LLAMA | GQA | TIED | ATTENTION_BIAS | SLIDING],
    "cohere": [LLAMA, LLAMA | GQA | UNTIED | ATTENTION_BIAS | {"use_qk_norm": True}],
    "cohere2": [LLAMA, LLAMA | GQA | UNTIED | ATTENTION_BIAS | SLIDING | {"sliding_window_pattern": 2}],
    "nemotron_h": [
        NEMOTRON_H,
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]}
        | {"mlp_bias": True, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "num_experts_per_tok": 3},
    ],
    "nemotron": [LLAMA | {"num_key_value_heads": 6}, LLAMA | WIDE_HEADS | TIED | ATTENTION_BIAS | MLP_BIAS],
    "persimmon": [LLAMA, LLAMA | TIED | {"qk_layernorm": False}],
    "phi": [LLAMA, LLAMA | GQA | TIED | {"qk_layernorm": True}],
    "stablelm": [
        LLAMA | {"num_key_value_heads": 6},
        LLAMA | GQA | TIED | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ],
    "starcoder2": [LLAMA, LLAMA | GQA | UNTIED | {"use_bias": False} | SLIDING],
    "bloom": [
        {"vocab_size": 101, "hidden_size": 48, "n_layer": 3, "n_head": 6},
        {"vocab_size": 101, "n_embed": 48, "num_hidden_layers": 2, "num_attention_heads": 4} | UNTIED,
    ],
    "codegen": [GPT2 | {"n_head": 4, "rotary_dim": 4}, GPT2 | {"n_head": 4, "n_inner": 80, "rotary_dim": 4} | TIED],
    "falcon": [
        LLAMA,
        LLAMA | UNTIED | {"bias": True, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80},
        LLAMA | {"multi_query": False, "parallel_attn": False, "alibi": True},
        LLAMA | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ],
    "gpt2": [GPT2, GPT2 | UNTIED | {"n_inner": 80, "n_positions": 33}],
    "gpt_bigcode": [GPT2, GPT2 | UNTIED | {"n_inner": 80, "n_positions": 33, "multi_query": False}],
    "gpt_neo": [
        GPT_NEO | {"num_layers": 24},
        GPT_NEO
        | UNTIED
        | {"intermediate_size": 80, "max_position_embeddings": 33, "window_size": 7}
        | {"attention_types": [[["global"], 1], [["local", "global", "local"], 1]]},
    ],
    "gpt_neox": [LLAMA, LLAMA | TIED | {"attention_bias": False, "use_parallel_residual": False}],
    "gptj": [GPT2 | {"rotary_dim": 4}, GPT2 | TIED | {"rotary_dim": 4, "n_inner": 80}],
    "mpt": [MPT, MPT | UNTIED | {"n_layers": 2, "expansion_ratio": 3}],
    "opt": [
        OPT,
        OPT | UNTIED | {"enable_bias": False, "layer_norm_elementwise_affine": False, "max_position_embeddings": 33},
        OPT | {"word_embed_proj_dim": 20, "do_layer_norm_before": False},
        OPT | {"_remove_final_layer_norm": True},
    ],
    "deepseek_v2": [
        LLAMA | {"num_experts_per_tok": 3},
        LLAMA | LATENT | DEEPSEEK | TIED | ATTENTION_BIAS | MLP_BIAS | {"n_shared_experts": 3},
        LLAMA | LATENT | DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 2},
    ],
    "deepseek_v3": [
        LLAMA | {"num_hidden_layers": 4},
        LLAMA | LATENT | DEEPSEEK | TIED | ATTENTION_BIAS | {"first_k_dense_replace": 1, "n_shared_experts": 2},
        LLAMA | LATENT | DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0},
    ],
    "dots1": [
        LLAMA | DEEPSEEK | {"n_shared_experts": 2},
        LLAMA | GQA | DEEPSEEK | TIED | {"n_shared_experts": 1, "first_k_dense_replace": 1, "max_window_layers": 1},
    ],
    "flex_olmo": [LLAMA, LLAMA | GQA | TIED | ATTENTION_BIAS | {"num_experts": 5, "num_experts_per_tok": 3}],
    "glm4_moe_lite": [
        LLAMA | LATENT | DEEPSEEK,
        LLAMA
        | LATENT
        | DEEPSEEK
        | TIED
        | ATTENTION_BIAS
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2},
    ],
    "glm4_moe": [LLAMA, LLAMA | WIDE_HEADS | DEEPSEEK | TIED | ATTENTION_BIAS | {"use_qk_norm": True}],
    "gpt_oss": [LLAMA, LLAMA | WIDE_HEADS | EXPERTS | TIED | SLIDING | {"attention_bias": False}],
    "granitemoe": [LLAMA, LLAMA | GQA | EXPERTS | TIED | ATTENTION_BIAS],
    "granitemoeshared": [LLAMA, LLAMA | GQA | EXPERTS | TIED | {"shared_intermediate_size": 28}],
    "minimax_m2": [LLAMA, LLAMA | WIDE_HEADS | EXPERTS | TIED],
    "mixtral": [LLAMA, LLAMA | WIDE_HEADS | EXPERTS | TIED | SLIDING],
    "olmoe": [LLAMA, LLAMA | GQA | TIED | ATTENTION_BIAS | {"num_experts": 5, "num_experts_per_tok": 3}],
    "phimoe": [
        LLAMA | SLIDING,
        LLAMA | GQA | EXPERTS | TIED | ATTENTION_BIAS | {"lm_head_bias": True, "num_experts_per_tok": 2},
    ],
    "qwen2_moe": [
        LLAMA,
        LLAMA
        | GQA
        | MOE_WIDTH
        | TIED
        | {"num_experts": 5, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 28, "qkv_bias": False}
        | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | {"use_sliding_window": True, "max_window_layers": 3},
    ],
    "qwen3_5_text": [LLAMA | LINEAR, LLAMA | WIDE_HEADS | LINEAR | TIED | {"num_hidden_layers": 5} | ATTENTION_BIAS],
    "qwen3_5_moe_text": [LLAMA, LLAMA | WIDE_HEADS | LINEAR | MOE_WIDTH | QWEN_EXPERTS | {"num_hidden_layers": 5}],
    "qwen3_next": [
        LLAMA,
        LLAMA
        | WIDE_HEADS
        | LINEAR
        | MOE_WIDTH
        | QWEN_EXPERTS
        | {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 1}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ],
    "qwen3_moe": [
        LLAMA,
        LLAMA
        | WIDE_HEADS
        | MOE_WIDTH
        | TIED
        | ATTENTION_BIAS
        | {"num_experts": 5, "num_experts_per_tok": 3, "mlp_only_layers": [0], "use_sliding_window": True}
        | SLIDING,
    ],
}
ALL_CASES = [
    pytest.param(family, case, id=f"{family}-{number}")
    for family, cases in CASES.items()
    for number, case in enumerate(cases)
]
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def transformers_config(family: str, case: dict[str, Any]) -> Any:
    return CONFIG_MAPPING[family](**case, **SPECIAL_TOKENS)


def meta_model(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def parameters_by_layer(model: torch.nn.Module) -> dict[int | str, dict[str, int]]:
    """Layer number, or "ends" for parameters outside the layers -> path inside it -> number of parameters."""
    parts: dict[int | str, dict[str, int]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        inside = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.(.*)", name)
        layer, path = (int(inside[1]), inside[2]) if inside else ("ends", name)
        parts[layer][path] = parameter.numel()
    return parts


# -- parameters -------------------------------------------------------------------------------------------------------


def test_every_family_has_two_cases() -> None:
    assert CASES.keys() == FAMILIES.keys()
    assert len(CASES) >= 50
    assert all(len(cases) >= 2 for cases in CASES.values())


@pytest.mark.parametrize(("family", "case"), ALL_CASES)
def test_parameters_equal_those_of_transformers(family: str, case: dict[str, Any]) -> None:
    config = transformers_config(family, case)
    parts = parameters_by_layer(meta_model(config))
    shape = ModelShape.from_config({"model_type": family, **case})

    for layer in range(shape.layers):
        assert shape.layer_parameters(layer).total == sum(parts[layer].values()), f"layer {layer}"
    assert shape.total_parameters == sum(sum(part.values()) for part in parts.values())
    # What save_pretrained writes describes the same model as the few keys it was made from.
    for saved in map(ModelShape.from_config, (config.to_dict(), config.to_diff_dict())):
        assert dataclasses.replace(saved, max_positions=shape.max_positions) == shape
    positions = getattr(config, "max_position_embeddings", None)
    assert ModelShape.from_config(config.to_dict()).max_positions == positions


@pytest.mark.parametrize(("family", "case"), ALL_CASES)
def test_paths_of_matrices_equal_those_of_transformers(family: str, case: dict[str, Any]) -> None:
    parts = parameters_by_layer(meta_model(transformers_config(family, case)))
    shape = ModelShape.from_config({"model_type": family, **case})
    for layer, is_moe in enumerate(shape.moe_layers):
        mixer = shape.mixers[layer]
        has_mlp = mixer is None or not shape.mlp_only
        mlp = (shape.moe if is_moe else shape.mlp) if has_mlp else None
        assert (mlp is None) == (not has_mlp)
        router = shape.moe.router if is_moe and shape.moe else ()
        for linear in (*(mixer.linears if mixer else ()), *router, *(mlp.linears if mlp else ())):
            found = [parts[layer].get(linear.path + suffix, 0) for suffix in ("", ".weight", "_bias", ".bias")]
            assert sum(found) == linear.parameters, linear.path
            assert (found[2] + found[3] > 0) == linear.bias, linear.path
        has_qk_norm = any(re.search(r"\b(q|query)_(layer)?norm", path) for path in parts[layer])
        assert has_qk_norm == (isinstance(mixer, AttentionShape) and mixer.qk_norm)


@pytest.mark.parametrize(("family", "case"), ALL_CASES)
def test_windows_equal_those_of_transformers(family: str, case: dict[str, Any]) -> None:
    config = transformers_config(family, case)
    shape = ModelShape.from_config({"model_type": family, **case})
    if family == "gpt_neo":
        expected = [config.window_size if kind == "local" else None for kind in config.attention_layers]
    else:
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        window = getattr(config, "sliding_window", None)
        expected = [window if kind == "sliding_attention" else None for kind in types]
    assert list(shape.windows) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_equal_those_of_transformers(family: str) -> None:
    config_class = CONFIG_MAPPING[family]
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    filled_in = config_class()
    for key, default in {**COMMON_DEFAULTS, **FAMILIES[family].defaults}.items():
        for name in set(ALIASES.get(key, (key,))) & fields.keys():
            assert default in (fields[name], vars(filled_in).get(name)), name


def test_families_with_parallel_residual() -> None:
    parallel = {
        (family, number)
        for family, cases in CASES.items()
        for number, case in enumerate(cases)
        if ModelShape.from_config({"model_type": family, **case}).parallel_residual
    }
    always = {(family, number) for family in ("codegen", "cohere", "cohere2", "gptj", "phi") for number in (0, 1)}
    assert parallel == always | {("falcon", 0), ("falcon", 1), ("falcon", 3), ("gpt_neox", 0), ("stablelm", 1)}


LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}


def llama_like(model_type: str, layers: int, hidden: int, heads: int, ffn: int, **others: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {"model_type": model_type, **sizes, "intermediate_size": ffn, **others}


PUBLIC_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-2-7B": (6_738_415_616, llama_like("llama", 32, 4096, 32, 11008, vocab_size=32000)),
    "Llama-3.1-8B": (8_030_261_248, llama_like(layers=32, hidden=4096, heads=32, ffn=14336, **LLAMA_3)),
    "Llama-3.1-70B": (70_553_706_496, llama_like(layers=80, hidden=8192, heads=64, ffn=28672, **LLAMA_3)),
    "Llama-3.1-405B": (405_853_388_800, llama_like(layers=126, hidden=16384, heads=128, ffn=53248, **LLAMA_3)),
    "Llama-3.2-1B": (1_235_814_400, llama_like(layers=16, hidden=2048, heads=32, ffn=8192, **LLAMA_3, **TIED)),
    "Mistral-7B-v0.1": (7_241_732_096, llama_like("mistral", 32, 4096, 32, 14336, vocab_size=32000)),
    "Mixtral-8x7B": (46_702_792_704, llama_like("mixtral", 32, 4096, 32, 14336, vocab_size=32000)),
    "Qwen2.5-0.5B": (
        494_032_768,
        llama_like("qwen2", 24, 896, 14, 4864, vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        llama_like("qwen2", 28, 3584, 28, 18944, vocab_size=152064, num_key_value_heads=4),
    ),
    "Qwen3-0.6B": (596_049_920, llama_like(layers=28, hidden=1024, heads=16, ffn=3072, **QWEN_3, **TIED)),
    "Qwen3-8B": (8_190_735_360, llama_like(layers=36, hidden=4096, heads=32, ffn=12288, **QWEN_3)),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        llama_like("qwen3_moe", 48, 2048, 32, 6144, vocab_size=151936, head_dim=128, moe_intermediate_size=768),
    ),
    "Gemma-2-2B": (2_614_341_888, llama_like("gemma2", 26, 2304, 8, 9216, vocab_size=256000)),
    "DeepSeek-V3 without MTP": (671_026_404_352, llama_like("deepseek_v3", 61, 7168, 128, 18432, vocab_size=129280)),
    "gpt-oss-20b": (
        20_914_757_184,
        llama_like("gpt_oss", 24, 2880, 64, 2880, vocab_size=201088, num_local_experts=32),
    ),
    "Phi-2": (2_779_683_840, llama_like("phi", 32, 2560, 32, 10240, vocab_size=51200)),
    "Pythia-6.9B": (6_857_302_016, llama_like("gpt_neox", 32, 4096, 32, 16384, vocab_size=50432)),
    "Falcon-7B": (6_921_720_704, llama_like("falcon", 32, 4544, 71, 18176, vocab_size=65024)),
    "GPT-2": (124_439_808, {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}),
    "MPT-7B": (
        6_649_286_656,
        {"model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32},
    ),
    "OPT-350M": (
        331_196_416,
        llama_like("opt", 24, 1024, 16, 0, vocab_size=50272)
        | {"ffn_dim": 4096, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "BLOOM-560M": (
        559_214_592,
        {"model_type": "bloom", "vocab_size": 250880, "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
    ),
}


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_public_models_have_their_published_size(name: str) -> None:
    parameters, config = PUBLIC_MODELS[name]
    assert ModelShape.from_config(config).total_parameters == parameters


def test_parts_of_llama_3_1_8b() -> None:
    shape = ModelShape.from_config(PUBLIC_MODELS["Llama-3.1-8B"][1])
    layer = shape.layer_parameters(0)
    assert shape.embedding_parameters == shape.lm_head_parameters == 128256 * 4096
    assert shape.final_norm_parameters == 4096
    assert (layer.attention, layer.mlp) == (4096 * 128 * (2 * 32 + 2 * 8), 3 * 4096 * 14336)
    assert (layer.router, layer.norms) == (0, 2 * 4096)
    assert (shape.attention.heads, shape.attention.kv_heads, shape.attention.head_dim) == (32, 8, 128)
    assert shape.mlp is not None
    assert (shape.mlp.ffn, shape.mlp.gated) == (14336, True)
    assert shape.moe is None
    assert not any(shape.moe_layers)
    assert set(shape.windows) == {None}
    assert shape.active_parameters == shape.total_parameters


def test_a_tied_head_has_no_parameters_but_counts_as_a_matrix() -> None:
    config = PUBLIC_MODELS["Llama-3.1-8B"][1]
    tied, untied = (ModelShape.from_config(config | tie) for tie in (TIED, UNTIED))
    assert tied.lm_head_parameters == 0
    assert untied.total_parameters - tied.total_parameters == 128256 * 4096
    assert tied.matmul_parameters == untied.matmul_parameters


def test_experts_of_mixtral() -> None:
    shape = ModelShape.from_config(PUBLIC_MODELS["Mixtral-8x7B"][1])
    assert shape.mlp is None
    assert shape.moe is not None
    assert (shape.moe.experts, shape.moe.top_k, shape.moe.expert_ffn, shape.moe.shared_ffn) == (8, 2, 14336, 0)
    assert shape.layer_parameters(0).router == 8 * 4096
    # "uses 13B active parameters" (Mixtral of Experts, arXiv 2401.04088)
    assert shape.active_parameters == 12_879_925_248


def test_dense_and_expert_layers_mix() -> None:
    shape = ModelShape.from_config(PUBLIC_MODELS["DeepSeek-V3 without MTP"][1])
    assert shape.moe_layers == (False,) * 3 + (True,) * 58
    assert shape.mlp is not None
    assert shape.mlp.ffn == 18432
    assert shape.moe is not None
    assert (shape.moe.expert_ffn, shape.moe.shared_ffn) == (2048, 2048)
    assert (shape.attention.head_dim, shape.attention.value_head_dim, shape.attention.kv_heads) == (192, 128, 128)
    # "37B activated for each token" (DeepSeek-V3 Technical Report, arXiv 2412.19437)
    assert round((shape.active_parameters - shape.embedding_parameters) / 1e9) == 37


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def measured_training_flops(family: str, case: dict[str, Any], seq_len: int, *, recompute: bool) -> float:
    """FLOPs per token of forward and backward pass, counted by torch on a model that computes the masked half too."""
    config = transformers_config(family, case)
    # FlopCounterMode sees neither fused attention nor the grouped matrix products of experts on a CPU.
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).train()
    if recompute:
        # The reentrant form repeats whole layers; the other one stops after the last activation that is needed.
        model.activation_checkpointing_enable({"use_reentrant": True})
    tokens = torch.randint(3, case["vocab_size"], (3, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return counter.get_total_flops() / tokens.numel()


RECURRENT = [family for family in CASES if FAMILIES[family].linear_layers is not rules.no_layer]


@pytest.mark.parametrize("family", [family for family in CASES if family not in RECURRENT])
def test_training_flops_equal_those_that_torch_counts(family: str) -> None:
    case = CASES[family][1]
    shape = ModelShape.from_config({"model_type": family, **case})
    seq_len = 7  # no longer than the windows of the cases: eager attention computes beyond them too
    assert measured_training_flops(family, case, seq_len, recompute=False) == shape.flops_per_token(seq_len)


@pytest.mark.parametrize("family", RECURRENT)
def test_flops_outside_of_states_equal_those_that_torch_counts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and convolutions take what Megatron-LM counts; here sums replace them, which torch does not count."""
    case = CASES[family][1]
    shape = ModelShape.from_config({"model_type": family, **case})
    assert shape.recurrent is not None
    module = sys.modules[type(meta_model(transformers_config(family, case))).__module__]

    def convolution(values: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return values + weight.mean(-1)[None, :, None]

    def delta_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
        repeats = value.shape[2] // key.shape[2]
        mean = (query.mean(-1) + key.mean(-1)).repeat_interleave(repeats, dim=2) + kwargs["g"] + kwargs["beta"]
        return value + mean.unsqueeze(-1), None

    def scan(values: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, b: Any, c: Any, **kwargs: Any) -> Any:
        return values + (dt + decay + kwargs["D"]).unsqueeze(-1) + (b.mean() + c.mean())

    monkeypatch.setattr(module, "causal_conv1d_fn", convolution)
    name = "mamba2_chunk_scan" if isinstance(shape.recurrent, MambaShape) else "torch_chunk_gated_delta_rule"
    monkeypatch.setattr(module, name, scan if isinstance(shape.recurrent, MambaShape) else delta_rule)
    states = 3 * shape.recurrent.flops_per_token * sum(shape.other_layers)
    assert measured_training_flops(family, case, 7, recompute=False) == shape.flops_per_token(7) - states


def test_flops_of_states() -> None:
    """Written out once for each kind of layer."""
    delta = ModelShape.from_config({"model_type": "qwen3_next", **CASES["qwen3_next"][1]}).recurrent
    assert delta is not None
    assert delta.flops_per_token == 2 * (4 * 6 * 12 * 20 + 3 * (2 * 36 + 120))
    mamba = ModelShape.from_config({"model_type": "nemotron_h", **NEMOTRON_H}).recurrent
    assert mamba is not None
    assert mamba.flops_per_token == 7 * (4 * 12) * 10


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "deepseek_v3", "opt"])
def test_hardware_flops_equal_those_that_torch_counts(family: str) -> None:
    case = CASES[family][2] if family == "opt" else CASES[family][1]
    shape = ModelShape.from_config({"model_type": family, **case})
    assert measured_training_flops(family, case, 7, recompute=True) == shape.hardware_flops_per_token(7)


def test_flops_of_llama_3_1_8b() -> None:
    shape = ModelShape.from_config(PUBLIC_MODELS["Llama-3.1-8B"][1])
    matrices = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 128256 * 4096
    attention = 12 * 32 * 32 * 128 * 8192
    head = 128256 * 4096
    assert shape.matmul_parameters == matrices
    assert shape.flops_per_token(8192) == 6 * matrices + attention
    assert shape.flops_per_token(8192, attention="causal") == 6 * matrices + attention / 2
    assert shape.forward_flops_per_token(8192) == shape.flops_per_token(8192) / 3
    assert shape.hardware_flops_per_token(8192) == (6 * matrices + attention) + 2 * (matrices - head) + attention / 3


@pytest.mark.parametrize("seq_len", [5, 7, 40])
def test_windows_limit_the_attention_term(seq_len: int) -> None:
    case = LLAMA | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    shape = ModelShape.from_config({"model_type": "gemma2", **case})
    heads_and_width = 2 * 6 * (256 + 256)  # head_dim is Gemma's default

    attention = shape.forward_flops_per_token(seq_len) - 2 * shape.matmul_parameters
    assert attention == heads_and_width * (2 * min(seq_len, 7) + seq_len)

    # Counted one by one, a causal query in place i sees min(i, w) keys; the formula leaves out half of the diagonal.
    causal = shape.forward_flops_per_token(seq_len, attention="causal") - 2 * shape.matmul_parameters
    places = range(1, seq_len + 1)
    seen = sum(2 * min(place, 7) + place for place in places) / seq_len
    diagonal = (2 * min(seq_len, 7) + seq_len) / (2 * seq_len)
    assert causal == pytest.approx(heads_and_width * (seen - diagonal))


def test_an_unknown_attention_count_is_refused() -> None:
    shape = ModelShape.from_config(PUBLIC_MODELS["GPT-2"][1])
    with pytest.raises(UsageError, match="use full or causal"):
        shape.flops_per_token(128, attention="half")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="seq_len is 0"):
        shape.flops_per_token(0)


# -- LoRA -------------------------------------------------------------------------------------------------------------

LORA_CASES = [
    ("llama", 1, ["q_proj", "v_proj"]),
    ("llama", 1, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    ("llama", 2, ["mlp.down_proj", "lm_head"]),
    ("gpt2", 1, ["c_proj"]),
    ("gpt2", 1, ["attn.c_proj"]),
    ("mixtral", 1, ["q_proj", "o_proj"]),
    ("deepseek_v3", 1, ["q_b_proj", "kv_b_proj"]),
    *((family, 1, "all-linear") for family in ("llama", "gpt2", "phi3", "bloom", "gpt_neox", "stablelm", "arcee")),
    ("opt", 2, "all-linear"),
    *((family, 1, "all-linear") for family in ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2")),
    ("glm4_moe_lite", 1, "all-linear"),
    *((family, 1, "all-linear") for family in ("qwen2_moe", "granitemoeshared", "gpt_oss")),
    *((family, 1, "all-linear") for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),
    *((family, 1, "all-linear") for family in ("gemma4_text", "nemotron_h")),
]


def lora_model(family: str, case: dict[str, Any], target_modules: Any, *, device: str) -> torch.nn.Module:
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(transformers_config(family, case), attn_implementation="eager")
        with warnings.catch_warnings(action="ignore"):  # PEFT reads a deprecated property of transformers
            if target_modules == "all-linear":
                return get_peft_model(model, ModelArguments(use_peft=True, lora_r=5).lora_config(model))
            return get_peft_model(model, LoraConfig(r=5, target_modules=target_modules))


@pytest.mark.parametrize(("family", "number", "target_modules"), LORA_CASES)
def test_lora_parameters_equal_those_of_peft(family: str, number: int, target_modules: Any) -> None:
    case = CASES[family][number]
    model = lora_model(family, case, target_modules, device="meta")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert ModelShape.from_config({"model_type": family, **case}).lora_parameters(5, target_modules) == trained


def test_a_token_passes_the_adapters_of_its_experts_only() -> None:
    shape = ModelShape.from_config({"model_type": "qwen3_moe", **CASES["qwen3_moe"][1]})
    assert shape.moe is not None
    hidden, inner = shape.hidden, shape.moe.expert_ffn
    each = 2 * 5 * (hidden + 2 * inner) + 5 * (inner + hidden)  # gate and up with twice the rank, down
    idle = sum(shape.moe_layers) * (shape.moe.experts - shape.moe.top_k) * each
    assert shape.lora_parameters(5) - shape.lora_parameters(5, active=True) == idle > 0


def test_lora_flops_equal_those_that_torch_counts() -> None:
    case = CASES["llama"][1]
    model = lora_model("llama", case, ["q_proj", "down_proj"], device="cpu")
    model.enable_input_require_grads()  # else the first layer has less to do than the formula says
    tokens = torch.randint(3, case["vocab_size"], (3, 7))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    shape = ModelShape.from_config({"model_type": "llama", **case})
    adapters = shape.lora_parameters(5, ["q_proj", "down_proj"])
    assert counter.get_total_flops() / tokens.numel() == shape.flops_per_token(7, lora_parameters=adapters)
    again = shape.hardware_flops_per_token(7, lora_parameters=adapters)
    assert again - shape.flops_per_token(7, lora_parameters=adapters) == (
        shape.forward_flops_per_token(7) - 2 * shape.vocab * shape.hidden + 2 * adapters
    )


@pytest.mark.parametrize(
    ("family", "target_modules", "message"),
    [
        ("llama", ["q_proj", "c_attn"], "'c_attn', which is not a linear layer of llama"),
        ("llama", "q_proj", "give a list of names"),
        ("mixtral", ["q_proj", "gate"], "mixture of experts is not counted"),
        ("qwen2_moe", ["q_proj", "shared_expert.down_proj"], "shared_expert.down_proj of a mixture of experts"),
    ],
)
def test_lora_targets_that_cannot_be_counted_are_refused(family: str, target_modules: Any, message: str) -> None:
    shape = ModelShape.from_config({"model_type": family, **CASES[family][1]})
    with pytest.raises(UsageError, match=message):
        shape.lora_parameters(8, target_modules)


def test_lora_rank_is_at_least_1() -> None:
    with pytest.raises(UsageError, match="rank is 0"):
        ModelShape.from_config({"model_type": "llama", **LLAMA}).lora_parameters(0, ["q_proj"])


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", **LLAMA}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = ModelShape.from_config(config)
    assert ModelShape.from_config(tmp_path) == expected
    assert ModelShape.from_config(str(tmp_path / "config.json")) == expected


def test_the_language_model_of_an_image_and_text_model_is_read() -> None:
    text = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7, "vocab_size": 101}
    outer = CONFIG_MAPPING["gemma3"](text_config=text, tie_word_embeddings=False)
    parts = meta_model(outer)
    language = [
        parameter.numel()
        for name, parameter in parts.named_parameters()
        if "vision" not in name and "multi" not in name
    ]
    shape = ModelShape.from_config(outer.to_dict())
    assert (shape.model_type, shape.layers, shape.attention.heads) == ("gemma3_text", 7, 8)
    assert shape.total_parameters == sum(language)
    # The outer config of the hub's Gemma 3 holds only what differs from the defaults.
    read = ModelShape.from_config({"model_type": "gemma3", "text_config": text, **UNTIED})
    assert dataclasses.replace(read, max_positions=shape.max_positions) == shape


def test_a_tower_that_is_left_out_is_counted_and_named(tmp_path, log) -> None:
    text = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 7, "vocab_size": 101}
    vision = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 2}
    outer = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision)
    outer.save_pretrained(tmp_path)
    tower = meta_model(outer).get_encoder(modality="image")
    of_layers = sum(weight.numel() for name, weight in tower.named_parameters() if ".layers." in name)
    assert tower_parameters(outer.to_dict()) == pytest.approx(of_layers, rel=0.02)
    find_model(str(tmp_path))
    assert "vision tower has about 0.664 M parameters" in log.text
    assert tower_parameters(text | {"model_type": "llama"}) is None


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"model_type": "qwen3_next", **LLAMA, **LINEAR, "linear_num_value_heads": 4},
            UnsupportedModelError,
            "linear_num_value_heads 4 is not a multiple of linear_num_key_heads 3",
        ),
        ({"model_type": "gemma4_text", **LLAMA}, UnsupportedModelError, "layers that embed the tokens again"),
        ({"model_type": "qwen3_mo"}, UnsupportedModelError, "qwen3_moe"),
        ({"model_type": "mamba2", **LLAMA}, UnsupportedModelError, "'mamba2' is unknown"),
        (
            {"model_type": "paligemma", "text_config": {}},
            UnsupportedModelError,
            "'paligemma' has its language model in text_config",
        ),
        (dict(LLAMA), ConfigFileError, "no model_type"),
        (
            {"model_type": "llama", "vocab_size": 101},
            UnsupportedModelError,
            "num_hidden_layers is missing; set num_hidden_layers or n_layer",
        ),
        ({"model_type": "llama", **LLAMA, "hidden_size": "48"}, UnsupportedModelError, "hidden_size is '48'"),
        ({"model_type": "llama", **LLAMA, "hidden_size": 0}, UnsupportedModelError, "hidden_size is 0"),
        ({"model_type": "llama", **LLAMA, "hidden_size": 49}, UnsupportedModelError, "not a multiple"),
        ({"model_type": "llama", **LLAMA, "attention_bias": "no"}, UnsupportedModelError, "attention_bias is 'no'"),
        ({"model_type": "dots1", **LLAMA}, UnsupportedModelError, "num_experts is missing"),
        (
            {"model_type": "mixtral", **LLAMA, "num_experts_per_tok": 9},
            UnsupportedModelError,
            "more than the 8 experts",
        ),
        (
            {"model_type": "gemma2", **LLAMA, "layer_types": ["full_attention"] * 2},
            UnsupportedModelError,
            "has 2 entries",
        ),
        (
            {"model_type": "gemma2", **LLAMA, "layer_types": ["full_attention"] * 2 + ["linear_attention"]},
            UnsupportedModelError,
            "contains linear_attention",
        ),
        ({"model_type": "gpt_neo", **GPT_NEO}, UnsupportedModelError, "attention_types is for 24 layers"),
        (
            {"model_type": "glm4_moe_lite", **LLAMA, **LATENT, "mlp_layer_types": ["dense"] * 2},
            UnsupportedModelError,
            "mlp_layer_types must have dense or sparse for each of its 3 layers, but has 2",
        ),
    ],
)
def test_configs_that_cannot_be_read_are_refused(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        ModelShape.from_config(config)
    assert isinstance(caught.value, HfScaleError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no model config at"), ("{", "cannot be read"), ("[]", "not a JSON object")]
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigFileError, match=message) as caught:
        ModelShape.from_config(path)
    assert str(path) in str(caught.value)


def test_reading_a_shape_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, hfscale.facts.model_shape, hfscale.facts.hardware, hfscale.facts.layout; "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
