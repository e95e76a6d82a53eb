"""Expert parallelism of `ParallelTrainer`: experts spread over the ranks of a stage train as those of one process."""

import pytest
import torch
import torch.distributed as dist
from parallel_families import SMALL, compare, small_config
from parallel_world import LENGTH, in_world, tiny_causal_lm, tiny_config, train
from safetensors.torch import load_file
from test_parallel import BALANCED, FIRST, plain, same
from transformers import AutoModelForCausalLM, TrainerCallback

from hfscale.errors import LayoutError, UnsupportedModelError
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import CONTEXT_PARALLEL_UNSUPPORTED, TENSOR_PARALLEL_PLAN_MISSING
from hfscale.parallel.arguments import decide_layout
from hfscale.parallel.checks import check_config
from hfscale.parallel.experts import expert_parallel_plan
from hfscale.parallel.stages import StagePlan
from hfscale.recipe.recompute import checkpointing_kwargs
from hfscale.recipe.router_bias import BIAS
from hfscale.trainer.expert_counter import counter_of
from hfscale.trainer.frames import calling_trainer

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


@pytest.mark.long
def test_experts_on_two_ranks_train_and_resume_as_in_one_process(tmp_path):
    """Losses, gradient norms before they are clipped, evaluations, and the weights after three steps; the third step
    again from a checkpoint, with other ranks."""
    alone = QWEN | {"export": str(tmp_path / "one")}
    saving = {"args": {"save_strategy": "steps", "save_steps": 2}, "output_dir": str(tmp_path / "run")}
    spread = QWEN | saving | {"parallel": {"ep_size": 2}, "empty": True, "export": str(tmp_path / "spread")}
    before = {"resume": str(tmp_path / "run" / "checkpoint-2")}
    resumed = QWEN | before | {"parallel": {"tp_size": 2, "ep_size": 2}}
    resumed |= {"output_dir": str(tmp_path / "other"), "export": str(tmp_path / "resumed")}
    # Dense layers as in DDP, over whose replicas the experts are spread.
    replicas = QWEN | before | {"parallel": {"dp_replicate_size": 2, "ep_size": 2}}
    replicas |= {"output_dir": str(tmp_path / "ddp"), "export": str(tmp_path / "replicas")}
    (expected,) = in_world(1, train, [alone])
    assert max(expected["grad_norm"]) > 1, "nothing is clipped"
    found, *rest = in_world(2, train, [spread, resumed, replicas])
    same(found, expected, first=FIRST, later=TOLERANCE)
    for one in rest:
        same(one, {key: expected[key][-1:] for key in ("loss", "grad_norm", "eval_loss")}, first=TOLERANCE)
    for folder in ("spread", "resumed", "replicas"):
        check_weights(tmp_path / folder, tmp_path / "one")


RECOMPUTED = {"activation_checkpointing": True}
SELECTIVE = RECOMPUTED | {"activation_checkpointing_kwargs": checkpointing_kwargs("selective")}


BIASED = {
    "family": "deepseek_v3",
    "model": {name: SMALL[name] for name in small_config("deepseek_v3").to_dict().keys() & SMALL.keys()}
    | {"num_key_value_heads": 4},
    "bias_rate": 0.01,
    # Adam divides gradients that are 0 but for rounding by their own size.
    "args": {"optim": "sgd", "learning_rate": 0.1},
}


def biases_of(folder):
    """The bias of each router of an exported model, by name."""
    return {name: value for name, value in weights_of(folder).items() if name.endswith(BIAS)}


def check_bias(size, layouts, folder):
    """Train DeepSeek-V3 in layouts, and the last of three steps again from the checkpoints of others; compare losses
    and the exported bias of the routers with those of one process."""
    alone = BIASED | {"export": str(folder / "one")}
    (expected,) = in_world(1, train, [alone])
    jobs = []
    for number, layout in enumerate(layouts):
        saving = {"args": {"save_strategy": "steps", "save_steps": 2}}
        own = {"output_dir": str(folder / str(number)), "export": str(folder / f"export-{number}")}
        for extra in (layout, saving):
            extra["args"] = BIASED["args"] | layout.get("args", {}) | extra.get("args", {})
        jobs.append(BIASED | layout | saving | own)
        before = str(folder / str((number - 1) % len(layouts)) / "checkpoint-2")
        resumed = {"output_dir": str(folder / f"again-{number}"), "export": str(folder / f"resumed-{number}")}
        jobs.append(BIASED | layout | resumed | {"resume": before})
    jobs = jobs[::2] + jobs[1::2]
    found = in_world(size, train, jobs)
    for one in found[: len(layouts)]:
        same(one, expected, first=FIRST, later=TOLERANCE)
    biases = biases_of(folder / "one")
    assert len(biases) == BIASED["model"]["num_hidden_layers"] - 1
    assert all(0.009 < bias.abs().max() < 0.031 for bias in biases.values())
    for job in jobs:
        for name, bias in biases_of(job["export"]).items():
            torch.testing.assert_close(bias, biases[name], rtol=0, atol=1e-6)


