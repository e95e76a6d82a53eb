"""One callback in several Trainers and trainings, its copies, and what is left when it has been removed."""

import copy
import pickle

import pytest
from test_integrations import LASTING, changes
from tiny import RandomTokens, logged, make_callback, tiny_arguments, tiny_model, tiny_tokenizer, tiny_trainer
from transformers import Trainer

import hfscale
from hfscale import LRScalingCallback, ScalingCallback, SpotCheckpointCallback
from hfscale.checkpoint.preemption import NOTICES
from hfscale.checkpoint.store import list_checkpoints, read_status

SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
NAMES = sorted(name for name in hfscale.__all__ if name.endswith("Callback"))


def pickled(callback):
    return pickle.loads(pickle.dumps(callback))  # noqa: S301


def steps(folder):
    return [int(path.name.removeprefix("checkpoint-")) for path in list_checkpoints(folder)]


def test_one_callback_in_two_trainers_keeps_their_limits_apart(tmp_path):
    """The second Trainer has no limit; both are made before either trains, and the first trains again afterwards."""
    callback = ScalingCallback()
    limited = tiny_trainer(tmp_path / "limited", callback, save_total_limit=1, **SAVING)
    unlimited = tiny_trainer(tmp_path / "unlimited", callback, **SAVING)
    limited.train()
    first = callback.spot_checkpoint.last_committed
    unlimited.train()
    limited.train()
    assert (steps(tmp_path / "limited"), steps(tmp_path / "unlimited")) == ([3], [1, 2, 3])
    assert first == callback.spot_checkpoint.last_committed == "checkpoint-3"
    assert logged(limited, "scaling/tokens_seen") == logged(unlimited, "scaling/tokens_seen")
    assert limited.args.save_total_limit == 1


def test_nothing_of_a_run_that_saved_is_in_one_that_does_not(tmp_path):
    callback = SpotCheckpointCallback()
    tiny_trainer(tmp_path / "saving", callback, **SAVING).train()
    trainer = tiny_trainer(tmp_path / "other", callback, max_steps=3)
    trainer.train()
    assert (callback.last_committed, callback.preemption.last_write_s) == (None, None)
    assert logged(trainer, "checkpoint/bytes") == []
    assert read_status(tmp_path / "other")["checkpoint"] is None


@pytest.mark.parametrize("name", NAMES)
def test_copies_before_and_after_a_training_train_alike(tmp_path, name):
    callback = make_callback(name)
    losses = []
    for number in range(2):
        for copied in (pickled(callback), copy.deepcopy(callback)):
            trainer = tiny_trainer(tmp_path / f"{number}-{len(losses)}", copied, tokenizer=tiny_tokenizer(), **SAVING)
            trainer.evaluate()
            trainer.train()
            losses.append(logged(trainer, "loss"))
        if number == 0:
            tiny_trainer(tmp_path / "original", callback, tokenizer=tiny_tokenizer(), **SAVING).train()
    assert losses == [losses[0]] * 4


def test_a_copy_keeps_the_options_and_the_notices_of_the_process():
    callback = ScalingCallback(
        lr_scaling=LRScalingCallback(base_global_batch_size=8),
        spot_checkpoint=SpotCheckpointCallback(every_steps=7, notice_s=5, on_preemption="return"),
    )
    callback.spot_checkpoint.cadence.every_minutes = 3
    copied = pickled(callback)
    spot = copied.spot_checkpoint
    assert (spot.cadence.every_steps, spot.cadence.every_minutes, spot.options.on_preemption) == (7, 3, "return")
    assert (copied.lr_scaling.options.base_global_batch_size, spot.preemption.notice_s) == (8, 5)
    assert spot.preemption.notices is NOTICES


def test_after_its_removal_nothing_is_left(tmp_path):
    plain = tiny_trainer(tmp_path / "plain")
    trainer = tiny_trainer(tmp_path, ScalingCallback(lr_scaling=LRScalingCallback(base_global_batch_size=1)))
    trainer.train()
    trainer.remove_callback(ScalingCallback)
    assert changes(trainer)["callbacks"] == changes(plain)["callbacks"]
    trainer.train()
    assert not LASTING & set(vars(trainer))
    assert not [key for record in trainer.state.log_history for key in record if "/" in key]
    assert logged(trainer, "learning_rate") == pytest.approx([trainer.args.learning_rate] * 4)


def test_trials_of_a_search_have_folders_limits_and_state_of_their_own(tmp_path):
    callback = ScalingCallback()
    trainer = Trainer(
        model_init=lambda: tiny_model(),
        args=tiny_arguments(tmp_path, **SAVING, save_total_limit=2),
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(4),
        callbacks=[callback],
    )
    trainer.hyperparameter_search(
        lambda trial: {"seed": trial.suggest_int("seed", 1, 1)}, n_trials=2, backend="optuna"
    )
    assert [steps(tmp_path / f"run-{number}") for number in (0, 1)] == [[2, 3], [2, 3]]
    assert steps(tmp_path) == []
    for number in (0, 1):
        assert hfscale.latest_checkpoint(tmp_path / f"run-{number}") == str(tmp_path / f"run-{number}/checkpoint-3")
        assert len((tmp_path / f"run-{number}" / "scaling.jsonl").read_text().splitlines()) == 3
        assert not list(tmp_path.glob(f"run-{number}/*superseded*"))
    assert read_status(tmp_path)["checkpoint"] == "run-1/checkpoint-3"
    assert trainer.args.save_total_limit == 2
