"""LRScalingCallback in Trainers: every kind of optimizer and scheduler, and every way to resume."""

import json
import logging

import pytest
import torch
from tiny import logged, tiny_model, tiny_trainer

from hfscale import LRScalingCallback, ScalingCallback
from hfscale.errors import UsageError

LR = 1e-2
RULE = {"base_global_batch_size": 1}  # four sequences a step: kappa 4, AdamW x 2, SGD x 4


def train(tmp_path, *, resume=None, optimizers=(None, None), callback=None, **arguments):
    trainer = tiny_trainer(tmp_path, callback or LRScalingCallback(**RULE), optimizers=optimizers, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_adamw_trains_at_twice_the_rate(tmp_path):
    trainer = train(tmp_path)
    assert logged(trainer, "learning_rate") == pytest.approx([2 * LR] * 4)
    assert set(logged(trainer, "lr_scaling/factor")) == {2.0}


def test_the_update_is_scaled_and_not_only_the_log(tmp_path):
    """SGD changes each weight by learning rate x gradient: the first step is exactly four times as long."""
    moves = []
    for callback in (LRScalingCallback(rule="none"), LRScalingCallback(**RULE)):
        before = tiny_model().lm_head.weight
        trainer = train(tmp_path, callback=callback, optim="sgd", max_steps=1, max_grad_norm=0.0)
        moves.append((trainer.model.lm_head.weight - before).norm().item())
    assert moves[1] / moves[0] == pytest.approx(4, rel=1e-4)


def test_accumulation_is_part_of_the_global_batch(tmp_path):
    trainer = train(tmp_path, gradient_accumulation_steps=4)
    assert logged(trainer, "lr_scaling/factor")[0] == 4


def test_warmup_keeps_its_steps(tmp_path):
    trainer = train(tmp_path, lr_scheduler_type="constant_with_warmup", warmup_steps=2)
    assert logged(trainer, "learning_rate") == pytest.approx([0, LR, 2 * LR, 2 * LR])


@pytest.mark.parametrize(("given", "becomes"), [(2, 4), (0.25, 0.5), (0.8, 1.0)])
def test_warmup_scale_applies_to_steps_and_to_a_share(tmp_path, given, becomes):
    callback = LRScalingCallback(**RULE, warmup_scale=2)
    trainer = tiny_trainer(tmp_path, callback, warmup_steps=given)
    assert trainer.args.warmup_steps == becomes


@pytest.mark.parametrize("case", ["alone", "with its scheduler", "with initial_lr of an earlier scheduler"])
def test_an_optimizer_given_by_the_user_is_scaled(tmp_path, case):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if case != "alone" else None
    scheduler = scheduler if case == "with its scheduler" else None
    trainer = tiny_trainer(tmp_path, LRScalingCallback(**RULE), model=model, optimizers=(optimizer, scheduler))
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([4 * LR] * 4)


class TestResume:
    def first(self, tmp_path, **arguments):
        train(tmp_path, save_strategy="steps", save_steps=2, lr_scheduler_type="linear", **arguments)
        return str(tmp_path / "checkpoint-2")

    def test_does_not_scale_twice(self, tmp_path):
        checkpoint = self.first(tmp_path)
        trainer = train(tmp_path / "b", resume=checkpoint, lr_scheduler_type="linear")
        assert logged(trainer, "learning_rate") == pytest.approx([2 * LR * share for share in (1, 0.75, 0.5, 0.25)])

    def test_an_equal_global_batch_changes_nothing(self, tmp_path):
        checkpoint = self.first(tmp_path)
        parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        trainer = train(tmp_path / "b", resume=checkpoint, lr_scheduler_type="linear", **parts)
        assert logged(trainer, "learning_rate")[2:] == pytest.approx([2 * LR * 0.5, 2 * LR * 0.25])

    @pytest.mark.parametrize("own_state_restored", [False, True])
    def test_a_changed_factor_rescales_what_was_restored(self, tmp_path, own_state_restored):
        checkpoint = self.first(tmp_path)
        more = {"gradient_accumulation_steps": 4, "restore_callback_states_from_checkpoint": own_state_restored}
        trainer = train(tmp_path / "b", resume=checkpoint, lr_scheduler_type="linear", **more)
        assert logged(trainer, "learning_rate")[2:] == pytest.approx([4 * LR * 0.5, 4 * LR * 0.25])
        state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
        assert state["stateful_callbacks"]["hfscale"]["lr_scaling"]["factor"] == 2

    def test_a_checkpoint_of_a_run_without_the_callback_is_rescaled(self, tmp_path):
        checkpoint = self.first(tmp_path, callback=LRScalingCallback(rule="none"))
        plain = tmp_path / "plain"
        tiny_trainer(plain, save_strategy="steps", save_steps=2, lr_scheduler_type="linear").train()
        for start in (checkpoint, str(plain / "checkpoint-2")):
            trainer = train(tmp_path / "b", resume=start, lr_scheduler_type="linear", save_strategy="steps")
            assert logged(trainer, "learning_rate")[2:] == pytest.approx([2 * LR * 0.5, 2 * LR * 0.25])

    def test_scaling_in_on_train_begin_would_double(self, tmp_path):
        """The control: what common guides do, and why it is wrong."""

        class Naive(LRScalingCallback):
            def on_init_end(self, args, state, control, **kwargs):
                pass

            def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
                lr_scheduler.base_lrs = [lr * 2 for lr in lr_scheduler.base_lrs]

        checkpoint = self.first(tmp_path, callback=Naive())
        trainer = train(tmp_path / "b", callback=Naive(), resume=checkpoint, lr_scheduler_type="linear")
        assert logged(trainer, "learning_rate")[3] == pytest.approx(4 * LR * 0.25)


def test_added_after_the_trainer_was_made(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.add_callback(LRScalingCallback(**RULE))
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([2 * LR] * 4)


def test_reporting_to_wandb_does_not_make_it_scale_twice(tmp_path):
    """A callback that is prepended while Trainer iterates over the list would shift it."""
    scaling = ScalingCallback(lr_scaling=LRScalingCallback(**RULE))
    trainer = tiny_trainer(tmp_path, scaling, report_to="wandb")
    assert trainer.args.learning_rate == pytest.approx(2 * LR)


def test_training_twice_scales_once(tmp_path):
    trainer = train(tmp_path)
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([2 * LR] * 4)


def test_logs_once_what_it_did_and_why(tmp_path, caplog):
    logging.getLogger("hfscale").propagate = True
    with caplog.at_level(logging.INFO, logger="hfscale"):
        train(tmp_path)
    lines = [record.getMessage() for record in caplog.records if "lr_scaling" in record.getMessage()]
    assert len(lines) == 1
    for part in ("0.01 -> 0.02", "1 -> 4 sequences", "kappa 4", "sqrt rule for adamw_torch_fused", "steps kept"):
        assert part in lines[0]


def test_an_unknown_rule_is_an_error_when_the_trainer_is_made(tmp_path):
    with pytest.raises(UsageError, match="--lr_scaling_rule is 'cubic'"):
        tiny_trainer(tmp_path, LRScalingCallback(rule="cubic"))


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.world(2))])
@pytest.mark.parametrize("case", ["hf", "deepspeed_optimizer", "deepspeed_both"])
def test_in_several_processes(launch, tmp_path, processes, case):
    """Two processes of two sequences: kappa 4, with DDP, a DeepSpeed optimizer, and its scheduler too."""
    from conftest import REPOSITORY

    config = REPOSITORY / "tests" / "workers" / "deepspeed.yaml" if case.startswith("deepspeed") else None
    done = launch(processes, REPOSITORY / "tests" / "workers" / "lr_scaling.py", case, config=config)
    assert done.code == 0, done.err[-3000:]
    result = json.loads((tmp_path / f"{case}.json").read_text())
    # A DeepSpeed scheduler sets the first rate after its first step, so that all of its rates come one step later.
    shares = (0, 0, 0.5, 1) if case == "deepspeed_both" else (0, 0.5, 1, 1)
    rates = [share * 2 * LR for share in shares]
    assert result["fresh"] == pytest.approx(rates)
    assert result["resumed"] == pytest.approx(rates[2:])
    assert result["changed"] == pytest.approx([2 * rate for rate in rates[2:]])
    assert result["factor"] == pytest.approx(2)
