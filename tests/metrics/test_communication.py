"""Exposed communication: the arithmetic of intervals, what a sample profiles, and measurements in two processes."""

import itertools
import json
import logging
import random

import pytest
import torch
from conftest import REPOSITORY
from tiny import tiny_trainer
from torch.autograd.profiler_util import FunctionEvent
from transformers import TrainerCallback

from hfscale import ScalingMetricsCallback
from hfscale.metrics.communication_profile import SampledSteps, Timeline, exposed_of_step, subtracted_length, union
from hfscale.metrics.meters.communication import CommunicationMeter
from hfscale.metrics.profiler import ProfilerCallback

CPU = torch.device("cpu")


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
    """An event of Kineto, with times in microseconds. It counts what is read of all events."""

    reads = 0

    def __init__(self, name, start, end, *, thread=1, on_gpu=False, is_user_annotation=False):
        kinds = torch.autograd.DeviceType
        self.values = {
            "name": name,
            "start_ns": 1000 * start,
            "end_ns": 1000 * end,
            "start_thread_id": thread,
            "is_user_annotation": is_user_annotation,
            "device_type": kinds.CUDA if on_gpu else kinds.CPU,
        }

    def __getattr__(self, name):
        Event.reads += 1
        value = self.values[name]
        return lambda: value


def test_on_a_gpu_only_kernels_are_compared():
    events = [
        Event("aten::mm", 0, 1000),
        Event("gemm_kernel", 0, 100, on_gpu=True),
        Event("ncclDevKernel_AllReduce_Sum_f32", 80, 180, on_gpu=True),
        Event("gemm_kernel", 180, 400, on_gpu=True),
        Event("FSDP::post_backward_reduce (layers.1)", 0, 400, on_gpu=True, is_user_annotation=True),
    ]
    found = exposed_of_step([Timeline.of_gpu(events)])
    assert found.seconds == pytest.approx(80e-6)
    assert found.step_s == pytest.approx(400e-6)


def test_on_a_cpu_operators_on_gloo_threads_hide_no_communication():
    events = [
        Event("aten::mm", 0, 100),
        Event("aten::copy_", 60, 190, thread=2),
        Event("gloo:all_gather", 50, 200, thread=2, is_user_annotation=True),
        Event("aten::mm", 200, 300),
    ]
    assert exposed_of_step([Timeline.of_cpu(events)]).seconds == pytest.approx(100e-6)
    assert exposed_of_step([Timeline.of_cpu([Event("aten::mm", 0, 100)])]) is None


def test_a_step_is_computed_from_its_last_two_micro_batches():
    def part(*, exposed, computed):
        communication = [(computed, computed + exposed)] if exposed else []
        computation = [(0, computed)] if computed else []
        return Timeline(communication=communication, computation=computation)

    def found(other, last):
        step = exposed_of_step([other, last], micro_batches=16, before_s=2800e-9)
        return round(step.seconds * 1e9), round(step.step_s * 1e9)

    # FSDP2 gathers weights in every micro-batch, and reduces gradients with the last one.
    assert found(part(exposed=20, computed=180), part(exposed=50, computed=200)) == (15 * 20 + 50, 2800 + 200 + 250)
    # ZeRO-1 reduces with the last one only.
    assert found(part(exposed=0, computed=180), part(exposed=50, computed=200)) == (50, 2800 + 180 + 250)
    # ParallelTrainer computes when it has the last one.
    assert found(part(exposed=0, computed=0), part(exposed=500, computed=900)) == (500, 2800 + 1400)


