"""The first log after a resume is the mean of all steps since the log before, as in a run that was not interrupted."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_ranks import run_ranks
from tiny import RandomTokens, StopAt, tiny_arguments, tiny_model
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.preemption.stop import PreemptionStop
from hfscale.checkpoint.running_loss import NAME, keep_running_loss
from hfscale.core.versions import has_epoch_methods
from hfscale.errors import CheckpointError

pytestmark = pytest.mark.skipif(not has_epoch_methods(), reason="the sum is a local variable of Trainer")


class Stream(IterableDataset):
    """Rows in order, with no length."""

    def __init__(self, rows):
        self.rows = RandomTokens(rows)

    def __iter__(self):
        return iter([self.rows[number] for number in range(len(self.rows))])


def train(folder, *callbacks, resume=False, data=None, **arguments):
    """Train 8 steps of 4 sequences and log every third one; return the logs, and the mean loss of the launch."""
    batch = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    defaults = {"max_steps": 8, "logging_steps": 3, "per_device_train_batch_size": batch}
    args = tiny_arguments(folder, **(defaults | arguments))
    callbacks = [SpotCheckpointCallback(), *callbacks]
    trainer = Trainer(tiny_model(), args, train_dataset=data or RandomTokens(), callbacks=callbacks)
    checkpoint = latest_checkpoint(str(folder)) if resume else None
    mean = trainer.train(resume_from_checkpoint=checkpoint).training_loss
    return [(log["step"], log["loss"]) for log in trainer.state.log_history if "loss" in log], mean


def begin(folder):
    """Train as a whole, and to step 4."""
    whole, _ = train(folder / "whole", save_strategy="no")
    train(folder / "broken", StopAt(4))
    (folder / f"whole-{os.environ['RANK']}.json").write_text(json.dumps(whole))


def resume(folder):
    """Resume from step 4."""
    resumed, _ = train(folder / "broken", resume=True)
    (folder / f"resumed-{os.environ['RANK']}.json").write_text(json.dumps(resumed))


def test_a_log_covers_the_steps_before_the_resume(tmp_path):
    whole, _ = train(tmp_path / "whole", save_strategy="no")
    each, _ = train(tmp_path / "each", save_strategy="no", logging_steps=1)
    train(tmp_path / "broken", StopAt(4))
    resumed, mean = train(tmp_path / "broken", resume=True)
    assert resumed == whole
    # The record that ends a training is about the steps of its launch, in Trainer too
    rest = [loss for step, loss in each if step > 4]
    assert mean == pytest.approx(sum(rest) / len(rest), rel=1e-6)


def test_the_log_of_an_epoch_is_of_this_epoch(tmp_path):
    """Trainer logs it after the save of the last step, so that the sum in this checkpoint has been logged."""
    arguments = {"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3}
    arguments |= {"per_device_train_batch_size": 16, "save_strategy": "steps", "save_steps": 4}  # of 64 rows
    whole, _ = train(tmp_path / "whole", **arguments | {"save_strategy": "no"})
    train(tmp_path / "broken", StopAt(5), **arguments)
    shutil.rmtree(tmp_path / "broken" / "checkpoint-5")
    assert latest_checkpoint(tmp_path / "broken").endswith("checkpoint-4")
    resumed, _ = train(tmp_path / "broken", resume=True, **arguments)
    assert [log for log in resumed if log[0] > 4] == [log for log in whole if log[0] > 4]


@pytest.mark.parametrize(
    "arguments",
    [{"logging_steps": 3, "gradient_accumulation_steps": 2}, {"logging_strategy": "epoch"}],
    ids=["ends within a step", "logged by epoch"],
)
def test_a_log_after_a_pass_over_a_stream_counts_each_loss_once(tmp_path, monkeypatch, caplog, arguments):
    """A step that goes on with the next pass is read again as a whole; a pass that has been logged is not again."""
    monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)
    arguments = arguments | {"save_strategy": "epoch", "data": Stream(20)}
    whole, _ = train(tmp_path / "whole", **arguments)
    ends_within_step = "a pass over the stream ends within step 3: the checkpoint of step 2 is saved before its rest"
    assert caplog.text.count(ends_within_step) == ("logging_strategy" not in arguments)
    if "logging_strategy" in arguments:
        first, second = Stops(4), Stops()
        with pytest.raises(SystemExit):
            train(tmp_path / "broken", first, **arguments)
        assert latest_checkpoint(str(tmp_path / "broken")).endswith("checkpoint-5")
        train(tmp_path / "broken", second, resume=True, **arguments)
        assert first.logged + second.logged == whole
        return
    train(tmp_path / "broken", **arguments)
    for step in (8, 7, 6, 5, 4):
        shutil.rmtree(tmp_path / "broken" / f"checkpoint-{step}", ignore_errors=True)
    assert latest_checkpoint(str(tmp_path / "broken")).endswith("checkpoint-2")
    resumed, _ = train(tmp_path / "broken", resume=True, **arguments)
    assert [log for log in resumed if log[0] > 2] == [log for log in whole if log[0] > 2]


class Stops(TrainerCallback):
    """Makes the stop file at a step, and notes what is logged."""

    def __init__(self, step=None):
        self.step = step
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logged.append((state.global_step, logs["loss"]))

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            Path(args.output_dir, "hfscale_stop").touch()


@pytest.mark.parametrize("step", [5, 7])
def test_an_epoch_in_which_a_run_stops_is_logged_once(tmp_path, monkeypatch, step):
    """At its end: by the next launch, or by the one that stops after its last step."""
    monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)
    arguments = {"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3}
    arguments |= {"per_device_train_batch_size": 16, "save_strategy": "steps", "save_steps": 100}  # of 64 rows
    whole, _ = train(tmp_path / "whole", **arguments | {"save_strategy": "no"})
    first, second = Stops(step), Stops()
    with pytest.raises(SystemExit):
        train(tmp_path / "broken", first, **arguments)
    assert latest_checkpoint(str(tmp_path / "broken")).endswith(f"checkpoint-{step + 1}")
    train(tmp_path / "broken", second, resume=True, **arguments)
    assert first.logged + second.logged == whole


def test_each_rank_has_a_sum_and_another_number_of_ranks_their_mean(tmp_path):
    assert run_ranks(2, begin, tmp_path, log=tmp_path / "log") == [0, 0]
    files = sorted((tmp_path / "broken" / "checkpoint-4").glob(f"{NAME}_*.json"))
    assert len({json.loads(path.read_text())["loss"] for path in files}) == 2
    shutil.copytree(tmp_path / "broken", tmp_path / "alone")
    assert run_ranks(2, resume, tmp_path, log=tmp_path / "log") == [0, 0]
    whole = json.loads((tmp_path / "whole-0.json").read_text())
    assert json.loads((tmp_path / "resumed-0.json").read_text()) == whole
    alone, _ = train(tmp_path / "alone", resume=True)
    assert [step for step, _ in alone] == [step for step, _ in whole]
    assert [loss for _, loss in alone] == pytest.approx([loss for _, loss in whole], rel=1e-5)


@pytest.mark.parametrize("text", ['{"loss": "many", "last_log": 3}', "[]", "{"])
def test_a_broken_file_is_an_error_of_one_line(tmp_path, text):
    (tmp_path / f"{NAME}_0.json").write_text(text)
    adapter = SimpleNamespace(trainer=None, announced=SimpleNamespace(json={}), resumes_from=str(tmp_path))
    with pytest.raises(CheckpointError, match=f"{NAME}_0.json"):
        keep_running_loss(adapter)
