"""Context parallelism: training is the same when each rank has a part of every sequence, and errors are detected."""

import pytest
import torch
from parallel_families import compare
from parallel_world import in_world, tiny_causal_lm, tiny_config, train
from test_parallel import BALANCED, FIRST, LORA, TIED, check, same, wrong
from transformers import LlamaConfig, TrainingArguments

from hfscale import ParallelArguments
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.support import CONTEXT_PARALLEL_TESTED
from hfscale.parallel import context
from hfscale.parallel.arguments import SCHEDULES, check_arguments, decide_layout, plan_stages
from hfscale.parallel.checks import check_config
from hfscale.parallel.context import ContextParallel, local_positions, restore_order
from hfscale.parallel.mesh import ParallelMesh, make_mesh
from hfscale.parallel.stages import StagePlan

CONTEXT = {"cp_size": 2}
WINDOW = {"sliding_window": 5}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_one_early_and_one_late_chunk(ranks):
    own = [local_positions(12 * ranks, rank, ranks) for rank in range(ranks)]
    assert {positions.sum().item() for positions in own} == {own[0].sum().item()}  # the same causal work
    assert {len(positions) for positions in own} == {12}
    parts = torch.cat(own).view(1, -1)
    assert restore_order(parts, ranks, dim=1).tolist() == [list(range(12 * ranks))]


@pytest.mark.long
def test_training_is_the_same_with_sequences_split_over_ranks():
    smoothed = {"label_smoothing_factor": 0.1, "max_grad_norm": 0.1}
    jobs = [
        {
            "parallel": CONTEXT | {"tp_size": 2, "sequence_parallel": True},
            "data": {"ragged": True},
            "args": smoothed,
        },
        {
            "parallel": CONTEXT | {"pp_size": 2},
            "data": {"packed": True},
            "model": TIED,
            "empty": True,
            "args": {"activation_checkpointing": True},
        },
    ]
    check(4, jobs)


@pytest.mark.faults
def test_training_is_the_same_with_sequences_split_under_every_layout():
    packed, ragged = {"data": {"packed": True}}, {"data": {"ragged": True}}
    window = {"family": "mistral", "model": WINDOW}
    learned = {"parallel": {"cp_size": 4}, "family": "gpt2"}  # with learned positions
    learned["model"] = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    smoothed = {"label_smoothing_factor": 0.1, "max_grad_norm": 0.1}
    check(2, [{"parallel": CONTEXT}, {"parallel": CONTEXT, "args": smoothed} | ragged, {"parallel": CONTEXT} | packed])
    four = [{"cp_size": 4}, CONTEXT | {"tp_size": 2}, CONTEXT | {"dp_replicate_size": 2}]
    four += [CONTEXT | {"pp_size": 2, "pipeline_schedule": name} for name in SCHEDULES if name != "1F1B"]
    check(4, [{"parallel": parallel} | window | packed for parallel in four])
    check(4, [{"parallel": CONTEXT} | window])  # and two data parallel ranks
    check(4, [{"parallel": CONTEXT, "lora": LORA} | ragged, learned | ragged])
    eight = {"tp_size": 2, "pp_size": 2}
    check(8, [{"parallel": CONTEXT | eight} | packed, {"parallel": CONTEXT | eight | {"sequence_parallel": True}}])


@pytest.mark.faults
def test_a_checkpoint_resumes_with_and_without_context_parallelism(tmp_path):
    steps = {"max_steps": 4, "eval_steps": 4}
    saving = {"args": steps | {"save_strategy": "steps", "save_steps": 2}}
    (expected,) = in_world(1, train, [{"args": steps}])
    rest = {key: expected[key][-2 if key != "eval_loss" else -1 :] for key in ("loss", "grad_norm", "eval_loss")}
    jobs = []
    for name, parallel, other in (("cp", CONTEXT, {}), ("dp", {}, CONTEXT)):
        first = saving | {"parallel": parallel, "output_dir": str(tmp_path / name), "scaling": True}
        jobs += [first, saving | {"parallel": other, "resume": f"{first['output_dir']}/checkpoint-2"}]
        jobs[-1]["output_dir"] = str(tmp_path / f"{name}-resumed")
    found = in_world(2, train, jobs)
    for uninterrupted, resumed in zip(found[::2], found[1::2], strict=True):
        same(uninterrupted, expected)
        assert len(resumed["loss"]) == 2
        same(resumed, rest)
    assert found[0]["tokens"] == found[2]["tokens"] != []


def without_restored_order(patch):
    patch.setattr(context, "restore_order", lambda parts, ranks, dim: parts)


