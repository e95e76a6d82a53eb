"""Recipes wait for no GPU to learn whether a batch holds several documents, and masks stay what they were."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_world import SIZES, tiny_causal_lm
from test_packing import FAMILIES
from test_weight_casts import make_trainer
from tiny import tiny_model
from torch import nn
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
    TrainerCallback,
    masking_utils,
)

from hfscale.recipe.document_masks import _KnownDocuments, _numbers_tokens, documents_are_known

MICRO_BATCHES = 4


class Reads(TorchDispatchMode):
    """Counts the values that are read from the device, each of which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name() in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
        return function(*args, **(kwargs or {}))


class ReadsOfSteps(TrainerCallback):
    """Notes how many values each step reads."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.steps: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = self.reads.count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(self.reads.count - self.before)


@pytest.mark.parametrize(
    "flags", [{}, {"chunked": True}, {"torch_compile_regional": True, "torch_compile_backend": "aot_eager"}]
)
def test_a_step_without_a_log_waits_for_nothing(flags: dict[str, Any], tmp_path: Path) -> None:
    losses = []
    for is_known in (False, True):
        reads = Reads()
        counted = ReadsOfSteps(reads)
        trainer = make_trainer(
            tmp_path / str(is_known), counted, model=tiny_model(use_cache=False), logging_steps=3, **flags
        )
        look = masking_utils.find_packed_sequence_indices
        with reads:
            if is_known:
                with documents_are_known(trainer):
                    trainer.train()
            else:
                trainer.train()
        assert masking_utils.find_packed_sequence_indices is look
        assert counted.steps[:2] == ([0, 0] if is_known else [MICRO_BATCHES, MICRO_BATCHES])
        assert not trainer.model.model._forward_pre_hooks
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_number_the_tokens_of_a_row(family: str) -> None:
    model = tiny_causal_lm(family, **FAMILIES[family])
    before = model.config._attn_implementation
    assert _numbers_tokens(model)
    assert model.config._attn_implementation == before


class NumbersByPadding(LlamaModel):
    """A decoder that numbers tokens by what they are, as those of the RoBERTa family do."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        positions = (input_ids != self.config.pad_token_id).cumsum(-1)
        return super().forward(input_ids, **(kwargs | {"position_ids": positions}))


class OfPadding(LlamaForCausalLM):
    """A causal language model with this decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = NumbersByPadding(config)


def test_a_decoder_that_numbers_tokens_by_what_they_are_is_left_alone(tmp_path: Path) -> None:
    model = OfPadding(tiny_model(use_cache=False, pad_token_id=0).config)
    assert not _numbers_tokens(model)
    reads = Reads()
    counted = ReadsOfSteps(reads)
    trainer = make_trainer(tmp_path, counted, model=model, logging_steps=3)
    with documents_are_known(trainer), reads:
        trainer.train()
    assert counted.steps[:2] == [MICRO_BATCHES, MICRO_BATCHES]


def test_a_model_with_images_is_left_alone() -> None:
    config = AutoConfig.for_model("gemma3", text_config={**SIZES, "head_dim": 8})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert not _numbers_tokens(model)


POSITIONS = (
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2], [0, 1, 0, 0, 0, 0]],  # one document, two, one with padding
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]],
    [[7, 8, 9, 0, 1, 2], [3, 4, 5, 6, 0, 1], [0, 0, 0, 1, 2, 3]],  # rows that begin in a document
)


@pytest.mark.parametrize("positions", POSITIONS)
def test_documents_have_the_numbers_that_transformers_gives_them(positions: list[list[int]]) -> None:
    rows = torch.tensor(positions)
    known = _KnownDocuments(are_cut=True)
    known.expect(nn.Identity(), (), {"position_ids": rows})
    expected = masking_utils.find_packed_sequence_indices(rows)
    found = known.find(rows)
    assert found is not None
    assert torch.equal(found, torch.zeros_like(found) if expected is None else expected)


@pytest.mark.parametrize(
    ("are_cut", "args", "kwargs"),
    [
        (False, (), {"position_ids": torch.tensor([[0, 1, 0, 1]])}),
        (True, (torch.zeros(1, 4), None, torch.tensor([[0, 1, 0, 1]])), {}),
    ],
)
def test_what_is_not_known_is_looked_at(are_cut: bool, args: Any, kwargs: Any) -> None:
    known = _KnownDocuments(are_cut=are_cut)
    known.expect(nn.Identity(), args, kwargs)
    found = known.find(torch.tensor([[0, 1, 0, 1]]))
    assert found is not None
    assert found.tolist() == [[0, 0, 1, 1]]
    assert known.find(torch.tensor([[0, 1, 2, 3]])) is None


class LayersReachedError(Exception):
    """Ends a forward pass with the mask that the layers get."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask


def end(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    raise LayersReachedError(kwargs["attention_mask"])


@pytest.mark.parametrize(("attention", "expected_reads"), [("flex_attention", [1, 0]), ("sdpa", [1, 1])])
def test_cut_documents_see_what_they_saw(
    attention: str, expected_reads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = flex_attention.create_block_mask
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda *args, **options: make(*args, **(options | {"_compile": False}))
    )
    model = tiny_model(use_cache=False)
    trainer = make_trainer(tmp_path, model=model)
    model.set_attn_implementation(attention)
    trainer.args.cuts_attention = True
    model.model.layers[0].register_forward_pre_hook(end, with_kwargs=True)
    positions = torch.tensor([[*range(100), *range(156)], [*range(256)]])
    masks, counts = [], []
    for documents in (nullcontext(), documents_are_known(trainer)):
        reads = Reads()
        with documents, pytest.raises(LayersReachedError) as reached, reads:
            model(input_ids=torch.zeros_like(positions), position_ids=positions)
        counts.append(reads.count)
        mask = reached.value.mask
        masks.append(mask.to_dense() if attention == "flex_attention" else mask)
    assert torch.equal(*masks)
    assert not masks[0].all()
    assert counts == expected_reads
