"""Bytes of adapters: what is formed from weights, what bitsandbytes replaces, options of adapters."""

import pytest
import torch
from live_bytes import live_bytes
from parallel_families import small_config
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from hfscale import estimate, plan
from hfscale.errors import UsageError
from hfscale.facts.activations import kept_bytes
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.planner.adapters import formed_bytes
from hfscale.planner.memory import GIB, host_gib
from hfscale.trainer.expert_adapters import add_own_adapters

SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 96, "vocab_size": 64, "head_dim": 32}
TOKENS = 64


def config_of(family, layers):
    return small_config(family, **SIZES, num_hidden_layers=layers)


def kept_by_autograd(family, layers, regime, *, by_hfscale=False, modules="all-linear", **options):
    """Bytes that autograd keeps of a small model with adapters on all linear layers."""
    torch.manual_seed(0)
    is_cast = regime == "lora"
    model = AutoModelForCausalLM.from_config(config_of(family, layers)).to(torch.bfloat16)
    adapters = LoraConfig(r=8, target_modules=modules, task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, adapters, autocast_adapter_dtype=is_cast)
    model.enable_input_require_grads()
    if by_hfscale:
        add_own_adapters(model)

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            return model.base_model.model.model(torch.randint(0, 64, (1, TOKENS)))

    return live_bytes(forward, model.parameters())


def job_of(shape, regime, **options):
    layout = {"dp_replicate": 2} if regime == "lora" else {"dp_shard": 2}
    sizes = {"layout": layout, "zero": 0 if regime == "lora" else 3}
    run = estimate(
        shape,
        gpu="H100-80GB",
        seq_len=TOKENS,
        method="lora",
        lora_rank=8,
        compile=False,
        **sizes | options,
    )
    return run.job


@pytest.mark.parametrize("regime", ["lora", "lora_bf16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama"])
def test_what_is_formed_from_weights_is_counted(family, regime):
    shape = ModelShape.from_config(config_of(family, 4).to_dict())
    of_tokens = kept_bytes(shape, regime, "none", TOKENS, 8)
    deepspeed = {"zero": 2, "layout": {"dp_shard": 2}}
    for by_hfscale in (False, True) if shape.moe else (True,):
        options = {} if by_hfscale else deepspeed
        layers = [kept_by_autograd(family, number, regime, by_hfscale=by_hfscale) for number in (1, 3)]
        found = (layers[1] - layers[0]) / 2
        formed = formed_bytes(job_of(shape, regime, **options), regime).kept
        assert found == pytest.approx(TOKENS * (of_tokens.unsplit + of_tokens.split) + formed, rel=0.02)
        if not by_hfscale:
            assert formed > 0.2 * found  # without it the check above would fail


@pytest.mark.parametrize("regime", ["lora", "lora_bf16"])
@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("llama", "q_proj,v_proj"),
        ("llama", "q_proj,k_proj,v_proj,o_proj"),
        ("llama", "gate_proj,up_proj,down_proj"),
        ("llama", "o_proj"),
        ("qwen3", "down_proj"),
        ("cohere", "q_proj,v_proj"),
        ("mixtral", "q_proj,v_proj"),
        ("qwen3_moe", "q_proj,k_proj,v_proj,o_proj"),
    ],
)
def test_adapters_on_fewer_matrices_keep_less(family, modules, regime):
    shape = ModelShape.from_config(config_of(family, 4).to_dict())
    of_tokens = kept_bytes(shape, regime, "none", TOKENS, 8)
    everywhere = TOKENS * (of_tokens.unsplit + of_tokens.split)
    layers = [kept_by_autograd(family, number, regime, modules=modules.split(",")) for number in (1, 3)]
    found = (layers[1] - layers[0]) / 2
    formed = formed_bytes(job_of(shape, regime, lora_target_modules=modules), regime).kept
    assert found == pytest.approx(everywhere + formed, rel=0.02)
    assert found < 0.97 * everywhere  # without it the check above would fail


