"""Reference models that follow the one that is trained: a resume is exact, or refused in one line."""

from types import SimpleNamespace

import pytest
import torch
from tiny import logged, tiny_model, tiny_trainer

from hfscale import ScalingCallback
from hfscale.checkpoint import followers
from hfscale.checkpoint.followers import FILE, why_not_kept
from hfscale.errors import CheckpointError, UsageError

callbacks = pytest.importorskip("trl.trainer.callbacks")


def trainer_of(folder, **arguments):
    """A Trainer that mixes a half of its weights into a reference model after each step."""
    reference = tiny_model()
    sync = callbacks.SyncRefModelCallback(ref_model=reference, accelerator=None)
    trainer = tiny_trainer(
        folder, ScalingCallback(), sync, save_strategy="steps", save_steps=2, learning_rate=1e-2, **arguments
    )
    trainer.args.ref_model_sync_steps = 1
    trainer.args.ref_model_mixup_alpha = 0.5
    return trainer, reference


@pytest.fixture
def whole(tmp_path):
    """The folder of a complete run of four steps, and its reference model."""
    trainer, reference = trainer_of(tmp_path / "whole", max_steps=4)
    trainer.train()
    return tmp_path / "whole", reference


def test_a_resumed_run_has_the_reference_of_an_uninterrupted_one(whole, tmp_path):
    folder, expected = whole
    trainer, reference = trainer_of(tmp_path / "resumed", max_steps=4)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    for name, weight in reference.named_parameters():
        assert torch.equal(weight, expected.get_parameter(name)), name
    assert not torch.equal(next(reference.parameters()), next(tiny_model().parameters()))
    assert logged(trainer, "loss")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "does not hold the reference model"),
        (lambda file: file.write_bytes(b"x"), "cannot be read"),
    ],
)
def test_a_checkpoint_without_the_reference_is_refused(whole, tmp_path, change, message):
    folder, _ = whole
    checkpoint = folder / "checkpoint-2"
    change(checkpoint / FILE)
    with pytest.raises(CheckpointError, match=message):
        followers._read(checkpoint / FILE, [tiny_model()])


@pytest.mark.parametrize("kind", ["BEMACallback", "PEFTAdapterEMACallback"])
def test_what_no_checkpoint_holds_is_named_at_the_start_and_refuses_a_resume(tmp_path, log, kind):
    names = {"BEMACallback": "running_model", "PEFTAdapterEMACallback": "shadow_weights"}
    moving = type(kind, (), {"__module__": "trl.trainer.callbacks"})()
    setattr(moving, names[kind], object())
    trainer = tiny_trainer(tmp_path / "out")
    trainer.callback_handler.callbacks.append(moving)
    assert kind in why_not_kept(trainer)
    adapter = SimpleNamespace(trainer=trainer, resumes_from=None)
    followers.keep_followers(adapter)
    assert "cannot be resumed" in log.text
    adapter.resumes_from = str(tmp_path / "checkpoint-2")
    with pytest.raises(UsageError, match=f"checkpoint-2: {kind} moves weights"):
        followers.keep_followers(adapter)


def test_a_reference_of_which_ranks_have_parts_is_not_kept(tmp_path, monkeypatch):
    trainer, _ = trainer_of(tmp_path / "out")
    assert why_not_kept(trainer) is None
    facts = SimpleNamespace(is_replicated=False)
    monkeypatch.setattr(followers.Strategy, "of", lambda trainer: SimpleNamespace(facts=facts))
    assert "the reference model follows" in why_not_kept(trainer)
