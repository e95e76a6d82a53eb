"""ProfilerCallback writes traces of the chosen steps only, and marks the parts of each step for Nsight Systems."""

import json

import pytest
from tiny import logged, tiny_trainer

from hfscale.errors import UsageError
from hfscale.metrics import profiler
from hfscale.metrics.profiler import ProfilerCallback


def test_each_chosen_step_has_a_trace_of_its_operators(tmp_path):
    tiny_trainer(tmp_path, ProfilerCallback([2, 4])).train()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["step-2.json", "step-4.json"]
    events = json.loads((tmp_path / "profile" / "step-2.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::mm" in names
    assert any(str(name).startswith("Optimizer.step") for name in names)


def test_without_steps_no_folder_is_made(tmp_path):
    tiny_trainer(tmp_path, ProfilerCallback([])).train()
    assert not (tmp_path / "profile").exists()


def test_steps_are_counted_from_1():
    with pytest.raises(UsageError, match=r"^steps is \[0\]: 0 is below 1"):
        ProfilerCallback([0])


class Recorder:
    """Stands in for `torch.cuda.nvtx`: the nesting of the ranges, as Nsight Systems shows it."""

    def __init__(self):
        self.lines = []
        self.depth = 0

    def range_push(self, msg):
        self.lines.append("  " * self.depth + msg)
        self.depth += 1

    def range_pop(self):
        self.depth -= 1


STEP = ["  forward", "  backward", "  forward", "  backward", "  optimizer", "between steps"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_parts_of_each_step_are_marked(tmp_path, monkeypatch, compiled):
    recorder = Recorder()
    monkeypatch.setattr("torch.cuda.nvtx", recorder)
    monkeypatch.setattr(profiler, "device_of", lambda args: "cuda")
    arguments = {"max_steps": 2, "logging_steps": 1, "gradient_accumulation_steps": 2, "torch_compile": compiled}
    plain = tiny_trainer(tmp_path / "plain", **arguments)
    trainer = tiny_trainer(tmp_path / "marked", ProfilerCallback(nvtx=True), **arguments)
    for each in (plain, trainer):
        each.train()
    assert recorder.lines == ["between steps", "step 1", *STEP, "step 2", *STEP]
    assert recorder.depth == 0
    assert logged(trainer, "loss") == logged(plain, "loss")
    evaluated = len(recorder.lines)
    trainer.evaluate(trainer.train_dataset)
    assert len(recorder.lines) == evaluated


def test_ranges_on_a_cpu_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"^nvtx is True: this training runs on the device 'cpu'"):
        tiny_trainer(tmp_path, ProfilerCallback(nvtx=True)).train()
