"""Rows of a table of runs: what is read, what is inferred, and what is refused."""

import re

import pytest
from conftest import REPOSITORY

from benchmarks.planner_memory import only_ran
from benchmarks.planner_runs import load
from hfscale.errors import HfScaleError
from hfscale.planner.estimate import estimate_job
from hfscale.planner.estimate_command import table_line
from hfscale.planner.frameworks import find_framework
from hfscale.planner.memory import allocated_gib, memory_of
from hfscale.planner.table import assumed, infer_framework, job_of, row_shape
from hfscale.planner.table_text import interconnect_gb_s

LLAMA = {
    "model": "Llama-3.1-8B",
    "params_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq_len": "8192.0",
    "micro_batch": "1",
    "global_batch_seqs": "8",
    "gpus": "8",
    "gpu_type": "H100-80GB",
    "dp_shard": "8",
    "dp_replicate": "1",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "precision": "bf16-mixed",
    "ac": "none",
    "compile": "no",
}


def row(**changes):
    return {**LLAMA, **changes}


def test_the_model_is_exact_if_its_widths_are_given():
    assert row_shape(row()).total_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("changes", "gated", "tied"),
    [
        ({}, True, False),
        ({"params_b": "7.505"}, True, True),
        ({"ffn": "16384", "params_b": ""}, False, False),
        ({"ffn": "16384", "params_b": "9.0"}, True, False),
        ({"layers": "4"}, True, False),  # the count is the whole model's, so it says nothing
    ],
)
def test_gated_and_tied_are_inferred_from_the_parameter_count(changes, gated, tied):
    shape = row_shape(row(**changes))
    assert (shape.mlp.gated, shape.tied) == (gated, tied)


def test_a_known_name_needs_no_widths():
    blank = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "params_b"), "")
    assert row_shape(row(model="Qwen3-8B", **blank)).total_parameters == 8_190_735_360


def test_experts_are_read_from_the_name():
    shape = row_shape(row(model="Grok1-314B(MoE 8e top2)", params_b="314"))
    assert (shape.moe.experts, shape.moe.top_k) == (8, 2)


@pytest.mark.parametrize(
    ("model", "widths", "experts"),
    [
        ("Mixtral 8x7B", {}, (8, 2)),
        ("DeepSeek-V3 (671B)", {"hidden": "7168", "layers": "61", "heads": "128", "kv_heads": "128"}, (256, 8)),
        ("mixtral-8x7b", {"layers": "4"}, (8, 2)),
        ("some 16x12B", {"hidden": "6144", "heads": "48", "params_b": ""}, (16, 2)),
    ],
)
def test_mixtures_of_a_known_name_and_width_are_those_of_the_catalogue(model, widths, experts):
    shape = row_shape(row(model=model, vocab="32000", **widths))
    assert (shape.moe.experts, shape.moe.top_k) == experts
    assert shape.layers == len(shape.windows) == len(shape.moe_layers) == int(widths.get("layers", "32"))


@pytest.mark.parametrize(
    ("model", "experts"),
    [("a model of 64 experts, 6 active", (64, 6)), ("MoE with 8 experts, top-2", (8, 2)), ("8 experts top 1", (8, 1))],
)
def test_experts_are_read_from_words(model, experts):
    shape = row_shape(row(model=model, params_b=""))
    assert (shape.moe.experts, shape.moe.top_k) == experts
    noted = row_shape(row(model="some MoE", params_b="", note=model))
    assert (noted.moe.experts, noted.moe.top_k) == experts


@pytest.mark.parametrize(
    "model", ["some MoE", "a mixture-of-experts", "Qwen-like 30B-A3B", "Scout 17B-16E", "Mixtral", "a 16-expert model"]
)
def test_a_mixture_whose_experts_are_unknown_is_not_sized_as_dense(model):
    line = table_line(0, row(model=model, params_b="47"))
    assert "mixture of experts" in line["error"]
    assert line["tokens_per_s_per_gpu"] is None


def test_the_exchange_of_many_small_experts_is_overlapped():
    widths = {"hidden": "7168", "layers": "61", "heads": "128", "kv_heads": "128", "vocab": "129280"}
    changes = {
        "gpus": "1024",
        "dp_shard": "1",
        "dp_replicate": "64",
        "tp": "2",
        "pp": "8",
        "global_batch_seqs": "8192",
    }
    many = job_of(row(model="DeepSeek-V3", params_b="671", **widths, **changes))
    assert (many.layer_split[0], many.virtual_stages) == (8, 4)  # eight chunks per rank would be more than layers
    assert (many.stack, many.expert_parallel, many.overlapped_experts) == ("megatron", 64, True)
    assert not job_of(row(model="Grok1-314B(MoE 8e top2)", **{**changes, "tp": "8", "pp": "2"})).overlapped_experts


