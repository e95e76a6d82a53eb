"""Mixtures of experts of other families, loaded with `distributed_config`: trained, resumed under another layout."""

import shutil

import pytest
import transformers
from native_runs import EVERY, STEPS, VOCAB, Layout, Run, launch, records, set_seed

from hfscale.cli import main

pytestmark = [pytest.mark.faults, pytest.mark.world(4)]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SMALL = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
MODELS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**(SIZES | SMALL | LATENT)),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        intermediate_size=32,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        pad_token_id=0,
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **SIZES,
        intermediate_size=48,
        moe_intermediate_size=16,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        hidden_size_per_layer_input=0,
        pad_token_id=0,
    ),
    "uneven": lambda: transformers.Qwen3MoeConfig(**SIZES, **SMALL, head_dim=8, num_experts=6),
}
"""Configs of each family; three experts of a rank of `uneven` are sharded over two ranks."""
GEMMA4_PLAN = {f"model.layers.*.mlp.{name}": "replicate" for name in ("gate_proj", "up_proj", "down_proj")}
"""As docs/experts.md says: transformers would split the dense MLP over the ranks that share the experts."""
LAYOUTS = {"uneven": Layout(fsdp=4, ep=2), "gemma4": Layout(fsdp=2, ep=2, ep_plan=GEMMA4_PLAN)}


@pytest.mark.parametrize("family", MODELS)
def test_a_family_trains_like_one_process_and_resumes(tmp_path, family):
    set_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[family]()).save_pretrained(tmp_path / "model")
    layout = LAYOUTS.get(family, Layout(fsdp=2, ep=2))
    saved = {"save_strategy": "steps", "save_steps": EVERY}
    launch(Run(layout=Layout(), arguments=saved), tmp_path / "model", tmp_path / "single")
    launch(Run(layout=layout), tmp_path / "model", tmp_path / "run")
    expected = records(tmp_path / "run")
    for step, values in records(tmp_path / "single").items():
        assert expected[step] == pytest.approx(values, rel=1e-5, abs=1e-5), step
    others = [(layout, 0.0), (Layout(fsdp=2), 1e-5)]
    if family != "gpt_oss":  # transformers has no tensor-parallel plan for it
        others.append((Layout(tp=2), 1e-5))
    for other, tolerance in others:
        resumed = shutil.copytree(tmp_path / "run", tmp_path / str(other), dirs_exist_ok=True)
        shutil.rmtree(resumed / "out" / f"checkpoint-{STEPS}")
        launch(Run(layout=other), tmp_path / "model", resumed)
        assert list(records(resumed)) == list(range(EVERY + 1, STEPS + 1))
        for step, values in records(resumed).items():
            assert values == pytest.approx(expected[step], rel=tolerance, abs=tolerance), (step, other)
    source, target = tmp_path / "run" / "out" / f"checkpoint-{STEPS}", tmp_path / "exported"
    assert main(["checkpoints", "export", str(source), str(target)]) == 0
    _, report = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
