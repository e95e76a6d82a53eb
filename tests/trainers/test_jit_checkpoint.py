"""What transformers tests of `enable_jit_checkpoint` and of lists of callbacks, with our callback in the Trainer."""

import os
import signal

import pytest
from tiny import logged, tiny_trainer
from transformers import TrainerCallback

from hfscale import ScalingCallback, SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.preemption.stop import PreemptionStop
from hfscale.checkpoint.store import list_checkpoints, read_status, verify
from hfscale.core.versions import is_at_least

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.skipif(not is_at_least("transformers", "5.0"), reason="the flag came in transformers 5.0"),
]
EPOCH = 16  # steps: 64 rows by 4


class Terminate(TrainerCallback):
    """Sends SIGTERM to this process at an event of a step; several times if asked."""

    def __init__(self, event, step, times=1):
        self.event, self.step, self.times = event, step, times

    def __getattribute__(self, name):
        if not name.startswith("on_") or name != object.__getattribute__(self, "event"):
            return object.__getattribute__(self, name)
        return self._terminate

    def _terminate(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGTERM)
                self.step = -1


@pytest.fixture(autouse=True)
def _vote_at_each_step(monkeypatch):
    """These steps take milliseconds, and a run votes every few seconds."""
    monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = tiny_trainer(tmp_path_factory.mktemp("whole"), max_steps=EPOCH + 4)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("event", "step", "stops_at"),
    [
        ("on_step_begin", 2, 3),
        ("on_pre_optimizer_step", 2, 3),
        ("on_optimizer_step", 2, 3),
        ("on_step_end", 3, 3),
        ("on_epoch_end", EPOCH, EPOCH + 1),
        ("on_epoch_begin", EPOCH, EPOCH + 1),
    ],
)
@pytest.mark.parametrize("callback", [ScalingCallback, SpotCheckpointCallback])
def test_a_signal_saves_the_step_that_it_stops_at_and_the_run_resumes(
    tmp_path, whole, event, step, stops_at, callback
):
    """transformers waits three seconds and saves at the next event; here the step is finished and saved at once."""
    before = signal.getsignal(signal.SIGTERM)
    arguments = {"enable_jit_checkpoint": True, "save_strategy": "epoch", "max_steps": EPOCH + 4}
    trainer = tiny_trainer(tmp_path, callback(), Terminate(event, step), **arguments)
    with pytest.raises(SystemExit) as ending:
        trainer.train()
    assert ending.value.code == 75
    assert trainer.state.global_step in (step, stops_at)
    assert signal.getsignal(signal.SIGTERM) is before
    newest = list_checkpoints(tmp_path)[-1]
    assert newest.name == f"checkpoint-{trainer.state.global_step}"
    verify(newest)
    assert not list(tmp_path.rglob("checkpoint-is-incomplete.txt"))
    assert read_status(tmp_path)["status"] == "preempted"
    resumed = tiny_trainer(tmp_path, callback(), **arguments)
    resumed.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_several_signals_are_one_stop(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        SpotCheckpointCallback(),
        Terminate("on_step_begin", 1, times=3),
        enable_jit_checkpoint=True,
        save_strategy="epoch",
    )
    with pytest.raises(SystemExit):
        trainer.train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_training_without_a_signal_is_the_one_without_the_flag(tmp_path, whole):
    trainer = tiny_trainer(tmp_path, ScalingCallback(), enable_jit_checkpoint=True, max_steps=EPOCH + 4)
    trainer.train()
    assert logged(trainer, "loss") == logged(whole, "loss")


def test_the_list_of_callbacks_is_that_of_trainer_and_ours(tmp_path):
    """transformers compares the list after adding, popping and removing callbacks by class and by instance."""

    def names(trainer):
        return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]

    plain = names(tiny_trainer(tmp_path))
    scaling = ScalingCallback()
    trainer = tiny_trainer(tmp_path, scaling)
    expected = [*plain[:-1], "ScalingCallback", plain[-1]]
    assert names(trainer) == expected
    assert trainer.pop_callback(ScalingCallback) is scaling
    assert names(trainer) == plain
    trainer.add_callback(scaling)
    assert names(trainer) == [*plain, "ScalingCallback"]
    trainer.train()
    assert names(trainer)[: len(plain) + 1] == [*plain, "ScalingCallback"]
    trainer.remove_callback(scaling)
    before = names(trainer)
    trainer.train()
    assert "ScalingCallback" not in names(trainer)
    assert names(trainer) == [name for name in before if name != "ScalingCallback"]
