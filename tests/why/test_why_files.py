"""`hfscale why` from the files that every run writes: what it names, what it leaves alone, what it refuses."""

import json
import shutil

import pytest
import torch
from forked_ranks import run_ranks
from tiny import RandomTokens, StopAt, tiny_model, tiny_trainer
from transformers import TrainerCallback

from hfscale import ScalingCallback
from hfscale.cli import main
from hfscale.errors import UsageError
from hfscale.why.answer import compare_runs
from hfscale.why.tolerance import norm_tolerance


def train(folder, *callbacks, model=None, dataset=None, resume=None, **arguments):
    trainer = tiny_trainer(folder, ScalingCallback(), *callbacks, model=model, **arguments)
    if dataset is not None:
        trainer.train_dataset = dataset
    trainer.train(resume_from_checkpoint=resume)
    return folder


def train_rank(folder, options):
    """Train in this process, which is a rank."""
    torch.set_num_threads(1)
    train(folder, **options)


def train_ranks(folder, **options):
    """Train on two ranks with the same global batch."""
    arguments = {"per_device_train_batch_size": 2, "lr_scheduler_type": "linear", **options}
    log = folder / "log"
    codes = run_ranks(2, train_rank, folder / "out", arguments, log=log)
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in log.iterdir())
    return folder / "out"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of four steps on one process."""
    return train(tmp_path_factory.mktemp("plain") / "out", lr_scheduler_type="linear")


class FlipsWeight(TrainerCallback):
    """Changes one bit of the exponent of a weight, after a step."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.after:
            weight = model.model.layers[1].mlp.down_proj.weight
            with torch.no_grad():
                weight.view(torch.int32)[0, 0] ^= 1 << 26


