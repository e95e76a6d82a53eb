"""A resumed run has the evaluations, the best model and the early stop of an uninterrupted one."""

import math
import os
import signal

import pytest
import torch
from tiny import StopAt, tiny_trainer
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.preemption.stop import PreemptionStop

ARGUMENTS = {
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "learning_rate": 0.05,
    "per_device_eval_batch_size": 1,
}
EPOCHS = ARGUMENTS | {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1}


@pytest.fixture(autouse=True)
def votes_at_each_step(monkeypatch):
    monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)


class SignalAt(TrainerCallback):
    """Sends this process a signal at an event of a step."""

    def __init__(self, event, step, number=signal.SIGTERM):
        self._step, self._number = step, number
        setattr(self, event, self._send)

    def _send(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._step = -1
            os.kill(os.getpid(), self._number)


def run(folder, *callbacks, rows=None, notice_s=30.0, **arguments):
    spot = SpotCheckpointCallback(on_preemption="return", notice_s=notice_s)
    trainer = tiny_trainer(folder, spot, *callbacks, **(ARGUMENTS | arguments))
    if rows is not None:
        trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(rows))
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder))
    return trainer, spot


def results(trainer):
    """What an evaluation decides: its metrics, the best step, the rates, the final step and model."""
    history = trainer.state.log_history
    return {
        "eval_loss": {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry},
        "rates": {entry["step"]: entry["learning_rate"] for entry in history if "learning_rate" in entry},
        "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "best": (trainer.state.best_global_step, trainer.state.best_metric),
        "end": trainer.state.global_step,
        "model": {name: value.clone() for name, value in trainer.model.state_dict().items()},
    }


def check_equal(again, whole):
    again, whole = results(again), results(whole)
    models = again.pop("model"), whole.pop("model")
    assert again == whole
    assert all(torch.equal(models[0][name], value) for name, value in models[1].items())


@pytest.mark.parametrize(
    "program",
    [{}, {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}],
    ids=["best model", "plateau"],
)
def test_an_evaluation_that_was_cut_short_is_made_by_the_next_launch(tmp_path, monkeypatch, program):
    whole, _ = run(tmp_path / "whole", **program)
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)
    first, spot = run(tmp_path / "run", SignalAt("on_prediction_step", 4), **program)
    assert spot.preempted is not None
    assert first.state.global_step == 4
    assert 4 not in results(first)["eval_loss"]
    assert latest_checkpoint(tmp_path / "run").endswith("checkpoint-4")
    again, _ = run(tmp_path / "run", **program)
    check_equal(again, whole)


class DrawingCollator:
    """Masks some of the labels at random, more with each batch that it has made."""

    def __init__(self):
        self.batches = 0

    def __call__(self, rows):
        self.batches += 1
        batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        is_masked = torch.rand(batch["labels"].shape) < min(0.1 + 0.01 * self.batches, 0.5)
        batch["labels"] = batch["labels"].masked_fill(is_masked, -100)
        return batch


class CountingTrainer(Trainer):
    """Scales the loss by the number of losses that it has computed."""

    losses = 0

    def compute_loss(self, *args, **kwargs):
        self.losses += 1
        found = super().compute_loss(*args, **kwargs)
        scale = 1 + 0.01 * self.losses
        return (found[0] * scale, *found[1:]) if isinstance(found, tuple) else found * scale


@pytest.mark.parametrize(
    ("cadence", "event", "step"),
    [
        (ARGUMENTS, "on_prediction_step", 4),
        (ARGUMENTS, "on_step_begin", 5),
        (EPOCHS, "on_prediction_step", 5),
        (EPOCHS, "on_step_begin", 4),
    ],
)
def test_an_evaluation_that_was_cut_short_moves_nothing(tmp_path, monkeypatch, cadence, event, step):
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)

    def train(folder, *callbacks):
        spot = SpotCheckpointCallback(on_preemption="return")
        trainer = tiny_trainer(folder, spot, *callbacks, **cadence)
        trainer.__class__ = CountingTrainer
        trainer.data_collator = DrawingCollator()
        trainer.train_dataset = torch.utils.data.Subset(trainer.train_dataset, range(20))
        trainer.train(resume_from_checkpoint=latest_checkpoint(folder))
        return trainer

    whole = train(tmp_path / "whole")
    first = train(tmp_path / "run", SignalAt(event, step))
    assert first.state.global_step < whole.state.global_step
    check_equal(train(tmp_path / "run"), whole)


def test_an_evaluation_that_was_cut_short_leaves_nothing_in_the_last_log(tmp_path, monkeypatch):
    """As TRL's Trainers do, this one logs what it has gathered in an evaluation for as long as the model evaluates."""
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)
    trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(on_preemption="return"), **ARGUMENTS)
    trainer.add_callback(SignalAt("on_prediction_step", 4))
    log, names = trainer.log, []

    def log_gathered(logs, *args):
        names.extend(logs if trainer.model.training else (*logs, "eval_gathered"))
        log(logs, *args)

    trainer.log = log_gathered
    trainer.train()
    assert trainer.state.global_step == 4
    assert names.count("eval_gathered") == names.count("eval_loss") == 1


