"""Expert parallelism, and pipelines whose stages differ by a layer, compared with values computed by hand."""

from dataclasses import replace

import pytest
from planner_jobs import job

from hfscale import plan
from hfscale.errors import LayoutError
from hfscale.facts.hardware import accelerator
from hfscale.facts.models import find_model
from hfscale.planner.activations import kept_and_working, micro_batches_in_flight
from hfscale.planner.advice import assumptions
from hfscale.planner.estimate import estimate_job
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.network import Group, Network
from hfscale.planner.search import PlanRequest, layouts
from hfscale.planner.throughput import EXPERT_OVERLAP, expert_exchange_s, nodes_of_a_token

PERFECT = replace(shared_constants(), link_rate=1.0, network_rate=1.0, hop_s=0.0, network_hop_s=0.0)
NETWORK = Network.of(accelerator("H800"), node_size=8, network_gb_s=50.0, shared=PERFECT)
DEEPSEEK = find_model("deepseek-v3")


def deepseek(**changes):
    """DeepSeek-V3 as Megatron would run its published layout: 16 stages, experts over 64 ranks."""
    options = {"dp_replicate": 128, "pp": 16, "virtual_stages": 2, "expert_parallel": 64, "zero": 1}
    options |= {"stack": "megatron", "global_batch": 15360, "overlapped_experts": True, "shape": DEEPSEEK}
    return job(gpu=accelerator("H800"), **{**options, **changes})


class TestExchange:
    def test_a_token_crosses_the_network_once_per_node(self):
        """Eight experts on at most 4 of 8 nodes are on 4 (1 - (3/4)^8) of them, and one in eight of these is the
        token's own node."""
        seconds = NETWORK.routed_s(1e9, Group(size=64), copies=8, nodes=4)
        assert seconds == pytest.approx(4 * (1 - 0.75**8) * 7 / 8 * 1e9 / 50e9)
        assert seconds < NETWORK.routed_s(1e9, Group(size=64), copies=8, nodes=8)
        # Every expert a copy of its own: all but the eighth that stays in the node.
        assert NETWORK.exchange_s(8e9, Group(size=64)) == pytest.approx(8 * 7 / 8 * 1e9 / 50e9)

    def test_inside_a_node_every_copy_uses_its_links(self):
        assert NETWORK.routed_s(1e9, Group(size=8), copies=8, nodes=4) == pytest.approx(8 * 7 / 8 * 1e9 / 200e9)
        assert NETWORK.routed_s(1e9, Group(size=1), copies=8, nodes=4) == 0.0

    @pytest.mark.parametrize(("nodes", "reached"), [(8, 4), (16, 8), (4, 4), (2, 2)])
    def test_the_router_limits_the_nodes(self, nodes, reached):
        """Four of eight groups, which are on as many nodes, or on two nodes each (arXiv 2412.19437, section 2.1.2)."""
        assert nodes_of_a_token(DEEPSEEK, nodes) == reached
        assert nodes_of_a_token(find_model("qwen3-30b-a3b"), nodes) == nodes

    def test_tokens_are_sent_in_8_bits_and_returned_in_16(self):
        wide, narrow = (expert_exchange_s(deepseek(precision=kind), NETWORK, 0.0) for kind in ("bf16", "fp8"))
        assert narrow / wide == pytest.approx((2 + 1 + 4 / 128) / 4, rel=1e-6)

    def test_the_hidden_part_is_limited_by_the_computation(self):
        whole = expert_exchange_s(deepseek(), NETWORK, 0.0)
        half_hidden = expert_exchange_s(deepseek(), NETWORK, whole / 2)
        assert half_hidden == pytest.approx(whole * (1 - EXPERT_OVERLAP / 2))
        # A computation runs slower during the exchange, however long the computation is.
        hidden = expert_exchange_s(deepseek(), NETWORK, 100 * whole)
        assert hidden == pytest.approx(whole * (1 - EXPERT_OVERLAP))
        plain = deepseek(overlapped_experts=False)
        assert expert_exchange_s(plain, NETWORK, 100 * whole) > 2 * whole

    @pytest.mark.parametrize(
        "changes",
        [
            {"virtual_stages": 1},
            {"activation_checkpointing": "full"},
            {"expert_parallel": 1},
            {"stack": "titan"},
            {"global_batch": 128},
        ],
    )
    def test_what_megatron_cannot_overlap_is_refused(self, changes):
        with pytest.raises(LayoutError, match="overlapped_experts needs stack megatron, expert_parallel above 1"):
            deepseek(**changes).check()
        deepseek(**changes, overlapped_experts=False).check()

    def test_every_overlapping_choice_is_valid(self):
        found = plan("qwen3-30b-a3b", gpu="B200", gpus=64, global_batch=128, stack="megatron", top=1000)
        jobs = [choice.estimate.job for choice in found.choices]
        assert any(run.overlapped_experts for run in jobs)
        assert any(run.micro_batches == 1 for run in jobs)
        for run in jobs:
            run.check()

    def test_one_more_chunk_is_in_flight(self):
        overlapped, plain = deepseek(), deepseek(overlapped_experts=False)
        assert micro_batches_in_flight(overlapped) - micro_batches_in_flight(plain) == pytest.approx(1 / 2)


