"""A launch that resumes with another learning rate, or another schedule of it, says so."""

import logging

import pytest
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


def test_a_rate_that_is_scaled_with_the_batch_is_the_same_schedule(tmp_path, caplog):
    train(tmp_path, StopAt(4), LRScalingCallback(base_global_batch_size=1))
    caplog.clear()
    train(tmp_path, LRScalingCallback(base_global_batch_size=1), resumes=True)
    assert JUMPS not in caplog.text
    assert NO_EFFECT not in caplog.text
