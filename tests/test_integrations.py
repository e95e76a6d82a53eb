"""What hfscale changes on a Trainer is undone, and only `hfscale.integrations` uses internals of other libraries."""

import signal
from collections import deque

import accelerate
import pytest
import torch
import transformers.trainer
from tiny import tiny_trainer
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import hfscale
from hfscale import (
    CommHealthCallback,
    LRScalingCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
)
from hfscale.errors import HfScaleError, UsageError
from hfscale.integrations.sequence_parallel import SkippableUlyssesLoader
from hfscale.integrations.trainer import TrainerAdapter, resumed_from, training_frame

SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
LASTING = {"train", "get_eval_dataloader", "_hfscale_adapter"}


class Raise(TrainerCallback):
    """Raises at an event, while `on` is set."""

    def __init__(self, event="on_step_end"):
        self.on = True
        setattr(self, event, self._raise)

    def _raise(self, args, state, control, **kwargs):
        if self.on and state.global_step in (0, 3):
            raise RuntimeError("broken off")


def changes(trainer):
    """Everything that can be replaced on a Trainer, by name."""
    methods = {name for name in vars(trainer) if hasattr(type(trainer), name)}
    return {
        "methods": methods - {"train", "get_eval_dataloader"},
        "adapter": "_hfscale_adapter" in vars(trainer),
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
        "args": {name: value for name, value in vars(trainer.args).items() if name != "learning_rate"},
        "accelerator": {name for name in vars(trainer.accelerator) if hasattr(type(trainer.accelerator), name)},
        "dataset": id(trainer.train_dataset),
        "signal": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
    }


