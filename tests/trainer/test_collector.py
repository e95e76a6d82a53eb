"""`LogCollector`: one clock for all parts of a training, and one exchange between the ranks at each log."""

import inspect
import json
import os

import pytest
import torch.distributed as dist
from forked_ranks import run_ranks
from parallel_world import in_world, train
from tiny import logged, make_callback, tiny_trainer
from transformers import Trainer, TrainerCallback, TrainerState

from hfscale import CommHealthCallback, ScalingCallback, ScalingMetricsCallback
from hfscale.core.clocks import PhaseClock
from hfscale.core.collectives import DEBUG_VARIABLE, Channel
from hfscale.core.distributed import rank
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.collector import LogCollector
from hfscale.trainer.hooks import MetricInjector

EXCHANGING = {"CommHealthCallback", "ScalingMetricsCallback", "ScalingCallback"}


class Part:
    """A part whose number is a power of ten times the number of its rank plus one."""

    def __init__(self, *names):
        self.names = names
        self.seconds = {}
        self.exchanged = None

    def numbers(self, state, logs, seconds):
        self.seconds = dict(seconds)
        return {name: 10.0**digit * (rank() + 1) for digit, name in enumerate(self.names)}

    def judge(self, columns, state):
        return {"rank": rank(), "step": state.global_step, "sum": {n: float(c.sum()) for n, c in columns.items()}}

    def keys(self, exchanged, state, logs):
        self.exchanged = exchanged
        return {f"of/{name}": 1.0 for name in self.names}


class Exchanges:
    """Names the exchanges of this process within each log of Trainer's own, except the log that ends a training."""

    def __init__(self):
        self.names = {}
        """Names of the exchanges, by step."""

    def patch(self, setattr):
        enter = Channel._enter

        def watched(channel, name):
            frame = inspect.currentframe()
            while frame is not None and frame.f_code is not MetricInjector.__call__.__code__:
                frame = frame.f_back
            if frame is not None and "train_runtime" not in frame.f_locals["logs"]:
                step = frame.f_locals["self"]._trainer.state.global_step
                self.names.setdefault(step, []).append(name)
            return enter(channel, name)

        setattr(Channel, "_enter", watched)
        return self


class LogsOnRank0(TrainerCallback):
    """Logs on the main process only, as user code may do."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and state.is_world_process_zero:
            TrainerAdapter.current().trainer.log({"loss": 1.0, "extra": 2.0})


def exchanges_of_a_world(job):
    """The exchanges at each log of a training of `parallel_world`, and how often a pipeline's bubble was logged."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Exchanges().patch(monkeypatch.setattr)
        return {"bubble": len(train(job)["bubble"]), "names": watch.names}


@pytest.mark.parametrize("name", [*sorted(EXCHANGING), "LRScalingCallback", "SpotCheckpointCallback"])
def test_a_callback_alone_makes_one_exchange_at_a_log_or_none(tmp_path, monkeypatch, name):
    watch = Exchanges().patch(monkeypatch.setattr)
    tiny_trainer(tmp_path, make_callback(name)).train()
    assert watch.names == ({step: ["log"] for step in range(1, 5)} if name in EXCHANGING else {})


@pytest.mark.world(2)
@pytest.mark.parametrize("callbacks", [1, 2])
def test_two_ranks_make_one_exchange_at_a_log_and_none_at_a_log_of_one_rank(tmp_path, callbacks):
    def work():
        watch = Exchanges().patch(setattr)
        parts = [ScalingMetricsCallback(), CommHealthCallback()] if callbacks == 2 else [ScalingCallback()]
        trainer = tiny_trainer(tmp_path / "out", LogsOnRank0(), *parts, max_steps=6, logging_steps=2)
        trainer.train()
        own = [record for record in trainer.state.log_history if "grad_norm" in record]
        assert len(own) == 3
        for record in own:
            assert {"scaling/tokens_per_s", "scaling/straggler_skew", "scaling/data_wait_fraction"} <= set(record)
        (tmp_path / f"names-{os.environ['RANK']}").write_text(json.dumps(watch.names))
        dist.destroy_process_group()

    codes = run_ranks(2, work, log=tmp_path, env={DEBUG_VARIABLE: "120"}, timeout_s=240.0)
    assert codes == [0, 0], [(tmp_path / f"rank-{number}.log").read_text() for number in range(2)]
    for number in range(2):
        assert json.loads((tmp_path / f"names-{number}").read_text()) == {"2": ["log"], "4": ["log"], "6": ["log"]}