def test_equal_runs_have_no_difference(plain, tmp_path, capsys):
    other = train(tmp_path / "out", lr_scheduler_type="linear", run_name="another name")
    assert main(["why", str(plain), str(other), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["first_difference"]["kind"] == "none"
    assert answer["compared"] | {"reason": ""} == {
        "how": "bits",
        "reason": "",
        "logged_steps": 4,
        "last_step": 4,
        "traced_steps": [],
    }
    assert answer["before"] == []


def test_a_learning_rate_is_named_with_both_values(plain, tmp_path, capsys):
    other = train(tmp_path / "out", lr_scheduler_type="linear", learning_rate=2e-2)
    assert main(["why", str(plain), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["first_difference"]
    assert found == {
        "step": 1,
        "rank": None,
        "kind": "config",
        "module": None,
        "operation": "learning_rate",
        "a": 0.01,
        "b": 0.02,
    }


@pytest.mark.parametrize(
    ("arguments", "kind", "operation", "step"),
    [
        ({"max_grad_norm": 0.1}, "config", "max_grad_norm", 2),
        ({"weight_decay": 0.1}, "config", "weight_decay", 2),
        ({"adam_epsilon": 1e-3}, "config", "adam_epsilon", 2),
        ({"seed": 7}, "config", "seed", 1),
        ({"data_seed": 7}, "config", "data_seed", 1),
    ],
)
def test_an_argument_that_explains_the_difference_is_named(plain, tmp_path, arguments, kind, operation, step):
    other = train(tmp_path / "out", lr_scheduler_type="linear", **arguments)
    found = compare_runs(plain, other).first_difference
    assert (found.kind, found.operation, found.step) == (kind, operation, step)


def test_other_rows_are_other_data(plain, tmp_path):
    dataset = RandomTokens()
    dataset.rows[:, -1] = 5
    answer = compare_runs(plain, train(tmp_path / "out", dataset=dataset, lr_scheduler_type="linear"))
    assert (answer.first_difference.kind, answer.first_difference.step) == ("data", 1)
    assert answer.first_difference.operation == "inputs"


def test_other_first_weights_are_named(plain, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    found = compare_runs(plain, train(tmp_path / "out", model=model, lr_scheduler_type="linear")).first_difference
    assert (found.kind, found.step) == ("weights", 1)


def test_a_model_config_explains_the_forward(plain, tmp_path):
    model = tiny_model(rms_norm_eps=1e-3)
    answer = compare_runs(plain, train(tmp_path / "out", model=model, lr_scheduler_type="linear"))
    assert (answer.first_difference.kind, answer.first_difference.step) == ("config", 1)
    assert answer.first_difference.operation == "config.rms_norm_eps"


def test_a_weight_that_changes_between_two_steps_is_found_at_the_next_step(plain, tmp_path):
    other = train(tmp_path / "out", FlipsWeight(2), lr_scheduler_type="linear")
    answer = compare_runs(plain, other)
    assert (answer.first_difference.step, answer.first_difference.operation) == (3, "loss")
    assert answer.first_difference.kind == "optimizer"
    assert answer.before == []


def test_a_resumed_run_equals_an_uninterrupted_one(plain, tmp_path):
    arguments = {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "out", StopAt(2), **arguments)
    train(tmp_path / "out", resume=str(tmp_path / "out" / "checkpoint-2"), **arguments)
    answer = compare_runs(plain, tmp_path / "out")
    assert not answer.first_difference.is_one
    assert answer.compared["logged_steps"] == 4


def test_runs_that_log_at_other_steps_are_compared_where_both_have_logged(plain, tmp_path):
    answer = compare_runs(plain, train(tmp_path / "out", lr_scheduler_type="linear", logging_steps=2, seed=42))
    assert answer.compared["logged_steps"] == 2
    assert answer.first_difference.kind == "none"


@pytest.mark.long
def test_two_ranks_equal_one_process_within_rounding(plain, tmp_path):
    answer = compare_runs(plain, train_ranks(tmp_path))
    assert answer.first_difference.kind == "none", answer
    assert answer.compared["how"] == "tolerance"
    assert {one.name for one in answer.before} >= {"strategy", "world_size"}


def test_a_fault_on_two_ranks_is_beyond_rounding(plain, tmp_path):
    answer = compare_runs(plain, train_ranks(tmp_path, adam_epsilon=1e-3))
    assert (answer.first_difference.kind, answer.first_difference.operation) == ("config", "adam_epsilon")


def test_bad_input_is_one_line(plain, tmp_path, capsys):
    assert main(["why", str(plain), str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    assert main(["why", str(tmp_path), str(plain)]) == 2
    assert "give the --output_dir of a run" in capsys.readouterr().err
    short = train(tmp_path / "out", max_steps=2, logging_steps=5)
    with pytest.raises(UsageError, match="no logged or traced step in common"):
        compare_runs(plain, short)


@pytest.mark.parametrize("elements", [2**16, 2**20, 2**22])
def test_the_error_of_a_norm_on_a_cpu_is_within_its_tolerance(elements):
    numbers = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    exact = numbers.double().norm().item()
    assert abs(torch.linalg.vector_norm(numbers).item() - exact) / exact <= norm_tolerance(elements)
    assert norm_tolerance(elements) <= 1e-3


def test_a_gradient_norm_may_differ_by_the_error_of_a_norm_on_a_cpu(plain, tmp_path):
    """Of a small model it may not: its tolerance is that of sums."""
    for name, numbers in (("small", 20_000), ("large", 4_000_000)):
        folder = tmp_path / name
        shutil.copytree(plain, folder)
        timeline = [json.loads(line) for line in (folder / "hfscale_timeline.jsonl").read_text().splitlines()]
        for event in timeline:
            if event["event"] == "setup":
                event["model"]["elements"] = {"float32": numbers}
                event["layout"]["dp_shard"] = 2
        records = [json.loads(line) for line in (folder / "scaling.jsonl").read_text().splitlines()]
        records = [{**one, "grad_norm": one["grad_norm"] * (1 + 1e-4)} for one in records]
        (folder / "hfscale_timeline.jsonl").write_text("".join(json.dumps(one) + "\n" for one in timeline))
        (folder / "scaling.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert compare_runs(plain, tmp_path / "small").first_difference.is_one
    found = compare_runs(plain, tmp_path / "large").first_difference
    assert not found.is_one, found
