"""The contract that every meter of `hfscale.metrics.meters` fulfils."""

import importlib
import math
import pkgutil
from dataclasses import fields

import pytest
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hfscale import ScalingMetricsCallback
from hfscale.metrics import meters
from hfscale.metrics.meters.communication import CommunicationMeter
from hfscale.metrics.meters.efficiency import EfficiencyMeter
from hfscale.metrics.meters.goodput_and_cost import GoodputMeter
from hfscale.metrics.meters.meter import Meter, Window
from hfscale.metrics.meters.noise_scale import NoiseScaleMeter
from hfscale.metrics.meters.utilization import UtilizationMeter
from hfscale.metrics.tokens import TokenCounter, TokenCounts
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy

METERS = {
    UtilizationMeter: lambda: UtilizationMeter(1.0, TokenCounter()),
    CommunicationMeter: CommunicationMeter,
    EfficiencyMeter: lambda: EfficiencyMeter(None),
    GoodputMeter: lambda: GoodputMeter(2.0),
    NoiseScaleMeter: NoiseScaleMeter,
}
WINDOW = Window(steps=2, seconds=1.0, tokens=0.0, tokens_seen=0, tokens_per_s_per_gpu=0.0, sequence_length=0)
every_meter = pytest.mark.parametrize("kind", METERS, ids=lambda kind: kind.__name__)


class TrainerWithItsOwnLoss(Trainer):
    """A Trainer whose FLOPs must be counted, because a formula need not hold for its loss."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Drives(TrainerCallback):
    """Calls a meter as `ScalingMetricsCallback` does, and keeps its numbers of each step."""

    def __init__(self, meter):
        self.meter = meter
        self.numbers = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.meter.begin(TrainerAdapter.current().trainer, state)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.meter.watches_steps:
            self.meter.step_begin(state)

    def on_substep_end(self, args, state, control, **kwargs):
        if self.meter.watches_steps:
            self.meter.substep_end(state)

    def on_step_end(self, args, state, control, **kwargs):
        if self.meter.watches_steps:
            self.meter.step_end(state)
        self.numbers.append(self.meter.numbers(state))

    def on_train_end(self, args, state, control, **kwargs):
        self.meter.end()


def prepared_trainer(output_dir):
    """Return a Trainer as it is when training begins."""
    trainer = tiny_trainer(output_dir, gradient_accumulation_steps=2)
    trainer.current_gradient_accumulation_steps = 2  # Trainer sets it with the first batch
    trainer.state.logging_steps = 1
    return trainer


def hooks_of(model):
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    return hooks + [hook for p in model.parameters() for hook in (p._backward_hooks or ())]


def test_every_meter_of_the_package_is_tested():
    for module in pkgutil.iter_modules(meters.__path__):
        importlib.import_module(f"{meters.__name__}.{module.name}")
    assert set(Meter.__subclasses__()) == set(METERS)
    in_use = ScalingMetricsCallback(noise_scale=True)._meters
    assert [type(meter) for meter in in_use] == list(METERS)


def test_no_two_meters_exchange_a_number_of_the_same_name(tmp_path):
    trainer = prepared_trainer(tmp_path)
    names = [field.name for field in fields(TokenCounts)] + ["training_s", "data_wait_s", "memory_peak_gib"]
    for make in METERS.values():
        meter = make()
        meter.begin(trainer, trainer.state)
        names += meter.numbers(trainer.state)
    assert len(names) == len(set(names))


@every_meter
def test_the_names_of_the_numbers_are_the_same_at_every_log(tmp_path, kind):
    drives = Drives(METERS[kind]())
    trainer = TrainerWithItsOwnLoss(
        model=tiny_model(),
        args=tiny_arguments(tmp_path, gradient_accumulation_steps=2),
        train_dataset=RandomTokens(),
        callbacks=[drives],
        data_collator=default_data_collator,
    )
    trainer.train()
    assert len(drives.numbers) == 4
    assert all(list(numbers) == list(drives.numbers[0]) for numbers in drives.numbers)


@every_meter
def test_the_names_of_the_numbers_are_the_same_on_every_rank(tmp_path, monkeypatch, kind):
    trainer = prepared_trainer(tmp_path)
    names = []
    for rank in range(3):
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda args: 3))
        monkeypatch.setattr(TrainingArguments, "process_index", property(lambda args, rank=rank: rank))
        meter = METERS[kind]()
        meter.begin(trainer, trainer.state)
        names.append(list(meter.numbers(trainer.state)))
        meter.end()
    assert names == [names[0]] * 3


@every_meter
def test_what_no_rank_knows_has_no_key(tmp_path, kind):
    trainer = prepared_trainer(tmp_path)
    meter = METERS[kind]()
    meter.begin(trainer, trainer.state)
    columns = {name: [math.nan, math.nan] for name in meter.numbers(trainer.state)}
    assert meter.keys(columns, WINDOW, trainer.state) == {}


@every_meter
def test_it_begins_and_ends_any_number_of_times_and_leaves_nothing_behind(tmp_path, kind):
    trainer = prepared_trainer(tmp_path)
    adapter = TrainerAdapter.of(trainer)
    Strategy.forget(trainer)
    before = hooks_of(trainer.model), set(vars(trainer))
    meter = METERS[kind]()
    meter.end()
    for _ in range(2):
        meter.begin(trainer, trainer.state)
        meter.begin(trainer, trainer.state)
        if meter.watches_steps:
            meter.step_begin(trainer.state)
        first = list(meter.numbers(trainer.state))
        meter.end()
        meter.end()
    adapter.restore()
    assert list(meter.numbers(trainer.state)) == first
    Strategy.forget(trainer)
    assert (hooks_of(trainer.model), set(vars(trainer))) == before
