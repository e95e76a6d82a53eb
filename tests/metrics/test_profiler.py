"""ProfilerCallback writes traces of the chosen steps only."""

import json

import pytest
from tiny import tiny_trainer

from hfscale.errors import UsageError
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
