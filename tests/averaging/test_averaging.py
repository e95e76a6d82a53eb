"""Averaged weights in one process: the mean and the moving average, evaluations, the best model, resume and export."""

import logging
import os
import random
import signal

import pytest
import torch
from average_runs import SAVING, Reference, stored
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import RandomTokens, StopAt, logged, tiny_arguments, tiny_model, tiny_trainer
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from hfscale import SpotCheckpointCallback, WeightAveragingCallback
from hfscale.checkpoint.formats.pieces import Pieces
from hfscale.errors import CheckpointError, ParameterError, UsageError
from hfscale.facts.strategies import STRATEGIES, StrategyFacts
from hfscale.facts.support import Combination, why_not
from hfscale.trainer.strategies import Strategy

EMA = {"ema_decay": 0.9, "evaluate_average": True}
LAST = {"average_last": 2, "average_every_steps": 1, "evaluate_average": True}


def spot(**options):
    return SpotCheckpointCallback(cloud=None, **options)


def train(folder, *callbacks, resume=None, **arguments):
    trainer = tiny_trainer(folder, *callbacks, **(SAVING | arguments))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [EMA, LAST, LAST | {"average_device": "cpu"}], ids=["ema", "last", "last-cpu"])
@pytest.mark.parametrize("saver", ["spot", "plain"])
def test_it_agrees_with_a_reference_resumes_and_is_exported(options, saver, tmp_path):
    if saver == "plain" and options is not EMA:
        pytest.skip("the same for each kind")

    def callbacks():
        return [*([spot()] if saver == "spot" else []), WeightAveragingCallback(**options)]

    reference = Reference(options.get("ema_decay", 0.0), options.get("average_last", 0))
    whole = train(tmp_path / "whole", *callbacks(), reference)
    assert max(reference.differences) <= 1e-6
    assert reference.changed == []
    plain = train(tmp_path / "without")
    assert logged(whole, "loss") == logged(plain, "loss")
    assert logged(whole, "eval_loss") != logged(plain, "eval_loss")
    average = stored(tmp_path / "whole" / "checkpoint-4")
    exported = dict(LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "average").named_parameters())
    assert equal(average, exported)
    train(tmp_path / "cut", *callbacks(), StopAt(2))
    resumed = train(tmp_path / "cut", *callbacks(), resume=tmp_path / "cut" / "checkpoint-2")
    assert equal(average, stored(tmp_path / "cut" / "checkpoint-4"))
    assert logged(resumed, "eval_loss") == logged(whole, "eval_loss")


class FailsAtEvaluation(TrainerCallback):
    """Raises in the second evaluation, in which it sees the weights."""

    def __init__(self):
        self.evaluations = 0
        self.seen = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.before = {name: one.detach().clone() for name, one in model.named_parameters()}

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.evaluations += 1
        self.seen = {name: one.detach().clone() for name, one in model.named_parameters()}
        if self.evaluations == 2:
            raise RuntimeError("no metric")


def test_an_evaluation_that_raises_leaves_the_weights_as_they_were(tmp_path):
    failing = FailsAtEvaluation()
    trainer = tiny_trainer(tmp_path, WeightAveragingCallback(**EMA), failing, **SAVING)
    with pytest.raises(RuntimeError, match="no metric"):
        trainer.train()
    after = dict(trainer.model.named_parameters())
    assert equal(failing.before, after)
    assert not equal(failing.seen, after)


