"""The activations of experts that `ParallelTrainer` spreads over tensor-parallel ranks, counted on two gloo ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from parallel_world import in_world
from planner_jobs import job as planned_job
from planner_ranks import LocalBytes, parallel_model
from transformers import AutoConfig

from benchmarks.activations import gpu_kernels
from hfscale.facts.model_shape import ModelShape
from hfscale.parallel.arguments import decide_layout
from hfscale.parallel.stages import StagePlan
from hfscale.planner.activations import kept_and_working
from hfscale.planner.frameworks import find_framework

MODEL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
}
TOKENS = 256
LAYERS = (1, 2)


def live_bytes(layers, tokens, sequence):
    """Bytes that a rank holds between the forward and the backward pass of a model."""
    config = AutoConfig.for_model("qwen3_moe", **MODEL, num_hidden_layers=layers, max_position_embeddings=2048)
    layout = decide_layout(2, tp=2, ep=2)
    found = []

    def loss_of(view, inputs):
        loss = view(**inputs, use_cache=False).loss
        found.append(live.now)
        return loss

    model = parallel_model(config, layout, StagePlan(), loss_of=loss_of, sequence_parallel=sequence)
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    with gpu_kernels(), LocalBytes() as live:
        model(micro_batches=1, input_ids=ids, labels=ids)
    return found[-1]


def kept_of_a_layer(sequence):
    """Bytes per token that a layer keeps, on average of the ranks, whose experts get unequal numbers of tokens."""
    few, many = ([live_bytes(layers, tokens, sequence) for tokens in (TOKENS, 2 * TOKENS)] for layers in LAYERS)
    kept = torch.tensor(((many[1] - many[0]) - (few[1] - few[0])) / TOKENS / (LAYERS[1] - LAYERS[0]))
    dist.all_reduce(kept)
    return kept.item() / 2


@pytest.mark.long
def test_a_layer_keeps_what_the_planner_says():
    """With and without sequence parallelism; each rank keeps a part of the copies that experts get of a token."""
    for sequence, found in zip((True, False), in_world(2, kept_of_a_layer, [True, False]), strict=True):
        run = planned_job(
            shape=ModelShape.from_config({**MODEL, "model_type": "qwen3_moe", "num_hidden_layers": 4}),
            tp=2,
            pp=2,
            dp_shard=2,
            seq_len=TOKENS,
            global_batch=16,
            expert_parallel=2,
            expert_imbalance=1.0,
            sequence_parallel=sequence,
        )
        kept, _ = kept_and_working(run, find_framework("hf"))
        assert kept / TOKENS == pytest.approx(found, rel=0.03), sequence
    split, _ = kept_and_working(replace(run, expert_parallel=1), find_framework("hf"))
    assert split / TOKENS > 1.03 * found