@pytest.mark.long
def test_the_bias_of_routers_is_that_of_one_process(tmp_path):
    check_bias(2, [{"parallel": {"pp_size": 2}, "empty": True}, {"parallel": {"ep_size": 2}, "batch": 1}], tmp_path)


@pytest.mark.faults
def test_the_bias_of_routers_in_every_layout(tmp_path):
    layouts = [
        {"parallel": {"pp_size": 2, "ep_size": 2, "pipeline_schedule": "ZBV"}, "args": RECOMPUTED},
        {"parallel": {"pp_size": 2, "ep_size": 2, "pipeline_schedule": "DualPipeV"}},
        {"parallel": {"tp_size": 2, "pp_size": 2}},
        {"parallel": {"dp_replicate_size": 2, "ep_size": 2}},
        {"parallel": {"dp_replicate_size": 4, "ep_size": 4}},
        {"parallel": {"tp_size": 2, "ep_size": 2}},
    ]
    check_bias(4, [layout | {"batch": 1} for layout in layouts], tmp_path)


def test_selective_recomputation_of_spread_experts_does_not_change_the_training():
    """FSDP2's hooks run another number of profiler operators in the recomputation (torchtitan#3427)."""
    deepseek = {"family": BIASED["family"], "model": BIASED["model"]}
    (expected,) = in_world(1, train, [deepseek])
    layouts = ({"dp_replicate_size": 2, "ep_size": 2}, {"tp_size": 2, "ep_size": 2})
    for found in in_world(2, train, [deepseek | {"parallel": layout, "args": SELECTIVE} for layout in layouts]):
        same(found, expected, first=FIRST, later=TOLERANCE)


ADAPTED = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADAPTED_JOB = QWEN | {"lora": ADAPTED, "args": {"optim": "sgd", "learning_rate": 0.1}}


def check_adapters(size, layouts, folder):
    """Train adapters of experts in layouts, and the third step again from a checkpoint of another one; compare losses,
    norms before clipping and exported adapters with those of one process."""
    (expected,) = in_world(1, train, [ADAPTED_JOB | {"export": str(folder / "one")}])
    jobs = []
    for number, layout in enumerate(layouts):
        saving = {"args": ADAPTED_JOB["args"] | layout.get("args", {}) | {"save_strategy": "steps", "save_steps": 2}}
        saving |= {"output_dir": str(folder / str(number)), "export": str(folder / f"export-{number}")}
        jobs.append(ADAPTED_JOB | layout | saving)
    for number, layout in enumerate(layouts):
        own = {"output_dir": str(folder / f"again-{number}"), "export": str(folder / f"resumed-{number}")}
        own["resume"] = str(folder / str((number - 1) % len(layouts)) / "checkpoint-2")
        jobs.append(ADAPTED_JOB | layout | own)
    found = in_world(size, train, jobs)
    last = {key: expected[key][-1:] for key in ("loss", "grad_norm", "eval_loss")}
    for number, one in enumerate(found):
        same(one, expected if number < len(layouts) else last, first=TOLERANCE, later=TOLERANCE)
    adapters = load_file(folder / "one" / "adapter_model.safetensors")
    assert sum("experts" in name for name in adapters) == 2 * 2 * EXPERTS["num_hidden_layers"]
    for job in jobs:
        own = load_file(f"{job['export']}/adapter_model.safetensors")
        assert own.keys() == adapters.keys()
        assert max((own[name] - adapters[name]).abs().max().item() for name in own) <= TOLERANCE


