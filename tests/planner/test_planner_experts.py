"""Expert parallelism, and pipelines whose stages differ by a layer, compared with values computed by hand."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from planner_jobs import job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # no public way to make a world that is not there

from hfscale import plan
from hfscale.errors import LayoutError
from hfscale.facts.hardware import accelerator
from hfscale.facts.models import find_model
from hfscale.planner.activations import kept_and_working, micro_batches_in_flight
from hfscale.planner.advice import assumptions
from hfscale.planner.estimate import estimate_job
from hfscale.planner.experts import (
    EXPERT_OVERLAP,
    expert_exchange_s,
    gathered_share,
    kept_share,
    layer_parameters,
    nodes_of_a_token,
)
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.memory import state_bytes
from hfscale.planner.network import Group, Network
from hfscale.planner.search import PlanRequest, layouts
from hfscale.planner.throughput import _sharded_traffic

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


class TestShardedExperts:
    @pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (8, 16), (6, 4)])
    def test_fsdp2_gives_each_rank_complete_experts(self, experts, ranks):
        """Compared with what torch allocates on the first rank for a parameter of the shape that transformers gives
        them."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(torch.zeros(experts, 3, 5))
            fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
            kept = module.weight.to_local().numel()
            module.unshard()
            gathered = module.weight.untyped_storage().nbytes() / 4
        finally:
            dist.destroy_process_group()
        run = job(shape=with_experts(experts), dp_shard=ranks, zero=3)
        assert kept_share(run, ranks) == kept / (experts * 15)
        assert gathered_share(run) == gathered / (experts * 15)

    def test_more_ranks_than_experts_need_no_less_memory_per_rank(self):
        """Mixtral's eight experts on eight ranks and on 64."""
        few, many = (state_bytes(mixtral(ranks), find_framework("hf")) for ranks in (8, 64))
        experts = 12 * 32 * 8 * 3 * 4096 * 14336 / 8
        others = 12 * (46_702_792_704 - 8 * experts / 12)
        assert few.parameters + few.optimizer == pytest.approx(experts + others / 8, rel=1e-3)
        assert many.parameters + many.optimizer == pytest.approx(experts + others / 64, rel=1e-3)
        sharded = estimate_job(mixtral(64)).memory
        assert sharded.total > 2 * estimate_job(mixtral(64, stack="titan")).memory.total
        text = "FSDP2 shards the 8 experts of a layer by expert: a rank keeps up to 1 of them"
        request = PlanRequest(shape=mixtral(64).shape, gpu=accelerator("H100-80GB"), gpus=64)
        said = [any(line.startswith(text) for line in assumptions(request, mixtral(ranks), None)) for ranks in (8, 64)]
        assert said == [False, True]

    def test_ranks_with_the_same_experts_gather_them(self):
        """64 ranks that share experts by 8: a layer's experts are gathered from the 8 nodes, an eighth each."""
        run = replace(mixtral(64, stack="titan"), expert_parallel=8)
        perfect = _sharded_traffic(run, replace(find_framework("titan"), overlap_dp=0.0), NETWORK, 0.0, 0.0, 0.0)
        dense, experts = layer_parameters(run)
        assert experts == 3 * 4096 * 14336
        inside = 50e9 * 8  # a ring over all ranks of a node uses all of its network cards
        seconds = (2 * 2 + 4) * (dense * 63 / 64 / min(inside, 200e9) + experts * 7 / 8 / 50e9)
        assert perfect.per_layer == pytest.approx(seconds)


def with_experts(experts):
    shape = find_model("mixtral-8x7b")
    return replace(shape, moe=replace(shape.moe, experts=experts))


def mixtral(ranks, **changes):
    options = {"shape": find_model("mixtral-8x7b"), "dp_shard": ranks, "zero": 3, "global_batch": ranks}
    return job(**{**options, **changes})
