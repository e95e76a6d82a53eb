"""Packing of documents into rows: what a row contains, and that its documents do not see each other."""

import itertools
from typing import Any

import pytest
import torch
from parallel_world import SIZES, VOCAB, tiny_causal_lm
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

from benchmarks import packing as packing_benchmark
from hfscale.core.versions import enable_recomputation
from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.recipe.arguments import DataArguments, RecipeTrainingArguments
from hfscale.recipe.data import load_datasets
from hfscale.recipe.document_attention import cut_attention, pass_document_lengths
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import cut_document_attention, load_model, load_tokenizer
from hfscale.recipe.packing import RowCollator, best_fit, pack_rows, set_packing_defaults

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {},
}


def documents(*lengths: int) -> list[tuple[list[int], list[int]]]:
    """Return documents of random tokens, of which every third label is ignored."""
    generator = torch.Generator().manual_seed(sum(lengths))
    made = []
    for length in lengths:
        tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        made.append((tokens, [-100 if place % 3 == 2 else token for place, token in enumerate(tokens)]))
    return made


def pack(made: Any, size: int, packing: str = "bestfit", *, cut: bool = True) -> list[dict[str, list[int]]]:
    columns = pack_rows(made, packing=packing, block_size=size, cut=cut, pad=0)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


# Rows.


def test_best_fit_fills_the_fullest_row_that_has_space():
    assert best_fit([3, 7, 2, 5, 10, 3], 10) == [[0, 1], [2, 3, 5], [4]]
    assert best_fit([], 10) == []
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 65, (400,), generator=generator).tolist()
    rows = best_fit(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(400))
    assert all(sum(lengths[number] for number in row) <= 64 for row in rows)
    assert sum(lengths) / (64 * len(rows)) > 0.98


def test_rows_of_best_fit_have_positions_labels_and_padding():
    first, second, third = documents(4, 6, 5)
    rows = pack([first, second, third], 10)
    assert rows == [
        {
            "input_ids": [*first[0], *second[0]],
            "labels": [-100, *first[1][1:], -100, *second[1][1:]],
            "position_ids": [*range(4), *range(6)],
        },
        {
            "input_ids": [*third[0], *[0] * 5],
            "labels": [-100, *third[1][1:], *[-100] * 5],
            "position_ids": [*range(5), *[0] * 5],
        },
    ]


def test_long_documents_are_cut_and_single_tokens_left_out():
    (long,) = documents(21)
    rows = pack([long, ([7], [7])], 10)
    assert [row["input_ids"] for row in rows] == [long[0][:10], long[0][10:20]]
    assert len(pack(documents(25), 10)) == 3


def test_concatenated_rows_are_a_stream_whose_documents_restart():
    made = documents(4, 9, 3, 8)
    rows = pack(made, 10, "concat", cut=True)
    stream = [token for tokens, _ in made for token in tokens]
    assert [row["input_ids"] for row in rows] == [stream[:10], stream[10:20]]
    assert [row["position_ids"] for row in rows] == [[*range(4), *range(6)], [*range(3), *range(3), *range(4)]]
    plain = pack(made, 10, "concat", cut=False)
    assert [set(row) for row in plain] == [{"input_ids", "labels"}] * 2
    assert plain[0]["labels"] == [label for _, labels in made for label in labels][:10]


def test_unpacked_rows_are_padded_to_the_longest_of_a_batch():
    made = documents(4, 6)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    batch = RowCollator(tokenizer)(pack(made, 10, "none", cut=False))
    assert batch["input_ids"].shape == (2, 6)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert batch["labels"][0].tolist() == [*made[0][1], -100, -100]


def test_the_defaults_depend_on_the_data():
    for flags, is_chat, expected in (
        ({}, False, ("concat", False)),
        ({}, True, ("bestfit", True)),
        ({"packing": "bestfit"}, False, ("bestfit", True)),
        ({"document_attention": True}, False, ("concat", True)),
        ({"packing": "none"}, True, ("none", False)),
        ({"packing": "bestfit", "document_attention": False}, True, ("bestfit", False)),
    ):
        args = DataArguments(**flags)
        set_packing_defaults(args, is_chat=is_chat)
        assert (args.packing, args.document_attention) == expected
    with pytest.raises(UsageError, match="--document_attention"):
        DataArguments(packing="none", document_attention=True)


# Attention.


