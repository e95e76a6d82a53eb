"""Checks of layouts, stages, models and batches that need no process group, and the errors where they do not fit."""

import ast
import inspect
from functools import cache

import pytest
import torch
from accelerate import Accelerator
from conftest import REPOSITORY
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import placement_types
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.models.mixtral.modeling_mixtral import MixtralPreTrainedModel

from hfscale import ParallelArguments
from hfscale.errors import (
    LayoutError,
    StrategyMismatchError,
    UnsupportedModelError,
    UsageError,
)
from hfscale.facts.schedules import SCHEDULES
from hfscale.parallel.arguments import check_arguments, decide_layout, plan_stages
from hfscale.parallel.checks import check_config
from hfscale.parallel.partition import ModelStructure, layer_costs, partition_by_cost
from hfscale.parallel.pipeline import TORCH_SCHEDULES, stack_batches
from hfscale.parallel.stages import StagePlan
from hfscale.recipe.layout import set_up_parallelism
from hfscale.trainer.strategies.requested import check_launch

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def ranges(specs):
    return [(spec.layers.start, spec.layers.stop) for spec in specs]


def test_equal_layers_are_distributed_evenly_and_the_head_counts():
    assert ranges(partition_by_cost([1.0] * 8, 0.0, 4)) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    # A head of two layers' cost: the last stage takes fewer.
    assert ranges(partition_by_cost([1.0] * 10, 2.0, 4)) == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_layers_are_weighted_by_cost():
    # Three dense layers of three times the cost first, as in DeepSeek's models.
    assert ranges(partition_by_cost([3.0, 3.0, 3.0, *[1.0] * 9], 0.0, 3)) == [(0, 2), (2, 6), (6, 12)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
def test_no_partition_has_a_faster_slowest_stage(stages):
    generator = torch.Generator().manual_seed(stages)
    costs = torch.rand(9, generator=generator).tolist()
    specs = partition_by_cost(costs, 0.7, stages)
    found = max(sum(costs[i] for i in spec.layers) + (0.7 if spec.is_last else 0) for spec in specs)

    def slowest(start, left):
        if left == 1:
            return sum(costs[start:]) + 0.7
        ends = range(start + 1, len(costs) - left + 2)
        return min(max(sum(costs[start:end]), slowest(end, left - 1)) for end in ends)

    assert found == pytest.approx(slowest(0, stages))
    assert [n for spec in specs for n in spec.layers] == list(range(9))


def test_only_the_experts_that_a_token_passes_count():
    config = MixtralConfig(**TINY, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=1)
    model = on_meta(config)
    costs, head = layer_costs(model, ModelStructure.of(model))
    expert = 3 * 32 * 64
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    assert costs == [attention + expert + 4 * 32] * 2  # and the router
    assert head == 96 * 32


def test_the_structure_is_found_by_inspection():
    found = ModelStructure.of(on_meta(LlamaConfig(**TINY, num_hidden_layers=3, tie_word_embeddings=True)))
    assert (found.layers, found.depth, found.token_embedding) == ("model.layers", 3, "model.embed_tokens")
    assert (found.after, found.head, found.tied) == (("model.norm", "lm_head"), "lm_head", True)
    assert found.layer_of("model.layers.12.mlp.up_proj.weight") == 12
    assert found.layer_of("model.layers_norm.weight") is None


def test_every_schedule_name_has_a_schedule_of_torch():
    assert tuple(TORCH_SCHEDULES) == tuple(SCHEDULES)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_are_assigned_as_in_torch(schedule, pp):
    plan = StagePlan(schedule=schedule, pp=pp)
    style = "v" if SCHEDULES[schedule] == "v" else "loop"
    expected = schedules.generate_stage_to_rank_mapping(pp, plan.stages, style)
    assert {stage: plan.rank_of(stage) for stage in range(plan.stages)} == expected
    assert sorted(stage for rank in range(pp) for stage in plan.stages_of(rank)) == list(range(plan.stages))


@pytest.mark.parametrize(
    ("schedule", "pp", "bad", "nearest"),
    [("1F1B", 4, 3, 4), ("GPipe", 4, 2, 4), ("Interleaved1F1B", 2, 5, 4), ("DualPipeV", 2, 3, 4), ("ZBV", 4, 1, 4)],
)
def test_the_error_for_too_few_micro_batches_gives_the_nearest_number_that_works(schedule, pp, bad, nearest):
    plan = StagePlan(schedule=schedule, pp=pp)
    with pytest.raises(
        LayoutError,
        match=rf"gradient_accumulation_steps is {bad}:.*set gradient_accumulation_steps=[{nearest}{bad - 1}]$",
    ):
        plan.check_micro_batches(bad)
    assert plan.supports(nearest)
    assert plan.supports(plan.micro_batches_for(bad))


def test_idle_time_follows_the_published_formulas():
    assert StagePlan(pp=4).bubble_fraction(12) == pytest.approx(3 / 15)  # (p-1)/(m+p-1)
    one, two = StagePlan(pp=4), StagePlan(schedule="Interleaved1F1B", pp=4, virtual_stages=2)
    assert two.bubble_fraction(8) < one.bubble_fraction(8)
    assert StagePlan(pp=1).bubble_fraction(1) == 0
    assert [one.in_flight(rank, 8) for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"tp": 3, "pp": 2}, r"tp_size 3 x pp_size 2 .* does not divide the 8 processes: set tp_size=(1|2|4)"),
        ({"tp": 3}, r"set tp_size=(2|4), or start 9$"),
        ({"tp": 2, "pp": 3}, r"does not divide the 8 processes: set pp_size=(2|4)"),
        ({"tp": 2, "pp": 2, "dp_shard": 4}, r"needs 16 processes, but the world has 8.*dp_shard=2"),
    ],
)
def test_sizes_that_do_not_fit_the_world_are_refused(sizes, line):
    with pytest.raises(LayoutError, match=line):
        decide_layout(8, **sizes)