def without_gradients_of_other_ranks(patch):
    patch.setattr(context, "Partial", context.Replicate)


def without_sum_over_the_ranks(patch):
    patch.setattr(ParallelMesh, "data_mesh", property(lambda mesh: mesh.device_mesh["pp"]))


def change_local_inputs(patch, change):
    shard_inputs = ContextParallel.shard_inputs
    patch.setattr(ContextParallel, "shard_inputs", lambda self, inputs: change(shard_inputs(self, inputs)))


def with_labels_shifted_late(patch):
    def shift(inputs):
        labels = torch.nn.functional.pad(inputs["input_ids"], (0, 1), value=-100)[:, 1:].contiguous()
        return inputs | {"shift_labels": labels}

    change_local_inputs(patch, shift)


def with_positions_from_zero(patch):
    def count(inputs):
        positions = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
        return inputs | {"position_ids": positions}

    change_local_inputs(patch, count)


BREAKS = {
    f.__name__: f
    for f in (
        without_restored_order,
        without_gradients_of_other_ranks,
        without_sum_over_the_ranks,
        with_labels_shifted_late,
        with_positions_from_zero,
    )
}


def compare_intact_and_broken(job):
    """Results of `compare` by name: of the intact jobs, and of one job with each of `BREAKS`; then a refusal."""
    found = {name: compare(one) for name, one in job["intact"].items()}
    broken = {}
    for name, breaks in BREAKS.items():
        with pytest.MonkeyPatch.context() as patch:
            breaks(patch)
            broken[name] = compare(job["broken"])
    return found, broken, split_unknown_input()


def split_unknown_input():
    model = tiny_causal_lm()
    config = model.config
    parallel = ContextParallel(model, make_mesh(decide_layout(2, cp=2), "cpu").cp_mesh)
    assert config._attn_implementation == "sdpa"  # the config of other models is unchanged
    assert model.model.layers[0].self_attn.config._attn_implementation == parallel.kernel
    tokens = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(UsageError) as raised:
        parallel.shard_inputs({"input_ids": tokens, "token_type_ids": tokens})
    return str(raised.value)


@pytest.mark.long
def test_every_break_is_detected():
    job = {"family": "llama", "cp": 2}
    balanced = {"family": "mixtral", "cp": 2, "config": BALANCED}
    jobs = {"intact": {"even": job, "odd": job | {"length": 11}, "balance": balanced}, "broken": job}
    ((found, broken, refused),) = in_world(2, compare_intact_and_broken, [jobs])
    assert wrong(found, found.values()) == {}
    assert "token_type_ids" in refused
    assert "cp_size=1" in refused
    assert broken.keys() == BREAKS.keys()
    for name, error in broken.items():
        assert max(error["loss"], error["norm"]) > 100 * FIRST, (name, error)


@pytest.mark.faults
@pytest.mark.parametrize("family", sorted(CONTEXT_PARALLEL_TESTED))
def test_every_family_with_sequences_split_over_ranks(family):
    job = {"family": family, "cp": 2}
    jobs = {"odd": job | {"length": 11}, "pp": job | {"pp": 2}}
    assert wrong(jobs, in_world(4, compare, list(jobs.values()))) == {}


def test_unsupported_models_and_arguments_are_refused(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    layout, _ = plan_stages(ParallelArguments(cp_size=2, tp_size=2), args, world_size=8)
    assert (layout.dp_shard, layout.cp, layout.tp) == (2, 2, 2)
    with pytest.raises(LayoutError, match=r"cp_size 3 .* set cp_size=(2|4), or start"):
        decide_layout(8, cp=3)
    with pytest.raises(UsageError, match=r"cp_size=2.*mamba.*cp_size=1"):
        check_config(tiny_config("mamba"), decide_layout(2, cp=2), StagePlan())
    with pytest.raises(UsageError, match=r"jamba.*carry a state.*cp_size=1"):
        check_config(tiny_config("jamba"), decide_layout(2, cp=2), StagePlan())
    long = LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UsageError, match=r"rope_type dynamic.*cp_size=1"):
        check_config(long, decide_layout(2, cp=2), StagePlan())
    flash = LlamaConfig(attn_implementation="flash_attention_2")
    with pytest.raises(UsageError, match=r"flash_attention_2.*attn_implementation='sdpa'"):
        check_config(flash, decide_layout(2, cp=2), StagePlan())
    check_arguments(args, compute_loss=True)
    with pytest.raises(UsageError, match=r"compute_loss_func.*cp_size=1"):
        check_arguments(args, cp=2, compute_loss=True)
