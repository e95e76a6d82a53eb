"""Whether rows are packed documents is known without the device, and masks stay what they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_families import small_config
from test_fast_defaults import recipe_arguments
from tiny import RandomTokens, tiny_model
from transformers import LlamaModel, Trainer, masking_utils

from hfscale import ScalingCallback
from hfscale.parallel.weights import build_model
from hfscale.recipe.document_attention import makes_uncut_masks
from hfscale.recipe.packed_check import answer_packed_check


def make_trainer(folder: Path, model: Any) -> Trainer:
    return Trainer(
        model=model, args=recipe_arguments(folder), train_dataset=RandomTokens(), callbacks=[ScalingCallback()]
    )


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return a list to which each question of a mask whether rows are packed is added."""
    reads = []
    original = masking_utils.torch.diff

    def diff(positions: torch.Tensor, **options: Any) -> torch.Tensor:
        reads.append(positions.shape)
        return original(positions, **options)

    monkeypatch.setattr(masking_utils.torch, "diff", diff)
    return reads


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3_text", "mixtral"])
def test_logits_are_those_that_transformers_computes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = build_model(small_config(family, use_cache=False), seed=0, dtype=torch.float32).train()
    rows = torch.randint(3, 60, (2, 12))
    inputs: list[dict[str, torch.Tensor]] = [
        {"input_ids": rows},
        {"input_ids": rows, "position_ids": torch.tensor([[*range(5), *range(7)]] * 2)},
        {"input_ids": rows, "attention_mask": torch.tensor([[1] * 12, [1] * 8 + [0] * 4])},
    ]
    before = [model(**keywords).logits for keywords in inputs]
    answer_packed_check(make_trainer(tmp_path, model))
    reads = count_reads(monkeypatch)
    assert torch.equal(model(**inputs[0]).logits, before[0])
    assert not reads
    for keywords, logits in list(zip(inputs, before, strict=True))[1:]:
        assert torch.equal(model(**keywords).logits, logits)
    assert reads  # positions that are given are looked at
    assert not torch.equal(before[0], before[1])


class RestartsAtPadding(LlamaModel):
    """A decoder that counts positions from scratch behind a token of padding."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        if position_ids is None:
            starts = (input_ids == self.config.pad_token_id).long().cumsum(-1)
            position_ids = torch.stack([torch.tensor(_count(row.tolist())) for row in starts])
        return super().forward(input_ids=input_ids, position_ids=position_ids, **options)


def _count(documents: list[int]) -> list[int]:
    return [documents[: index + 1].count(document) - 1 for index, document in enumerate(documents)]


def test_a_decoder_whose_positions_depend_on_the_tokens_is_asked(tmp_path: Path) -> None:
    model = tiny_model(use_cache=False, pad_token_id=2)
    assert makes_uncut_masks(model)
    model.model.__class__ = RestartsAtPadding
    assert not makes_uncut_masks(model)
    hooks = len(model.model._forward_pre_hooks)
    answer_packed_check(make_trainer(tmp_path, model))
    assert len(model.model._forward_pre_hooks) == hooks


def test_an_error_in_a_forward_pass_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(use_cache=False)
    answer_packed_check(make_trainer(tmp_path, model))
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[9999]]))
    reads = count_reads(monkeypatch)
    masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0]]))
    assert reads
