"""Pipelines in the planner: stages as `ParallelTrainer` divides them, memory, bubbles, and what the search
proposes."""

import random
from dataclasses import replace
from typing import get_args

import pytest
import torch
from planner_jobs import job
from torch.distributed.pipelining._backward import stage_backward_input  # no public name
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from benchmarks.activations import LiveBytes, gpu_kernels
from hfscale import plan
from hfscale.errors import LayoutError
from hfscale.facts.families import FAMILIES
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.facts.schedules import PLANNER_SCHEDULES, SCHEDULES, rank_layers, schedule_name, stage_layers
from hfscale.facts.support import (
    PIPELINE_TESTED,
    PIPELINE_UNSUPPORTED,
    SEQUENCE_PARALLEL_TESTED,
    TENSOR_PARALLEL_PLAN_MISSING,
    TENSOR_PARALLEL_UNSUPPORTED,
)
from hfscale.parallel.partition import ModelStructure, layer_costs, partition_by_cost
from hfscale.parallel.stages import StagePlan
from hfscale.planner.activations import (
    held_bytes,
    kept_and_waiting,
    kept_and_working,
    layer_bytes,
    micro_batches_in_flight,
    transient_bytes,
    waiting_bytes,
)
from hfscale.planner.estimate import estimate_job
from hfscale.planner.frameworks import find_framework
from hfscale.planner.memory import local_parameters, memory_of
from hfscale.planner.options import Schedule

KINDS = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)]
"""The planner's schedules with stages per rank."""


def stage_plan(schedule, pp, stages_per_rank):
    return StagePlan(schedule=schedule_name(schedule, stages_per_rank), pp=pp, virtual_stages=stages_per_rank)


def test_the_planner_names_every_schedule_of_the_trainer():
    assert {schedule_name(schedule, stages) for schedule, stages in KINDS} == set(SCHEDULES)
    assert set(PLANNER_SCHEDULES) == {schedule for schedule, _ in KINDS}
    assert set(PLANNER_SCHEDULES) == set(get_args(Schedule))


def test_stages_have_the_layers_that_the_trainer_gives_them():
    dice = random.Random(0)
    for _ in range(60):
        layers, head = dice.randint(2, 40), dice.choice([0.1, 0.5, 1.0, 1.23, 2.7, 9.0])
        stages = dice.randint(1, min(layers, 9))
        cuts = partition_by_cost([1.0] * layers, head, stages)
        assert sorted(stage_layers(layers, head, stages)[:-1]) == sorted(len(cut.layers) for cut in cuts[:-1])
        assert stage_layers(layers, head, stages)[-1] == len(cuts[-1].layers), (layers, head, stages)


@pytest.mark.parametrize(("schedule", "stages"), KINDS)
def test_ranks_hold_the_layers_of_their_stages(schedule, stages):
    plan = stage_plan(schedule, 3, stages)
    each = stage_layers(23, 1.5, 3 * stages)
    expected = tuple(sum(each[stage] for stage in plan.stages_of(rank)) for rank in range(3))
    assert rank_layers(23, 1.5, 3, stages, plan.schedule) == expected


def test_the_head_has_the_cost_that_the_trainer_gives_it():
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    layers, head = layer_costs(model, ModelStructure.of(model))
    shape = type(job().shape).from_config({**sizes, "model_type": "llama"})
    assert shape.head_layers == pytest.approx(head / layers[0])


def test_every_family_with_a_tensor_parallel_plan_has_pipelines_and_sequence_parallelism():
    planned = set(FAMILIES) - {"gemma4_text"}  # its larger models, which are sized, do not embed the tokens again
    assert planned - PIPELINE_TESTED == planned & set(PIPELINE_UNSUPPORTED)
    assert set(PIPELINE_UNSUPPORTED).isdisjoint(planned - TENSOR_PARALLEL_PLAN_MISSING)
    assert planned - set(SEQUENCE_PARALLEL_TESTED) <= {
        *TENSOR_PARALLEL_PLAN_MISSING,
        *TENSOR_PARALLEL_UNSUPPORTED,
    }