def test_remaining_ranks_become_shards():
    assert decide_layout(16, tp=2, pp=2).dp_shard == 4
    assert decide_layout(16, tp=2, pp=2, dp_replicate=2).dp_shard == 2


@pytest.mark.parametrize(
    ("config", "sizes", "line"),
    [
        (
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
            {"tp": 2},
            "3 key-value heads.*tp_size=[13]",
        ),
        ({"vocab_size": 5}, {"tp": 4}, "tp_size is 4, too many for the model's 5 vocabulary entries"),
        ({"num_hidden_layers": 3}, {"pp": 4}, "3 layers: set pp_size=3"),
        ({"quantization_config": {"quant_method": "gptq"}}, {"tp": 2}, "quantised"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(config, sizes, line):
    model = LlamaConfig(**(TINY | {"num_hidden_layers": 4} | config))
    layout = decide_layout(8, **sizes)
    with pytest.raises(UsageError, match=line):
        check_config(model, layout, StagePlan(pp=layout.pp))


def test_fewer_key_value_heads_than_ranks_need_projections_of_their_own():
    layout = decide_layout(4, tp=4)
    check_config(LlamaConfig(**(TINY | {"num_key_value_heads": 1, "vocab_size": 97})), layout, StagePlan())
    after_norms = Olmo2Config(**(TINY | {"num_key_value_heads": 1}))  # its norms take all heads at once
    with pytest.raises(LayoutError, match="1 key-value heads: set tp_size=1"):
        check_config(after_norms, layout, StagePlan())


def test_a_model_without_a_tensor_parallel_plan_is_refused():
    from transformers import OPTConfig

    with pytest.raises(UsageError, match="tensor-parallel plan for opt; set tp_size=1"):
        check_config(OPTConfig(), decide_layout(2, tp=2), StagePlan())


@pytest.mark.parametrize(("schedule", "virtual"), [("1F1B", 2), ("ZBV", 3), ("DualPipeV", 1)])
def test_a_wrong_number_of_stages_per_rank_is_refused(schedule, virtual):
    with pytest.raises(UsageError, match=rf"^virtual_stages is {virtual}: {schedule}"):
        StagePlan(schedule=schedule, pp=2, virtual_stages=virtual)


def test_a_model_that_is_not_a_stack_of_layers_is_refused():
    model = on_meta(LlamaConfig(**TINY, num_hidden_layers=2))
    model.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedModelError, match=r"5 layers.*pp_size=1"):
        ModelStructure.of(model)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"fp16": True}, "fp16=True.*bf16=True"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy'"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen='all'.*scaling/tokens_seen"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    ],
)
def test_unsupported_arguments_are_refused(arguments, line, tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 1} if "lr_scheduler_type" in arguments else {}
    args = TrainingArguments(str(tmp_path), use_cpu="fp16" not in arguments, report_to="none", **given, **arguments)
    with pytest.raises(UsageError, match=line):
        check_arguments(args)


