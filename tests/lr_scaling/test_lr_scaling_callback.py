"""LRScalingCallback in Trainers: every kind of optimizer and scheduler, and every way to resume."""

import json
import logging

import pytest
import torch
from tiny import RandomTokens, logged, tiny_arguments, tiny_model, tiny_trainer
from transformers import Trainer, TrainerCallback

from hfscale import LRScalingCallback, ScalingCallback, SpotCheckpointCallback
from hfscale.core.versions import is_at_least, what_is_missing
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


@pytest.mark.parametrize(("given", "becomes"), [(1, 2), (0.25, 2), (0.8, 4)])
def test_warmup_scale_applies_to_steps_and_to_a_share(tmp_path, given, becomes):
    """Of four steps; a share stays at most the whole training."""
    argument = "warmup_ratio" if given < 1 and not is_at_least("transformers", "5.0") else "warmup_steps"
    callback = LRScalingCallback(**RULE, warmup_scale=2)
    trainer = train(tmp_path, callback=callback, lr_scheduler_type="constant_with_warmup", **{argument: given})
    rates = [2 * LR * min(1, step / becomes) for step in range(4)]
    assert logged(trainer, "learning_rate") == pytest.approx(rates)
    assert getattr(trainer.args, argument) == given


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

    @pytest.mark.skipif(
        not is_at_least("transformers", "5.4"),
        reason="before transformers 5.4, Trainer resumes with the checkpoint's per_device_train_batch_size",
    )
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


def test_training_twice_scales_once(tmp_path):
    trainer = train(tmp_path)
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([2 * LR] * 4)


class TestTheArgumentsStayTheUsers:
    def test_k_folds_with_one_arguments_object_train_at_one_rate(self, tmp_path):
        args = tiny_arguments(tmp_path, lr_scheduler_type="constant_with_warmup", warmup_steps=1)
        given = args.to_dict()
        for _ in range(3):
            callback = LRScalingCallback(**RULE, warmup_scale=2)
            trainer = Trainer(tiny_model(), args, train_dataset=RandomTokens(), callbacks=[callback])
            trainer.train()
            assert logged(trainer, "learning_rate") == pytest.approx([0, LR, 2 * LR, 2 * LR])
            assert args.to_dict() == given

    def test_trainers_made_before_either_trains_have_their_own_factor(self, tmp_path):
        """With one arguments object and one callback; the second has another optimizer and so another rule."""
        args, callback = tiny_arguments(tmp_path), LRScalingCallback(**RULE)
        first = Trainer(tiny_model(), args, train_dataset=RandomTokens(), callbacks=[callback])
        model = tiny_model()
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        second = Trainer(model, args, train_dataset=RandomTokens(), callbacks=[callback], optimizers=(sgd, None))
        for trainer, factor in ((first, 2), (second, 4), (first, 2)):
            trainer.train()
            assert logged(trainer, "learning_rate") == pytest.approx([factor * LR] * 4)
            assert callback.scaling.factor == factor
        assert args.learning_rate == LR

    def test_other_callbacks_and_saved_arguments_have_the_values_of_the_user(self, tmp_path):
        seen = []

        class Look(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                seen.append(args.to_dict())

            on_step_end = on_save = on_train_begin

        spot = SpotCheckpointCallback(asynchronous=False)
        scaling = ScalingCallback(lr_scaling=LRScalingCallback(**RULE, warmup_scale=2), spot_checkpoint=spot)
        saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
        trainer = tiny_trainer(tmp_path, scaling, warmup_steps=2, **saving)
        trainer.callback_handler.callbacks.insert(0, Look())  # where reporting callbacks are
        given = trainer.args.to_dict()
        trainer.train()
        assert len(seen) == 7
        assert all(arguments == given for arguments in seen)
        saved = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
        assert saved.to_dict() == given

    def test_they_are_restored_when_the_optimizer_cannot_be_made(self, tmp_path):
        class Broken(Trainer):
            def create_scheduler(self, *args, **kwargs):
                raise RuntimeError("no scheduler")

        args = tiny_arguments(tmp_path, warmup_steps=2)
        trainer = Broken(tiny_model(), args, train_dataset=RandomTokens(), callbacks=[LRScalingCallback(**RULE)])
        with pytest.raises(RuntimeError, match="no scheduler"):
            trainer.train()
        assert (args.learning_rate, args.warmup_steps) == (LR, 2)


class TestRatesFromElsewhere:
    """The learning rates do not come from the training arguments, or not from them alone."""

    def run(self, tmp_path, kind, **options):
        args = tiny_arguments(tmp_path, **options.pop("arguments", {}))
        trainer = kind(args=args, train_dataset=RandomTokens(), callbacks=[LRScalingCallback(**RULE)], **options)
        trainer.train()
        return trainer

    def test_an_overridden_create_optimizer(self, tmp_path):
        """Its groups have rates of their own, and the rule is that of its optimizer, not of `--optim`."""

        class Own(Trainer):
            def create_optimizer(self, model=None):
                body, head = [*self.model.model.parameters()], [*self.model.lm_head.parameters()]
                groups = [{"params": body, "lr": self.args.learning_rate / 10}, {"params": head, "lr": 0.5}]
                self.optimizer = torch.optim.SGD(groups, lr=1.0)
                return self.optimizer

        trainer = self.run(tmp_path, Own, model=tiny_model())
        assert rates(trainer) == pytest.approx([4 * LR / 10, 4 * 0.5])
        assert logged(trainer, "lr_scaling/factor") == [4] * 5

    def test_optimizer_cls_and_kwargs(self, tmp_path):
        options = {"model": tiny_model(), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.3})}
        assert rates(self.run(tmp_path, Trainer, **options)) == pytest.approx([4 * 0.3] * 2)

    def test_a_scheduler_made_from_the_arguments_has_the_scaled_rate(self, tmp_path, log):
        class Own(Trainer):
            peak = None

            def create_scheduler(self, num_training_steps, optimizer=None):
                peak = self.peak or self.args.learning_rate
                scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, peak, total_steps=5)
                self.lr_scheduler = scheduler
                return scheduler

        trainer = self.run(tmp_path, Own, model=tiny_model())
        assert max(logged(trainer, "learning_rate")) > 1.5 * LR
        assert logged(trainer, "lr_scaling/factor") == [2] * 5
        assert not [record for record in log.records if record.levelno >= logging.WARNING]
        Own.peak = 0.7
        trainer = self.run(tmp_path, Own, model=tiny_model())
        warnings = [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "0.7" in warnings[0]
        assert "OneCycleLR" in warnings[0]
        assert logged(trainer, "lr_scaling/factor") == []

    def test_the_absolute_minimum_of_a_schedule_is_kept(self, tmp_path):
        arguments = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}}
        trainer = train(tmp_path, **arguments, max_steps=6)
        assert trainer.lr_scheduler.get_last_lr() == pytest.approx([1e-3] * 2)

    def test_auto_find_batch_size_scales_for_the_batch_that_runs(self, tmp_path):
        class Small(Trainer):
            def training_step(self, model, inputs, *args, **kwargs):
                if len(inputs["input_ids"]) > 4:
                    raise RuntimeError("CUDA out of memory.")
                return super().training_step(model, inputs, *args, **kwargs)

        arguments = {"per_device_train_batch_size": 16, "auto_find_batch_size": True}
        args = tiny_arguments(tmp_path, **arguments)
        callback = LRScalingCallback(base_global_batch_size=4)
        trainer = Small(tiny_model(), args, train_dataset=RandomTokens(), callbacks=[callback])
        trainer.train()
        batch = trainer._train_batch_size
        assert batch <= 4
        assert logged(trainer, "learning_rate") == pytest.approx([LR * (batch / 4) ** 0.5] * 4)

    def test_the_rates_of_trials_are_scaled_like_those_of_the_arguments(self, tmp_path):
        """So that the best trial's values, put into the arguments, train as the trial did."""
        seen = []

        class Rates(TrainerCallback):
            def on_step_end(self, args, state, control, optimizer=None, **kwargs):
                seen.extend([args.learning_rate, optimizer.param_groups[0]["lr"]])

        trainer = Trainer(
            model_init=lambda: tiny_model(),
            args=tiny_arguments(tmp_path, max_steps=1),
            train_dataset=RandomTokens(),
            eval_dataset=RandomTokens(4),
            callbacks=[LRScalingCallback(**RULE), Rates()],
        )
        space = {0: (1e-3, 4), 1: (1e-2, 16)}
        trainer.hyperparameter_search(
            lambda trial: {
                "learning_rate": trial.suggest_float("learning_rate", *[space[trial.number][0]] * 2),
                "per_device_train_batch_size": space[trial.number][1],
            },
            n_trials=2,
            backend="optuna",
        )
        assert seen == pytest.approx([1e-3, 2e-3, 1e-2, 4e-2])