@pytest.mark.world(2)
def test_a_pipeline_makes_one_exchange_at_a_log_with_callbacks_and_without(tmp_path):
    job = {"parallel": {"pp_size": 2}, "args": {"max_steps": 2, "logging_steps": 1, "eval_strategy": "no"}}
    jobs = [job | {"scaling": scaling, "output_dir": str(tmp_path / f"{scaling}")} for scaling in (False, True)]
    for result in in_world(2, exchanges_of_a_world, jobs):
        assert result == {"names": {"1": ["log"], "2": ["log"]}, "bubble": 2}


@pytest.mark.world(2)
def test_every_rank_gets_the_numbers_of_all_or_the_judgement_of_rank_0(tmp_path):
    def work():
        dist.init_process_group("gloo")
        first, judged, last = Part("a", "b"), Part("a", "c"), Part("d")
        collector = LogCollector()
        collector.add(first)
        collector.add(judged, judged.judge)
        collector.add(last)
        collector.add(first)  # has no effect
        state = TrainerState()
        state.global_step = 7
        assert list(collector.keys(state, {})) == ["of/a", "of/b", "of/c", "of/d"]
        assert first.exchanged == {"a": [1.0, 2.0], "b": [10.0, 20.0]}
        assert judged.exchanged == {"rank": 0, "step": 7, "sum": {"a": 3.0, "c": 30.0}}
        assert last.exchanged == {"d": [1.0, 2.0]}
        dist.destroy_process_group()

    codes = run_ranks(2, work, log=tmp_path, env={DEBUG_VARIABLE: "120"})
    assert codes == [0, 0], [(tmp_path / f"rank-{number}.log").read_text() for number in range(2)]


def test_each_event_ends_one_phase_and_a_log_starts_a_new_window():
    collector = LogCollector()
    seconds = iter(range(100))
    collector.clock = PhaseClock(now=lambda: float(next(seconds)))
    part = Part("a")
    collector.add(part)
    state = TrainerState()
    events = (collector.on_epoch_begin, collector.on_step_begin, collector.on_step_end)
    for event in (*events, collector.on_evaluate, collector.on_save):
        event(None, state, None)
        collector.batch_fetched()
    collector.on_log(None, state, None, logs={"eval_loss": 1.0})
    collector.on_log(None, state, None, logs={"loss": 1.0})
    collector.keys(state, {})
    assert part.seconds == {"data_wait": 5.0, "compute": 3.0, "evaluate": 2.0, "save": 1.0, "other": 2.0}
    collector.batch_fetched()
    collector.keys(state, {})
    assert part.seconds == {"data_wait": 1.0, "compute": 1.0}


def test_a_callback_that_is_added_when_training_begins_takes_part(tmp_path, monkeypatch):
    class Adds(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            for callback in (CommHealthCallback(), ScalingMetricsCallback()):
                trainer.add_callback(callback)

    watch = Exchanges().patch(monkeypatch.setattr)
    trainer: Trainer = tiny_trainer(tmp_path, Adds())
    trainer.train()
    assert watch.names == {step: ["log"] for step in range(1, 5)}
    assert len(logged(trainer, "scaling/data_wait_fraction")) == 4
    assert not any(isinstance(callback, LogCollector) for callback in trainer.callback_handler.callbacks)


def test_a_second_training_has_a_collector_of_its_own(tmp_path):
    parts = []

    class Collects(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            parts.append(Part("a"))
            TrainerAdapter.current().collect(parts[-1])

    trainer = tiny_trainer(tmp_path, Collects(), max_steps=1)
    trainer.train()
    trainer.train()
    assert [record["of/a"] for record in trainer.state.log_history if "of/a" in record] == [1.0, 1.0]
    assert parts[1].exchanged == {"a": [1.0]}
    assert 0 < parts[1].seconds["compute"] < 60
