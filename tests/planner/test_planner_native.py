"""The memory of transformers' expert parallelism, compared with what torch's `MemTracker` counts on gloo ranks.

Each rank trains a small mixture of experts that transformers shards while it loads it, as in a script of a user.
"""

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from planner_jobs import job
from planner_ranks import received_tokens
from torch.distributed._tools.mem_tracker import MemTracker  # no public name
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.distributed import DistributedConfig

from benchmarks.activations import gpu_kernels, recompute
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.frameworks import find_framework
from hfscale.planner.memory import GIB, allocated_gib, memory_of

TOKENS = 1024
MICRO_BATCHES = 2
COMMON = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 32}
ROUTED = {"num_experts_per_tok": 4, "moe_intermediate_size": 192}
SHARED = {
    **ROUTED,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "intermediate_size": 768,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
GATED = {
    **GROUPED,
    **ROUTED,
    "num_experts": 16,
    "shared_expert_intermediate_size": 192,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MODELS = {
    "qwen3_moe": {**GROUPED, **ROUTED, "num_experts": 16, "norm_topk_prob": True},
    "mixtral": {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 192},
    "gpt_oss": {
        **GROUPED,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 192,
        "sliding_window": 128,
    },
    "glm4_moe": {**GROUPED, **SHARED, "first_k_dense_replace": 1},
    "qwen3_next": {**GATED, **LINEAR, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_5_moe_text": {**GATED, **LINEAR},
    "nemotron_h": {
        **GROUPED,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "moe_shared_expert_intermediate_size": 384,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "chunk_size": 64,
    },
    "deepseek_v3": {**COMMON, **SHARED, **LATENT, "num_key_value_heads": 8, "first_k_dense_replace": 1},
}


def save_model(family, folder, *, favoured=1.0, **sizes):
    """Save a model whose routers score the first half of the experts with weights of a larger spread."""
    set_seed(0)
    config = AutoConfig.for_model(family, **(MODELS[family] | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data[: len(parameter) // 2] *= favoured
    model.save_pretrained(folder)
    return config


def count_peaks(folder, sizes, kinds, tokens, out):
    """Write this rank's peak of the bytes in use in a step, and the tokens that its experts got in each layer, for
    each recomputation."""
    found = {}
    for kind in kinds:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            distributed_config=DistributedConfig(fsdp_mixed_precision=True, **sizes),
        )
        model._apply(torch.clone)  # on a CPU the loaded shards are views of the complete tensors
        model.train()
        if kind != "none":
            recompute(model, kind, has_adapters=False)
        found[kind] = _peak_of_a_step(model, tokens)
    Path(out, f"rank-{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _peak_of_a_step(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, COMMON["vocab_size"], (1, tokens), generator=generator)

    def step(tracker=None):
        for number in range(MICRO_BATCHES):
            # Replicas reduce their gradients with the last micro-batch only, as in Trainer.
            model.set_requires_all_reduce(number == MICRO_BATCHES - 1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            if tracker is not None:
                tracker.reset_mod_stats()
        optimizer.step()
        optimizer.zero_grad()

    with gpu_kernels(), received_tokens() as received:
        step()  # makes the optimizer's states
        received.clear()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step(tracker)
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {"bytes": snapshot["Total"], "received": received}


def planned_bytes(config, sizes, kind, tokens, imbalance):
    """The planner's peak of the bytes in use, without memory that is only reserved: the block of the bf16 logits."""
    shape = ModelShape.from_config(config.to_dict())
    run = job(
        shape=shape,
        dp_replicate=sizes.get("dp_replicate_size", 1),
        dp_shard=sizes["fsdp_size"],
        expert_parallel=sizes["ep_size"],
        expert_imbalance=imbalance,
        zero=3,
        seq_len=tokens,
        global_batch=sizes["fsdp_size"] * sizes.get("dp_replicate_size", 1) * MICRO_BATCHES,
        activation_checkpointing=kind,
    )
    run.check()
    memory = memory_of(run, find_framework("hf"))
    return allocated_gib(memory) * GIB - (2 * tokens * shape.vocab if memory.loss else 0)


def compare(family, sizes, kinds, folder, *, tokens=TOKENS, favoured=1.0, **model_sizes):
    config = save_model(family, folder, favoured=favoured, **model_sizes)
    world = sizes["fsdp_size"] * sizes.get("dp_replicate_size", 1)
    codes = run_ranks(world, count_peaks, folder, sizes, kinds, tokens, folder, log=folder, timeout_s=270)
    assert codes == [0] * world, (folder / "rank-0.log").read_text()[-3000:]
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
    even = tokens * ModelShape.from_config(config.to_dict()).top_k
    for kind in kinds:
        fullest = max((rank[kind] for rank in ranks), key=lambda found: found["bytes"])
        # Without recomputation all layers are kept, with it one at a time.
        received = mean(fullest["received"]) if kind == "none" else max(fullest["received"])
        planned = planned_bytes(config, sizes, kind, tokens, max(1.0, received / even))
        assert planned == pytest.approx(fullest["bytes"], rel=0.03), kind
    if favoured > 1:
        assert max(mean(rank["none"]["received"]) for rank in ranks) > 1.2 * even


@pytest.mark.long
def test_the_peak_of_a_narrow_model_equals_that_counted_by_torch(tmp_path):
    """Half as many tokens and half the width: activations have the same share of the peak."""
    narrow = {"hidden_size": 128, "head_dim": 16, "moe_intermediate_size": 96}
    compare("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, ("full",), tmp_path, tokens=TOKENS // 2, **narrow)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("family", "sizes", "favoured", "kinds"),
    [
        ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, 1.0, ("none", "full")),
        ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, 4.0, ("none", "full")),
        ("qwen3_moe", {"fsdp_size": 4, "ep_size": 2}, 1.0, ("none", "selective", "full")),
        ("qwen3_moe", {"fsdp_size": 4, "ep_size": 4}, 1.0, ("none", "full")),
        ("qwen3_moe", {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, 1.0, ("none", "full")),
        ("mixtral", {"fsdp_size": 4, "ep_size": 2}, 1.0, ("none", "full")),
        ("gpt_oss", {"fsdp_size": 2, "ep_size": 2}, 1.0, ("none", "full")),
        ("gpt_oss", {"fsdp_size": 4, "ep_size": 2}, 1.0, ("none", "full")),
        ("glm4_moe", {"fsdp_size": 4, "ep_size": 2}, 1.0, ("none", "full")),
        ("deepseek_v3", {"fsdp_size": 4, "ep_size": 2}, 1.0, ("none", "full")),
        *(
            (family, {"fsdp_size": 2, "ep_size": 2}, 1.0, kinds)
            for family, kinds in (
                ("qwen3_next", ("none", "full")),
                ("qwen3_5_moe_text", ("none", "full")),
                ("nemotron_h", ("none", "full")),
            )
        ),
    ],
)
def test_the_peak_equals_that_counted_by_torch(tmp_path, family, sizes, favoured, kinds):
    compare(family, sizes, kinds, tmp_path, favoured=favoured)