def test_selective_recomputation_of_experts_drops_norms_activations_and_expanded_latents():
    whole, kept = (
        kept_and_working(deepseek(activation_checkpointing=kind), find_framework("megatron"))[0]
        for kind in ("none", "selective")
    )
    inner = 2 * (58 * (8 + 1) * 2048 + 3 * 18432) / 61
    latent = 2 * 128 * 128 + 2 * 128 * (192 + 128) - 2 * (1536 + 512)
    assert (whole - kept) / 4096 == pytest.approx(4 * 7168 + inner * 58 / 61 + latent, rel=1e-3)
    dense = job(stack="megatron", activation_checkpointing="selective")
    assert kept_and_working(dense, find_framework("megatron")) == kept_and_working(
        replace(dense, activation_checkpointing="none"), find_framework("megatron")
    )


def with_layers(shape, layers):
    return replace(shape, layers=layers, windows=shape.windows[:layers], moe_layers=shape.moe_layers[:layers])


class TestUnevenPipelines:
    def test_the_fullest_of_16_stages_sets_the_pace_of_61_layers(self):
        assert deepseek().layer_split == (4, 3)
        shape = replace(find_model("llama-3.1-8b"), vocab=8)  # the head would make the last stage slower
        even, odd = (
            estimate_job(job(shape=with_layers(shape, layers), pp=8, zero=0, stack="megatron", global_batch=64))
            for layers in (32, 29)
        )
        assert (even.job.layer_split, odd.job.layer_split) == ((4, 4), (4, 3))
        assert odd.time.compute == pytest.approx(even.time.compute, rel=1e-3)
        assert odd.time.bubble < even.time.bubble

    def test_they_are_proposed_unless_they_are_very_uneven(self):
        found = plan("deepseek-v3", gpu="H800", gpus=2048, global_batch=15360, stack="megatron", top=1000)
        stages = {choice.estimate.job.layout.pp for choice in found.choices}
        assert found.choices[0].estimate.job.overlapped_experts
        assert sum("while another micro-batch is computed" in text for text in found.assumptions) == 1
        uneven = [choice.estimate.job for choice in found.choices if 61 % choice.estimate.job.layout.pp]
        assert any(text.startswith("61 layers") for text in assumptions(found.request, uneven[0], None))
        assert {4, 8, 16} <= stages
        shape = with_layers(find_model("llama-3.1-8b"), 27)
        few = PlanRequest(shape=shape, gpu=accelerator("H100-80GB"), gpus=64, stack="megatron")
        # 28 places for 27 layers on 2 and on 4 ranks, 32 on 8 and on 16.
        assert {layout.pp for layout, _, _ in layouts(few, 64)} == {1, 2, 4}
