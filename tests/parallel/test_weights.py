"""Drawn weights depend only on the seed and the names, and have the distribution that transformers gives them."""

import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from hfscale.parallel.weights import build_model, draw_weights

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES),
    "apertus": ApertusConfig(**SIZES),  # its activation has weights
    "gpt2": GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
}


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_equal(first, second):
    first, second = tensors(first), tensors(second)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_do_not_depend_on_how_the_model_was_built(name):
    built = build_model(CONFIGS[name], seed=7, dtype=torch.float32)
    torch.manual_seed(12345)
    other = AutoModelForCausalLM.from_config(CONFIGS[name])
    draw_weights(other, seed=7)
    assert_equal(built, other)
    tied = built.get_input_embeddings().weight is built.get_output_embeddings().weight
    assert tied == CONFIGS[name].tie_word_embeddings


@pytest.mark.parametrize("name", CONFIGS)
def test_each_weight_has_the_standard_deviation_of_transformers(name):
    """GPT-2 draws its residual projections with a smaller scale, in the parent module's rule."""
    model = build_model(CONFIGS[name], seed=7, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_config(CONFIGS[name])
    for (key, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert found.std(correction=0).item() == pytest.approx(expected.std(correction=0).item(), rel=0.15), key
        assert found.mean().item() == pytest.approx(expected.mean().item(), abs=0.004), key


def test_matrices_and_seeds_differ():
    model = build_model(CONFIGS["llama"], seed=7, dtype=torch.float32)
    queries = [layer.self_attn.q_proj.weight for layer in model.model.layers]
    assert not torch.equal(queries[0], queries[1])
    other = build_model(CONFIGS["llama"], seed=8, dtype=torch.float32)
    assert not torch.equal(other.model.layers[0].self_attn.q_proj.weight, queries[0])


def test_the_global_random_state_does_not_change():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    before = torch.get_rng_state()
    draw_weights(model, seed=7)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # Gemma's embedding has a weight and a buffer
def test_without_parameters_only_the_buffers_are_computed(name):
    expected_model = build_model(CONFIGS[name], seed=7, dtype=torch.float32)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(CONFIGS[name])
    empty.to_empty(device="cpu")
    empty.tie_weights()
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.fill_(5.0)
    draw_weights(empty, seed=7, parameters=False)
    assert all((parameter == 5.0).all() for parameter in empty.parameters())
    assert empty.get_input_embeddings().weight is empty.lm_head.weight or not empty.config.tie_word_embeddings
    for (buffer, found), expected in zip(empty.named_buffers(), expected_model.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=buffer)
