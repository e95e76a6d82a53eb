"""The built-in models, compared with those that transformers builds from the same keys."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfscale.errors import UnsupportedModelError
from hfscale.facts.models import catalogue, catalogue_names, catalogue_shape, find_model

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "phi-4": 14_659_507_200,
    "smollm2-1.7b": 1_711_376_384,
    "pythia-6.9b": 6_857_302_016,
    "bloom-176b": 176_247_271_424,
}
"""Numbers of parameters in the safetensors headers on the hub."""


@pytest.mark.parametrize("name", catalogue_names())
def test_parameters_are_those_of_transformers(name):
    keys = {key: value for key, value in catalogue()[name].items() if key != "hub"}
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Tied weights are one tensor, so parameters() counts them once.
    assert catalogue_shape(name).total_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_the_published_ones(name, parameters):
    assert catalogue_shape(name).total_parameters == parameters


def test_hub_ids_are_unique_and_case_is_ignored():
    hubs = [hub.casefold() for entry in catalogue().values() for hub in entry["hub"]]
    assert len(hubs) == len(set(hubs))
    assert find_model("Meta-Llama/llama-3.1-8B") == find_model("LLAMA-3.1-8B") == catalogue_shape("llama-3.1-8b")


def test_all_models_but_those_with_alibi_say_how_long_a_sequence_can_be():
    unknown = {name for name in catalogue_names() if catalogue_shape(name).max_positions is None}
    assert unknown == {"bloom-176b", "glm-4.5", "kimi-k2"}  # the sources of the last two do not say


@pytest.mark.parametrize(
    ("name", "positions"),
    [("qwen3-8b", 40_960), ("qwen3-32b", 40_960), ("qwen2.5-1.5b", 131_072), ("minimax-m2", 196_608)],
)
def test_a_sequence_is_at_most_as_long_as_the_published_config_says(name, positions):
    assert catalogue_shape(name).max_positions == positions


def test_no_window_if_the_published_config_has_none():
    assert set(catalogue_shape("mistral-7b").windows) == {None}
    assert set(catalogue_shape("mistral-7b-v0.1").windows) == {4096}


def test_a_file_takes_precedence_over_the_catalogue(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"intermediate_size": 96, "vocab_size": 100, "num_key_value_heads": 4}'
    )
    assert find_model(str(tmp_path)).hidden == 64


def test_an_unknown_name_is_one_line_with_the_nearest_names():
    with pytest.raises(UnsupportedModelError, match=r"'llama-3\.1-9b'.*llama-3\.1-8b") as caught:
        find_model("llama-3.1-9b")
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_cannot_be_read_is_reported(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedModelError, match=r"nobody/qwen3-8c.*qwen3-8b"):
        find_model("nobody/qwen3-8c")