@pytest.mark.long
def test_adapters_of_experts_are_those_of_one_process(tmp_path):
    check_adapters(2, [{"parallel": {"ep_size": 2, "tp_size": 2}}, {"parallel": {"ep_size": 2}}], tmp_path)


@pytest.mark.long
def test_adapted_experts_are_read_from_files_and_their_adapters_drawn(tmp_path):
    tiny_causal_lm("qwen3_moe", seed=7, **EXPERTS).save_pretrained(tmp_path / "base")
    job = ADAPTED_JOB | {"empty": True, "weights_from": str(tmp_path / "base"), "output_dir": str(tmp_path / "run")}
    (expected, plain_model) = in_world(1, train, [job | {"parallel": {}}, QWEN | {"args": ADAPTED_JOB["args"]}])
    assert abs(expected["loss"][0] - plain_model["loss"][0]) <= FIRST  # new adapters change nothing
    (found,) = in_world(2, train, [job | {"parallel": {"ep_size": 2, "tp_size": 2}}])
    same(found, expected, first=FIRST, later=TOLERANCE)


@pytest.mark.faults
def test_adapters_of_experts_in_every_layout(tmp_path):
    layouts = [
        {"parallel": {"ep_size": 2}, "args": ADAPTED_JOB["args"] | RECOMPUTED},
        {"parallel": {"ep_size": 4, "tp_size": 2}},
        {"parallel": {"ep_size": 2, "pp_size": 2}},
        {"parallel": {"ep_size": 2, "dp_replicate_size": 2}},
        {"parallel": {"ep_size": 2, "dp_replicate_size": 4}},
    ]
    check_adapters(4, [layout | {"batch": 1} for layout in layouts], tmp_path)


