"""Expert parallelism, and pipelines whose stages differ by a layer, compared with values computed by hand."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from planner_jobs import job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # no public way to make a world that is not there
from transformers import CONFIG_MAPPING

from hfscale import estimate, plan
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.families import FAMILIES
from hfscale.facts.hardware import accelerator
from hfscale.facts.models import find_model
from hfscale.planner.activations import exchange_bytes, kept_and_working, micro_batches_in_flight
from hfscale.planner.advice import assumptions
from hfscale.planner.emit import emit
from hfscale.planner.estimate import estimate_job
from hfscale.planner.experts import (
    EXPERT_OVERLAP,
    expert_exchange_s,
    gathered_share,
    kept_share,
    layer_parameters,
    nodes_of_a_token,
    owners,
)
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.job import strategy_of
from hfscale.planner.kernels import Rates, layer_forward
from hfscale.planner.launchable import recipe_of
from hfscale.planner.layouts import layouts
from hfscale.planner.memory import state_bytes
from hfscale.planner.network import Group, Network
from hfscale.planner.request import PlanRequest
from hfscale.planner.throughput import _Copies, _sharded_traffic

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

    def test_inside_a_node_a_token_is_sent_once_to_each_rank(self):
        """Eight experts on eight ranks are on 8 (1 - (7/8)^8) of them."""
        ranks = 8 * (1 - (7 / 8) ** 8)
        assert NETWORK.routed_s(1e9, Group(size=8), copies=8, nodes=4) == pytest.approx(ranks * 7 / 8 * 1e9 / 200e9)
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

    def test_paired_passes_of_parallel_trainer_hide_their_exchanges(self):
        """Of 2 x 32 forward passes of a rank 2 x 32 - 3 x 4 + 1 are paired."""
        sizes = {"dp_replicate": 1, "dp_shard": 16, "pp": 4, "expert_parallel": 8, "global_batch": 16 * 32, "zero": 3}
        apart = deepseek(**sizes, overlapped_experts=False, stack="hf", schedule="zbv")
        paired = replace(apart, schedule="dualpipev")
        exchange = expert_exchange_s(apart, NETWORK, 1e6)
        assert expert_exchange_s(paired, NETWORK, 0.0) == pytest.approx(exchange)
        hidden = exchange * EXPERT_OVERLAP * (2 * 32 - 3 * 4 + 1) / (2 * 32)
        assert expert_exchange_s(paired, NETWORK, 1e6) == pytest.approx(exchange - hidden)

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
        perfect = _sharded_traffic(
            run, replace(find_framework("titan"), overlap_dp=0.0), NETWORK, _Copies(), 0.0, 0.0, 0.0
        )
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


QWEN = find_model("qwen3-30b-a3b")


def qwen(**changes):
    """Qwen3-30B-A3B on two nodes of H100s, whose GPUs share its experts."""
    options = {"shape": QWEN, "dp_shard": 16, "expert_parallel": 8, "zero": 3}
    return job(**{**options, **changes})


class TestOfTransformers:
    """Expert parallelism of the stack `hf`, which transformers does itself."""

    def test_states_are_spread_over_all_ranks(self):
        alone, spread = (state_bytes(qwen(expert_parallel=size), find_framework("hf")) for size in (1, 8))
        assert spread.parameters == pytest.approx(alone.parameters)
        assert spread.optimizer == pytest.approx(8 * QWEN.total_parameters / 16)

    def test_fewer_experts_are_gathered(self):
        experts = 128 * 3 * 2048 * 768
        assert layer_parameters(qwen())[1] == experts / 8
        assert layer_parameters(qwen(expert_parallel=1))[1] == experts
        exact = replace(find_framework("hf"), overlap_dp=0.0)
        spread = _sharded_traffic(qwen(), exact, NETWORK, _Copies(), 0.0, 0.0, 0.0).per_layer
        assert (
            spread < _sharded_traffic(qwen(expert_parallel=1), exact, NETWORK, _Copies(), 0.0, 0.0, 0.0).per_layer / 3
        )

    def test_a_layer_exchanges_its_tokens_twice_forward_and_twice_backward(self):
        """Each of 4096 tokens goes to 8 experts of 2048 numbers of 2 bytes, seven eighths of which are on other ranks
        of the node; a repeated forward pass exchanges them again."""
        sent = 4096 * 8 * 2048 * 2 * 7 / 8
        once = expert_exchange_s(qwen(expert_imbalance=1.0), NETWORK, 0.0)
        assert once == pytest.approx(4 * sent / 200e9)
        for kind in ("full", "selective"):
            again = qwen(expert_imbalance=1.0, activation_checkpointing=kind)
            assert expert_exchange_s(again, NETWORK, 0.0) == pytest.approx(1.5 * once)
        assert expert_exchange_s(qwen(expert_imbalance=1.0, precision="fp32"), NETWORK, 0.0) == pytest.approx(2 * once)

    def test_between_nodes_the_exchange_uses_the_network(self):
        sent = 4096 * 8 * 2048 * 2
        across = expert_exchange_s(qwen(expert_imbalance=1.0, expert_parallel=16), NETWORK, 0.0)
        assert across == pytest.approx(4 * sent * 8 / 16 / 50e9)

    def test_the_fullest_rank_sets_pace_and_memory(self):
        even, uneven = (estimate_job(qwen(expert_imbalance=factor)) for factor in (1.0, 2.0))
        slow, quick = (expert_exchange_s(run.job, NETWORK, 0.0) for run in (uneven, even))
        assert slow == pytest.approx(2 * quick)
        assert uneven.time.compute > 1.15 * even.time.compute
        # A layer keeps of a received token 2 bytes of each input and 8 of each inner width of an expert.
        more = 4096 * 8 * (2 * 2048 + 8 * 768) * 48 / 2**30
        assert uneven.memory.activations - even.memory.activations == pytest.approx(more, rel=1e-6)
        alone = estimate_job(qwen(expert_parallel=1))
        assert estimate_job(qwen(expert_parallel=1, expert_imbalance=2.0)).time == alone.time

    def test_layouts_that_only_the_parallel_trainer_runs_are_searched(self):
        found = plan("qwen3-30b-a3b", gpu="H200", gpus=16, global_batch=64, top=1000)
        jobs = [choice.estimate.job for choice in found.choices]
        jobs = [run for run in jobs if run.layout.pp == 1 and run.runs_parallel_trainer]
        assert {run.layout.tp for run in jobs} >= {1, 2}
        assert {run.zero for run in jobs} == {0, 3}
        for run in jobs:
            run.check()
            assert recipe_of(run) == "recipes/tp_pp/train.py"
            assert strategy_of(run) == "parallel"
            assert run.sequence_parallel == (run.layout.tp > 1)
        over_replicas = [run for run in jobs if run.expert_parallel > run.layout.dp_shard * run.layout.tp]
        assert over_replicas

    def test_gradients_are_reduced_over_replicas_once_per_step(self):
        once, twice = (estimate_job(qwen(dp_replicate=2, dp_shard=8, global_batch=16 * n)).time for n in (1, 2))
        apart, both = (
            estimate_job(qwen(dp_replicate=2, dp_shard=8, global_batch=16 * n, expert_parallel=1)).time for n in (1, 2)
        )
        assert twice.communication - once.communication < both.communication - apart.communication

    @pytest.mark.parametrize(
        ("changes", "error", "reason"),
        [
            ({"expert_parallel": 3}, LayoutError, "does not divide 128 experts"),
            ({"expert_parallel": 32}, LayoutError, "does not divide the 16 ranks that share one replica .*: use 16"),
            ({"dp_replicate": 16, "dp_shard": 1, "zero": 1}, LayoutError, "expert_parallel=8 with zero=1"),
            ({"dp_shard": 8, "tp": 16}, LayoutError, "is no multiple of tp 16: use 1"),
            (
                {"tp": 4, "pp": 2, "dp_shard": 8, "expert_parallel": 2},
                LayoutError,
                "expert_parallel is 2, .* the 32 ranks .* .a stage of it., or is no multiple of tp 4: use 1",
            ),
            ({"offload": "full"}, UsageError, "offload is planned with DeepSpeed"),
            ({"method": "qlora"}, UsageError, "4-bit experts"),
            (
                {"expert_imbalance": 0.5},
                UsageError,
                "expert_imbalance is 0.5: it must be a finite number of at least 1",
            ),
        ],
    )
    def test_what_transformers_or_the_planner_cannot_do_is_refused(self, changes, error, reason):
        with pytest.raises(error, match=reason):
            qwen(**changes).check()

    def test_adapters_are_those_of_the_attention_as_in_the_recipes(self):
        run = estimate(QWEN, gpu="H100-80GB", layout={"dp_shard": 8, "ep": 8}, seq_len=4096, zero=3, method="lora")
        assert run.job.expert_parallel == 8
        attention = QWEN.lora_parameters(16, ["q_proj", "k_proj", "v_proj", "o_proj"])
        assert run.memory.parameters == pytest.approx((2 * QWEN.total_parameters + 4 * attention) / 8 / 2**30)

    def test_tensor_parallel_ranks_have_other_experts_and_send_a_part_of_the_tokens(self):
        """Four ranks that share matrices and tokens, in two stages, compared with four that share nothing."""
        options = {"pp": 2, "expert_imbalance": 1.0, "activation_checkpointing": "full", "global_batch": 64}
        split = qwen(tp=4, dp_shard=2, sequence_parallel=True, **options)
        apart = qwen(dp_shard=8, **options)
        split.check()
        hf = find_framework("hf")
        dense, experts = layer_parameters(split)
        assert (4 * dense, experts) == pytest.approx(layer_parameters(apart))
        assert (owners(split, 2), owners(apart, 8)) == (1, 1)
        states = [state_bytes(run, hf) for run in (split, apart)]
        assert states[0].optimizer == pytest.approx(states[1].optimizer, rel=1e-6)
        exchanged = [expert_exchange_s(run, NETWORK, 0.0) for run in (split, apart)]
        assert exchanged[0] == pytest.approx(exchanged[1] / 4)
        # Of the exchange each has a quarter too.
        assert exchange_bytes(split) == pytest.approx(exchange_bytes(apart) / 4)
        rates = Rates(split, hf, shared_constants())
        products = [layer_forward(run, hf, shared_constants(), rates).matmul for run in (split, apart)]
        assert products[1] / 4 <= products[0] < products[1]

    def test_expert_and_tensor_parallelism_are_searched_together(self):
        found = plan("qwen3-235b-a22b", gpu="H100-80GB", gpus=128, seq_len=4096, global_batch=512, top=1000)
        jobs = [choice.estimate.job for choice in found.choices]
        both = {(run.layout.tp, run.expert_parallel) for run in jobs if run.layout.tp > 1 and run.expert_parallel > 1}
        assert both
        assert all(ep % tp == 0 for tp, ep in both)
        for run in jobs:
            run.check()

    def test_the_layout_of_a_plan_can_be_estimated(self):
        found = plan("qwen3-30b-a3b", gpu="H100-80GB", gpus=16, top=50)
        native = [choice for choice in found.choices if choice.estimate.job.is_native]
        choice = next(one for one in native if one.estimate.job.layout.dp_replicate == 1).to_dict()
        assert choice["layout"] == {
            "dp_replicate": 1,
            "dp_shard": 16,
            "cp": 1,
            "tp": 1,
            "pp": 1,
            "ep": choice["expert_parallel"],
        }
        again = estimate(
            "qwen3-30b-a3b",
            gpu="H100-80GB",
            layout=choice["layout"],
            seq_len=4096,
            zero=choice["zero_stage"],
            micro_batch=choice["micro_batch"],
            global_batch=choice["global_batch"],
            activation_checkpointing=choice["activation_checkpointing"],
        )
        assert again.time.total == pytest.approx(choice["step_time_s"])
        with pytest.raises(LayoutError, match="layout has ep 8, and expert_parallel is 4"):
            estimate("qwen3-30b-a3b", gpu="H100-80GB", layout={"dp_shard": 8, "ep": 8}, expert_parallel=4, seq_len=64)


class TestSearch:
    def test_expert_parallelism_is_a_choice_beside_fsdp2(self):
        """With few tokens per GPU, gathering all experts takes longer than sending tokens to them."""
        found = plan("qwen3-235b-a22b", gpu="H200-141GB", gpus=64, global_batch=64, top=50)
        runs = {strategy_of(c.estimate.job): c.estimate for c in found.choices if c.estimate.job.layout.dp_shard == 64}
        assert {"native", "fsdp2"} <= set(runs)
        assert runs["native"].time.total < runs["fsdp2"].time.total
        assert runs["native"].job.expert_parallel in (2, 4, 8, 16, 32, 64)
        assert any(
            "transformers shards the model itself" in line
            for line in assumptions(found.request, runs["native"].job, None)
        )

    @pytest.mark.long
    def test_every_choice_is_valid(self):
        found = plan("qwen3-30b-a3b", gpu="B200", gpus=32, global_batch=64, top=1000)
        jobs = [choice.estimate.job for choice in found.choices]
        assert {run.layout.dp_replicate for run in jobs if run.is_native} == {1, 4}
        for run in jobs:
            run.check()

    def test_one_node_of_several_is_used_for_the_exchange(self):
        """Over a slow network tokens are exchanged in the node."""
        found = plan("qwen3-30b-a3b", gpu="B200", gpus=64, network_gb_s=10.0, top=1000)
        runs = [choice.estimate.job for choice in found.choices if choice.estimate.job.is_native]
        assert {run.expert_parallel for run in runs} <= {2, 4, 8}

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"gpus": 7, "gpus_per_node": 7}, "no number of ranks divides both the 7 GPUs and the 128 experts"),
            ({"method": "qlora"}, "4-bit experts"),
            ({"task": "sft"}, "the recipes for TRL spread no experts"),
            ({"gpu": "A100-40GB"}, "expert parallelism needs"),
        ],
    )
    def test_what_is_not_tried_or_does_not_fit_has_one_reason(self, options, reason):
        found = plan("qwen3-30b-a3b", **{"gpu": "H100-80GB", "gpus": 8, "top": 50} | options)
        assert not any(choice.estimate.job.is_native for choice in found.choices)
        assert sum(reason in row.reason for row in found.rejected) == 1

    def test_dense_models_are_not_concerned(self):
        found = plan("llama-3.1-8b", gpu="H100-80GB", gpus=8, top=50)
        assert not any("expert" in row.reason for row in found.rejected)

    @pytest.mark.parametrize(("gpus", "replicas"), [(8, 1), (32, 4)])
    def test_it_is_emitted_for_the_sharded_recipe(self, tmp_path, gpus, replicas):
        """Replicas exchange gradients once per step, unless each micro-batch is to synchronise."""
        found = plan("qwen3-30b-a3b", gpu="B200", gpus=gpus, global_batch=16 * gpus, top=1000)
        number = next(
            n
            for n, choice in enumerate(found.choices, 1)
            if (job := choice.estimate.job).is_native and job.layout.dp_replicate == replicas and job.micro_batches > 1
        )
        assert found.choices[number - 1].to_dict()["recipe"] == "recipes/sharded/train.py"
        emit(found, tmp_path, number=number)
        flags = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
        layout = found.choices[number - 1].to_dict()["layout"]
        assert (flags["fsdp_size"], flags["ep_size"]) == (layout["dp_shard"], layout["ep"])
        assert flags.get("dp_replicate_size", 1) == replicas
        assert ("accelerator_config" in flags) == (replicas == 1)
        launcher = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
        assert launcher["distributed_type"] == "MULTI_GPU"
        assert "parallelism_config" not in launcher

    def test_it_is_planned_and_emitted_with_a_pipeline(self, tmp_path):
        """Experts that each rank of a stage would gather, and keep for a step, are spread over a node's ranks."""
        found = plan("qwen3-235b-a22b", gpu="H100-80GB", gpus=128, global_batch=512, top=1000)
        staged = [(n, c.estimate) for n, c in enumerate(found.choices, 1) if c.estimate.job.layout.pp > 1]
        assert min((e.time.total, e.job.expert_parallel) for _, e in staged)[1] > 1
        number, best = next((n, e) for n, e in staged if e.job.expert_parallel > 1 and e.job.layout.tp > 1)
        best.job.check()
        alone = estimate_job(replace(best.job, expert_parallel=1))
        assert alone.memory.total > best.memory.total
        assert found.choices[number - 1].to_dict()["recipe"] == "recipes/tp_pp/train.py"
        emit(found, tmp_path, number=number)
        flags = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
        sizes = ("tp_size", "pp_size", "dp_shard_size", "ep_size")
        assert [flags[size] for size in sizes] == [
            best.job.layout.tp,
            best.job.layout.pp,
            best.job.layout.dp_shard,
            best.job.expert_parallel,
        ]

    @pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.experts is not None])
    def test_transformers_has_a_plan_for_every_family_of_experts(self, family):
        assert "ep_dispatch_experts" in CONFIG_MAPPING[family].base_model_ep_plan.values()
