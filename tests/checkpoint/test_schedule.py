"""A launch that resumes with another learning rate, or another schedule of it, says so."""

import logging

import pytest
import torch
from tiny import RandomTokens, StopAt, tiny_arguments, tiny_model
from transformers import Trainer, TrainerCallback

from hfscale import LRScalingCallback, SpotCheckpointCallback, latest_checkpoint

JUMPS, NO_EFFECT = "rate jumps", "argument has no effect"


class Rates(TrainerCallback):
    """The learning rate of each step."""

    def __init__(self):
        self.of_step = {}

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.of_step[state.global_step] = optimizer.param_groups[0]["lr"]


def train(folder, *callbacks, resumes=False, **options):
    rates = Rates()
    defaults = {"max_steps": 12, "save_strategy": "steps", "save_steps": 100, "lr_scheduler_type": "cosine"}
    arguments = tiny_arguments(folder, **(defaults | options))
    callbacks = [SpotCheckpointCallback(), rates, *callbacks]
    trainer = Trainer(tiny_model(), arguments, train_dataset=RandomTokens(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder) if resumes else None)
    return rates.of_step


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"max_steps": 20}, [JUMPS]),
        ({"warmup_steps": 8}, [JUMPS]),
        ({"lr_scheduler_type": "linear"}, [JUMPS]),
        ({"learning_rate": 1e-4}, [NO_EFFECT]),
    ],
    ids=["the same", "more steps", "warm-up", "kind", "rate"],
)
def test_another_schedule_is_named_at_the_resume(tmp_path, caplog, options, said):
    whole = train(tmp_path / "whole")
    train(tmp_path / "run", StopAt(4))
    caplog.clear()
    rates = train(tmp_path / "run", resumes=True, **options)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in (JUMPS, NO_EFFECT) if any(text in line for line in lines)] == said
    assert (rates[5] != pytest.approx(whole[5])) == (JUMPS in said)


def test_a_rate_that_has_an_effect_is_not_said_to_have_none(tmp_path, caplog):
    """Without the state of the optimizer and the schedule, Trainer makes both from the arguments."""
    train(tmp_path, StopAt(4), save_only_model=True)
    rates = Rates()
    options = {"max_steps": 8, "learning_rate": 1e-4, "lr_scheduler_type": "constant", "save_only_model": True}
    arguments = tiny_arguments(tmp_path, **options)
    trainer = Trainer(
        tiny_model(), arguments, train_dataset=RandomTokens(), callbacks=[SpotCheckpointCallback(), rates]
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert rates.of_step[4] == 1e-4
    assert NO_EFFECT not in caplog.text


def test_a_rate_that_is_scaled_with_the_batch_is_the_same_schedule(tmp_path, caplog):
    train(tmp_path, StopAt(4), LRScalingCallback(base_global_batch_size=1))
    caplog.clear()
    train(tmp_path, LRScalingCallback(base_global_batch_size=1), resumes=True)
    assert JUMPS not in caplog.text
    assert NO_EFFECT not in caplog.text


@pytest.mark.parametrize("kind", ["ChainedScheduler", "ReduceLROnPlateau", "LambdaLR"])
def test_a_schedule_of_the_user_is_left_alone(tmp_path, caplog, kind):
    """It may have no rates to begin with, or count how often its function is called."""
    calls = []

    def of(optimizer):
        schedulers = torch.optim.lr_scheduler
        if kind == "ChainedScheduler":
            return schedulers.ChainedScheduler([schedulers.ExponentialLR(optimizer, 0.9)])
        if kind == "ReduceLROnPlateau":
            return schedulers.ReduceLROnPlateau(optimizer)
        return schedulers.LambdaLR(optimizer, lambda step: calls.append(step) or 1.0)

    def run(*callbacks, resume=None):
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100, "eval_strategy": "steps"}
        arguments = tiny_arguments(tmp_path, **options, eval_steps=1, metric_for_best_model="eval_loss")
        data = {"train_dataset": RandomTokens(), "eval_dataset": RandomTokens(4)}
        callbacks = [SpotCheckpointCallback(), *callbacks]
        trainer = Trainer(model, arguments, optimizers=(optimizer, of(optimizer)), callbacks=callbacks, **data)
        trainer.train(resume_from_checkpoint=resume)

    run(StopAt(2))
    calls.clear()
    run(resume=latest_checkpoint(tmp_path))
    assert JUMPS not in caplog.text
    assert calls == ([0, 1, 2, 3, 4] if kind == "LambdaLR" else [])  # as in an uninterrupted run
