"""A resumed run has the evaluations, the best model and the early stop of an uninterrupted one."""

import math
import os
import signal

import pytest
import torch
from tiny import StopAt, tiny_trainer
from transformers import EarlyStoppingCallback, TrainerCallback

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


@pytest.mark.parametrize(("number", "notice_s"), [(signal.SIGINT, None), (signal.SIGTERM, 600.0)])
def test_an_evaluation_that_fits_into_the_notice_is_finished(tmp_path, number, notice_s):
    whole, _ = run(tmp_path / "whole")
    first, spot = run(tmp_path / "run", SignalAt("on_prediction_step", 4, number), notice_s=notice_s)
    assert spot.preempted is not None
    assert 4 in results(first)["eval_loss"]
    again, _ = run(tmp_path / "run")
    check_equal(again, whole)


def test_the_evaluation_of_an_epoch_is_made_if_its_last_step_was_saved_before(tmp_path):
    arguments = EPOCHS | {"rows": 16}
    whole, _ = run(tmp_path / "whole", **arguments)
    first, _ = run(tmp_path / "run", SignalAt("on_step_begin", 3), **arguments)
    assert first.state.global_step == 4
    assert results(first)["eval_loss"] == {}
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


def test_a_run_that_has_stopped_early_takes_no_further_step(tmp_path):
    first, _ = run(tmp_path, Worse(), EarlyStoppingCallback(2))
    assert first.state.global_step == 6
    again, _ = run(tmp_path, Worse(), EarlyStoppingCallback(2))
    check_equal(again, first)