class Counts(TrainerCallback):
    """The tokens of each expert of all layers, of all ranks."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.counter = counter_of(calling_trainer())

    def on_train_end(self, args, state, control, **kwargs):
        self.counter.detach()
        counts = torch.cat(self.counter.counts)
        if dist.is_initialized():
            dist.all_reduce(counts)
        self.counts = counts.tolist()


def count(job):
    """Train; return the load of the experts in each log, and the tokens of all experts."""
    counts = Counts()
    result = train(job | {"scaling": True, "callbacks": [counts]})
    return {"load": result["load"], "counts": counts.counts}


LOAD_LAYOUTS = {
    "V-shaped": (2, {"parallel": {"pp_size": 2, "pipeline_schedule": "ZBV"}, "args": RECOMPUTED}),
    "virtual": (2, {"parallel": {"pp_size": 2, "pipeline_schedule": "InterleavedZeroBubble"}, "args": RECOMPUTED}),
    "experts": (2, {"parallel": {"ep_size": 2, "tp_size": 2}}),
    "sequences": (2, {"parallel": {"tp_size": 2, "sequence_parallel": True}}),
    "context": (2, {"parallel": {"cp_size": 2}}),
    "stages of experts": (4, {"parallel": {"pp_size": 2, "ep_size": 2}, "args": RECOMPUTED, "batch": 1}),
    "paired passes": (
        4,
        {
            "model": EXPERTS | {"num_hidden_layers": 8},
            "parallel": {"pp_size": 2, "ep_size": 2, "pipeline_schedule": "DualPipeV"},
            "args": RECOMPUTED,
            "batch": 1,
        },
    ),
}


def check_load(layouts):
    """Compare the load in layouts, (processes, job) by name, with that in one process."""
    base = {"family": "qwen3_moe", "model": EXPERTS | {"num_hidden_layers": 4}}
    for ranks in {ranks for ranks, _ in layouts.values()}:
        jobs = {name: base | job for name, (size, job) in layouts.items() if size == ranks}
        alone = [{key: value for key, value in plain(job).items() if key != "args"} for job in jobs.values()]
        found = dict(zip(jobs, in_world(ranks, count, list(jobs.values())), strict=True))
        expected = dict(zip(jobs, in_world(1, count, alone), strict=True))
        assert found == expected
        for name, one in expected.items():
            rows = 18 if jobs[name].get("data") else 3 * 8
            layers = (base | jobs[name])["model"]["num_hidden_layers"]
            assert sum(one["counts"]) == rows * LENGTH * 2 * layers, name  # tokens, choices, layers
            assert len(one["load"]) == 3


def test_the_load_of_experts_is_that_of_one_process():
    """Each token counts once: neither when a layer is computed again, nor in batches that fill the third step."""
    filled = {"parallel": {"pp_size": 2}, "data": {"size": 18}, "args": RECOMPUTED}
    check_load({"stages": (2, filled)})


@pytest.mark.faults
def test_the_load_of_experts_in_every_layout():
    check_load(LOAD_LAYOUTS)


PADDED = {"data": {"ragged": True}}
CUT = {"data": {"ragged": True, "cut": True}, "batch": 1}
UNEVALUATED = {"eval_strategy": "no"}
PADDED_LAYOUTS = {
    "stages": (2, PADDED | {"parallel": {"pp_size": 2}, "args": UNEVALUATED | RECOMPUTED}),
    "stages, batches of one length each": (2, CUT | {"parallel": {"pp_size": 2}, "args": UNEVALUATED}),
    "stages, filled": (
        2,
        {"data": {"ragged": True, "size": 18}, "parallel": {"pp_size": 2}, "args": UNEVALUATED, "batch": 4},
    ),
    "context": (2, PADDED | {"parallel": {"cp_size": 2}, "args": UNEVALUATED}),
    "context, split unevenly": (2, CUT | {"parallel": {"cp_size": 2}, "args": UNEVALUATED}),
    "sequences, split unevenly": (
        2,
        CUT | {"parallel": {"tp_size": 2, "sequence_parallel": True}, "args": UNEVALUATED},
    ),
    "experts": (2, PADDED | {"parallel": {"ep_size": 2}, "args": UNEVALUATED}),
    "V-shaped": (
        2,
        PADDED | {"parallel": {"pp_size": 2, "pipeline_schedule": "ZBV"}, "args": UNEVALUATED | RECOMPUTED},
    ),
    "paired passes": (
        4,
        CUT
        | {
            "model": EXPERTS | {"num_hidden_layers": 8},
            "parallel": {"pp_size": 2, "ep_size": 2, "pipeline_schedule": "DualPipeV"},
            "args": UNEVALUATED | RECOMPUTED,
        },
    ),
}


def check_padded_load(layouts):
    """Compare the load in layouts, (processes, job) by name, with that of single sequences without padding."""
    base = {"family": "qwen3_moe", "model": EXPERTS | {"num_hidden_layers": 4}}
    for ranks in {ranks for ranks, _ in layouts.values()}:
        jobs = {name: base | job for name, (size, job) in layouts.items() if size == ranks}
        alone = [
            {key: value for key, value in job.items() if key != "parallel"}
            | {"batch": 1, "accumulation": 8, "args": UNEVALUATED, "data": job["data"] | {"cut": True}}
            for job in jobs.values()
        ]
        found = dict(zip(jobs, in_world(ranks, count, list(jobs.values())), strict=True))
        expected = dict(zip(jobs, in_world(1, count, alone), strict=True))
        assert found == expected
        for name, one in expected.items():
            layers = jobs[name]["model"]["num_hidden_layers"]
            rows = 18 if jobs[name]["data"].get("size") else 3 * 8
            assert 0 < sum(one["counts"]) < rows * LENGTH * 2 * layers, name  # tokens, choices, layers


@pytest.mark.long
def test_padding_does_not_count_in_stages():
    """Neither that of the batches, which each stage gets, nor that of micro-batches and of rows that fill a step."""
    check_padded_load({name: layout for name, layout in PADDED_LAYOUTS.items() if name.startswith("stages")})


@pytest.mark.faults
def test_padding_does_not_count_in_every_layout():
    check_padded_load(PADDED_LAYOUTS)


@pytest.mark.long
def test_padding_does_not_move_the_bias_of_routers_in_stages(tmp_path):
    sgd = BIASED["args"] | UNEVALUATED
    alone = BIASED | CUT | {"args": sgd, "accumulation": 8, "export": str(tmp_path / "one")}
    staged = BIASED | PADDED | {"args": sgd | RECOMPUTED, "parallel": {"pp_size": 2}, "export": str(tmp_path / "two")}
    (expected,) = in_world(1, train, [alone])
    (found,) = in_world(2, train, [staged])
    assert found["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    biases = biases_of(tmp_path / "one")
    assert all(bias.abs().max() > 0.009 for bias in biases.values())
    for name, bias in biases_of(tmp_path / "two").items():
        torch.testing.assert_close(bias, biases[name], rtol=0, atol=1e-6)


@pytest.mark.long
def test_families_with_and_without_tokens_for_every_rank():
    jobs = {family: {"family": family, "ep": 2, "gradients": True} for family in FAMILIES}
    jobs["one choice"] = {"family": "qwen3_moe", "ep": 2, "one_choice": True, "gradients": True}
    jobs["gemma4"] = GEMMA4 | {"ep": 2, "gradients": True}
    jobs["gemma4, split too"] = GEMMA4 | {"ep": 2, "tp": 2, "gradients": True}
    assert wrong(jobs, in_world(2, compare, list(jobs.values()))) == {}


LAYOUTS = {
    2: [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "dp_replicate": 2}],
    4: [
        {"ep": 2},
        {"ep": 4},
        {"ep": 2, "pp": 2},
        {"ep": 2, "pp": 2, "schedule": "ZBV"},
        {"ep": 4, "tp": 2},
        {"ep": 2, "dp_replicate": 2},
        {"ep": 2, "dp_replicate": 4},
        {"ep": 4, "dp_replicate": 2},
        {"ep": 2, "dp_replicate": 2, "pp": 2},
    ],
    8: [
        {"ep": 4, "tp": 2, "pp": 2, "schedule": "InterleavedZeroBubble"},
        {"ep": 2, "dp_replicate": 2, "pp": 2, "schedule": "DualPipeV"},
        {"ep": 2, "pp": 4},
        {"ep": 4, "cp": 2, "pp": 2, "schedule": "Interleaved1F1B"},
        {"ep": 4, "tp": 2, "pp": 2, "schedule": "DualPipeV"},
        {"ep": 4, "cp": 2, "pp": 2, "schedule": "DualPipeV"},
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
        QWEN | {"parallel": {"ep_size": 4, "dp_replicate_size": 4}, "muon": True},
        six | {"parallel": {"ep_size": 2}, "muon": True},
    ]
    jobs = [job | {"batch": 1} for job in jobs]
    expected = in_world(1, train, [plain(job) for job in jobs])
    for found, one in zip(in_world(4, train, jobs), expected, strict=True):
        same(found, one, first=FIRST, later=5 * TOLERANCE)


@pytest.mark.faults
def test_a_checkpoint_moves_through_all_layouts(tmp_path):
    """EP 4, then EP 2 x TP 2, FSDP2 alone, stages with EP 2, EP 2 over DDP, and one process."""
    layouts = [
        {"ep_size": 4},
        {"ep_size": 2, "tp_size": 2},
        {},
        {"ep_size": 2, "pp_size": 2, "pipeline_schedule": "ZBV"},
        {"ep_size": 2, "dp_replicate_size": 4},
    ]
    job = {"family": "qwen3_moe", "model": EXPERTS | {"num_hidden_layers": 4}, "batch": 1}
    steps = {"max_steps": 6, "lr_scheduler_type": "constant", "eval_steps": 6}
    (expected,) = in_world(1, train, [plain(job) | {"args": steps, "export": str(tmp_path / "one")}])
    jobs = []
    for number, parallel in enumerate(layouts, 1):
        args = steps | {"max_steps": number, "save_strategy": "steps", "save_steps": 1}
        jobs.append(job | {"parallel": parallel, "args": args, "output_dir": str(tmp_path / str(number))})
        if number > 1:
            jobs[-1]["resume"] = str(tmp_path / str(number - 1) / f"checkpoint-{number - 1}")
    found = in_world(4, train, jobs)
    last = job | {"parallel": {}, "batch": 2, "args": steps, "resume": str(tmp_path / "5" / "checkpoint-5")}
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
        (
            {"dp_replicate": 4, "ep": 3},
            "ep_size 3 must divide the 2 ranks of one replica, or be those of several: choose one of 1, 2, 4, 8",
        ),
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
        expert_parallel_plan(dense)


def test_a_layout_without_spread_experts_is_the_one_of_earlier_checkpoints():
    assert type(decide_layout(8, ep=1)) is type(decide_layout(8)) is ParallelLayout
    layout = decide_layout(32, pp=2, cp=2, tp=2, ep=4)
    assert (layout.ep, layout.efsdp, layout.world_size) == (4, 4, 32)
    assert "experts over 4 ranks" in str(layout)
    assert layout.summary == "shard 4 cp 2 tp 2 pp 2 ep 4"