def rates(trainer):
    """The learning rates that the optimizer has been used with, by parameter group, under a constant schedule."""
    return [group["lr"] for group in trainer.optimizer.param_groups]


def test_a_checkpoint_without_an_optimizer_is_not_rescaled(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)
    more = {"gradient_accumulation_steps": 4}
    trainer = train(tmp_path / "b", resume=str(tmp_path / "checkpoint-2"), **more)
    assert logged(trainer, "learning_rate")[2:] == pytest.approx([4 * LR] * 2)


def test_logs_once_what_it_did_and_why(tmp_path, log):
    train(tmp_path)
    lines = [record.getMessage() for record in log.records if "lr_scaling" in record.getMessage()]
    assert len(lines) == 1
    for part in ("0.01 -> 0.02", "1 -> 4 sequences", "tokens per step x 4", "sqrt rule for AdamW", "steps kept"):
        assert part in lines[0]


def test_an_unknown_rule_is_an_error_when_the_trainer_is_made(tmp_path):
    with pytest.raises(UsageError, match=r"^rule is 'cubic'"):
        tiny_trainer(tmp_path, LRScalingCallback(rule="cubic"))


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.world(2))])
@pytest.mark.parametrize(
    "case",
    [
        "hf",
        pytest.param("deepspeed_optimizer", marks=pytest.mark.faults),
        pytest.param("deepspeed_both", marks=pytest.mark.long),
    ],
)
def test_in_several_processes(launch, tmp_path, processes, case):
    """Two processes of two sequences: kappa 4, with DDP, a DeepSpeed optimizer, and its scheduler too."""
    from conftest import REPOSITORY

    missing = what_is_missing("DeepSpeed") if case.startswith("deepspeed") else None
    if missing:
        pytest.skip(missing)
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