@pytest.mark.parametrize(("numbers", "is_put_back"), [(8, True), (2**20 + 1, False)], ids=["small", "large"])
def test_a_buffer_that_an_evaluation_changes_is_put_back_or_named(tmp_path, monkeypatch, log, numbers, is_put_back):
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)
    trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(on_preemption="return"), **ARGUMENTS)
    trainer.add_callback(SignalAt("on_prediction_step", 2))
    model = trainer.model
    model.register_buffer("passes", torch.zeros(numbers), persistent=False)

    def count(*_):
        model.passes.add_(1)

    model.register_forward_hook(count)
    trainer.train()
    assert trainer.state.global_step == 2
    assert (float(model.passes[0]) == 2) == is_put_back
    assert ("has changed the buffer passes" in log.text) != is_put_back


def test_what_cannot_be_put_back_is_named_and_the_run_is_saved(tmp_path, monkeypatch, log):
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)

    def fail(states):
        raise TypeError("no state")

    monkeypatch.setattr("hfscale.checkpoint.evaluations.set_rng_state", fail)
    run(tmp_path, SignalAt("on_prediction_step", 4))
    assert "could not be put back (TypeError: no state)" in log.text
    assert latest_checkpoint(tmp_path).endswith("checkpoint-4")


def test_an_evaluation_that_is_cut_short_twice_is_made_before_the_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)
    whole, _ = run(tmp_path / "whole")
    run(tmp_path / "run", SignalAt("on_prediction_step", 4))
    second, spot = run(tmp_path / "run", SignalAt("on_prediction_step", 4))
    assert spot.preempted is not None
    assert second.state.global_step == 4
    again, _ = run(tmp_path / "run")
    check_equal(again, whole)


@pytest.mark.parametrize(
    ("arguments", "event", "step", "left"),
    [
        (EPOCHS, "on_step_begin", 3, {4}),  # the epoch's own checkpoint
        (ARGUMENTS | {"save_steps": 6}, "on_prediction_step", 4, set()),  # not of Trainer's cadence
    ],
)
def test_only_the_checkpoint_of_a_stop_is_temporary(tmp_path, monkeypatch, arguments, event, step, left):
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)
    arguments = arguments | {"load_best_model_at_end": False, "rows": 16}
    run(tmp_path, SignalAt(event, step), **arguments)
    run(tmp_path, **arguments)
    assert {4} & {int(path.name[11:]) for path in tmp_path.glob("checkpoint-*")} == left


@pytest.mark.parametrize(("number", "notice_s"), [(signal.SIGINT, None), (signal.SIGTERM, 600.0)])
def test_an_evaluation_that_fits_into_the_notice_is_finished(tmp_path, number, notice_s):
    whole, _ = run(tmp_path / "whole")
    first, spot = run(tmp_path / "run", SignalAt("on_prediction_step", 4, number), notice_s=notice_s)
    assert spot.preempted is not None
    assert 4 in results(first)["eval_loss"]
    again, _ = run(tmp_path / "run")
    check_equal(again, whole)


class BegunSteps(TrainerCallback):
    """Counts the steps that have begun."""

    begun = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun += 1


