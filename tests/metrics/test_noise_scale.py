"""The gradient noise scale: compared with a case of known noise, and with gradients computed by hand."""

import pytest
import torch
from tiny import RandomTokens, logged, tiny_arguments, tiny_model, tiny_trainer
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from hfscale import ScalingMetricsCallback
from hfscale.metrics.meters.noise_scale import NoiseScale, Sample, advice

SIZE = 1024
KNOWN = 8.0
"""trace(Sigma) / |G|^2 of `Rows`, which is SIZE x 1 / (SIZE / KNOWN)."""


class Rows(Dataset):
    """A dataset of gradients, drawn with a known mean and a known variance."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(size, SIZE, generator=generator) + (1 / KNOWN) ** 0.5

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"inputs_embeds": self.rows[index], "labels": torch.zeros(1)}


class MeanOfInputs(nn.Module):
    """A model whose gradient is the mean of its inputs, for every value of its parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE))

    def forward(self, inputs_embeds, labels):
        return {"loss": (inputs_embeds @ self.w).mean()}


class EachStep(TrainerCallback):
    """Has the noise scale sampled in each logged step."""

    def __init__(self, metrics):
        self.metrics = metrics

    def on_train_begin(self, args, state, control, **kwargs):
        self.metrics._noise.min_steps_between = 1


def noise_trainer(output_dir, *, model=None, noise_scale=True, **overrides):
    arguments = tiny_arguments(output_dir, **overrides)
    steps = arguments.max_steps * arguments.gradient_accumulation_steps * arguments.world_size
    callback = ScalingMetricsCallback(noise_scale=noise_scale)
    callbacks = [callback, EachStep(callback)] if noise_scale else [callback]
    return Trainer(model=model or MeanOfInputs(), args=arguments, train_dataset=Rows(4 * steps), callbacks=callbacks)


def test_the_known_noise_scale_is_measured(tmp_path):
    """Gradients are clipped for the update, and must be measured before it."""
    trainer = noise_trainer(tmp_path, gradient_accumulation_steps=4, max_steps=100, max_grad_norm=0.5)
    trainer.train()
    values = logged(trainer, "scaling/noise_scale")
    assert len(values) == 91  # none before the tenth sample
    assert values[-1] == pytest.approx(KNOWN, rel=0.1)


def test_squares_are_those_of_the_gradient_of_each_micro_batch(tmp_path):
    """Trainer divides its loss by the tokens of all micro-batches, which must be undone."""
    trainer = tiny_trainer(
        tmp_path,
        ScalingMetricsCallback(noise_scale=True),
        gradient_accumulation_steps=3,
        max_steps=1,
        per_device_train_batch_size=2,
        max_grad_norm=1e-3,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    saved = trainer.state.stateful_callbacks["hfscale"]["noise_scale"]
    model, rows = tiny_model(), RandomTokens().rows
    squares, total = [], [torch.zeros_like(p) for p in model.parameters()]
    for part in range(3):
        batch = rows[2 * part : 2 * part + 2]
        gradients = torch.autograd.grad(model(input_ids=batch, labels=batch).loss, list(model.parameters()))
        squares.append(sum(float(g.square().sum()) for g in gradients))
        total = [t + g / 3 for t, g in zip(total, gradients, strict=True)]
    big_square = sum(float(t.square().sum()) for t in total)
    sample = Sample(small_square=sum(squares) / 3, big_square=big_square, small_batch=2, big_batch=6)
    noise, signal = sample.noise_and_signal()
    assert saved["noise"] / 0.05 == pytest.approx(noise, rel=1e-3)
    assert saved["signal"] / 0.05 == pytest.approx(signal, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("arguments", "reason"), [({}, "two micro-batches"), ({"fp16": True}, "fp16")])
def test_is_absent_with_a_reason_if_it_cannot_be_measured(tmp_path, caplog, monkeypatch, arguments, reason):
    trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(noise_scale=True))
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    monkeypatch.setattr(trainer, "compute_loss_context_manager", lambda: torch.enable_grad())
    with caplog.at_level("INFO", logger="hfscale"):
        trainer.train()
    assert any("scaling/noise_scale is not logged" in line and reason in line for line in caplog.messages)
    assert logged(trainer, "scaling/noise_scale") == []


def test_is_off_by_default(tmp_path):
    trainer = noise_trainer(tmp_path, gradient_accumulation_steps=2, max_steps=12, noise_scale=False)
    trainer.train()
    assert logged(trainer, "scaling/noise_scale") == []


@pytest.mark.long
def test_one_step_in_fifty_is_sampled_however_often_is_logged(tmp_path):
    trainer = tiny_trainer(
        tmp_path, ScalingMetricsCallback(noise_scale=True), gradient_accumulation_steps=2, max_steps=105
    )
    trainer.train()
    assert trainer.state.stateful_callbacks["hfscale"]["noise_scale"]["samples"] == 3  # steps 1, 51 and 101


def test_a_log_of_another_step_than_the_sampled_one_is_not_used(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        ScalingMetricsCallback(noise_scale=True),
        gradient_accumulation_steps=2,
        logging_strategy="epoch",
        logging_steps=5,
        max_steps=24,
    )
    trainer.train()  # 8 steps an epoch
    assert len(logged(trainer, "loss")) == 3
    assert "samples" not in trainer.state.stateful_callbacks["hfscale"]["noise_scale"]


def test_is_unknown_if_the_signal_is_not_positive():
    scale = NoiseScale({})
    for _ in range(20):
        scale.add(Sample(small_square=20.0, big_square=2.0, small_batch=1, big_batch=8))
    assert scale.value() is None


def test_the_averages_survive_a_resume():
    generator = torch.Generator().manual_seed(0)
    drawn = [
        Sample(small_square=20 + float(a), big_square=12 + float(b), small_batch=4, big_batch=16)
        for a, b in torch.randn(30, 2, generator=generator)
    ]
    uninterrupted = NoiseScale({})
    first = {}
    for sample in drawn:
        uninterrupted.add(sample)
    for sample in drawn[:15]:
        NoiseScale(first).add(sample)
    resumed = NoiseScale(dict(first))
    for sample in drawn[15:]:
        resumed.add(sample)
    assert resumed.value() == uninterrupted.value()


@pytest.mark.parametrize(
    ("noise_scale", "batch", "expected"),
    [
        (512.0, 64, ("larger", "512", "9.0 times", "8.0 times", "x 2.8")),
        (32.0, 256, ("smaller", "9.0 times")),
        (100.0, 100, ("balance", "2.0 times")),
    ],
)
def test_the_advice_has_its_numbers(noise_scale, batch, expected):
    for text in expected:
        assert text in advice(noise_scale, batch)
