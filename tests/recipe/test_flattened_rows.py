"""SFT with packing: a model whose documents would see each other is refused, and the others get a fast attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_families import small_config
from test_fast_defaults import kernels
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hfscale.errors import UnsupportedModelError
from hfscale.facts.support import LISTS
from hfscale.recipe import flattened_rows
from hfscale.recipe.flattened_rows import _reason_not_to_flatten, cut_flattened_rows
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.trl import DPOArguments, SFTArguments
from hfscale.trainer.flattened_rows import documents_are_apart

APART = ["gemma3_text", "gpt2", "gpt_neo", "lfm2", "llama", "mistral", "mixtral", "phi3", "qwen3", "qwen3_moe"]
MIXED = LISTS["documents_mixed"]
SIZES = {"mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1}, "zaya": {"num_experts_per_tok": 1}}
CPU = torch.device("cpu")


def on_meta(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(small_config(family, **SIZES.get(family, {})))


def arguments(folder: Path, **flags: Any) -> SFTArguments:
    return SFTArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_length=96, **flags)


@pytest.mark.parametrize("family", [*APART, *MIXED])
def test_a_small_model_shows_whether_documents_see_each_other(family: str) -> None:
    reason = _reason_not_to_flatten(on_meta(family), CPU)
    assert (reason is None) == (family in APART)


@pytest.mark.parametrize("family", LISTS["documents_need_kernel"])
def test_transformers_itself_says_that_a_kernel_is_missing(family: str) -> None:
    """Then the recipe leaves it to the training, and a plan says it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
        documents_are_apart(model, CPU, DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "jamba"])
def test_what_it_shows_is_what_happens_in_a_packed_batch(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family)).eval()
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    first, other, second = (torch.randint(3, 60, (length,)).tolist() for length in (5, 5, 7))
    logits = []
    for before in (first, other):
        batch = collator([{"input_ids": before + second, "seq_lengths": [5, 7]}])
        del batch["labels"]
        with torch.no_grad():
            logits.append(model(**batch, use_cache=False).logits[0, 5:])
    assert torch.allclose(*logits, atol=1e-5) == (family in APART)


def test_flash_attention_needs_no_mask() -> None:
    model = on_meta("gpt_oss")
    model.config._attn_implementation = "flash_attention_3"
    assert _reason_not_to_flatten(model, CPU) is None


def test_examining_a_model_draws_no_random_number_and_leaves_its_config() -> None:
    model = on_meta("qwen3")
    before, state = model.config.to_dict(), torch.get_rng_state()
    assert _reason_not_to_flatten(model, CPU) is None
    assert model.config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_packing_such_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        cut_flattened_rows(on_meta("gpt_oss"), ModelArguments(), arguments(tmp_path, packing=True))
    text = str(caught.value)
    assert "GptOssForCausalLM is not cut" in text
    assert text.endswith("give --packing false")
    assert "\n" not in text


def test_the_flag_that_was_given_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"give --padding_free false$"):
        cut_flattened_rows(on_meta("opt"), ModelArguments(), arguments(tmp_path, padding_free=True))


@pytest.mark.parametrize(
    ("installed", "flags", "attention", "multiple"),
    [
        (("flex_attention",), {}, "flex_attention", 96),
        (("flex_attention",), {"pad_to_multiple_of": 128}, "flex_attention", 128),
        (("flex_attention", "flash_attention_2"), {}, "flash_attention_2", None),
        ((), {}, "sdpa", None),
    ],
)
def test_packed_conversations_get_the_fastest_attention(
    installed: tuple[str, ...],
    flags: dict[str, Any],
    attention: str,
    multiple: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(flattened_rows.Kernels, "here", lambda args: replace(kernels(*installed), capability=(8, 0)))
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", lambda model, name: chosen.append(name))
    model = AutoModelForCausalLM.from_config(small_config("llama", num_attention_heads=2, head_dim=32))
    monkeypatch.setattr(
        flattened_rows,
        "attention_implementation",
        lambda config: chosen[-1] if chosen else config._attn_implementation,
    )
    args = arguments(tmp_path, packing=True, **flags)
    cut_flattened_rows(model, ModelArguments(), args)
    assert (chosen[-1:] or ["sdpa"]) == [attention]
    assert args.pad_to_multiple_of == multiple
    assert args.cuts_attention


def test_rows_are_flattened_where_trl_does_it(tmp_path: Path) -> None:
    assert arguments(tmp_path, packing=True).flattens_rows
    assert arguments(tmp_path, padding_free=True).flattens_rows
    assert not arguments(tmp_path).flattens_rows
    assert not arguments(tmp_path, packing=True, packing_strategy="wrapped").flattens_rows
    assert not DPOArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]).flattens_rows
