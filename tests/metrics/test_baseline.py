"""Scaling efficiency relative to a recorded baseline: which runs can be compared."""

from dataclasses import replace

import pytest
from tiny import LENGTH, logged, tiny_trainer

from hfscale import ScalingMetricsCallback
from hfscale.errors import ConfigFileError
from hfscale.metrics.baseline import Baseline, Workload, find, read_baselines, user_file
from hfscale.metrics.throughput import describe_workload
from hfscale.report.sweep_command import record_baseline

WORK = Workload(
    model_type="llama",
    parameters=100,
    trainable_parameters=100,
    device="NVIDIA H100",
    sequence_length=4096,
    tokens_per_gpu=8192,
    precision="bf16",
    recompute="none",
)
ONE = Baseline(workload=WORK, world_size=1, tokens_per_s_per_gpu=1000.0, strategy="single")


def test_weak_scaling_has_equal_tokens_per_gpu_and_strong_scaling_in_total():
    weak = find([ONE], WORK, 8)
    assert (weak.mode, weak.efficiency(800.0)) == ("weak", 0.8)
    assert "1 GPU (weak scaling, 8,192 tokens" in weak.describe()
    strong = find([ONE], replace(WORK, tokens_per_gpu=2048), 4)
    assert (strong.mode, strong.efficiency(500.0)) == ("strong", 0.5)
    assert "8,192 tokens per step" in strong.describe()


def test_the_baseline_with_fewest_gpus_is_used_and_weak_before_strong_scaling():
    eight = replace(ONE, world_size=8, tokens_per_s_per_gpu=900.0)
    other = replace(ONE, workload=replace(WORK, tokens_per_gpu=131072), world_size=1)
    assert find([eight, other, ONE], WORK, 16).baseline == ONE
    assert find([other], WORK, 16).mode == "strong"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parameters", 101),
        ("trainable_parameters", 7),
        ("device", "NVIDIA A100"),
        ("sequence_length", 2048),
        ("precision", "fp32"),
        ("recompute", "full"),
        ("model_type", "qwen3"),
    ],
)
def test_other_work_has_no_efficiency_and_the_reason_names_the_difference(field, value):
    reason = find([ONE], replace(WORK, **{field: value}), 8)
    assert isinstance(reason, str)
    assert f"{field.replace('_', ' ')} {value}" in reason


def test_the_reason_names_the_recorded_tokens_per_gpu():
    assert "8,192 on 1" in find([ONE], replace(WORK, tokens_per_gpu=4096), 8)
    assert "no baseline" in find([], WORK, 8)


def test_recording_replaces_the_same_work_and_keeps_other_baselines(tmp_path):
    path = tmp_path / "sub" / "baselines.json"
    record_baseline(path, ONE)
    record_baseline(path, replace(ONE, world_size=2))
    record_baseline(path, replace(ONE, tokens_per_s_per_gpu=1200.0))
    assert [(row.world_size, row.tokens_per_s_per_gpu) for row in read_baselines(path)] == [(2, 1000.0), (1, 1200.0)]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 2}', '{"format": 1, "baselines": [{"world_size": 1}]}', '{"format": 1, "baselines": 3}'],
)
def test_a_file_of_another_kind_is_an_error(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=r"b\.json"):
        read_baselines(path)


def test_a_speed_of_zero_is_refused(tmp_path):
    path = tmp_path / "b.json"
    record_baseline(path, ONE)
    path.write_text(path.read_text().replace("1000.0", "0"))
    with pytest.raises(ConfigFileError, match="tokens_per_s_per_gpu"):
        read_baselines(path)


def test_a_run_logs_its_efficiency(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    plain = tiny_trainer(tmp_path / "plain", ScalingMetricsCallback())
    plain.train()
    assert logged(plain, "scaling/efficiency") == []
    work = describe_workload(plain, sequence_length=LENGTH, tokens_per_gpu=4 * LENGTH)
    row = Baseline(workload=work, world_size=1, tokens_per_s_per_gpu=500.0, strategy="single")
    record_baseline(user_file(), row)
    trainer = tiny_trainer(tmp_path / "with", ScalingMetricsCallback())
    trainer.train()
    rates = logged(trainer, "scaling/tokens_per_s_per_gpu")
    assert logged(trainer, "scaling/efficiency") == [rate / 500.0 for rate in rates]
    # More accumulation steps are different work.
    other = tiny_trainer(tmp_path / "other", ScalingMetricsCallback(), gradient_accumulation_steps=2)
    other.train()
    assert logged(other, "scaling/efficiency") == []