def test_a_frozen_model_in_4_bits_is_refused_by_transformers_where_the_planner_refuses():
    with pytest.raises(UsageError, match="MXFP4"):
        plan("gpt-oss-20b", gpu="RTX4090", gpus=1, method="qlora")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "granitemoe"])
def test_what_bitsandbytes_replaces_is_counted(family):
    """It replaces `nn.Linear` and `Conv1D` alone, but the head."""
    config = config_of(family, 4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    left_out = get_keys_to_not_convert(model)
    replaced = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and not any(key in name for key in left_out)
    )
    shape = ModelShape.from_config(config.to_dict())
    assert shape.quantized_parameters == replaced
    assert BitsAndBytesConfig(load_in_4bit=True).llm_int8_skip_modules is None  # nothing else is left out


def test_experts_stay_in_16_bits_on_the_device_on_the_host_and_on_the_way():
    run = {"gpu": "H200", "layout": {"dp_replicate": 1}, "seq_len": 512, "method": "qlora"}
    qwen = estimate("qwen3-30b-a3b", **run)
    assert 55 < qwen.memory.parameters < 60
    assert 85 < estimate("mixtral-8x7b", **run).memory.parameters < 90
    offloaded = estimate("qwen3-30b-a3b", **run, offload="full", zero=3)
    assert host_gib(offloaded.job) > 55
    sharded = run | {"layout": {"dp_shard": 16}, "zero": 3, "gpus_per_node": 1}
    lora, qlora = (estimate("qwen3-30b-a3b", **sharded | {"method": method}) for method in ("lora", "qlora"))
    assert qlora.time.communication == pytest.approx(lora.time.communication, rel=0.1)


def test_adapters_of_experts_need_a_copy_of_them_under_deepspeed():
    """By what PEFT computes with, 2 bytes per expert parameter of each layer."""
    shape = find_model("qwen3-30b-a3b")
    run = {"gpu": "H200", "layout": {"dp_replicate": 1}, "seq_len": 4096, "method": "lora"}
    experts, attention = (
        estimate(shape, **run, lora_target_modules=modules) for modules in (None, "q_proj, k_proj,v_proj,o_proj")
    )
    copies = 2 * shape.layers * shape.mean_expert_parameters / GIB
    # The inputs of the experts are kept for the gradients of their adapters, which have copies in bf16
    moe = shape.moe
    inputs = shape.layers * 4096 * (moe.top_k * (shape.hidden + moe.expert_ffn) + shape.hidden)
    adapters = shape.lora_parameters(16) - shape.lora_parameters(16, ("q_proj", "k_proj", "v_proj", "o_proj"))
    kept = 2 * (inputs + adapters) / GIB
    assert experts.memory.activations - attention.memory.activations == pytest.approx(kept, rel=0.02)
    assert kept < 0.3 * copies
    sharded = {"layout": {"dp_shard": 2}, "zero": 2}
    deepspeed = estimate(shape, **run | sharded)
    assert deepspeed.memory.activations - attention.memory.activations > 0.9 * copies
    assert deepspeed.fits_word == "no"
    recomputed = estimate(shape, **run | sharded, activation_checkpointing="full")
    assert recomputed.memory.total < deepspeed.memory.total - 0.9 * copies
    assert experts.tokens_per_s_per_gpu < attention.tokens_per_s_per_gpu
    with pytest.raises(UsageError, match="'k_porj'"):
        estimate(shape, **run, lora_target_modules="k_porj")


def test_dropout_and_dora_keep_more():
    run = {"gpu": "H100-80GB", "layout": {"dp_replicate": 1}, "seq_len": 4096, "method": "lora", "compile": False}
    plain, dropped, dora = (
        estimate("llama-3.1-8b", **run, **options).memory.activations
        for options in ({}, {"lora_dropout": 0.1}, {"use_dora": True})
    )
    inputs = 6 * 4096 + 14336
    assert (dropped - plain) * GIB == pytest.approx(32 * 4096 * inputs, rel=0.01)  # a mask of a byte
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert (dora - plain) * GIB == pytest.approx(4 * 32 * 4096 * outputs)
