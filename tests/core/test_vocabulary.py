"""A model's folder without a tokenizer: transformers makes one that knows no text, and it is not trained with."""

import pytest
from tiny import tiny_tokenizer, tiny_trainer
from transformers import AutoTokenizer, ByT5Tokenizer, CanineTokenizer, GPT2Config, Qwen3Config

from hfscale import ScalingCallback
from hfscale.core.vocabulary import knows_no_text
from hfscale.errors import UsageError
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import load_tokenizer


@pytest.fixture(params=[Qwen3Config, GPT2Config], ids=lambda config: config.model_type)
def folder(request, tmp_path):
    """A folder with a config alone, as `model.save_pretrained` leaves it."""
    request.param().save_pretrained(tmp_path)
    return tmp_path


def test_a_recipe_needs_a_tokenizer(folder):
    with pytest.raises(UsageError, match=r"--model_name_or_path.* has no tokenizer: .*--tokenizer_name"):
        load_tokenizer(ModelArguments(model_name_or_path=str(folder)))


@pytest.mark.parametrize("make", [tiny_tokenizer, ByT5Tokenizer, CanineTokenizer])
def test_small_vocabularies_and_characters_are_known(make):
    assert not knows_no_text(make())


def test_nothing_else_is_judged():
    assert not knows_no_text(None)
    assert not knows_no_text(object())


def test_a_script_is_warned(tmp_path, caplog):
    Qwen3Config().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tiny_trainer(tmp_path / "run", ScalingCallback(), tokenizer=tokenizer, max_steps=1).train()
    assert sum("has special tokens only" in record.message for record in caplog.records) == 1
