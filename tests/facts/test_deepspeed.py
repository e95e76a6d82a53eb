"""DeepSpeed configs: what has been shown passes, everything else is refused, and what has no effect is named."""

import json
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from hfscale.core.spelling import speaking
from hfscale.facts.deepspeed import INERT, REFUSED, SHOWN, VALUES, inert_settings, unshown_setting
from hfscale.facts.support import why_not
from hfscale.trainer.strategies.description import Combination, with_deepspeed

REPOSITORY = Path(__file__).parent.parent.parent
SHIPPED = sorted((REPOSITORY / "ds_configs").glob("*.json"))
ZERO = "zero_optimization"
SECTIONS = {
    ZERO: DeepSpeedZeroConfig,
    f"{ZERO}.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    f"{ZERO}.offload_param": DeepSpeedZeroOffloadParamConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
}
"""Section of the config -> DeepSpeed's own model of it."""
OFF = {
    ZERO: {"stage": 2, "zenflow": None, "elastic_checkpoint": False, "offload_optimizer": {"super_offload": False}},
    "compile": {"deepcompile": False, "double_buffer": True},
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
    "expert_parallel": {},
    "tensor_parallel": {"autotp_size": 1},
    "gradient_allreduce_op": "Mean",
    "data_efficiency": {"enabled": False, "seed": 1},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
}
MODES = {
    "expert_parallel": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "compile.passes": {"compile": {"passes": ["autosp"]}},
    "compile.offload_activation": {"compile": {"offload_activation": True}},
    f"{ZERO}.zenflow": {ZERO: {"zenflow": {"topk_ratio": 0.1}}},
    f"{ZERO}.offload_optimizer.super_offload": {ZERO: {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "optimizer.type": {"optimizer": {"type": "Muon", "params": {"lr": "auto"}}},
    f"{ZERO}.elastic_checkpoint": {ZERO: {"elastic_checkpoint": True}},
    f"{ZERO}.load_from_fp32_weights": {ZERO: {"load_from_fp32_weights": False}},
    f"{ZERO}.parameter_alignment": {ZERO: {"parameter_alignment": True}},
    f"{ZERO}.zero_quantized_weights": {ZERO: {"zero_quantized_weights": True}},
    f"{ZERO}.zero_quantized_gradients": {ZERO: {"zero_quantized_gradients": True}},
    f"{ZERO}.mics_shard_size": {ZERO: {"mics_shard_size": 2}},
    f"{ZERO}.cpu_offload": {ZERO: {"cpu_offload": True}},
    "bf16.bf16_optimizer_states": {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    "bfloat16": {"bfloat16": {"enabled": True}},
    "data_types.buffer_dtype": {"data_types": {"buffer_dtype": "bf16"}},
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "data_efficiency": {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}},
    "curriculum_learning": {"curriculum_learning": {"enabled": True}},
    "progressive_layer_drop": {"progressive_layer_drop": {"enabled": True}},
    "sparse_attention": {"sparse_attention": {"mode": "fixed"}},
    "compression_training": {"compression_training": {"weight_quantization": {"shared_parameters": {}}}},
    "elasticity": {"elasticity": {"enabled": True}},
    "autotuning": {"autotuning": {"enabled": True}},
    "datastates_ckpt": {"datastates_ckpt": {"host_cache_size": 16}},
    "weight_quantization": {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}},
    "managed_gradient_accumulation": {"managed_gradient_accumulation": False},
    "gradient_allreduce_op": {"gradient_allreduce_op": "sum"},
    "checkpoint.writer": {"checkpoint": {"writer": {"type": "fast", "decoupled": True}}},
    "a_mode_of_tomorrow": {"a_mode_of_tomorrow": {"enabled": True, "size": 2}},
    f"{ZERO}.a_mode_of_tomorrow": {ZERO: {"a_mode_of_tomorrow": 2}},
    f"{ZERO}.offload_param.a_mode_of_tomorrow": {ZERO: {"offload_param": {"a_mode_of_tomorrow": "fast"}}},
    "optimiser": {"optimiser": {"type": "AdamW"}},
}
"""Setting -> a config that asks for it."""


def refusal(config):
    """What a script is told about a config; None where it may train."""
    asked = with_deepspeed(Combination(engine="trainer", strategy="zero2"), config)
    with speaking("python"):
        return why_not(asked)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_passes(path):
    config = json.loads(path.read_text())
    assert unshown_setting(config) == "none"
    assert refusal(config) is None
    assert inert_settings(config) == []


def test_what_is_off_asks_for_nothing():
    assert unshown_setting(OFF) == "none"
    assert inert_settings(OFF) == []


@pytest.mark.parametrize("path", MODES)
def test_a_mode_that_no_test_has_shown_is_refused_by_name(path):
    assert unshown_setting(MODES[path]) == path
    sentence = refusal(MODES[path])
    assert sentence.startswith(f"{path} in the DeepSpeed config: ")
    assert (REFUSED[path] in sentence) if path in REFUSED else ("no test of hfscale" in sentence)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_of_deepspeed_is_listed_or_refused(section):
    """With a value of its type; a field that DeepSpeed adds is refused because nothing lists it."""
    for name, field in SECTIONS[section].model_fields.items():
        for spelled in {name, field.alias or name}:
            path = f"{section}.{spelled}"
            config = {spelled: "of tomorrow"}
            for part in reversed(section.split(".")):
                config = {part: config}
            assert unshown_setting(config) == ("none" if path in SHOWN else path)


def test_the_list_has_no_setting_that_deepspeed_lacks():
    known = {f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields}
    known |= {f"{s}.{field.alias}" for s, model in SECTIONS.items() for field in model.model_fields.values()}
    listed = {*SHOWN, *VALUES}
    assert {path for path in listed if path.rpartition(".")[0] in SECTIONS} <= known
    assert not SHOWN & {*VALUES, *REFUSED, *INERT}
    assert all(value == str(value).lower() for values in VALUES.values() for value in values if isinstance(value, str))


def test_a_setting_without_effect_is_named():
    config = {"activation_checkpointing": {"cpu_checkpointing": True}, "pipeline": {"stages": 2}, ZERO: {"stage": 1}}
    assert refusal(config) is None
    lines = inert_settings(config)
    assert [line.split()[0] for line in lines] == ["activation_checkpointing", "pipeline"]
    assert all("has no effect" in line for line in lines)


def test_deepspeed_still_clips_at_one_where_its_config_does_not_say():
    """docs/versions.md says so."""
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1})
    assert config.gradient_clipping == 1.0