class WorseLater(TrainerCallback):
    """Makes the second evaluation the best one."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_loss"] = 1.0 if state.global_step == 4 else 2.0


@pytest.mark.parametrize(("evaluates", "is_cut"), [(True, False), (False, False), (True, True)])
def test_the_best_model_is_what_was_evaluated(evaluates, is_cut, tmp_path):
    """Also if another launch has found it."""

    def callbacks():
        return [WeightAveragingCallback(ema_decay=0.9, evaluate_average=evaluates), WorseLater(), spot()]

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 6}
    resume = None
    if is_cut:
        train(tmp_path, *callbacks(), StopAt(4), **best)
        resume = tmp_path / "checkpoint-4"
    trainer = train(tmp_path, *callbacks(), resume=resume, **best)
    assert trainer.state.best_global_step == 4
    loaded = dict(trainer.model.named_parameters())
    weights = dict(LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4").named_parameters())
    average_of_best = stored(tmp_path / "checkpoint-4")
    exported = dict(LlamaForCausalLM.from_pretrained(tmp_path / "average").named_parameters())
    assert not equal(average_of_best, weights)
    if evaluates:
        assert equal(average_of_best, loaded)
        assert equal(average_of_best, exported)
    else:
        assert equal(weights, loaded)
        assert equal(stored(tmp_path / "checkpoint-6"), exported)


def test_of_adapters_only_the_trained_parameters_are_averaged(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    train(tmp_path, spot(), WeightAveragingCallback(**EMA), model=get_peft_model(tiny_model(), config))
    average = stored(tmp_path / "checkpoint-4")
    assert {name.split(".")[-3] for name in average} == {"lora_A", "lora_B"}
    assert not (tmp_path / "average" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "average")
    for name, one in loaded.named_parameters():
        if "lora_" in name:
            assert torch.equal(one, average[name.removeprefix("base_model.model.")])


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, EMA, "it has no average"),
        (LAST, EMA, "it has a mean of snapshots, and a moving average is asked for"),
    ],
)
def test_an_average_that_cannot_continue_starts_anew_with_a_line(before, after, said, tmp_path, caplog):
    averaging = [] if before is None else [WeightAveragingCallback(**before)]
    train(tmp_path, spot(), *averaging, StopAt(2))
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        callback = WeightAveragingCallback(**after)
        train(tmp_path, spot(), callback, resume=tmp_path / "checkpoint-2")
    assert any(said in line and "the average starts anew" in line for line in caplog.messages)
    assert callback.average.updates == 2


def test_of_more_snapshots_the_last_ones_are_kept(tmp_path):
    three = {"average_last": 3, "average_every_steps": 1}
    train(tmp_path, spot(), WeightAveragingCallback(**three), StopAt(2), eval_strategy="no")
    callback = WeightAveragingCallback(average_last=2, average_every_steps=2)
    train(tmp_path, spot(), callback, resume=tmp_path / "checkpoint-2", eval_strategy="no")
    assert [each.step for each in callback.average.sets] == [2, 4]


def test_a_broken_average_ends_the_resume_in_one_line(tmp_path):
    train(tmp_path, WeightAveragingCallback(**EMA), StopAt(2))
    path = tmp_path / "checkpoint-2" / "hfscale_average" / "average.json"
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"average\.json cannot be read"):
        train(tmp_path, WeightAveragingCallback(**EMA), resume=tmp_path / "checkpoint-2")


def test_a_run_that_a_notice_ends_writes_no_averaged_model(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    averaging = WeightAveragingCallback(**EMA)
    trainer = train(tmp_path, spot(on_preemption="return"), averaging, Stops(), max_steps=50, eval_strategy="no")
    assert trainer.state.global_step < 50
    assert averaging.average.updates == trainer.state.global_step
    assert not (tmp_path / "average").exists()


class WithStatistics(nn.Module):
    """A model with running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, input_ids=None, labels=None):
        loss = self.head(self.norm(input_ids[:, :4].float())).square().mean()
        return {"loss": loss}


def test_running_statistics_are_those_of_the_training_and_a_line_says_so(tmp_path, caplog):
    model = WithStatistics()
    args = tiny_arguments(tmp_path)
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        Trainer(model, args, train_dataset=RandomTokens(), callbacks=[WeightAveragingCallback(ema_decay=0.5)]).train()
    assert any("'norm' is a BatchNorm1d: its running statistics are not averaged" in line for line in caplog.messages)
    written = load_file(tmp_path / "average" / "model.safetensors")
    assert torch.equal(written["norm.running_mean"], model.norm.running_mean)
    assert not torch.equal(written["head.weight"], model.head.weight)