def test_a_dense_model_of_another_width_is_not_a_mixture():
    assert row_shape(row(model="mixtral-8x7b-like dense", hidden="2048", heads="16", params_b="")).moe is not None
    assert row_shape(row(model="Llama-3.1-8B")).moe is None


def test_missing_widths_are_inferred_from_the_parameter_count():
    shape = row_shape({"model": "a 7B", "params_b": "7", "seq_len": "4096"})
    assert 6e9 < shape.total_parameters < 8e9
    assert row_shape(row(layers="", params_b="181", hidden="14336", vocab="250880", ffn="57344")).layers == 72


@pytest.mark.parametrize(
    ("changes", "framework"),
    [
        ({}, "hf"),
        ({"compile": "yes"}, "titan"),
        ({"compile": ""}, "titan"),
        ({"precision": "float8"}, "titan"),
        ({"precision": "mxfp8"}, "hf"),
        ({"precision": "mxfp8", "dp_shard": "1", "tp": "8"}, "megatron"),
        ({"model": "nanotron-3.57B", "dp_shard": "1", "tp": "8"}, "titan"),
        ({"ac": "selective-op"}, "titan"),
        ({"dp_shard": "", "dp_replicate": "8"}, "megatron"),
        ({"dp_shard": "1", "tp": "8"}, "megatron"),
        ({"dp_shard": "1", "pp": "8"}, "megatron"),
        ({"dp_shard": "2", "tp": "4", "compile": ""}, "titan"),
        ({"stack": "megatron"}, "megatron"),
    ],
)
def test_the_framework_is_inferred_from_the_columns(changes, framework):
    assert job_of(row(**changes)).stack == framework


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"precision": "bfloat16"}, "precision", "bf16"),
        ({"precision": "BF16-pure"}, "pure_bf16", True),
        ({"precision": "fp16/bf16-mixed"}, "precision", "fp16"),
        ({"precision": "float8-rowwise"}, "rowwise_fp8", True),
        ({"precision": ""}, "precision", "bf16"),
        ({"ac": "block"}, "activation_checkpointing", "full"),
        ({"ac": "selective-layer"}, "activation_checkpointing", "selective"),
        ({"ac": "None"}, "activation_checkpointing", "none"),
        ({"gpus": ""}, "zero", 3),
        ({"zero": "0", "dp_shard": "1", "dp_replicate": "8"}, "zero", 0),
        ({"method": "LoRA"}, "method", "lora"),
        ({"virtual_stages": "4", "pp": "8", "dp_shard": "1"}, "virtual_stages", 4),
    ],
)
def test_spellings(changes, field, value):
    assert getattr(job_of(row(**changes)), field) == value


@pytest.mark.parametrize(
    ("changes", "method", "column"),
    [
        ({}, "full", None),
        ({"note": "SFT fine-tune (LoRA MFU = 2/3 of SFT FLOPs)"}, "full", None),
        ({"note": "HF Trainer, LoRA r8 all linear, packing"}, "lora", "note"),
        ({"note": 'ablation row "QLoRA (AC, offload)"'}, "qlora", "note"),
        ({"model": "Llama-3.1-8B-LoRA"}, "lora", "model"),
        ({"note": "LoRA finetune", "method": "full"}, "full", None),
        ({"method": "LoRA+bnb.nf4-dq"}, "qlora", None),
        ({"method": "see elsewhere"}, "full", None),
    ],
)
def test_adapters_are_inferred_from_other_columns(changes, method, column):
    assert job_of(row(**changes)).method == method
    assert assumed(row(**changes)) == ([f"method {method}, from the column {column}"] if column else [])


def test_a_power_limit_without_a_number_is_reported():
    told = row(gpu_type="B200-power-limited")
    assert job_of(told) == job_of(row(gpu_type="B200"))
    assert table_line(0, told)["assumed"] == ["B200 at its usual power, because B200-power-limited gives no limit"]
    assert "assumed" not in table_line(0, row())


def test_allocated_peaks_are_predicted_as_such():
    whole = table_line(0, row())["peak_mem_gib"]
    told = table_line(0, row(measure="max_memory_allocated/1e9"))["peak_mem_gib"]
    memory = estimate_job(job_of(row())).memory
    assert told == pytest.approx(allocated_gib(memory), abs=1e-3)
    assert told < whole - memory.context
    assert table_line(0, row(measure="nvidia-smi"))["peak_mem_gib"] == whole


def test_the_source_is_ignored():
    assert infer_framework(row(source="NVIDIA/Megatron-LM"), job_of(row()).layout) == "hf"
    assert job_of(row(source="anything")) == job_of(row())


def test_measured_columns_are_ignored():
    assert job_of(row(tokens_per_s_per_gpu="1", peak_mem_gb="OOM", mfu="x")) == job_of(row())


def test_how_the_loss_is_computed():
    plain, kernel, compiled = (job_of(row(stack="titan", loss=text)) for text in ("", "kernel", "compiled"))
    assert (plain.loss_kernel, kernel.loss_kernel) == (False, True)
    assert (plain.compiled_loss, compiled.compiled_loss) == (False, True)


