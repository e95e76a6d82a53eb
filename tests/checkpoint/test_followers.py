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
        (lambda file: file.unlink(), "does not hold the weights that follow"),
        (lambda file: file.write_bytes(b"x"), "cannot be read"),
    ],
)
def test_a_checkpoint_without_the_reference_is_refused(whole, tmp_path, change, message):
    folder, _ = whole
    checkpoint = folder / "checkpoint-2"
    change(checkpoint / FILE)
    with pytest.raises(CheckpointError, match=message):
        followers._read(checkpoint / FILE, dict(tiny_model().named_parameters()))


def averaged(folder, *, last=False, **arguments):
    """A Trainer with TRL's average, whose callback begins before or after that of hfscale."""
    average = callbacks.BEMACallback(update_freq=1, update_after=1)
    ours = ScalingCallback()
    order = [ours, average] if last else [average, ours]
    trainer = tiny_trainer(folder, *order, save_strategy="steps", save_steps=2, learning_rate=1e-2, **arguments)
    return trainer, average


@pytest.mark.parametrize("last", [False, True])
def test_a_resumed_run_has_the_average_of_an_uninterrupted_one(tmp_path, last):
    whole, expected = averaged(tmp_path / "whole", last=last, max_steps=6)
    whole.train()
    trainer, average = averaged(tmp_path / "resumed", last=last, max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name in ("theta0_params", "ema_params"):
        assert all(map(torch.equal, getattr(average, name), getattr(expected, name))), name
    for name, weight in average.running_model.named_parameters():
        assert torch.equal(weight, expected.running_model.get_parameter(name)), name
    assert not torch.equal(average.theta0_params[0], dict(trainer.model.named_parameters())[average.param_names[0]])


def of_trl(kind, attribute):
    """A callback of TRL, by its module, with an attribute."""
    moving = type(kind, (), {"__module__": "trl.trainer.callbacks"})()
    setattr(moving, attribute, object())
    return moving


def adapter_of(trainer, checkpoint=None):
    return SimpleNamespace(trainer=trainer, resumes_from=checkpoint, announced=SimpleNamespace(tensors={}))


def test_what_no_checkpoint_holds_is_named_at_the_start_and_refuses_a_resume(tmp_path, log):
    trainer = tiny_trainer(tmp_path / "out")
    trainer.callback_handler.callbacks.append(of_trl("PEFTAdapterEMACallback", "shadow_weights"))
    assert "PEFTAdapterEMACallback" in why_not_kept(trainer)
    followers.Followers(adapter_of(trainer))
    assert "cannot be resumed" in log.text
    with pytest.raises(UsageError, match="checkpoint-2: PEFTAdapterEMACallback moves weights"):
        followers.Followers(adapter_of(trainer, str(tmp_path / "checkpoint-2")))


def test_a_run_that_is_to_be_restarted_is_refused_before_its_first_step(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path / "out")
    trainer.callback_handler.callbacks.append(of_trl("PEFTAdapterEMACallback", "shadow_weights"))
    monkeypatch.setattr(followers, "connect", lambda: object())
    with pytest.raises(UsageError, match="hfscale run cannot restart this run"):
        followers.Followers(adapter_of(trainer))


def test_an_average_of_weights_that_ranks_share_is_not_kept(tmp_path, monkeypatch):
    trainer, _ = averaged(tmp_path / "out")
    assert why_not_kept(trainer) is None
    facts = SimpleNamespace(is_replicated=False)
    monkeypatch.setattr(followers.Strategy, "of", lambda trainer: SimpleNamespace(facts=facts))
    assert "BEMACallback moves weights" in why_not_kept(trainer)