@pytest.mark.long
def test_a_million_events_are_read_once_each(monkeypatch):
    """Most events are calls of the CUDA runtime, of which only the kind is asked for, and none is converted."""
    monkeypatch.setattr(Event, "reads", 0)
    monkeypatch.setattr(FunctionEvent, "__init__", None)
    kernels = 10_000
    call = Event("cudaLaunchKernel", 0, 1)
    events = itertools.chain.from_iterable(
        (
            *itertools.repeat(call, 98),
            Event("gemm_kernel", 10 * at, 10 * at + 6, on_gpu=True),
            Event("ncclDevKernel_AllGather", 10 * at + 3, 10 * at + 9, on_gpu=True),
        )
        for at in range(kernels)
    )
    found = exposed_of_step([Timeline.of_gpu(events)])
    assert found.seconds == pytest.approx(kernels * 3e-6)
    assert Event.reads <= 98 * kernels + 2 * 5 * kernels


def test_the_intervals_of_a_long_step_are_compared_in_one_pass():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    intervals = 3000
    without = Counted((10 * at, 10 * at + 6) for at in range(intervals))
    of = [(10 * at + 3, 10 * at + 9) for at in range(intervals)]
    assert subtracted_length(of, without) == 3 * intervals
    assert without.reads <= 8 * intervals


class ProfiledMicroBatches(TrainerCallback):
    """Notes the micro-batches of which something was profiled, as (step, micro-batch)."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, *, model, **kwargs):
        self.state = state
        model.register_forward_hook(self.forward)

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro_batch = 0

    def forward(self, *_):
        self.micro_batch += 1
        if torch.autograd._profiler_enabled():
            self.seen.append((self.state.global_step + 1, self.micro_batch))


class SamplingCallback(ScalingMetricsCallback):
    """Profiles step 2 of one process; without other ranks it would profile none."""

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._communication._sampled = SampledSteps(CPU, first=2)
        self._communication.watches_steps = True


@pytest.mark.parametrize(
    ("micro_batches", "profiled"),
    [(1, [(2, 1)]), (2, [(2, 1), (2, 2)]), (3, [(2, 2), (2, 3)]), (16, [(2, 15), (2, 16)])],
)
def test_at_most_two_micro_batches_of_a_step_are_profiled(tmp_path, monkeypatch, micro_batches, profiled):
    monkeypatch.setattr(FunctionEvent, "__init__", None)  # making them takes 40 times as long as reading the events
    seen = ProfiledMicroBatches()
    trainer = tiny_trainer(tmp_path, SamplingCallback(), seen, max_steps=3, gradient_accumulation_steps=micro_batches)
    trainer.train()
    assert seen.seen == profiled
    assert not torch.autograd._profiler_enabled()


def test_a_step_that_the_user_traces_is_not_sampled(tmp_path):
    """The sample is taken in the next step; two profiles at the same time would spoil both."""
    seen = ProfiledMicroBatches()
    trainer = tiny_trainer(tmp_path, SamplingCallback(), ProfilerCallback([2]), seen, max_steps=4)
    trainer.train()
    assert seen.seen == [(2, 1), (3, 1)]
    assert (tmp_path / "profile" / "step-2.json").is_file()


def test_a_sample_that_another_profiler_interrupts_is_discarded():
    sampled = SampledSteps(CPU, first=1)
    sampled.step_begin(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        sampled.substep_end()
        sampled.substep_end()
    sampled.substep_end()
    sampled.step_end()
    assert sampled.last is None
    assert not torch.autograd._profiler_enabled()
    sampled.step_begin(1)
    assert torch.autograd._profiler_enabled()  # the next step is profiled instead
    sampled.stop()


@pytest.mark.parametrize(("mode", "is_sampled"), [("reduce-overhead", False), ("default", True)])
def test_cuda_graphs_are_not_profiled(tmp_path, monkeypatch, caplog, mode, is_sampled):
    trainer = tiny_trainer(tmp_path, torch_compile=True, torch_compile_mode=mode)
    monkeypatch.setattr(type(trainer.args), "world_size", property(lambda args: 2))
    meter = CommunicationMeter()
    with caplog.at_level(logging.INFO):
        meter.begin(trainer, trainer.state)
    assert meter.watches_steps == is_sampled
    assert (f"scaling/comm_fraction is not logged: the mode {mode}" in caplog.text) != is_sampled


@pytest.mark.world(2)
@pytest.mark.long
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
