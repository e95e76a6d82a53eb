"""Runs with data loader workers and dropout resume bit-equal, over epochs and evaluations."""

import math
import os
import signal

import pytest
from tiny import RandomTokens, StopAt, logged, tiny_arguments, tiny_model
from transformers import Trainer, TrainerCallback

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.preemption.stop import PreemptionStop

STEPS, EPOCH = 10, 4
SETS = {"one": RandomTokens(8), "two": RandomTokens(4)}


def train(folder, *callbacks, eval_dataset=SETS, resume=None):
    args = tiny_arguments(
        folder,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1000,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )
    trainer = Trainer(
        model=tiny_model(attention_dropout=0.1),
        args=args,
        train_dataset=RandomTokens(4 * EPOCH),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer, "loss")


class StopInEvaluation(TrainerCallback):
    """Asks for a stop in the first batch of the first evaluation."""

    def __init__(self):
        self._is_asked = False

    def on_prediction_step(self, *args, **kwargs):
        if not self._is_asked:
            self._is_asked = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The losses of a run without hfscale."""
    return train(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "stop_at",
    [pytest.param(1, marks=pytest.mark.long), pytest.param(EPOCH, marks=pytest.mark.long), EPOCH + 3],
    ids=["first epoch", "its end", "second epoch"],
)
def test_losses_are_those_of_an_uninterrupted_run(plain, tmp_path, stop_at):
    train(tmp_path, SpotCheckpointCallback(), StopAt(stop_at))
    assert train(tmp_path, SpotCheckpointCallback(), resume=str(tmp_path / f"checkpoint-{stop_at}")) == plain


@pytest.mark.parametrize("is_cut", [False, True], ids=["finished", "cut short"])
def test_losses_are_those_of_an_uninterrupted_run_after_a_stop_in_an_evaluation(tmp_path, monkeypatch, is_cut):
    """The launch that makes it up draws the seed of its loader, which the cut one has drawn and put back."""
    if is_cut:
        monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)
        monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)
    plain = train(tmp_path / "plain", eval_dataset=SETS["one"])
    spot = SpotCheckpointCallback(on_preemption="return")
    train(tmp_path, spot, StopInEvaluation(), eval_dataset=SETS["one"])
    assert spot.preempted is not None
    checkpoint = tmp_path / "checkpoint-2"
    assert ('"missing"' in (checkpoint / "trainer_state.json").read_text()) == is_cut
    assert train(tmp_path, SpotCheckpointCallback(), eval_dataset=SETS["one"], resume=str(checkpoint)) == plain