def test_unsupported_trainer_keywords_are_refused(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    check_arguments(args)
    for name, value in {"model_init": len, "optimizers": (object(), None)}.items():
        with pytest.raises(UsageError, match=name):
            check_arguments(args, **{name: value})


@pytest.mark.parametrize(("engine", "named"), [("DEEPSPEED", "recipes/sharded"), ("FSDP", "asks for FSDP")])
def test_another_engine_in_the_launchers_config_is_refused(engine, named, monkeypatch, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(UsageError, match=r"launch with accelerate_configs/tp_pp\.yaml") as raised:
        check_arguments(args)
    assert named in str(raised.value)


def test_megatron_is_refused_whether_or_not_it_is_installed(monkeypatch, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    asked = {"ACCELERATE_USE_MEGATRON_LM": "true"}
    with pytest.raises(StrategyMismatchError, match=r"launch with accelerate_configs/tp_pp\.yaml"):
        check_launch(args, asked)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StrategyMismatchError, match="which a Trainer cannot drive"):
        check_launch(args, asked)
    check_launch(args, {})


def test_other_recipes_refuse_pipelines(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(UsageError, match=r"--pp_size 2 needs recipes/tp_pp/train\.py"):
        set_up_parallelism(ParallelArguments(pp_size=2), args, {})
    with pytest.raises(UsageError, match="--sequence_parallel true needs recipes/tp_pp"):
        set_up_parallelism(ParallelArguments(tp_size=2, sequence_parallel=True), args, {})
    with pytest.raises(LayoutError, match=r"gradient_accumulation_steps is 1: .* set gradient_accumulation_steps=2"):
        plan_stages(ParallelArguments(pp_size=2), args, world_size=4)


def test_batches_of_a_step_are_concatenated_and_filled_up_without_labels():
    long = {"input_ids": torch.full((2, 4), 7), "labels": torch.full((2, 4), 7), "attention_mask": torch.ones(2, 4)}
    short = {name: value[:1, :3] for name, value in long.items()}
    stacked = stack_batches([long, short], 3)
    assert {value.shape for value in stacked.values()} == {(6, 4)}
    tokens = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]  # not those of the added row, nor of the added batch
    assert stacked["not_padding"].int().tolist() == tokens + [[0, 0, 0, 0]] * 3
    assert stacked["labels"][2].tolist() == [7, 7, 7, -100]
    assert (stacked["labels"][3:] == -100).all()
    assert stacked["attention_mask"][2].tolist() == [1, 1, 1, 0]
    assert (stacked["attention_mask"].sum(dim=1) > 0).all()
    with pytest.raises(UsageError, match="input pixel_values"):
        stack_batches([long | {"pixel_values": torch.zeros(2)}], 1)
    with pytest.raises(UsageError, match="input attention_mask is not a tensor of"):
        stack_batches([long | {"attention_mask": torch.ones(2, 1, 4, 4)}], 1)


TRAINER_METHODS = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_move_model_to_device",
    "_prepare_for_training",
    "_prepare_inputs",
    "_save_optimizer_and_scheduler",
    "_sync_replicated_trainable_parameters",
)
"""Methods of Trainer that ParallelTrainer overrides or calls."""

USED_IN = {
    "_StridedShard": "core/torch_internals.py",
    "_attn_implementation": "trainer/attention.py",
    "_dataloaders": "parallel/trainer.py",
    "_init_weights": "parallel/weights.py",
    "_modules": "parallel/partition.py",
    "_prepare_for_training": "parallel/trainer.py",
    "_resolve_parallel_plans": "parallel/tensor.py",
}
"""Other internals of torch, transformers and Accelerate -> the one module that uses them."""


def test_internals_of_libraries_are_where_this_package_uses_them():
    assert [name for name in TRAINER_METHODS if not callable(getattr(Trainer, name, None))] == []
    assert [name for name in ("_init_weights", "_resolve_parallel_plans") if not hasattr(PreTrainedModel, name)] == []
    assert isinstance(PreTrainedConfig._attn_implementation, property)
    assert "router_logits" in MixtralPreTrainedModel._can_record_outputs
    assert "self._dataloaders = []" in inspect.getsource(Accelerator.__init__)
    assert issubclass(placement_types._StridedShard, placement_types.Placement)
    assert torch.nn.Sequential(torch.nn.ReLU())._modules.keys() == {"0"}


@cache
def names_in(path):
    """All names that a module's code contains, without its comments and docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.name for node in nodes if isinstance(node, ast.alias | ast.FunctionDef)}


@pytest.mark.parametrize("name", USED_IN)
def test_internals_of_libraries_are_used_in_one_module(name):
    assert [path for path in (REPOSITORY / "hfscale").rglob("*.py") if name in names_in(path)] == [
        REPOSITORY / "hfscale" / USED_IN[name]
    ]
