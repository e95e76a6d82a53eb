"""Selective recomputation gives the same training and recomputes less than full recomputation."""

import pytest
import torch
from tiny import logged, tiny_model, tiny_trainer
from torch.utils.flop_counter import FlopCounterMode

from hfscale.recipe import recompute
from hfscale.recipe.recompute import checkpointing_kwargs


def flops_of_a_step(policy):
    model = tiny_model()
    model.train()
    if policy:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=checkpointing_kwargs(policy))
    tokens = model.dummy_inputs["input_ids"][:, :8] % 64
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops()


def test_selective_recomputes_less_than_full():
    none, selective, full = flops_of_a_step(None), flops_of_a_step("selective"), flops_of_a_step("full")
    assert none < selective < full
    # Every second product and all of attention are kept: at most half of what full recomputation repeats.
    assert (selective - none) / (full - none) <= 0.55


def test_the_outputs_of_every_implementation_of_attention_are_kept():
    with torch.library._scoped_library("flash_attn_for_a_test", "DEF") as library:  # the packages need a GPU
        library.define("_flash_attn_varlen_forward(Tensor q) -> Tensor")
        library.define("_flash_attn_varlen_backward(Tensor q) -> Tensor")
        flash = torch.ops.flash_attn_for_a_test
        assert recompute._is_attention(flash._flash_attn_varlen_forward.default)
        assert not recompute._is_attention(flash._flash_attn_varlen_backward.default)
    assert recompute._is_attention(torch.ops.higher_order.flex_attention)
    for kind in ("flash_attention", "attention_math", "fused_attention_overrideable"):
        assert recompute._is_attention(getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default)
    assert not recompute._is_attention(torch.ops.aten.mm.default)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_does_not_change_the_training(tmp_path, policy):
    plain = tiny_trainer(tmp_path / "plain", max_steps=3)
    plain.train()
    recomputed = tiny_trainer(
        tmp_path / policy,
        max_steps=3,
        activation_checkpointing=True,
        activation_checkpointing_kwargs=checkpointing_kwargs(policy),
    )
    recomputed.train()
    assert logged(recomputed, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-6)
    assert logged(recomputed, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), abs=1e-5)
