"""Batches with images: a spare row changes nothing, and modules run once, however many images there are."""

from collections import Counter
from functools import partial

import pytest
import torch
import vision_families
from datasets import Dataset
from transformers import AutoConfig, AutoModelForImageTextToText, set_seed

pytest.importorskip("trl")
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling  # (after the check)

from hfscale.errors import DataError
from hfscale.facts.support import LISTS
from hfscale.recipe.arguments import SourceArguments
from hfscale.recipe.images import ImageCollator, find_record_with_image, read_images

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
IMAGE = 60


def records(tmp_path):
    """Records of which every second one has an image, with paths that are relative to their folder."""
    file = vision_families.write_pictures(tmp_path, records=8)
    loaded = Dataset.from_json(str(file), cache_dir=str(tmp_path / "cache"))
    return read_images(loaded, SourceArguments(train_file=str(file)), "train")


def model_of(config):
    set_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").train()


def test_a_spare_row_changes_neither_loss_nor_gradients_and_runs_the_tower(tmp_path):
    rows = records(tmp_path)
    processor, config = vision_families.llava()
    collator = DataCollatorForVisionLanguageModeling(processor)
    without_image = [rows[1], rows[3]]
    assert not any(row["images"] for row in without_image)
    gradients = []
    for spare in (None, find_record_with_image(rows)):
        batch = ImageCollator(collator, spare)(without_image)
        assert ("pixel_values" in batch) == (spare is not None)
        model = model_of(config)
        model(**batch).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    plain, spared = gradients
    for name, gradient in spared.items():
        if plain[name] is not None:
            torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)
        elif gradient is not None:
            assert gradient.count_nonzero() == 0, name
    assert sum(plain[name] is None and spared[name] is not None for name in spared) > 10


def test_an_image_is_not_cut(tmp_path):
    rows = records(tmp_path)
    processor, _ = vision_families.llava()
    cut = ImageCollator(DataCollatorForVisionLanguageModeling(processor, max_length=30))
    assert cut([rows[0], rows[1]])["labels"].shape[1] == 30
    with pytest.raises(DataError, match="max_length 12 cuts an image"):
        ImageCollator(DataCollatorForVisionLanguageModeling(processor, max_length=12))([rows[0]])


def qwen(kind, images):
    """A config of Qwen-VL and a row with some images of 4 x 4 patches, of which four become a token."""
    text = SMALL | HEADS | {"model_type": f"{kind}_text", "head_dim": 8, "max_position_embeddings": 64}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "num_heads": 4, "patch_size": 4, "intermediate_size": 32, "spatial_merge_size": 2}
    vision |= {"hidden_size": 32, "out_hidden_size": 32}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32}
    if kind == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    tokens = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tokens)
    ids = torch.tensor([[3, *([62] + [IMAGE] * 4) * images, 4, 5]])
    patches = torch.randn(16 * images, 3 * 2 * 4 * 4)
    grid = torch.tensor([[1, 4, 4]] * images)
    types = (ids == IMAGE).int()
    return config, {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}


def with_processor(family, images):
    """A config and a row of a family of `vision_families`, with images that the processor has read."""
    processor, config = vision_families.FAMILIES[family]()
    record = next(vision_families.pictures.picture_records("train"))
    said = [{"type": "image"}] * images + [{"type": "text", "text": "What?"}]
    row = {"images": record["images"] * images, "messages": [{"role": "user", "content": said}]}
    batch = ImageCollator(DataCollatorForVisionLanguageModeling(processor))([row])
    batch.pop("labels")
    return config, dict(batch)


BUILDERS = {
    **{name: partial(with_processor, name) for name in vision_families.FAMILIES},
    **{name: partial(qwen, name) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
}


def test_every_family_that_may_be_sharded_is_counted():
    assert set(LISTS["towers_run_once"]) == set(BUILDERS)


@pytest.mark.parametrize("family", BUILDERS)
def test_no_module_with_weights_runs_more_often_for_more_images(family):
    counts = []
    for images in (1, 3):
        config, batch = BUILDERS[family](images)
        model = model_of(config)
        seen = Counter()
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(lambda *_, name=name, seen=seen: seen.update([name]))
        model(**batch)
        counts.append(seen)
    assert counts[0] == counts[1]
    tower = {id(module) for module in model.get_encoder(modality="image").modules()}
    assert any(id(module) in tower for name, module in model.named_modules() if counts[0][name])
