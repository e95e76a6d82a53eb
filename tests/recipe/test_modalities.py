"""Tokens have the same weight in the loss of each family of the YAML files, also where the class refuses it."""

import inspect

import pytest
import torch
import yaml
from conftest import REPOSITORY
from recipe_runs import GEMMA_4_EXPERTS
from tiny import EXPERT_SIZES, tiny_model
from transformers import AutoModelForImageTextToText, Gemma4Config, Gemma4ForConditionalGeneration, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hfscale.facts.models import catalogue
from hfscale.recipe import pictures
from hfscale.recipe.modalities import compute_without_gradients, parts_that_read_images, weigh_tokens_equally


def classes_of_yaml_files():
    """The classes of `AutoModelForCausalLM` for the models of all YAML files, and for their image-text versions."""
    types = {hub.casefold(): entry["model_type"] for entry in catalogue().values() for hub in entry["hub"]}
    texts = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "recipes").rglob("*.yaml")]
    names = {yaml.safe_load(text).get("model_name_or_path") for text in texts} - {None}
    found = {types[name.casefold()] for name in names}
    both = found | {name.removesuffix("_text") for name in found}
    return {MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]] for name in both if name in CONFIG_MAPPING}


def refuses_number(model):
    """Whether Trainer keeps the number of tokens from a model or class: its own rule."""
    if hasattr(model, "accepts_loss_kwargs"):
        return not model.accepts_loss_kwargs
    kinds = [one.kind for one in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD not in kinds


def gemma_4():
    text = {**EXPERT_SIZES, **GEMMA_4_EXPERTS, "moe_intermediate_size": 16}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision))


def test_gemma_4_alone_refuses_the_number_of_tokens_and_gets_it_nevertheless():
    found = classes_of_yaml_files()
    assert len(found) > 10
    assert {kind for kind in found if refuses_number(kind)} == {Gemma4ForConditionalGeneration}
    model = gemma_4()
    forward = vars(model).copy()
    weigh_tokens_equally(model)
    assert not refuses_number(model)
    assert vars(model) == forward | {"accepts_loss_kwargs": True}
    assert refuses_number(gemma_4())


class OwnMeanForCausalLM(LlamaForCausalLM):
    """Refuses the number with reason: it does not give it to its loss."""

    accepts_loss_kwargs = False

    def forward(self, *args, num_items_in_batch=None, **kwargs):
        return super().forward(*args, **kwargs)


class FewerLabelsForCausalLM(LlamaForCausalLM):
    """Refuses the number with reason: it leaves labels out."""

    accepts_loss_kwargs = False

    def forward(self, *args, labels=None, **kwargs):
        return super().forward(*args, labels=labels.masked_fill(labels < 3, -100), **kwargs)


@pytest.mark.parametrize("kind", [OwnMeanForCausalLM, FewerLabelsForCausalLM])
def test_a_class_that_does_not_divide_all_labels_by_the_number_stays_as_it_is(kind):
    model = kind(tiny_model().config)
    weigh_tokens_equally(model)
    assert refuses_number(model)


def image_model(*, is_checkpointed, computes_without=True):
    """The embedded LLaVA with a frozen tower, and a list that a layer of the tower adds to when it is computed."""
    torch.manual_seed(0)
    config = pictures.default_config(pictures.default_processor().tokenizer)
    model = AutoModelForImageTextToText.from_config(config).train()
    tower, _ = parts_that_read_images(model)
    for weight in tower:
        weight.requires_grad_(False)
    if computes_without:
        compute_without_gradients(model.get_encoder(modality="image"))
    if is_checkpointed:
        model.activation_checkpointing_enable()
    computed = []
    layer = model.get_encoder(modality="image").encoder.layers[0].self_attn  # inside of what is checkpointed
    layer.register_forward_pre_hook(lambda *_: computed.append(torch.is_grad_enabled()))
    return model, computed


def gradients_of_images(model):
    """The gradients of a step with an image, by the names of the parameters."""
    tokens = (pictures.SIDE // pictures.PATCH) ** 2
    ids = torch.tensor([[model.config.image_token_id] * tokens + [5, 6, 7, 8]])
    pixels = torch.linspace(0, 1, 3 * pictures.SIDE**2).reshape(1, 3, pictures.SIDE, pictures.SIDE)
    model(input_ids=ids, labels=ids, pixel_values=pixels).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("computes_without", [False, True])
def test_a_frozen_tower_is_computed_once(computes_without):
    """transformers itself computes it again under activation checkpointing."""
    model, computed = image_model(is_checkpointed=True, computes_without=computes_without)
    found = gradients_of_images(model)
    assert torch.is_grad_enabled()
    assert computed == ([False] if computes_without else [True, True])
    expected = gradients_of_images(image_model(is_checkpointed=False, computes_without=False)[0])
    assert found.keys() == expected.keys()
    assert any("projector" in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_gradients_are_computed_again_after_a_frozen_module_that_fails():
    module = torch.nn.Linear(2, 2).requires_grad_(False)
    compute_without_gradients(module)
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert torch.is_grad_enabled()
