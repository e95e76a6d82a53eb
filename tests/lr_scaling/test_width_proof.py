"""μTransfer holds: activations are flat over the width with it and not without, and the best rate stays."""

import math

import pytest
import torch
from conftest import REPOSITORY
from transformers import AutoConfig, AutoModelForCausalLM

from hfscale.lr_scaling.coordinate_check import coordinate_check
from hfscale.lr_scaling.lr_sweep import SweepSettings, best_trial, parse_rates, sweep_rates

SIZES = {
    "vocab_size": 64,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "intermediate_size": 1024,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
NO_HEAD_DIM = ("gpt2", "phi")


def family(name, **sizes):
    options = SIZES | sizes
    if name in NO_HEAD_DIM:
        del options["head_dim"]
    config = AutoConfig.for_model(name, **options)
    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(config)), config


def coordinates(name, widths, **options):
    kind, config = family(name)
    rows = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
    return coordinate_check(kind, config, rows, widths=widths, **options)


def not_flat(found):
    return {one.module: round(one.slope, 2) for one in found if not one.is_flat}


def test_activations_of_a_llama_are_flat_over_the_width_with_the_rules_only():
    widths = [32, 64, 128]
    assert not_flat(coordinates("llama", widths, seeds=1)) == {}
    plain = {one.module: one.slope for one in coordinates("llama", widths, transfers=False, seeds=1)}
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        assert plain[f"model.layers.*.{module}"] > 0.4
    assert plain["lm_head"] > 0.3


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "olmo2", "granite", "phi", "mixtral"])
def test_activations_of_each_family_are_flat_over_the_width(name):
    """The rules were never adjusted for the last four families."""
    widths = [64, 128, 256, 512]
    assert not_flat(coordinates(name, widths)) == {}
    assert len(not_flat(coordinates(name, widths, transfers=False, seeds=1))) > 4


def text_rows(block_size):
    text = (REPOSITORY / "CHANGELOG.md").read_bytes() + (REPOSITORY / "docs" / "limits.md").read_bytes()
    usable = len(text) // block_size * block_size
    return torch.tensor(list(text[:usable])).view(-1, block_size)


@pytest.mark.long
def test_the_best_rate_of_a_narrow_copy_is_that_of_the_model():
    sizes = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 512}
    kind, config = family("llama", vocab_size=256, **sizes)
    settings = SweepSettings(steps=60, batch=8, base_width=64)
    rates = parse_rates("2e-3..6.4e-2")
    narrow, wide = (
        best_trial(sweep_rates(kind, config, text_rows(32), width=width, rates=rates, settings=settings)).rate
        for width in (64, 256)
    )
    assert abs(math.log2(wide / narrow)) <= 1