class TestMemory:
    def test_the_second_of_16_ranks_of_405b_is_the_fullest(self):
        """Seven layers on the first rank and eight on the others: 15 micro-batches of eight are more than 16 of
        seven (recipes/tp_pp/llama-3.1-405b-full.yaml)."""
        run = job(shape=find_model("llama-3.1-405b"), tp=8, pp=16, dp_shard=8, global_batch=512)
        assert run.rank_layers[:2] == (7, 8)
        kept, waiting = kept_and_waiting(run, find_framework("hf"))
        held = [held_bytes(run, rank, layers, (kept, waiting)) for rank, layers in enumerate(run.rank_layers)]
        assert max(held) == held[1] == 15 * 8 * kept
        assert micro_batches_in_flight(run) == 16

    def test_the_first_rank_of_a_v_has_both_ends_of_the_model(self):
        line, v = job(pp=4, zero=0), job(pp=4, zero=0, schedule="zbv", virtual_stages=2)
        shape = line.shape
        whole = v.rank_layers[0] * shape.mean_layer_parameters + shape.embedding_parameters + shape.head_parameters
        assert local_parameters(v) == pytest.approx(whole)
        assert local_parameters(line) < whole
        v = job(pp=4, zero=0, schedule="zbv", virtual_stages=2, activation_checkpointing="full")
        assert memory_of(v, find_framework("hf")).loss > 0

    def test_logits_are_gathered_unless_the_loss_is_parallel(self):
        options = {"tp": 4, "pp": 2, "global_batch": 2, "activation_checkpointing": "full", "zero": 0}
        gathered, split = (estimate_job(job(loss_parallel=on, **options)) for on in (False, True))
        assert gathered.memory.loss == pytest.approx(4 * split.memory.loss)
        assert gathered.time.total > split.time.total

    def test_sequence_parallelism_keeps_gathered_inputs(self):
        """The inputs of attention and MLP of a layer are kept in full, not a quarter of them."""
        options = {"tp": 4, "zero": 0, "dp_replicate": 1, "stack": "hf"}
        run = job(**options)
        kept, _ = kept_and_working(run, find_framework("hf"))
        assert kept - layer_bytes(run, find_framework("hf")) == 2 * 2 * 4096 * 4096 * 3 / 4
        full = job(**options, activation_checkpointing="full")
        boundary, working = kept_and_working(full, find_framework("hf"))
        assert boundary == 2 * 4096 * 4096 / 4
        assert working == kept
        theirs = job(**{**options, "stack": "megatron"})
        assert kept_and_working(theirs, find_framework("megatron"))[0] == layer_bytes(
            theirs, find_framework("megatron")
        )


class TestTime:
    def test_bubbles_shrink_from_schedule_to_schedule(self):
        times = [
            estimate_job(job(pp=8, zero=0, global_batch=64, schedule=schedule, virtual_stages=stages)).time.bubble
            for schedule, stages in (("1f1b", 1), ("1f1b", 2), ("zero_bubble", 2), ("zbv", 2))
        ]
        assert times == sorted(times, reverse=True)
        assert times[-1] < times[0] / 3

    def test_a_v_has_two_stages_per_rank(self):
        with pytest.raises(LayoutError, match="virtual_stages is 1, but schedule zbv"):
            job(pp=4, schedule="zbv").check()


class TestSearch:
    def pipelines(self, **options):
        found = plan("llama-3.1-70b", gpu="H200", gpus=64, seq_len=4096, top=1000, **options)
        return [choice.estimate.job for choice in found.choices if choice.estimate.job.layout.pp > 1], found

    def test_the_trainer_can_run_every_pipeline(self):
        jobs, found = self.pipelines(global_batch=256)
        assert {run.zero for run in jobs} == {0, 3}
        for run in jobs:
            stage_plan(run.schedule, run.layout.pp, run.virtual_stages).check_micro_batches(run.micro_batches)
            assert run.layout.cp == 1
            assert run.sequence_parallel == (run.layout.tp > 1)
            assert run.loss_parallel == (run.layout.tp > 1)
            assert run.activation_checkpointing == "none" or run.schedule == "1f1b"
        assert not any("no pipelines" in row.reason for row in found.rejected)

    def test_a_schedule_with_a_smaller_bubble_is_chosen_where_it_matters(self):
        few, many = (self.pipelines(global_batch=batch)[0] for batch in (128, 4096))
        assert {run.schedule for run in few} - {"1f1b"}
        assert {(run.schedule, run.virtual_stages) for run in many if run.layout.pp == 2} == {("1f1b", 1)}

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"compile": True}, "stages are not compiled"),
            ({"precision": "fp8"}, "bf16 or fp32"),
            ({"optimizer": "adamw_8bit"}, "not tested with sharded stages"),
        ],
    )
    def test_what_pipelines_do_not_support_is_reported_once(self, options, reason):
        jobs, found = self.pipelines(**options)
        assert jobs == []
        assert len([row for row in found.rejected if reason in row.reason]) == 1

    def test_too_few_micro_batches_are_reported(self):
        _, found = self.pipelines(global_batch=8)
        assert any("16 pipeline stages: give --global-batch" in r.reason for r in found.rejected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_what_the_pass_of_the_inputs_keeps_and_needs_is_what_torch_counts(family):
    """Of one layer in bf16: the gradients that wait for the pass of the weights, and those that exist for a moment."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1, **heads}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
    config = AutoConfig.for_model(
        family,
        **sizes,
        **({"head_dim": 32} if family != "llama" else {}),
        **(experts if family == "qwen3_moe" else {}),
    )
    run = job(
        shape=ModelShape.from_config(config.to_dict()),
        pp=2,
        schedule="zbv",
        virtual_stages=2,
        seq_len=256,
        precision="bf16",
        zero=3,
        dp_shard=1,
    )
    with gpu_kernels():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        layer = model.model.layers[0]
        hidden = torch.randn(1, 256, 256, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(256)[None]
        rotary = model.model.rotary_emb(hidden, positions)
        with LiveBytes() as live:
            output = layer(hidden, position_embeddings=rotary, position_ids=positions, attention_mask=None)
            gradient = torch.ones_like(output)
            live.peak = 0
            _, groups = stage_backward_input([output], [gradient], [hidden], layer.parameters())
            moment = live.peak - live.now
    waiting = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for group in groups
        for several in group["grads"]
        for one in several
        if one is not None
    }
    assert waiting_bytes(run) == sum(waiting.values())
    one_stage = replace(run, schedule="1f1b", virtual_stages=1)
    assert transient_bytes(run) - transient_bytes(one_stage) == pytest.approx(moment, rel=0.03)
