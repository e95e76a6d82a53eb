"""Traces: what they name on one process and two, what they leave alone, and what they cost when they are off."""

import json

import pytest
import torch
from tiny import RandomTokens, logged, tiny_arguments, tiny_model
from transformers import Trainer, default_data_collator
from why_faults import FAULTS, Fault
from why_runs import Training, launch, make_trainer

from hfscale import TraceCallback
from hfscale.errors import ParameterError, UsageError
from hfscale.why.answer import compare_runs
from hfscale.why.options import read_steps
from hfscale.why.trace_files import read_trace

FAST = (
    "the epsilon of one norm",
    "another scaling of attention",
    "a wrong backward of an activation",
    "no clipping",
    "a stale optimizer state",
    "a flipped bit in a weight",
)
ON_TWO_RANKS = ("the gradient of a weight is lost on one rank", "a flipped bit in an activation")


def fault_named(name) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def train(training, folder):
    """Train in this process."""
    trainer = make_trainer(training, folder, "single")
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The output directory of a run without a fault, on one process."""
    folder = tmp_path_factory.mktemp("plain")
    train(Training(), folder)
    return folder


@pytest.fixture(scope="module")
def plain_ddp(tmp_path_factory):
    """The same on two ranks."""
    return launch(Training(), tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.mark.parametrize("name", FAST)
def test_a_fault_is_named_with_module_and_step(plain, tmp_path, name):
    fault = fault_named(name)
    reference = plain
    if fault.clean != Training():
        reference = tmp_path / "clean"
        train(fault.clean, reference)
    train(fault.faulty, tmp_path / "faulty")
    answer = compare_runs(reference, tmp_path / "faulty")
    found = answer.first_difference
    assert found.kind in fault.kinds
    assert found.step == fault.step
    assert (found.module or "").startswith(fault.module)
    assert fault.operation in (None, found.operation)
    assert any(one.name.startswith(fault.before) for one in answer.before) or not fault.before


def test_the_operation_of_a_forward_is_named(plain, tmp_path):
    train(fault_named("the epsilon of one norm").faulty, tmp_path)
    assert compare_runs(plain, tmp_path).first_difference.operation == "aten.add"


def test_a_setting_is_named_with_the_weight_that_shows_it(plain, tmp_path):
    train(fault_named("no weight decay").faulty, tmp_path)
    answer = compare_runs(plain, tmp_path)
    found = answer.first_difference
    assert (found.kind, found.operation) == ("config", "weight_decay")
    place = f"in their settings (weight_decay: 0.1 and 0), which show first in {found.module}, compared bit by bit"
    assert f"The runs differ first at step 1 on rank 0, {place}" in answer.explanation


@pytest.mark.parametrize("name", ON_TWO_RANKS)
@pytest.mark.long
def test_a_fault_of_one_rank_names_the_rank(plain_ddp, tmp_path, name):
    fault = fault_named(name)
    found = compare_runs(plain_ddp, launch(fault.faulty, tmp_path, "ddp")).first_difference
    assert (found.kind, found.step, found.rank) == (fault.kinds[0], fault.step, 1)
    assert found.module.startswith(fault.module)


def test_two_ranks_have_the_values_of_one_process(plain, plain_ddp):
    answer = compare_runs(plain, plain_ddp)
    assert answer.first_difference.kind == "none", answer
    assert answer.compared["traced_steps"] == [1, 2, 3, 4]


@pytest.mark.long
def test_layouts_are_not_compared_after_a_step_that_changes_the_weights_beyond_measure(tmp_path):
    large = Training(arguments={"learning_rate": 0.1})
    train(large, tmp_path / "one")
    train(large, tmp_path / "again")
    two = launch(large, tmp_path / "two", "ddp")
    answer = compare_runs(tmp_path / "one", two)
    assert answer.first_difference.kind == "none", answer
    assert "Step 1 changes the norm of the weights by more than a tenth" in answer.explanation
    assert "more than a tenth" not in compare_runs(tmp_path / "one", tmp_path / "again").explanation


def test_equal_runs_have_equal_traces(plain, tmp_path):
    train(Training(), tmp_path)
    assert not compare_runs(plain, tmp_path).first_difference.is_one
    for step in (1, 4):
        folders = [folder / "hfscale_trace" / f"step-{step}" for folder in (plain, tmp_path)]
        first, second = (read_trace(folder)[0].events for folder in folders)
        assert [event.to_line() for event in first] == [event.to_line() for event in second]
        assert {event.phase for event in first} >= {"forward", "backward", "gradient", "clipping", "optimizer", "rng"}


def test_mixed_precision_is_traced(tmp_path):
    """Under autocast autograd calls the hooks of some values without a gradient."""
    runs = [launch(Training(arguments={"bf16": True}), tmp_path / name, "single") for name in ("a", "b")]
    assert compare_runs(*runs).first_difference.kind == "none"


def test_a_trace_changes_nothing_and_is_gone_afterwards(tmp_path):
    traced = train(Training(), tmp_path / "traced")
    untraced = train(Training(trace=()), tmp_path / "untraced")
    assert logged(traced, "loss") == logged(untraced, "loss")
    assert logged(traced, "grad_norm") == logged(untraced, "grad_norm")
    assert not (tmp_path / "untraced" / "hfscale_trace").exists()
    for module in traced.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert "training_step" not in vars(traced)


def test_traces_of_an_earlier_run_are_set_aside(tmp_path):
    train(Training(trace=(1,)), tmp_path)
    train(Training(trace=(2,)), tmp_path)
    assert [path.name for path in (tmp_path / "hfscale_trace").iterdir()] == ["step-2"]
    assert len(list(tmp_path.glob("hfscale_trace-until-*"))) == 1


def test_bad_steps_and_bad_files_are_one_line(plain, tmp_path):
    with pytest.raises(ParameterError, match="steps is \\[0\\]"):
        TraceCallback([0])
    with pytest.raises(ParameterError, match="at most 32"):
        TraceCallback(range(1, 40))
    assert read_steps("5,6 7") == [5, 6, 7]
    with pytest.raises(ParameterError, match="steps is 'five'"):
        read_steps("five")
    train(Training(trace=(1,)), tmp_path)
    path = tmp_path / "hfscale_trace" / "step-1" / "rank-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(UsageError, match="is incomplete"):
        compare_runs(plain, tmp_path)
    header = json.loads(lines[0])
    path.write_text(json.dumps(header | {"world_size": 2}) + "\n" + "".join(lines[1:]))
    with pytest.raises(UsageError, match="lacks traces"):
        compare_runs(plain, tmp_path)


class ForwardOnly(Trainer):
    """Has no backward pass, for which flex attention needs a GPU."""

    def training_step(self, model, inputs, *args, **kwargs):
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs))


@pytest.mark.long
def test_a_model_with_flex_attention_is_traced_without_operations(tmp_path, caplog):
    model = tiny_model(attn_implementation="flex_attention", hidden_size=64)
    trainer = ForwardOnly(
        model=model,
        args=tiny_arguments(tmp_path, max_steps=1),
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[TraceCallback([1])],
    )
    trainer.train()
    assert "no single operations: torch compiles flex_attention" in caplog.text
    (trace,) = read_trace(tmp_path / "hfscale_trace" / "step-1")
    assert "forward" in {event.phase for event in trace.events}
    assert not trace.header["parts"]["operations"]