def test_states_in_bf16_and_norms_in_one_kernel():
    plain, changed = (job_of(row(stack="megatron", **more)) for more in ({}, {"states": "bf16", "norm": "kernel"}))
    assert (plain.pure_bf16, plain.norm_kernel) == (False, False)
    assert (changed.pure_bf16, changed.norm_kernel) == (True, True)


def test_published_runs_are_not_said_not_to_fit():
    """Runs of which only the speed was published fitted into the memory of their GPUs."""
    runs, _ = load()
    needed = [
        (run.row, run.source, memory_of(run.job, find_framework(run.job.stack)).total / run.job.gpu.memory_gib)
        for run in only_ran(runs)
    ]
    assert len(needed) > 400
    assert [run for run in needed if run[2] > 1] == []


def test_blank_data_parallel_axes_get_the_remaining_ranks():
    job = job_of(row(dp_shard="", dp_replicate="", gpus="64", tp="8", pp="2"))
    assert (job.layout.dp_replicate, job.layout.dp_shard) == (4, 1)
    assert job.zero == 1


def test_a_blank_recomputation_is_the_least_that_fits():
    small, large = row(ac="", seq_len="4096"), row(ac="", micro_batch="8", global_batch_seqs="64")
    assert job_of(small).activation_checkpointing == "none"
    assert job_of(large).activation_checkpointing != "none"


def test_old_megatron_has_no_flash_attention():
    old = row(gpu_type="A100-80GB", precision="fp16-mixed", dp_shard="1", tp="8", ac="full", seq_len="2048")
    assert not job_of(old).flash_attention
    assert not job_of(old).sequence_parallel
    assert job_of({**old, "ac": "selective+SP"}).sequence_parallel
    assert job_of({**old, "precision": "bf16-mixed", "ac": "none"}).flash_attention


def test_the_batch_of_a_pipeline_is_divided_into_micro_batches():
    job = job_of(row(dp_shard="1", pp="8", micro_batch="32", global_batch_seqs="32"))
    assert (job.micro_batch, job.micro_batches) == (4, 8)


@pytest.mark.parametrize(
    ("text", "gb_s"),
    [
        ("50 GB/s", 50),
        ("400Gb/s per GPU", 50),
        ("3.2Tbps", 50),
        ("4x100Gb/node", 6.25),
        ("25", 25),
        ("", None),
        ("8x400Gb/s IB", 50),
        ("EFA 3200 Gbps", 50),
        ("InfiniBand", None),
    ],
)
def test_interconnects(text, gb_s):
    assert interconnect_gb_s(text) == gb_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": "", "dp_shard": "", "dp_replicate": ""}, "gpus is blank"),
        ({"gpus": "9"}, "needs 8 processes, but the world has 9"),
        ({"gpus": "0"}, "gpus is 0"),
        ({"seq_len": "-5"}, "seq_len is -5"),
        ({"seq_len": ""}, "seq_len is blank"),
        ({"seq_len": "nan"}, "seq_len is nan"),
        ({"hidden": "many"}, "hidden is 'many'"),
        ({"tp": "1.5"}, "tp is 1.5"),
        ({"gpu_type": "H1000"}, "GPU 'H1000'"),
        ({"precision": "int3"}, "precision is 'int3'"),
        ({"ac": "maybe"}, "ac is 'maybe'"),
        ({"stack": "mine"}, "stack is 'mine'"),
        (
            {"dp_shard": "1", "tp": "8", "heads": "12", "kv_heads": "4"},
            "tp is 8, which does not divide 12 attention heads",
        ),
        ({"dp_shard": "", "dp_replicate": "", "tp": "3"}, "tp 3 x pp 1 x cp 1 does not divide 8 GPUs"),
        ({"global_batch_seqs": "12"}, "global_batch is 12"),
        ({"layers": "", "params_b": ""}, "has neither widths nor params_b"),
        ({"interconnect": "7 lanes"}, "interconnect is '7 lanes'"),
    ],
)
def test_a_bad_row_is_one_line(changes, message):
    with pytest.raises(HfScaleError) as caught:
        job_of(row(**changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class RecordedRow(dict):
    """A row that records the columns that are read."""

    def __init__(self, cells):
        super().__init__(cells)
        self.read = set()

    def get(self, column):
        self.read.add(column)
        return super().get(column)


def test_the_documentation_lists_the_columns_that_are_read():
    read = set()
    for changes in ({}, {"gpus": "", "layers": "", "hidden": ""}, {"precision": "fp16", "dp_shard": "1", "tp": "8"}):
        row = RecordedRow(LLAMA | changes)
        table_line(0, row)
        read |= row.read
    page = (REPOSITORY / "docs" / "planner_measure.md").read_text(encoding="utf-8")
    rows = page.split("## A table of runs\n")[1].partition("\nWithout")[0].splitlines()
    assert {
        name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    } == read
