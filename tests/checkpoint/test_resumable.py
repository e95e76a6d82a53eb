"""What a run can resume from is what is offered to it, and what it cannot is said."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from peft import LoraConfig
from tiny import StopAt, tiny_model, tiny_trainer
from torch.utils.data import BatchSampler, WeightedRandomSampler

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.data_order.owners import DataState
from hfscale.checkpoint.store import inspect
from hfscale.errors import CheckpointError, UsageError

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def train(folder, *callbacks, **arguments):
    trainer = tiny_trainer(folder, SpotCheckpointCallback(), *callbacks, **(SAVING | arguments))
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder))
    return trainer


def test_the_model_alone_is_not_offered(tmp_path, caplog):
    train(tmp_path, save_only_model=True)
    assert "save_only_model is True: the checkpoints have no optimizer" in caplog.text
    assert latest_checkpoint(tmp_path) is None
    (info, *_) = inspect(tmp_path)
    assert info.state == "incomplete"
    assert "save_only_model" in info.reason
    with pytest.raises(CheckpointError, match="none of them is verified"):
        train(tmp_path)


def test_a_resume_from_the_model_alone_by_hand_says_what_begins_anew(tmp_path, caplog):
    train(tmp_path, StopAt(2), save_only_model=True)
    trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), **SAVING)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "training continues at step 2 with a new optimizer" in caplog.text


def test_the_checkpoint_of_the_hub_is_found(tmp_path):
    train(tmp_path, StopAt(2))
    (tmp_path / "checkpoint-2").rename(tmp_path / "last-checkpoint")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    (tmp_path / "last-checkpoint").mkdir()  # of an upload that has just begun
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


def test_adapters_of_the_model_itself_are_refused_before_a_step(tmp_path):
    model = tiny_model()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), **SAVING)
    trainer.model = trainer.model_wrapped = model
    with pytest.raises(UsageError, match=r"has the adapters of model\.add_adapter"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_completed_run_is_not_trained_again_without_a_word(tmp_path, caplog):
    train(tmp_path, save_steps=4)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    checkpoint.rename(tmp_path / "elsewhere")
    train(tmp_path, save_steps=4)
    assert "this run has completed at step 4, and is trained again from step 0" in caplog.text


def test_a_generator_has_the_same_place_on_any_number_of_processes():
    def paths(wrap):
        sampler = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator())
        return set(DataState(wrap(BatchSampler(sampler, 2, drop_last=False))).generators())

    assert paths(lambda batches: batches) == paths(lambda batches: BatchSamplerShard(batches, 2, 0))