def test_a_stop_in_the_evaluation_that_is_made_up_begins_no_step(tmp_path):
    """Trainer began the next step, left it after a micro-batch, and the next log had the loss of that one twice."""
    arguments = EPOCHS | {"rows": 16, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    arguments |= {"save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": False, "logging_steps": 1}
    arguments |= {"per_device_eval_batch_size": 8}  # one batch, so that the signal does not cut the evaluation
    whole, _ = run(tmp_path / "whole", **arguments)
    run(tmp_path / "run", SignalAt("on_step_begin", 3), **arguments)
    stop = SignalAt("on_prediction_step", 4, signal.SIGINT)
    steps = BegunSteps()
    second, spot = run(tmp_path / "run", stop, steps, **arguments)
    assert spot.preempted is not None
    assert (second.state.global_step, steps.begun) == (4, 0)
    again, _ = run(tmp_path / "run", **arguments)
    check_equal(again, whole)


@pytest.mark.parametrize("stops_early", [False, True])
def test_what_a_program_draws_after_a_finished_run_is_what_it_drew_before(tmp_path, stops_early):
    """As for the data of a second stage, which the script begins with again after that one was interrupted."""
    arguments = EPOCHS | {"rows": 16}
    stop = [EarlyStoppingCallback(1, early_stopping_threshold=100.0)] if stops_early else []
    first, _ = run(tmp_path, *stop, **arguments)
    assert (first.state.global_step < first.state.max_steps) == stops_early
    drawn = torch.rand(4)
    again, _ = run(tmp_path, *stop, **arguments)
    assert again.state.global_step == first.state.global_step
    assert torch.equal(torch.rand(4), drawn)


class RemovesAtSave(TrainerCallback):
    """Removes a file at each save; a save that replaces a checkpoint takes it away for a moment, too."""

    def __init__(self, path):
        self.path = path

    def on_save(self, args, state, control, **kwargs):
        self.path.unlink(missing_ok=True)


def test_the_evaluation_that_is_made_up_may_save_the_checkpoint_that_the_run_resumes_from(tmp_path):
    """Whether its files are still there is looked at before: they come and go while it is replaced."""
    arguments = EPOCHS | {"rows": 16, "save_strategy": "best"}
    first, _ = run(tmp_path, SignalAt("on_step_begin", 3), **arguments)
    assert first.state.global_step == 4
    again, _ = run(tmp_path, RemovesAtSave(tmp_path / "checkpoint-4" / "rng_state.pth"), **arguments)
    assert again.state.global_step == 12


def test_the_evaluation_of_an_epoch_is_made_if_its_last_step_was_saved_before(tmp_path):
    arguments = EPOCHS | {"rows": 16}
    whole, _ = run(tmp_path / "whole", **arguments)
    first, _ = run(tmp_path / "run", SignalAt("on_step_begin", 3), **arguments)
    assert first.state.global_step == 4
    assert results(first)["eval_loss"] == {}
    again, _ = run(tmp_path / "run", **arguments)
    check_equal(again, whole)


@pytest.mark.parametrize("delay", [1, 2])
def test_an_evaluation_before_the_delay_is_not_missing(tmp_path, delay):
    """`eval_delay` counts epochs here: with 2, the checkpoint of the first one has no evaluation to come."""
    arguments = EPOCHS | {"rows": 16, "eval_delay": delay, "load_best_model_at_end": False}
    whole, _ = run(tmp_path / "whole", **arguments)
    assert list(results(whole)["eval_loss"]) == [4 * epoch for epoch in range(delay, 4)]
    run(tmp_path / "run", StopAt(4), **arguments)
    again, _ = run(tmp_path / "run", **arguments)
    check_equal(again, whole)


class CrashInEvaluation(TrainerCallback):
    """Ends the training in the evaluation of a step."""

    def __init__(self, step):
        self._step = step

    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            raise RuntimeError("the machine is gone")


def test_the_last_evaluation_is_made_after_a_crash_in_it(tmp_path):
    arguments = EPOCHS | {"rows": 16, "save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": False}
    whole, _ = run(tmp_path / "whole", **arguments)
    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path / "run", CrashInEvaluation(12), **arguments)
    again, _ = run(tmp_path / "run", **arguments)
    check_equal(again, whole)
    assert 12 in results(again)["eval_loss"]


class Worse(TrainerCallback):
    """Lets each evaluation after the first be worse."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_loss"] = 1.0 if state.global_step == 2 else 1.0 + state.global_step


@pytest.mark.parametrize("stop", [4, 6])
def test_early_stopping_counts_on_after_a_resume(tmp_path, stop):
    whole, _ = run(tmp_path / "whole", Worse(), EarlyStoppingCallback(3))
    assert whole.state.global_step == 8
    run(tmp_path / "run", Worse(), EarlyStoppingCallback(3), StopAt(stop))
    again, _ = run(tmp_path / "run", Worse(), EarlyStoppingCallback(3))
    check_equal(again, whole)


def test_a_resumed_run_is_not_evaluated_first(tmp_path):
    """`eval_on_start` counted for the early stop again, so that the run ended before its time."""
    at_start = {"eval_on_start": True}
    whole, _ = run(tmp_path / "whole", Worse(), EarlyStoppingCallback(3), **at_start)
    run(tmp_path / "run", Worse(), EarlyStoppingCallback(3), StopAt(4), **at_start)
    again, _ = run(tmp_path / "run", Worse(), EarlyStoppingCallback(3), **at_start)
    check_equal(again, whole)
    assert again.args.eval_on_start


def test_a_run_that_has_stopped_early_takes_no_further_step(tmp_path):
    first, _ = run(tmp_path, Worse(), EarlyStoppingCallback(2))
    assert first.state.global_step == 6
    again, _ = run(tmp_path, Worse(), EarlyStoppingCallback(2))
    check_equal(again, first)


class Stream(torch.utils.data.IterableDataset):
    """A stream that has the rows of a dataset, in order."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def test_an_evaluation_after_the_last_step_of_a_stream_moves_the_random_numbers_as_it_did(tmp_path):
    arguments = EPOCHS | {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": False}

    def train(folder, *callbacks):
        spot = SpotCheckpointCallback(on_preemption="return")
        trainer = tiny_trainer(folder, spot, *callbacks, **arguments)
        rows = torch.utils.data.Subset(trainer.train_dataset, range(12))
        trainer.train_dataset = Stream(rows)
        torch.manual_seed(0)
        trainer.train(resume_from_checkpoint=latest_checkpoint(folder))
        return trainer

    train(tmp_path / "whole")
    drawn = torch.rand(4)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        train(tmp_path / "run", CrashInEvaluation(6))
    assert train(tmp_path / "run").state.global_step == 6
    assert torch.equal(torch.rand(4), drawn)