def batch_of(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def losses_and_gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits, and the gradients of the summed loss."""
    model.zero_grad()
    output = model(**batch, use_cache=False, num_items_in_batch=1)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_parity(model: Any, made: Any, size: int) -> None:
    """Compare rows of packed documents with the documents alone: logits, and the sum of all gradients."""
    rows = pack(made, size)
    logits, gradients = losses_and_gradients(model, batch_of(rows))
    expected: dict[str, torch.Tensor] = {}
    for tokens, labels in made:
        alone, own = losses_and_gradients(
            model, {"input_ids": torch.tensor([tokens]), "labels": torch.tensor([labels])}
        )
        (row, start), *_ = [
            (number, start)
            for number, row in enumerate(rows)
            for start in range(size)
            if row["input_ids"][start : start + len(tokens)] == tokens and row["position_ids"][start] == 0
        ]
        torch.testing.assert_close(logits[row, start : start + len(tokens)], alone[0], rtol=1e-5, atol=1e-5)
        for name, gradient in own.items():
            expected[name] = expected[name] + gradient if name in expected else gradient
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, "eager" if family == "gemma2" else "sdpa") for family in FAMILIES] + [("mistral", "eager")],
)
def test_packed_documents_have_the_logits_and_gradients_of_documents_alone(family, attention):
    model = tiny_causal_lm(family, **FAMILIES[family]).eval()
    model.set_attn_implementation(attention)
    assert cut_attention(model) == attention
    check_parity(model, documents(9, 4, 12, 7, 3, 15), 20)


def test_recomputed_layers_are_cut_too():
    made = documents(9, 4, 12, 7, 3, 15)
    model = tiny_causal_lm(attention_dropout=0.0).train()
    batch = batch_of(pack(made, 20))
    logits, expected = losses_and_gradients(model, batch)
    enable_recomputation(model)
    again, gradients = losses_and_gradients(model, batch)
    torch.testing.assert_close(again, logits, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_the_loss_curve_does_not_depend_on_packing(monkeypatch):
    monkeypatch.setattr(packing_benchmark, "CURVE_STEPS", 12)
    monkeypatch.setattr(packing_benchmark, "CURVE_BLOCK", 64)
    assert packing_benchmark.loss_curve_difference() < 1e-4


def test_ranks_of_a_sequence_and_large_masks(tmp_path, caplog, monkeypatch):
    args = DataArguments(packing="bestfit", block_size=8192)
    set_packing_defaults(args, is_chat=True)
    training = RecipeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2)
    # Ranks can share a sequence under FSDP2, and on GPUs
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    training.use_cpu = False
    with pytest.raises(UsageError, match=r"--packing bestfit and --cp_size 2.*recipes/tp_pp/train.py"):
        cut_document_attention(tiny_causal_lm(), args, training, ParallelLayout(cp=2))
    with caplog.at_level("WARNING", logger="hfscale"):
        cut_document_attention(tiny_causal_lm(), args, training)
    assert "128 MiB" in caplog.text
    assert "flash_attention_2" in caplog.text


def test_a_model_that_is_loaded_before_the_data_is_refused(tmp_path):
    """The data decide whether attention is cut: conversations are packed, and their attention is."""
    tiny_causal_lm().config.save_pretrained(tmp_path / "config")
    model_args = ModelArguments(config_name=str(tmp_path / "config"))
    data_args = DataArguments(loss_on="assistant", block_size=64)  # the embedded conversations
    training_args = RecipeTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(UsageError, match="call load_datasets first"):
        load_model(model_args, training_args, None, data_args)
    load_datasets(data_args, training_args, load_tokenizer(ModelArguments()))
    load_model(model_args, training_args, None, data_args)
    assert training_args.cuts_attention


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("mamba", {}, "state along the sequence"),
        ("qwen3_next", {"num_experts": 4}, "linear_attention"),
        ("mpt", {}, "position_ids"),
        ("gpt_oss", {"num_local_experts": 4}, "without position_ids"),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64}, "without position_ids"),
        ("gpt_neox_japanese", {}, "masks of its own"),
    ],
)
def test_models_that_do_not_cut_are_refused(family, sizes, reason):
    known = AutoConfig.for_model(family)
    config = AutoConfig.for_model(
        family, **{name: value for name, value in SIZES.items() if hasattr(known, name)}, **sizes
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        cut_attention(model)
    assert "--document_attention false" in str(caught.value)
    assert model.config._attn_implementation == before


def test_an_attention_implementation_that_is_not_known_to_cut_is_refused():
    model = tiny_causal_lm()
    AttentionInterface.register("something", AttentionInterface()["sdpa"])
    model.set_attn_implementation("something")
    with pytest.raises(UsageError, match="--attn_implementation something"):
        cut_attention(model)


def variable_length_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Compute what FlashAttention computes from the boundaries of the flattened rows, one document at a time."""
    assert mask is None
    rows, heads, length, width = query.shape
    groups = heads // key.shape[1]
    query, key, value = (states.transpose(1, 2).flatten(0, 1).transpose(0, 1) for states in (query, key, value))
    ends = kwargs["cu_seq_lens_q"].tolist()
    assert kwargs["max_length_q"] == max(end - start for start, end in itertools.pairwise(ends))
    parts = []
    for start, end in itertools.pairwise(ends):
        q, k, v = query[:, start:end], key[:, start:end], value[:, start:end]
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        places = torch.arange(end - start)
        visible = places[:, None] >= places
        if kwargs.get("sliding_window"):
            visible &= places[:, None] - places < kwargs["sliding_window"]
        parts.append(nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=kwargs["scaling"]))
    return torch.cat(parts, dim=1).transpose(0, 1).reshape(rows, length, heads, width), None


def use_variable_length_attention(model: Any) -> None:
    AttentionInterface.register("variable_length", variable_length_attention)
    AttentionMaskInterface.register("variable_length", AttentionMaskInterface()["flash_attention_2"])
    model.set_attn_implementation("variable_length")
    model.base_model.register_forward_pre_hook(pass_document_lengths, with_kwargs=True)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "mixtral"])
def test_the_attention_of_every_layer_gets_the_boundaries_of_batches_of_several_rows(family):
    model = tiny_causal_lm(family, **FAMILIES[family]).eval()
    batch = batch_of(pack(documents(9, 4, 12, 7, 3, 15), 20))
    expected = model(**batch, use_cache=False).logits
    use_variable_length_attention(model)
    torch.testing.assert_close(model(**batch, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


def test_flash_attention_is_given_the_boundaries():
    model = tiny_causal_lm()
    model.config._attn_implementation = "flash_attention_2"  # the setter looks for the package
    assert cut_attention(model) == "flash_attention_2"
    assert pass_document_lengths in model.base_model._forward_pre_hooks.values()
