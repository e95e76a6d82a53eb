"""The best checkpoint is kept and loaded after the run has moved, and where only a remote copy is left."""

import shutil

import pytest
import torch
from tiny import StopAt, tiny_trainer
from transformers import TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint

ARGUMENTS = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
}


class SecondIsBest(TrainerCallback):
    """Lets the evaluation of step 2 be the best one."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_loss"] = 1.0 if state.global_step == 2 else 2.0


def train(folder, *callbacks, remote=None, limit=1):
    spot = SpotCheckpointCallback(remote=remote)
    trainer = tiny_trainer(folder, spot, SecondIsBest(), *callbacks, **ARGUMENTS, save_total_limit=limit)
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder, remote))
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def are_equal(one, other):
    return all(torch.equal(one[name], value) for name, value in other.items())


def names(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*") if "superseded" not in path.name)


@pytest.mark.parametrize("limit", [1, 2, None])
def test_after_the_folder_was_renamed(tmp_path, limit):
    whole = train(tmp_path / "whole", limit=limit)
    train(tmp_path / "run", StopAt(6), limit=limit)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert are_equal(train(tmp_path / "moved", limit=limit), whole)
    assert names(tmp_path / "moved") == names(tmp_path / "whole")


def test_one_that_is_gone_is_said(tmp_path, caplog):
    train(tmp_path, StopAt(6), limit=None)
    shutil.rmtree(tmp_path / "checkpoint-2")
    train(tmp_path, limit=None)
    assert sum("the best checkpoint, of step 2, is gone" in record.message for record in caplog.records) == 1


def test_by_a_relative_path_from_another_folder(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole")
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    train("../run", StopAt(6))
    monkeypatch.chdir(tmp_path)
    assert are_equal(train("run"), whole)


@pytest.mark.parametrize("limit", [1, None])
def test_on_an_empty_disk_with_a_remote_copy(tmp_path, limit):
    whole = train(tmp_path / "whole", limit=limit)
    remote = f"file://{tmp_path}/remote"
    train(tmp_path / "run", StopAt(6), remote=remote, limit=limit)
    shutil.rmtree(tmp_path / "run")
    assert are_equal(train(tmp_path / "new", remote=remote, limit=limit), whole)
    assert "checkpoint-2" in names(tmp_path / "remote")
