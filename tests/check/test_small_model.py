"""Small versions of models: the same classes, with fewer and narrower layers, and equal weights in each process."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfscale.check.equal_start import start_equally
from hfscale.trainer.small_model import make_config_small


def small(kind, **fields):
    config = AutoConfig.for_model(kind, vocab_size=100, **fields)
    make_config_small(config)
    return config


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gemma3_text", "gpt2", "gpt_oss"])
def test_a_small_model_computes(kind):
    config = small(kind)
    if hasattr(config, "num_local_experts"):
        config.num_local_experts = 4
    model = AutoModelForCausalLM.from_config(config)
    logits = model(torch.arange(8)[None]).logits
    assert logits.shape == (1, 8, 100)
    assert sum(parameter.numel() for parameter in model.parameters()) < 40_000_000


def test_layers_and_widths_are_reduced_in_proportion():
    config = small("llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
    assert config.num_hidden_layers == 2
    assert (config.num_attention_heads, config.num_key_value_heads, config.hidden_size) == (4, 1, 512)


def test_each_kind_of_layer_stays():
    config = small("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert len(config.layer_types) == config.num_hidden_layers


def test_a_config_that_is_small_stays_as_it_is():
    config = small("llama", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (16, 1, 16)


def test_models_start_equally_without_dropout_whatever_the_seed():
    config = AutoConfig.for_model("gpt2", vocab_size=50, n_layer=1, n_embd=16, n_head=2, attn_pdrop=0.3)
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        start_equally(model)
        model.train()
        weights.append(model(torch.arange(8)[None]).logits)
    assert torch.equal(*weights)