class PlainCopies(Strategy):
    """The smallest strategy: one process whose script says that it has set up copies."""

    @classmethod
    def name_in(cls, trainer):
        return "copies" if hasattr(trainer, "copies") else None

    def is_wrapped(self, wrapper):
        return True


def test_a_strategy_of_another_kind_has_an_average_without_code_of_its_own(tmp_path, monkeypatch):
    facts = StrategyFacts(
        name="copies", family="copies", file_format="unsharded", file_layout="unsharded", is_set_by_script=True
    )
    monkeypatch.setitem(STRATEGIES, "copies", facts)
    monkeypatch.setattr(Strategy, "kinds", [PlainCopies, *Strategy.kinds])
    reference = Reference(0.9)
    trainer = tiny_trainer(tmp_path, WeightAveragingCallback(**EMA), reference, **SAVING)
    trainer.copies = 1
    Strategy.forget(trainer)
    trainer.train()
    assert Strategy.of(trainer).name == "copies"
    assert max(reference.differences) <= 1e-6
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "average")
    assert equal(stored(tmp_path / "checkpoint-4"), dict(exported.named_parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give ema_decay, such as 0.999, or average_last"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0: it must be above 0 and below 1, such as 0.999"),
        ({"ema_decay": float("nan")}, "ema_decay is nan: it must be above 0 and below 1, such as 0.999"),
        ({"average_last": 1, "average_every_steps": 5}, "average_last is 1: it must be at least 2"),
        ({"average_last": 2}, "average_last is 2: give average_every_steps too"),
        ({"ema_decay": 0.9, "average_last": 2}, "average_last is 2: it excludes"),
        ({"evaluate_average": True}, "evaluate_average is True: give ema_decay or average_last too"),
        ({"ema_decay": 0.9, "average_device": "disk"}, "average_device is 'disk': use one of device, cpu"),
        ({"ema_decay": 0.9, "average_every_steps": 0}, "average_every_steps is 0: it must be greater than 0"),
    ],
)
def test_a_bad_option_is_one_line(options, message):
    with pytest.raises((ParameterError, UsageError)) as raised:
        WeightAveragingCallback(**options)
    assert str(raised.value).startswith(message)


def test_a_second_average_is_refused(tmp_path):
    both = [WeightAveragingCallback(**EMA), WeightAveragingCallback(**LAST)]
    with pytest.raises(UsageError, match="two WeightAveragingCallbacks"):
        train(tmp_path, *both)


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        ({"islands": 2}, "islands"),
        ({"zero": 3, "gathers_weights": False}, "stage3_gather_16bit_weights_on_model_save"),
        ({"param_device": "nvme"}, "offload_param"),
        ({"optimizer_device": "nvme"}, "offload_optimizer"),
        ({"strategy": "zero0", "precision": "bf16"}, "stage 0"),
        ({"strategy": "zero2", "round_robin": True}, "round_robin_gradients"),
        ({"evaluate_average": True, "task": "grpo"}, "GRPO"),
    ],
)
def test_what_cannot_be_averaged_is_refused(refused, word):
    reason = why_not(Combination(average=True, **refused), "average", "evaluate_average")
    assert reason is not None
    assert word in reason


def test_an_interval_of_a_flattened_tensor_is_cut_into_rectangles():
    draw = random.Random(0)
    for _ in range(200):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        full = torch.arange(float(torch.Size(shape).numel())).view(shape)
        start = draw.randint(0, full.numel())
        end = draw.randint(start, full.numel())
        pieces = Pieces.of_interval(full.reshape(-1)[start:end].clone(), shape, start)
        found = torch.full_like(full, -1.0)
        for piece in pieces.pieces:
            place = [slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True)]
            assert found[tuple(place)].shape == piece.tensor.shape
            assert bool((found[tuple(place)] == -1).all())
            found[tuple(place)] = piece.tensor
        expected = torch.full_like(full, -1.0)
        expected.view(-1)[start:end] = full.reshape(-1)[start:end]
        assert torch.equal(found, expected), (shape, start, end)
