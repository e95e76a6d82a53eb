"""Expert parallelism of `ParallelTrainer`: experts spread over the ranks of a stage train as those of one process."""

import pytest
import torch
from parallel_families import compare
from parallel_world import in_world, tiny_config, train
from test_parallel import BALANCED, FIRST, plain, same
from transformers import AutoModelForCausalLM

from hfscale.errors import LayoutError, UnsupportedModelError
from hfscale.facts.layout import ExpertLayout, ParallelLayout
from hfscale.facts.support import CONTEXT_PARALLEL_UNSUPPORTED, TENSOR_PARALLEL_PLAN_MISSING
from hfscale.parallel.arguments import decide_layout
from hfscale.parallel.checks import check_config
from hfscale.parallel.experts import expert_parallel_plan
from hfscale.parallel.stages import StagePlan

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2}
QWEN = {"family": "qwen3_moe", "model": EXPERTS}
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")
NOT_SUPPORTED = {"tp": TENSOR_PARALLEL_PLAN_MISSING, "cp": CONTEXT_PARALLEL_UNSUPPORTED}
TOLERANCE = 1e-5
GEMMA4 = {
    "family": "gemma4_text",
    "config": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
    },
}
"""Its plan of transformers also splits the dense MLP beside the experts, over ranks that see different batches."""


def wrong(names, results):
    """The results that differ from those of the unsplit model."""
    limits = {"loss": FIRST, "norm": TOLERANCE, "evaluation": FIRST, "gradient": TOLERANCE}
    return {
        name: {key: error[key] for key in limits}
        for name, error in zip(names, results, strict=True)
        if any(error[key] > limit for key, limit in limits.items())
    }


