"""The table of the bytes that Hugging Face's layers keep, compared with autograd on small models of every family."""

import json
import random

import pytest
import torch
from conftest import REPOSITORY
from planner_jobs import job
from transformers import CONFIG_MAPPING

from benchmarks.activations import (
    PEAKS,
    build,
    errors_of,
    forward,
    measure_sample,
    peak_bytes,
    planned_peak_bytes,
    planned_per_token,
)
from benchmarks.small_models import Sample, lengths_of, sample
from hfscale.errors import UnsupportedModelError
from hfscale.facts.activations import REGIMES, factors_of
from hfscale.facts.families import FAMILIES
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.planner.activations import layer_bytes, regime_of
from hfscale.planner.frameworks import find_framework
from hfscale.planner.memory import GIB, host_gib, node_host_gib, peak_of

OFTEN_TRAINED = ("llama", "qwen3", "olmo2", "gemma3_text", "gpt2")
MEASURED = tuple(name for name in FAMILIES if name not in OFTEN_TRAINED)


@pytest.mark.parametrize(
    "family",
    [
        *OFTEN_TRAINED,
        *(pytest.param(name, marks=pytest.mark.faults) for name in MEASURED),
    ],
)
def test_the_table_equals_what_autograd_keeps(family):
    """A small model of sizes that the fit has not seen, in every regime, with and without recomputation."""
    torch.manual_seed(0)
    random_ = random.Random(1)
    config = CONFIG_MAPPING[family](**sample(family, random_))
    drawn = Sample(config, ModelShape.from_config(config.to_dict()), lengths_of(family)[-1], 4)
    for (regime, recompute), found in measure_sample(drawn).items():
        planned = planned_per_token(drawn.shape, regime, recompute, drawn.seq_len, drawn.rank)
        assert planned == pytest.approx(found, rel=0.03), (regime, recompute)


def test_a_router_that_returns_a_tuple_gets_no_adapter():
    model = build(CONFIG_MAPPING["phimoe"](**sample("phimoe", random.Random(1))), "lora", "none")
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert torch.isfinite(forward(model, "lora", 1, 8, base=False))


def test_every_family_has_every_regime():
    with pytest.raises(UnsupportedModelError, match="the memory of sparrow is not known"):
        factors_of("sparrow", "mixed", "full")
    for family in (*OFTEN_TRAINED, *MEASURED):
        for regime in REGIMES:
            for kind in ("none", "selective", "full"):
                assert factors_of(family, regime, kind).layer["hidden"] > 0


@pytest.mark.faults
@pytest.mark.timeout(1200)  # linear attention is computed step by step without its kernels
@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "qwen3-8b",
        "gemma-3-1b",
        "qwen3-30b-a3b",
        "qwen3.5-9b",
        "qwen3.5-35b-a3b",
        "qwen3-next-80b-a3b",
        "gemma-4-26b-a4b",
        "nemotron-3-nano-30b-a3b",
    ],
)
def test_catalogue_models_keep_what_is_counted_at_full_width(name):
    errors = errors_of(name)
    assert max(map(abs, errors.values())) < 0.03, errors


RESULTS = REPOSITORY / "benchmarks" / "results"
COUNTED = json.loads((RESULTS / "activations.json").read_text(encoding="utf-8"))["peaks"]


@pytest.mark.parametrize(("name", "rows", "seq_len"), PEAKS)
def test_peaks_under_ddp_are_within_3_percent_of_the_measured_ones(name, rows, seq_len):
    """Measured: torch's MemTracker on a complete step of the model under DDP (`python -m benchmarks activations`)."""
    measured = COUNTED[name]
    assert (measured["sequences"], measured["seq_len"]) == (rows, seq_len)
    planned = planned_peak_bytes(find_model(name), rows, seq_len) / GIB
    assert planned == pytest.approx(measured["counted_gib"], rel=0.03)


@pytest.mark.faults
@pytest.mark.parametrize(("name", "rows", "seq_len"), PEAKS)
def test_peaks_under_ddp_equal_those_counted(name, rows, seq_len):
    assert planned_peak_bytes(find_model(name), rows, seq_len) == pytest.approx(
        peak_bytes(name, rows, seq_len), rel=0.03
    )


@pytest.mark.parametrize(
    ("changes", "regime"),
    [
        ({"zero": 0, "dp_replicate": 8}, "autocast"),
        ({"zero": 2, "dp_replicate": 8}, "bf16"),
        ({"zero": 3, "dp_shard": 8}, "mixed"),
        ({"zero": 0, "tp": 2, "pp": 2}, "mixed"),
        ({"zero": 3, "dp_shard": 8, "offload": "full"}, "bf16"),
        ({"zero": 0, "dp_replicate": 8, "precision": "fp32"}, "fp32"),
        ({"zero": 0, "dp_replicate": 8, "method": "lora"}, "lora"),
        ({"zero": 3, "dp_shard": 8, "method": "lora"}, "lora_bf16"),
    ],
)
def test_the_strategy_decides_the_formats(changes, regime):
    assert regime_of(job(**changes)) == regime


def test_autocast_keeps_fp32_residuals_and_norms():
    stack = find_framework("hf")
    autocast, mixed = (job(zero=zero, dp_replicate=8) for zero in (0, 2))
    more = layer_bytes(autocast, stack) - layer_bytes(mixed, stack)
    assert more == 10 * autocast.shape.hidden * autocast.tokens


class TestHostMemory:
    def test_offload_keeps_the_frozen_base_on_the_host(self):
        lora = job(shape=find_model("llama-3.1-405b"), method="lora", offload="full", dp_shard=1)
        assert host_gib(lora) > 756
        quantized = job(shape=find_model("llama-3.1-405b"), method="qlora", offload="full", dp_shard=1)
        assert 190 < host_gib(quantized) < 220  # embedding and head are in 16 bits

    @pytest.mark.parametrize(
        ("zero", "offload", "per_parameter"), [(2, "optimizer", 18), (3, "optimizer", 20), (3, "full", 22)]
    )
    def test_offload_needs_the_bytes_that_deepspeed_allocates(self, zero, offload, per_parameter):
        """Counted in DeepSpeed 0.19.8 on a CPU, without what stays on the GPU."""
        run = job(zero=zero, offload=offload)
        assert host_gib(run) == pytest.approx(per_parameter * run.shape.total_parameters / 8 / GIB)

    def test_ranks_share_what_is_offloaded(self):
        one, eight = (job(offload="full", dp_shard=ranks) for ranks in (1, 8))
        assert host_gib(one) == pytest.approx(8 * host_gib(eight))

    def test_every_rank_of_ddp_loads_all_weights_and_one_of_fsdp2(self):
        weights = 4 * find_model("llama-3.1-8b").total_parameters / GIB
        assert node_host_gib(job(zero=0, dp_replicate=8)) == pytest.approx(8 * weights)
        assert node_host_gib(job(dp_shard=64)) == pytest.approx(weights)
        assert node_host_gib(job(dp_shard=64, precision="fp8")) == pytest.approx(8 * weights)


def test_the_fullest_rank_of_a_pipeline_is_the_first_or_the_last():
    stack = find_framework("megatron")
    many = job(stack="megatron", pp=4, zero=1)
    few = job(stack="megatron", pp=4, zero=1, global_batch=1, activation_checkpointing="full")
    assert peak_of(many, stack).rank == "first pipeline rank"
    assert peak_of(few, stack).rank == "last pipeline rank"
    assert peak_of(job(), find_framework("hf")).rank == "every rank"
