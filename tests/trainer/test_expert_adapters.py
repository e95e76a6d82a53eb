"""LoRA on the stacked parameters of experts: as PEFT computes it, without merged copies that autograd keeps."""

import pytest
import torch
from live_bytes import live_bytes
from parallel_world import tiny_causal_lm
from peft import LoraConfig, get_peft_model

from hfscale.core.torch_internals import has_saved_tensor_hooks
from hfscale.trainer.expert_adapters import add_own_adapters, is_wrapped_parameter

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
ROWS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(implementation, dtype=torch.float32):
    model = tiny_causal_lm("qwen3_moe", seed=7, **EXPERTS).to(dtype)
    model.set_experts_implementation(implementation)
    torch.manual_seed(3)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=[], target_parameters=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    model.enable_input_require_grads()
    return model


def gradients(model):
    model.zero_grad()
    loss = model(input_ids=ROWS, labels=ROWS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_peft(implementation, dtype):
    model = adapted(implementation, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        wanted = gradients(model)
        add_own_adapters(model)
        for again in (gradients(model), gradients(model)):  # nothing of the first pass is left
            for one, other in zip(again, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_autograd_keeps_no_merged_copy_of_the_experts(implementation):
    model = adapted(implementation)
    experts = sum(module.get_param().nbytes for module in model.modules() if is_wrapped_parameter(module))

    def forward():
        return model(input_ids=ROWS).logits

    before = live_bytes(forward, model.parameters())
    add_own_adapters(model)
    after = live_bytes(forward, model.parameters())
    # `batched_mm` keeps the matrices of each token, which are copies of those of experts
    saved = 1.0 if implementation != "batched_mm" else 0.0
    assert (before - after) / experts == pytest.approx(saved, abs=0.05)


def test_recomputed_layers_and_adapters_that_are_switched_off_are_those_of_peft():
    model = adapted("grouped_mm")
    plain = gradients(model)
    with model.disable_adapter(), torch.no_grad():
        base = model(input_ids=ROWS, labels=ROWS).loss
    add_own_adapters(model)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(input_ids=ROWS, labels=ROWS).loss, base)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for one, other in zip(gradients(model), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_hooks_of_saved_tensors_are_seen():
    assert not has_saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        assert has_saved_tensor_hooks()
    assert not has_saved_tensor_hooks()