class TestRestore:
    @pytest.mark.parametrize("report_to", ["none", "wandb"])
    def test_nothing_is_left_after_a_training(self, tmp_path, report_to, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "disabled")
        trainer = tiny_trainer(tmp_path, ScalingCallback(), report_to=report_to, **SAVING)
        before = changes(trainer)
        trainer.train()
        assert changes(trainer) == before
        trainer.train()
        assert changes(trainer) == before
        assert trainer.state.global_step == 4

    @pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_step_end"])
    def test_nothing_is_left_after_a_training_that_broke_off(self, tmp_path, event):
        breaking = Raise(event)
        trainer = tiny_trainer(tmp_path, ScalingCallback(), breaking, **SAVING)
        before = changes(trainer)
        with pytest.raises(RuntimeError, match="broken off"):
            trainer.train()
        assert changes(trainer) == before
        breaking.on = False
        trainer.train()
        assert changes(trainer) == before
        assert trainer.state.global_step == 4
        assert hfscale.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")

    def test_a_removed_callback_leaves_nothing_after_the_next_training(self, tmp_path):
        plain = tiny_trainer(tmp_path / "plain")
        trainer = tiny_trainer(tmp_path, ScalingCallback(), report_to="none")
        trainer.remove_callback(ScalingCallback)
        trainer.train()
        assert not LASTING & set(vars(trainer))
        assert changes(trainer)["callbacks"] == changes(plain)["callbacks"]
        assert not [key for record in trainer.state.log_history for key in record if "/" in key]

    def test_what_the_user_replaced_meanwhile_stays(self, tmp_path):
        def mine(*args, **kwargs):
            return {}

        class Replace(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                trainer.evaluate = mine

        trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), Replace())
        trainer.train()
        assert trainer.evaluate is mine

    def test_all_undo_steps_run_when_one_of_them_raises(self, tmp_path):
        called = []

        def fail():
            raise ValueError("undo")

        class Add(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                adapter = TrainerAdapter.current()
                adapter.at_training_end(lambda: called.append("first"))
                adapter.at_training_end(fail)

        trainer = tiny_trainer(tmp_path, LRScalingCallback(), Add())
        with pytest.raises(ValueError, match="undo"):
            trainer.train()
        assert called == ["first"]


class TestAddedLater:
    """The callback meets its Trainer in a call of `train` that is already running."""

    def test_nothing_is_left_after_a_training(self, tmp_path):
        trainer = tiny_trainer(tmp_path, **SAVING)
        before = changes(trainer)
        trainer.add_callback(ScalingCallback())
        trainer.train()
        after = changes(trainer)
        assert after.pop("callbacks")[:-1] == before.pop("callbacks")
        assert after == before | {"adapter": True}

    @pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
    def test_nothing_is_left_after_a_training_that_broke_off(self, tmp_path, event):
        breaking = Raise(event)
        trainer = tiny_trainer(tmp_path, max_steps=3, **SAVING)
        before = changes(trainer)
        trainer.add_callback(ScalingCallback())
        trainer.add_callback(breaking)
        with pytest.raises(RuntimeError, match="broken off"):
            trainer.train()
        after = changes(trainer)
        assert after.pop("callbacks")[:-2] == before.pop("callbacks")
        assert after == before | {"adapter": True}
        breaking.on = False
        trainer.train()
        assert trainer.state.global_step == 3


def test_one_adapter_for_all_callbacks_and_trainings(tmp_path):
    seen = set()

    class Look(TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            seen.add(TrainerAdapter.current())

        def on_train_begin(self, args, state, control, **kwargs):
            seen.add(TrainerAdapter.current())

    trainer = tiny_trainer(tmp_path, LRScalingCallback(), Look(), CommHealthCallback(), ScalingMetricsCallback())
    trainer.train()
    trainer.train()
    assert seen == {TrainerAdapter.of(trainer)}
    with pytest.raises(HfScaleError, match="Trainer"):
        TrainerAdapter.current()


def test_the_order_of_the_users_callbacks_stays(tmp_path):
    orders = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            orders.append([type(callback).__name__ for callback in trainer.callback_handler.callbacks])

    trainer = tiny_trainer(tmp_path, Look(), ScalingCallback(), Raise("on_nothing"))
    before = changes(trainer)["callbacks"]
    trainer.train()
    assert orders[-1] == ["MetricInjector", *before]


def test_added_metrics_reach_callbacks_that_come_before(tmp_path):
    """As the reporting integrations do. The control: keys that a callback adds itself come too late for them."""
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(set(logs))

    class Adds(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            TrainerAdapter.current().add_metrics(lambda state: {"through/adapter": 1.0})

        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["late"] = 1.0

    tiny_trainer(tmp_path, Reporter(), Adds()).train()
    assert all("through/adapter" in keys and "late" not in keys for keys in seen)


def test_the_trainer_and_its_checkpoint_are_found_on_the_stack(tmp_path):
    found = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            frame = training_frame()
            found.append((TrainerAdapter.current().trainer, resumed_from(), frame.f_locals["self"]))

    first = tiny_trainer(tmp_path, Look(), save_strategy="steps", save_steps=2)
    first.train()
    second = tiny_trainer(tmp_path, Look(), max_steps=5)
    second.train(resume_from_checkpoint=True)
    assert found == [(first, None, first), (second, str(tmp_path / "checkpoint-4"), second)]
    assert training_frame() is None


class TestJitCheckpoint:
    """`enable_jit_checkpoint` installs transformers' own handler of SIGTERM over ours."""

    @pytest.fixture(autouse=True)
    def _handler(self):
        before = signal.getsignal(signal.SIGTERM)
        yield
        signal.signal(signal.SIGTERM, before)

    def test_is_refused_when_the_trainer_is_made(self, tmp_path):
        with pytest.raises(UsageError, match="--enable_jit_checkpoint true"):
            tiny_trainer(tmp_path, ScalingCallback(), enable_jit_checkpoint=True)

    def test_is_refused_when_training_begins(self, tmp_path):
        trainer = tiny_trainer(tmp_path, enable_jit_checkpoint=True)
        trainer.add_callback(SpotCheckpointCallback())
        with pytest.raises(UsageError, match="--enable_jit_checkpoint true"):
            trainer.train()

    def test_without_our_callback_transformers_handles_the_signal(self, tmp_path):
        """The control: its handler is not ours."""
        tiny_trainer(tmp_path, enable_jit_checkpoint=True)
        assert signal.getsignal(signal.SIGTERM).__module__.startswith("transformers.")


class Ulysses:
    """What DeepSpeed's loader for ranks that share a sequence does, on one process: each batch becomes two."""

    sp_world_size = 2

    def __init__(self, loader):
        self.dl, self.iter, self.micro_batches = loader, iter(loader), deque()

    def __len__(self):
        return len(self.dl) * self.sp_world_size

    def __iter__(self):
        return self

    def __next__(self):
        if not self.micro_batches:
            try:
                batch = next(self.iter)
            except StopIteration:
                self.iter = iter(self.dl)
                raise
            self.micro_batches.extend([(batch.tolist(), rank) for rank in range(self.sp_world_size)])
        return self.micro_batches.popleft()


class TestUlyssesLoader:
    def make(self, read=None):
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 12

            def __getitem__(self, index):
                if read is not None:
                    read.append(index)
                return index

        return Ulysses(DataLoader(Rows(), batch_size=2))

    @pytest.mark.parametrize("count", [1, 2, 5, 11, 12])
    def test_skips_what_the_run_has_seen_without_reading_it(self, count):
        everything = list(self.make())
        read = []
        loader = SkippableUlyssesLoader(self.make(read))
        assert list(accelerate.skip_first_batches(loader, count)) == everything[count:]
        assert len(read) == 12 - count // 2 * 2
        assert list(loader) == everything  # the next pass
        assert len(loader) == 12

    def test_deepspeeds_own_cannot_be_skipped_in(self):
        """The control: when this fails, the class is no longer needed."""
        with pytest.raises(AttributeError, match="dataset"):
            accelerate.skip_first_batches(self.make(), 1)

    def test_is_in_place_during_the_training_only(self, tmp_path):
        seen = []

        class Look(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(trainer.accelerator.deepspeed_ulysses_dl_adapter("loader", None))

        trainer = tiny_trainer(tmp_path, Look(), max_steps=1)
        trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader
        adapter = TrainerAdapter.of(trainer)
        adapter.before_each_training(lambda: adapter.wrap_ulysses_loader(lambda loader: f"wrapped {loader}"))
        for _ in range(2):
            trainer.train()
            assert trainer.accelerator.deepspeed_ulysses_dl_adapter("loader", None) == "loader"
        assert seen == ["wrapped loader"] * 2
        assert transformers.trainer.skip_first_batches is accelerate.skip_first_batches