def weights_of(folder):
    """The tensors of a folder for `from_pretrained`."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model.state_dict()


def check_weights(found, expected):
    """Assert that two exported models have the same tensors."""
    one, other = weights_of(found), weights_of(expected)
    assert one.keys() == other.keys()
    assert max((one[name] - other[name]).abs().max().item() for name in one) <= TOLERANCE


def test_experts_on_two_ranks_train_and_resume_as_in_one_process(tmp_path):
    """Losses, gradient norms before they are clipped, evaluations, and the weights after three steps; the third step
    again from a checkpoint, with other ranks."""
    alone = QWEN | {"export": str(tmp_path / "one")}
    saving = {"args": {"save_strategy": "steps", "save_steps": 2}, "output_dir": str(tmp_path / "run")}
    spread = QWEN | saving | {"parallel": {"ep_size": 2}, "empty": True, "export": str(tmp_path / "spread")}
    resumed = QWEN | {"parallel": {"tp_size": 2, "ep_size": 2}, "resume": str(tmp_path / "run" / "checkpoint-2")}
    resumed |= {"output_dir": str(tmp_path / "other"), "export": str(tmp_path / "resumed")}
    (expected,) = in_world(1, train, [alone])
    assert max(expected["grad_norm"]) > 1, "nothing is clipped"
    found, rest = in_world(2, train, [spread, resumed])
    same(found, expected, first=FIRST, later=TOLERANCE)
    same(rest, {key: expected[key][-1:] for key in ("loss", "grad_norm", "eval_loss")}, first=TOLERANCE)
    for folder in ("spread", "resumed"):
        check_weights(tmp_path / folder, tmp_path / "one")


def test_families_with_and_without_tokens_for_every_rank():
    jobs = {family: {"family": family, "ep": 2, "gradients": True} for family in FAMILIES}
    jobs["one choice"] = {"family": "qwen3_moe", "ep": 2, "one_choice": True, "gradients": True}
    jobs["gemma4"] = GEMMA4 | {"ep": 2, "gradients": True}
    jobs["gemma4, split too"] = GEMMA4 | {"ep": 2, "tp": 2, "gradients": True}
    assert wrong(jobs, in_world(2, compare, list(jobs.values()))) == {}


LAYOUTS = {
    2: [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "cp": 2}],
    4: [
        {"ep": 2},
        {"ep": 4},
        {"ep": 2, "pp": 2},
        {"ep": 2, "pp": 2, "schedule": "ZBV"},
        {"ep": 4, "tp": 2},
        {"ep": 2, "dp_replicate": 2},
    ],
    8: [
        {"ep": 4, "tp": 2, "pp": 2, "schedule": "InterleavedZeroBubble"},
        {"ep": 2, "dp_replicate": 2, "pp": 2, "schedule": "DualPipeV"},
        {"ep": 2, "pp": 4},
        {"ep": 4, "cp": 2, "pp": 2, "schedule": "Interleaved1F1B"},
    ],
}
"""By number of processes; the ranks that the sizes leave are data parallel."""


@pytest.mark.faults
@pytest.mark.parametrize("family", FAMILIES)
def test_families_in_every_layout(family):
    without = {axis for axis, missing in NOT_SUPPORTED.items() if family in missing}
    for ranks, layouts in LAYOUTS.items():
        jobs = {
            str(layout): {"family": family, "gradients": True, **layout}
            for layout in layouts
            if not without & layout.keys()
        }
        assert wrong(jobs, in_world(ranks, compare, list(jobs.values()))) == {}


@pytest.mark.faults
def test_experts_and_load_balancing_that_do_not_divide_evenly():
    """Six experts over two ranks, and those of each over two more: FSDP2 divides them by columns."""
    six = {"num_experts": 6}
    jobs = {"six experts": {"family": "qwen3_moe", "ep": 2, "config": six, "gradients": True}}
    jobs["balanced"] = {"family": "mixtral", "ep": 2, "pp": 2, "config": BALANCED}
    jobs["one choice"] = {"family": "qwen3_moe", "ep": 2, "pp": 2, "one_choice": True, "gradients": True}
    assert wrong(jobs, in_world(4, compare, list(jobs.values()))) == {}


@pytest.mark.faults
def test_training_in_every_layout_and_with_muon(tmp_path):
    """Schedules, recomputation, sequence parallelism, and Muon, which gets whole matrices of spread experts."""
    six = QWEN | {"model": EXPERTS | {"num_experts": 6}}
    jobs = [
        QWEN | {"parallel": {"ep_size": 2, "pp_size": 2}, "args": {"activation_checkpointing": True}},
        QWEN | {"parallel": {"ep_size": 2, "tp_size": 2, "sequence_parallel": True}, "data": {"ragged": True}},
        QWEN | {"parallel": {"ep_size": 4}, "lora": {"r": 4, "target_modules": ["q_proj", "o_proj"]}},
        QWEN | {"parallel": {"ep_size": 2}, "muon": True},
        QWEN | {"parallel": {"ep_size": 2, "tp_size": 2}, "muon": True},
        six | {"parallel": {"ep_size": 2}, "muon": True},
    ]
    jobs = [job | {"batch": 1} for job in jobs]
    expected = in_world(1, train, [plain(job) for job in jobs])
    for found, one in zip(in_world(4, train, jobs), expected, strict=True):
        same(found, one, first=FIRST, later=5 * TOLERANCE)


@pytest.mark.faults
def test_a_checkpoint_moves_through_all_layouts(tmp_path):
    """EP 4, then EP 2 x TP 2, FSDP2 alone, stages with EP 2, and one process."""
    layouts = [
        {"ep_size": 4},
        {"ep_size": 2, "tp_size": 2},
        {},
        {"ep_size": 2, "pp_size": 2, "pipeline_schedule": "ZBV"},
    ]
    job = {"family": "qwen3_moe", "model": EXPERTS | {"num_hidden_layers": 4}, "batch": 1}
    steps = {"max_steps": 5, "lr_scheduler_type": "constant", "eval_steps": 5}
    (expected,) = in_world(1, train, [plain(job) | {"args": steps, "export": str(tmp_path / "one")}])
    jobs = []
    for number, parallel in enumerate(layouts, 1):
        args = steps | {"max_steps": number, "save_strategy": "steps", "save_steps": 1}
        jobs.append(job | {"parallel": parallel, "args": args, "output_dir": str(tmp_path / str(number))})
        if number > 1:
            jobs[-1]["resume"] = str(tmp_path / str(number - 1) / f"checkpoint-{number - 1}")
    found = in_world(4, train, jobs)
    last = job | {"parallel": {}, "batch": 2, "args": steps, "resume": str(tmp_path / "4" / "checkpoint-4")}
    last |= {"output_dir": str(tmp_path / "last"), "export": str(tmp_path / "end")}
    found += in_world(1, train, [last])
    for key in ("loss", "grad_norm"):
        assert [one[key][-1] for one in found] == pytest.approx(expected[key], abs=5 * TOLERANCE), key
    check_weights(tmp_path / "end", tmp_path / "one")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ep": 3}, "ep_size 3 must divide the 8 ranks of one replica: choose one of 1, 2, 4, 8"),
        ({"pp": 2, "ep": 8}, "ep_size 8 must divide the 4 ranks of one replica in a stage: choose one of 1, 2, 4"),
        ({"dp_replicate": 8, "ep": 2}, "ep_size 2 must divide the 1 ranks"),
        ({"tp": 4, "ep": 2}, "and be a multiple of tp_size 4: choose one of 4, 8"),
    ],
)
def test_groups_that_are_not_complete_in_a_stage_are_refused(sizes, message):
    with pytest.raises(LayoutError) as caught:
        decide_layout(8, **sizes)
    assert message in str(caught.value)


def test_experts_that_cannot_be_spread_are_refused():
    spread = ExpertLayout(dp_shard=8, ep=8)
    with pytest.raises(LayoutError, match="ep_size 8 does not divide the model's 4 experts: choose one of 1, 2, 4"):
        check_config(tiny_config("qwen3_moe", **EXPERTS), spread, StagePlan())
    with pytest.raises(UnsupportedModelError, match=r"ep_size=8.*llama.*leave ep_size out"):
        check_config(tiny_config("llama"), spread, StagePlan())
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", **EXPERTS, mlp_only_layers=[0, 1]))
    with pytest.raises(UnsupportedModelError, match="no layer whose experts"):
        expert_parallel_plan(dense, 2)


def test_a_layout_without_spread_experts_is_the_one_of_earlier_checkpoints():
    assert type(decide_layout(8, ep=1)) is type(decide_layout(8)) is ParallelLayout
    layout = decide_layout(32, pp=2, cp=2, tp=2, ep=4)
    assert (layout.ep, layout.efsdp, layout.world_size) == (4, 4, 32)
    assert "experts over 4 ranks" in str(layout)
    assert layout.summary == "shard 4 cp 2 tp 2 pp 2 ep 4"
