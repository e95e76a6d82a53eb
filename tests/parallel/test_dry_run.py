"""The dry run: what the ranks of a simulated world hold adds up to the model."""

from dataclasses import replace

import pytest
import torch
from parallel_world import empty_causal_lm, in_world, tiny_config
from planner_jobs import job as planned_job
from transformers import AutoModelForCausalLM, TrainingArguments

from hfscale.errors import UsageError
from hfscale.facts.model_shape import ModelShape
from hfscale.parallel.arguments import decide_layout
from hfscale.parallel.dry_run import dry_run, print_dry_run
from hfscale.parallel.stages import StagePlan
from hfscale.planner.activations import exchange_bytes, kept_and_working
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.memory import GIB, memory_of, state_bytes
from hfscale.planner.peak import highest_moment

SIZES = {"num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128}


def simulate(job):
    """The dry run of a world of `ranks`; to be run in a process of its own, which has no other process group."""
    optional = {axis: job.get(axis) for axis in ("cp", "ep", "dp_replicate")}
    layout = decide_layout(job["ranks"], tp=job["tp"], pp=job["pp"], **optional)
    plan = StagePlan(pp=layout.pp, schedule=job["schedule"])
    args = TrainingArguments(
        "none", use_cpu=True, report_to="none", bf16=True, gradient_accumulation_steps=8, per_device_train_batch_size=1
    )
    recompute = job.get("recompute", False)
    args.gradient_checkpointing = recompute
    config = tiny_config(job.get("family", "llama"), **(SIZES | job.get("model", {})))  # one config for all models

    def empty():
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    ranks = dry_run(empty, layout, plan, args, block_size=32, sequence_parallel=job.get("sequence_parallel", False))
    print_dry_run(ranks, layout, plan, args)
    return [vars(rank) | {"total": rank.total} for rank in ranks]


@pytest.mark.parametrize(("schedule", "pp"), [("1F1B", 4), ("ZBV", 2)])
def test_the_parts_add_up_to_the_model(schedule, pp):
    (ranks,) = in_world(1, simulate, [{"ranks": 256, "tp": 4, "pp": pp, "schedule": schedule}])
    parameters = empty_causal_lm(**SIZES).num_parameters()
    assert sum(rank["parameters"] for rank in ranks) == parameters
    bounds = [map(int, part.split("-")) for rank in ranks for part in rank["layers"].split()]
    layers = [range(first, last + 1) for first, last in bounds]
    assert sorted(n for part in layers for n in part) == list(range(10))
    # Weights, gradients and moments take 16 bytes; norms are not sharded over tp, and small shards are padded.
    states = sum(rank["states"] for rank in ranks) * 2**30
    sharers = 256 // pp
    assert parameters * 16 / sharers <= states <= 2.5 * parameters * 16 / sharers
    assert [rank["loss"] > 0 for rank in ranks] == [schedule == "ZBV", *[False] * (pp - 2), schedule == "1F1B"]
    if schedule == "1F1B":  # a rank holds as many micro-batches as there are stages from it on
        assert ranks[0]["activations"] > ranks[-1]["activations"]


def test_sequence_parallelism_reduces_activations_and_logits_are_sharded():
    job = {"ranks": 64, "tp": 4, "pp": 2, "schedule": "1F1B"}
    jobs = [job | {"recompute": full, "sequence_parallel": sp} for full in (False, True) for sp in (False, True)]
    plain, sequence, recomputed, both = in_world(1, simulate, jobs)
    # A token has 16 h of norms, residuals and inputs, and 4 bytes of each norm's own. The 4 h of gathered inputs are
    # not split; of the others three quarters are saved, and so they are of what is received: hidden states, gradient.
    kept = 2 * 5 * 32  # micro-batches in flight, layers, tokens
    hidden = empty_causal_lm(**SIZES).config.hidden_size
    saved = (plain[0]["activations"] - sequence[0]["activations"]) * 2**30
    assert saved == pytest.approx(0.75 * (kept * (12 * hidden + 2 * 4) + 32 * 4 * hidden), rel=1e-6)
    assert both[0]["activations"] < recomputed[0]["activations"] / 1.5
    assert {rank["states"] for rank in plain} == {rank["states"] for rank in sequence}
    logits = 14 * 32 * 128 / 4 / 2**30
    ends = plain[1]["loss"] - logits  # what embedding and last norm keep: at least 2 fp32 copies of the hidden state
    assert ends > 32 * 8 * hidden / 2**30
    assert sequence[1]["loss"] - logits == pytest.approx(ends / 4)


def test_context_parallelism_halves_activations_except_keys_and_values_and_keeps_the_shards():
    job = {"ranks": 64, "tp": 2, "pp": 2, "schedule": "1F1B"}
    plain, context = in_world(1, simulate, [job, job | {"cp": 2}])
    for one, other in zip(plain, context, strict=True):
        # Slightly more than half, because the other rank's keys and values are kept too.
        assert 1.02 < 2 * other["activations"] / one["activations"] < 1.15
        assert (one["states"], one["gathered"]) == (other["states"], other["gathered"])
    assert plain[1]["loss"] == pytest.approx(2 * context[1]["loss"])


def test_a_dry_run_inside_a_real_world_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    args = TrainingArguments("none", use_cpu=True, report_to="none")
    with pytest.raises(UsageError, match="dry_run simulates"):
        dry_run(empty_causal_lm, decide_layout(4), StagePlan(), args, block_size=8)


def test_spread_experts_are_counted_once_and_gathered_by_the_ranks_that_share_them():
    """Sixteen data parallel ranks of a stage gather all experts; with `ep` 4, a quarter of them from four ranks; with
    `ep` 16 each rank computes with its own, of which it has a copy in bf16 and a sum of gradients."""
    experts = {"num_experts": 16, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    job = {"ranks": 64, "tp": 1, "pp": 4, "schedule": "1F1B", "family": "qwen3_moe", "model": experts}
    alone, four, sixteen = in_world(1, simulate, [job | {"ep": ep} for ep in (1, 4, 16)])
    of_a_layer = 16 * 3 * 32 * 32
    for rank in range(4):
        layers = sum(1 + int(last) - int(first) for first, last in [alone[rank]["layers"].split("-")])
        assert alone[rank]["parameters"] == four[rank]["parameters"] == sixteen[rank]["parameters"]
        assert four[rank]["states"] == pytest.approx(alone[rank]["states"])
        for spread, share in ((four, 1 / 4), (sixteen, 1 / 16)):
            saved = (alone[rank]["gathered"] - spread[rank]["gathered"]) * 2**30
            assert saved == pytest.approx((2 + 4) * layers * of_a_layer * (1 - share))


PLANNED = {
    "hidden_size": 256,
    "num_experts": 16,
    "moe_intermediate_size": 192,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 32,
}


@pytest.mark.parametrize("sizes", [{"tp": 1, "ep": 4}, {"tp": 2, "ep": 4}, {"tp": 4, "ep": 4}, {"tp": 4, "ep": 16}])
def test_the_planner_counts_what_the_ranks_of_spread_experts_hold(sizes):
    """States and what is gathered of them, on the fullest rank of four stages of 16 ranks."""
    job = {"ranks": 64, "pp": 4, "schedule": "1F1B", "family": "qwen3_moe", "model": PLANNED, **sizes}
    (ranks,) = in_world(1, simulate, [job])
    layout = decide_layout(64, pp=4, tp=sizes["tp"])
    run = planned_job(
        shape=ModelShape.from_config(tiny_config("qwen3_moe", **(SIZES | PLANNED)).to_dict()),
        **{axis: getattr(layout, axis) for axis in ("dp_shard", "tp", "pp")},
        seq_len=32,
        global_batch=8 * layout.dp_shard,
        expert_parallel=sizes["ep"],
    )
    run.check()
    hf = find_framework("hf")
    states = state_bytes(run, hf)
    fullest = max(ranks, key=lambda rank: rank["total"])
    assert states.parameters + states.gradients + states.optimizer == pytest.approx(fullest["states"] * GIB, rel=0.03)
    lean = memory_of(replace(run, sequence_parallel=False), hf, replace(shared_constants(), fragmentation=1.0))
    assert lean.buffers == pytest.approx(fullest["gathered"], rel=0.03)
    assert lean.activations == pytest.approx(fullest["activations"], rel=0.03)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "ep": 4},
        {"tp": 2, "ep": 16},
        {"tp": 1, "cp": 2, "ep": 4},
        {"tp": 4, "dp_replicate": 4, "ep": 4},
        {"tp": 4, "dp_replicate": 4, "ep": 16},
        {"tp": 1, "dp_replicate": 16, "ep": 16},
        {"tp": 1, "dp_replicate": 4, "ep": 8},
        {"tp": 2, "pp": 2, "dp_replicate": 4, "ep": 8},
    ],
)
def test_the_planner_counts_spread_experts_without_a_pipeline_and_over_replicas(sizes):
    """States, and gradients that are summed over micro-batches before they are reduced, of 16 ranks of a stage."""
    model = PLANNED | {"num_key_value_heads": 4}
    pp = sizes.get("pp", 1)
    job = {"ranks": 16 * pp, "schedule": "1F1B", "family": "qwen3_moe", "model": model, **sizes, "pp": pp}
    (ranks,) = in_world(1, simulate, [job])
    layout = decide_layout(
        16 * pp, pp=pp, **{axis: sizes[axis] for axis in sizes.keys() & {"tp", "cp", "dp_replicate"}}
    )
    run = planned_job(
        shape=ModelShape.from_config(tiny_config("qwen3_moe", **(SIZES | model)).to_dict()),
        **{axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")},
        seq_len=32,
        global_batch=8 * layout.data_parallel_size,
        expert_parallel=sizes["ep"],
        zero=3 if layout.dp_shard * layout.cp > 1 else 0,
        sequence_parallel=False,
        loss_parallel=sizes["tp"] > 1,
    )
    run.check()
    assert run.runs_parallel_trainer
    states = state_bytes(run, find_framework("hf"))
    fullest = max(ranks, key=lambda rank: rank["total"])
    assert states.parameters + states.gradients + states.optimizer == pytest.approx(fullest["states"] * GIB, rel=0.03)
    if pp == 1:
        kept, working = kept_and_working(run, find_framework("hf"))
        in_flight = run.shape.layers * kept + working + exchange_bytes(run)
        assert in_flight == pytest.approx(fullest["activations"] * GIB, rel=0.03)
        if run.zero == 3:
            summed = highest_moment(run, find_framework("hf"), states.gradients).gradients
            assert summed == pytest.approx(fullest["gathered"] * GIB, rel=0.05)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_planner_counts_spread_experts_that_do_not_divide(cp):
    """Six experts of two ranks, and those of each over more ranks than experts: FSDP2 divides them by columns."""
    model = PLANNED | {"num_experts": 6}
    job = {"ranks": 64, "pp": 4, "tp": 2, "cp": cp, "ep": 2, "schedule": "1F1B", "family": "qwen3_moe", "model": model}
    (ranks,) = in_world(1, simulate, [job])
    run = planned_job(
        shape=ModelShape.from_config(tiny_config("qwen3_moe", **(SIZES | model)).to_dict()),
        dp_shard=8 // cp,
        tp=2,
        cp=cp,
        pp=4,
        seq_len=32,
        global_batch=64,
        expert_parallel=2,
    )
    states = state_bytes(run, find_framework("hf"))
    found = max(rank["states"] for rank in ranks) * GIB
    assert states.parameters + states.gradients + states.optimizer == pytest.approx(found, rel=0.03)
