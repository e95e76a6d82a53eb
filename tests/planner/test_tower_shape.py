"""Vision towers: parameters and kept bytes of `towers.toml`, compared with transformers' models."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from benchmarks.activations import LiveBytes, gpu_kernels, recompute
from hfscale.errors import UnsupportedModelError
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_tower
from hfscale.facts.tower_shape import TowerShape
from hfscale.recipe.modalities import compute_without_gradients, parts_that_read_images

SIDE = 32
VISION = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "image_size": SIDE,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
FAMILIES = ("clip", "siglip", "gemma3", "idefics3", "smolvlm")
REGIMES = ("fp32", "autocast", "bf16")
RECOMPUTED = ("none", "selective", "full")


def config_of(family, **changes):
    """The config of a small image-and-text model; `clip` and `siglip` are LLaVA with such a tower."""
    vision = {**VISION, **changes}
    llama = {"model_type": "llama", **TEXT}
    if family in ("clip", "siglip"):
        strategy = {"clip": "default", "siglip": "full"}[family]
        tower = {"model_type": f"{family}_vision_model", **vision}
        return CONFIG_MAPPING["llava"](vision_config=tower, text_config=llama, vision_feature_select_strategy=strategy)
    if family == "gemma3":
        text = {**TEXT, "head_dim": 16}
        return CONFIG_MAPPING["gemma3"](
            vision_config={**vision, "vision_use_head": False}, text_config=text, mm_tokens_per_image=4
        )
    return CONFIG_MAPPING[family](vision_config=vision, text_config=llama, scale_factor=2)


def model_of(family, regime, *, trains_tower=True, policy="none", **changes):
    dtype = torch.bfloat16 if regime == "bf16" else torch.float32
    model = AutoModelForImageTextToText.from_config(config_of(family, **changes), dtype=dtype).train()
    tower, _ = parts_that_read_images(model)
    for weight in tower:
        weight.requires_grad_(trains_tower)
    if not trains_tower:
        compute_without_gradients(model.get_encoder(modality="image"))
    if policy != "none":
        recompute(model, policy, has_adapters=False)
    return model


def kept_of_images(model, regime, images):
    """The bytes in use after a forward pass of tower and projector, and the most in it."""
    pixels = torch.zeros(images, 3, SIDE, SIDE, dtype=model.dtype)
    if model.config.model_type in ("idefics3", "smolvlm"):
        pixels = torch.ones(1, images, 3, SIDE, SIDE, dtype=model.dtype)  # images of zeros are taken for padding
    is_cast = regime == "autocast"
    with gpu_kernels(), LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext():
            features = model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        now, peak = live.now, live.peak
    del features
    return now, peak


def per_image(model, regime):
    """What each further image keeps, and adds to the peak."""
    one, two = (kept_of_images(model, regime, images) for images in (1, 2))
    return two[0] - one[0], two[1] - one[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family):
    config = config_of(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shape, language = TowerShape.from_config(config.to_dict()), ModelShape.from_config(config.to_dict())
    tower, projector = parts_that_read_images(model)
    assert shape.tower_parameters == sum(weight.numel() for weight in tower)
    assert shape.projector_parameters == sum(weight.numel() for weight in projector)
    assert shape.total_parameters + language.total_parameters == model.num_parameters()


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_the_bytes_of_the_table(family, regime):
    shape = TowerShape.from_config(config_of(family).to_dict())
    for policy in RECOMPUTED:
        three, five = (
            per_image(model_of(family, regime, policy=policy, num_hidden_layers=layers), regime)[0]
            for layers in (3, 5)
        )
        assert (five - three) / 2 == shape.layer_bytes(regime, policy), policy


@pytest.mark.parametrize("trains_tower", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_tower_and_projector_keep_the_bytes_of_the_table(family, trains_tower):
    shape = TowerShape.from_config(config_of(family).to_dict())
    for regime in REGIMES:
        kept, _ = per_image(model_of(family, regime, trains_tower=trains_tower), regime)
        planned = shape.kept_bytes(regime, "none", trains_tower=trains_tower, trains_projector=True)
        assert planned == pytest.approx(kept, rel=0.07), regime


@pytest.mark.parametrize("family", ["clip", "gemma3"])
def test_the_forward_pass_of_a_frozen_tower_needs_the_bytes_of_the_table(family):
    """With an MLP four times as wide as the layer, as published towers have."""
    wide = {"hidden_size": 128, "intermediate_size": 512}
    shape = TowerShape.from_config(config_of(family, **wide).to_dict())
    for regime in REGIMES:
        _, peak = per_image(model_of(family, regime, trains_tower=False, **wide), regime)
        assert peak == shape.forward_bytes(regime), regime


def test_of_llava_only_the_layers_before_the_features_keep_anything():
    config = config_of("clip")
    shape = TowerShape.from_config(config.to_dict())
    assert shape.used_layers == VISION["num_hidden_layers"] - 1
    last = TowerShape.from_config({**config.to_dict(), "vision_feature_layer": -1})
    assert last.used_layers == VISION["num_hidden_layers"]
    frozen = {"trains_tower": False, "trains_projector": True}
    assert replace(shape, used_layers=9).kept_bytes("bf16", "none", **frozen) == shape.kept_bytes(
        "bf16", "none", **frozen
    )


def test_published_models():
    """Published numbers: the SigLIP tower of Gemma 3 has about 400M parameters (arXiv 2503.19786, table 1: 417M)."""
    gemma = find_tower("google/gemma-3-4b-pt")
    assert round(gemma.tower_parameters / 1e6) == 417
    assert (gemma.positions, gemma.tokens, gemma.text_hidden) == (4096, 256, 2560)
    llava = {  # llava-hf/llava-1.5-7b-hf
        "model_type": "llava",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
    }
    shape = TowerShape.from_config(llava)
    assert (shape.positions, shape.tokens) == (577, 576)
    language = ModelShape.from_config(llava).total_parameters
    assert language + shape.total_parameters == pytest.approx(7.06e9, rel=0.001)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2_vl"}, "'qwen2_vl'"),
        ({"vision_config": None}, "vision_config"),
        ({"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ({"vision_config": {"model_type": "clip_vision_model", "hidden_act": "gelu"}}, "'gelu'"),
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ({"vision_config": {"model_type": "clip_vision_model", "hidden_size": "64"}}, "hidden_size"),
    ],
)
def test_what_was_not_counted_is_refused_by_name(change, named):
    config = {**config_of("clip").to_dict(), **change}
    with pytest.raises(UnsupportedModelError, match=named):
        TowerShape.from_config(config)
