"""Exposed communication: the arithmetic of intervals, and measurements in two processes."""

import json
import random

import pytest
import torch
from conftest import REPOSITORY

from hfscale.metrics.meters.communication import exposed_communication, subtracted_length, union


def test_union_and_difference_equal_a_count_of_milliseconds():
    draw = random.Random(0)
    for _ in range(200):
        sets = []
        for _ in range(2):
            intervals = [(start, start + draw.randrange(1, 12)) for start in (draw.randrange(80) for _ in range(9))]
            sets.append((union(intervals), {ms for start, end in intervals for ms in range(start, end)}))
        (comm, comm_ms), (compute, compute_ms) = sets
        assert sum(end - start for start, end in comm) == len(comm_ms)
        assert subtracted_length(comm, compute) == len(comm_ms - compute_ms)


class Event:
    def __init__(self, name, start, end, *, thread=1, on_gpu=False, is_user_annotation=False):
        self.name, self.thread, self.is_user_annotation = name, thread, is_user_annotation
        self.time_range = type("Range", (), {"start": start, "end": end})
        kinds = torch.autograd.DeviceType
        self.device_type = kinds.CUDA if on_gpu else kinds.CPU


def test_on_a_gpu_only_kernels_are_compared():
    events = [
        Event("aten::mm", 0, 1000),
        Event("gemm_kernel", 0, 100, on_gpu=True),
        Event("ncclDevKernel_AllReduce_Sum_f32", 80, 180, on_gpu=True),
        Event("gemm_kernel", 180, 400, on_gpu=True),
        Event("FSDP::post_backward_reduce (layers.1)", 0, 400, on_gpu=True, is_user_annotation=True),
    ]
    found = exposed_communication(events)
    assert found.seconds == pytest.approx(80e-6)
    assert found.step_s == pytest.approx(400e-6)


def test_on_a_cpu_operators_on_gloo_threads_hide_no_communication():
    events = [
        Event("aten::mm", 0, 100),
        Event("gloo:all_gather", 50, 200, thread=2, is_user_annotation=True),
        Event("aten::copy_", 60, 190, thread=2),
        Event("aten::mm", 200, 300),
    ]
    assert exposed_communication(events).seconds == pytest.approx(100e-6)
    assert exposed_communication([Event("aten::mm", 0, 100)]) is None


@pytest.mark.world(2)
def test_two_processes_measure_known_communication_and_noise(launch, tmp_path):
    """Check DDP's counters, profiled FSDP2 steps, and the noise scale under both."""
    done = launch(2, REPOSITORY / "tests" / "workers" / "exchange.py")
    assert done.code == 0, done.err[-3000:]
    assert "profiler" not in done.err  # lines that Kineto writes
    found = json.loads((tmp_path / "found.json").read_text())
    for strategy in ("ddp", "fsdp2"):
        assert 0 < found[strategy]["comm_fraction"] <= 1, found
        assert found[strategy]["noise_scale"] == pytest.approx(found["known_noise_scale"], rel=0.1), found


@pytest.mark.timing
@pytest.mark.world(2)
def test_communication_that_no_computation_hides_is_the_cause_of_a_low_efficiency(launch, tmp_path):
    done = launch(2, REPOSITORY / "tests" / "workers" / "exchange.py", "wide")
    assert done.code == 0, done.err[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["comm_fraction"] > 0.2, found
    assert found["comm_over_backward"] > 1, found
    assert found["cause"] == "tokens per GPU too small", found
