"""Several trainings in one process: a notebook, a K-fold loop, a search. Each equals the one of plain Trainer."""

from pathlib import Path

import optuna
import pytest
import torch
from kinds_transformers import Rows, builder, llama, text
from kinds_trl import KINDS as TRL_KINDS
from tiny import logged
from trainer_contract import LEARNING_RATE, make, training_arguments
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from hfscale import LRScalingCallback, ScalingCallback

pytestmark = pytest.mark.trainers
build = builder(llama, text)
SHARING = ("sft", "dpo", "grpo")
"""Kinds of TRL's Trainers that share their arguments and their callback."""


def doubling() -> ScalingCallback:
    return ScalingCallback(lr_scaling=LRScalingCallback(rule="linear", base_global_batch_size=2))


def trainer_of(args: TrainingArguments, *callbacks: TrainerCallback) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        model=llama(), args=args, train_dataset=Rows(text), eval_dataset=Rows(text, 8), callbacks=list(callbacks)
    )


@pytest.fixture
def plain(tmp_path):
    """A finished training without the callback."""
    trainer = trainer_of(TrainingArguments(**training_arguments(tmp_path / "plain")))
    trainer.train()
    return trainer


def folders(folder: Path) -> list[str]:
    """The checkpoints, without those of earlier trainings that were archived under other names."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("checkpoint-*") if not path.suffix)


def test_trainers_that_share_their_arguments(tmp_path, plain):
    args = TrainingArguments(**training_arguments(tmp_path / "run", learning_rate=LEARNING_RATE / 2))
    before = args.to_dict()
    trainers = [trainer_of(args, doubling()) for _ in range(2)]
    trainers[0].train()
    trainers[1].train()
    later = trainer_of(args, doubling())
    later.train()
    for trainer in (*trainers, later):
        assert logged(trainer, "loss") == logged(plain, "loss")
        assert logged(trainer, "learning_rate") == logged(plain, "learning_rate")
    assert args.to_dict() == before
    assert folders(tmp_path / "run") == folders(tmp_path / "plain")


def test_one_callback_in_two_trainers(tmp_path, plain):
    callback = doubling()
    half = {"learning_rate": LEARNING_RATE / 2}
    trainer_of(
        TrainingArguments(**training_arguments(tmp_path / "first", **half, save_total_limit=1)), callback
    ).train()
    trainer = trainer_of(
        TrainingArguments(**training_arguments(tmp_path / "second", **half, save_total_limit=None)), callback
    )
    trainer.train()
    assert logged(trainer, "loss") == logged(plain, "loss")
    assert folders(tmp_path / "second") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.name) for kind in TRL_KINDS if kind.name in SHARING])
def test_trainers_of_trl_that_share_their_arguments_and_the_callback(tmp_path, kind):
    """Two are made before either trains, the third one later; all are scaled alike."""

    def train(trainer):
        set_seed(0)  # which Trainer does when it is made, and GRPO draws its completions from
        trainer.train()

    plain = make(kind, tmp_path / "plain")
    train(plain)
    callback = doubling()
    folder = tmp_path / "run"
    first = make(kind, folder, callback, learning_rate=LEARNING_RATE / 2)
    before = first.args.to_dict()

    def another():
        torch.manual_seed(0)
        return kind.build(folder, [callback], args=first.args)

    second = another()
    train(first)
    train(second)
    third = another()
    train(third)
    for trainer in (first, second, third):
        assert trainer.args is first.args
        assert logged(trainer, "loss") == logged(plain, "loss")
        assert logged(trainer, "learning_rate") == logged(plain, "learning_rate")
    assert first.args.to_dict() == before
    assert folders(folder) == folders(tmp_path / "plain")


def test_one_trainer_trains_twice(tmp_path, plain):
    trainer = trainer_of(TrainingArguments(**training_arguments(tmp_path / "run")), ScalingCallback())
    trainer.train()
    assert logged(trainer, "loss") == logged(plain, "loss")
    plain.train()
    trainer.train()
    assert logged(trainer, "loss") == logged(plain, "loss")
    assert folders(tmp_path / "run") == folders(tmp_path / "plain")


def test_hyperparameter_search(tmp_path):
    """The trials' rates are those that the search chose, scaled by the factor; each trial has its own checkpoints."""

    def search(folder, rates, *callbacks):
        trainer = Trainer(
            model_init=lambda trial: llama(),
            args=TrainingArguments(**training_arguments(folder)),
            train_dataset=Rows(text),
            eval_dataset=Rows(text, 8),
            callbacks=list(callbacks),
        )
        seen = []

        class Look(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                if "loss" in logs:
                    seen.append((logs["learning_rate"], logs["loss"]))

        trainer.add_callback(Look())
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
            compute_objective=lambda metrics: metrics["eval_loss"],
            n_trials=2,
            sampler=optuna.samplers.GridSampler({"learning_rate": rates}, seed=0),
        )
        return seen

    expected = search(tmp_path / "plain", [0.01, 0.02])
    seen = search(tmp_path / "scaled", [0.005, 0.01], doubling())
    assert sorted(seen) == sorted(expected)
    assert folders(tmp_path / "scaled") == folders(tmp_path / "plain")


@pytest.mark.parametrize("strategy", ["best", "epoch"])
def test_save_strategies(tmp_path, strategy):
    runs = {}
    for name, callbacks in (("plain", []), ("scaled", [ScalingCallback()])):
        options = {"save_strategy": strategy, "eval_strategy": "epoch" if strategy == "epoch" else "steps"}
        arguments = training_arguments(tmp_path / name, **options, save_total_limit=1, max_steps=32, logging_steps=16)
        runs[name] = trainer_of(TrainingArguments(**arguments), *callbacks)
        runs[name].train()
    assert logged(runs["scaled"], "loss") == logged(runs["plain"], "loss")
    assert folders(tmp_path / "scaled") == folders(tmp_path / "plain")
    assert (
        Path(runs["scaled"].state.best_model_checkpoint).name == Path(runs["plain"].state.best_model_checkpoint).name
    )


class LlamaThatNeedsMemory(LlamaForCausalLM):
    """Runs out of memory on more than four sequences."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        if len(input_ids) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def test_auto_find_batch_size(tmp_path, plain):
    """The factor is that of the batch that was found."""
    big = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 4, "auto_find_batch_size": True}
    half = {"learning_rate": LEARNING_RATE / 2}
    trainers = {}
    for name, callbacks, options in (("plain_found", [], {}), ("found", [doubling()], half)):
        torch.manual_seed(0)
        trainers[name] = Trainer(
            model=LlamaThatNeedsMemory(llama().config),
            args=TrainingArguments(**training_arguments(tmp_path / name, **big, **options)),
            train_dataset=Rows(text),
            eval_dataset=Rows(text, 8),
            callbacks=callbacks,
        )
        trainers[name].train()
    assert trainers["found"]._train_batch_size == 4
    assert logged(trainers["found"], "loss") == logged(trainers["plain_found"], "loss")
    assert logged(trainers["found"], "learning_rate") == pytest.approx(
        logged(trainers["plain_found"], "learning_rate")
    )
    assert set(logged(trainers["found"], "lr_scaling/factor")) == {2.0}
