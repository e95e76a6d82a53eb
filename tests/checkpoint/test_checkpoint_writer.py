"""Asynchronous saves: they write the same files as synchronous ones, one checkpoint at a time, and report errors."""

import errno
import functools
import io
import json
import resource
import shutil
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY
from peft import LoraConfig, get_peft_model
from test_spot_checkpoint import Interrupt, Pause
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint import contents as snapshots
from hfscale.checkpoint import host_copy as host_copies
from hfscale.checkpoint import saving as trainer_saving
from hfscale.checkpoint.captures.capture import write_shards
from hfscale.checkpoint.host_copy import HostCopy
from hfscale.checkpoint.overrides import WRITING_METHODS
from hfscale.checkpoint.store import verify
from hfscale.checkpoint.writer import CheckpointJob, CheckpointWriter, clear_unfinished, finish_renames, rank_of_file
from hfscale.core.activity import activity_of
from hfscale.core.alarms import listen
from hfscale.core.collectives import SAVING
from hfscale.core.run_files import MANIFEST_NAME, UNFINISHED
from hfscale.errors import StorageError
from hfscale.health.diagnosis import frames_of
from hfscale.recipe import corpus


@contextmanager
def paused_saves(monkeypatch):
    """Make every save wait for an event before it writes; yields the event and the list of (started, ended) times."""
    go = threading.Event()
    spans = []
    run = CheckpointWriter._run

    def waiting(self, job):
        started = time.monotonic()
        go.wait(120)
        run(self, job)
        spans.append((started, time.monotonic()))

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_run", waiting)
        yield go, spans


class BrokenState(TrainerCallback, ExportableState):
    """Its state, which Trainer saves with each checkpoint, cannot be read from step 1 on."""

    step = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step

    def state(self):
        return {"args": {}, "attributes": self.nothing if self.step else {}}


class CallAtStep(TrainerCallback):
    """Calls `call()` when step `step` begins."""

    def __init__(self, step, call):
        self.step = step
        self.call = call

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


def lora_model():
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


MODELS = {
    "full": tiny_model,
    "tied": lambda: tiny_model(tie_word_embeddings=True),
    "lora": lora_model,
    "no PreTrainedModel": lambda: Plain(),
}


class Plain(torch.nn.Module):
    """Trained by Trainer without being a PreTrainedModel; its buffer changes in each forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(64, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 64)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        logits = self.head(self.norm(self.embed(input_ids).flatten(0, 1)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels.flatten())}


class TestFiles:
    @pytest.mark.parametrize("kind", MODELS)
    def test_an_asynchronous_save_writes_the_files_of_a_synchronous_one(self, tmp_path, monkeypatch, kind):
        """The save of step 2 starts to write when step 5 begins; every file except the log has the same bytes."""
        records = {}
        for asynchronous in (False, True):
            folder = tmp_path / str(asynchronous)
            folder.mkdir()
            monkeypatch.chdir(folder)
            with paused_saves(monkeypatch) as (go, spans):
                if not asynchronous:
                    go.set()
                spot = SpotCheckpointCallback(asynchronous=asynchronous)
                trainer = tiny_trainer(
                    "run",
                    spot,
                    SaveAtSteps(2),
                    CallAtStep(5, go.set),
                    model=MODELS[kind](),
                    save_strategy="steps",
                    save_steps=100,
                    max_steps=7,
                    logging_strategy="no",
                    lr_scheduler_type="linear",
                )
                trainer.processing_class = corpus.default_tokenizer()
                trainer.train()
                assert spot._saving.synchronous_because == (None if asynchronous else "asynchronous is False")
            assert len(spans) == 2
            records[asynchronous] = verify(folder / "run" / "checkpoint-2").files
        names = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"}
        assert names | {"tokenizer.json"} <= set(records[True])
        assert records[True] == records[False]

    def test_the_trial_of_a_search_is_saved_as_trainer_saves_it(self, tmp_path, monkeypatch):
        """It has a folder of its own, and Trainer does not count the operations of a search."""
        records = []
        for asynchronous in (False, True):
            folder = tmp_path / str(asynchronous)
            folder.mkdir()
            monkeypatch.chdir(folder)
            spot = SpotCheckpointCallback(asynchronous=asynchronous)
            arguments = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch", "max_steps": 3}
            trainer = tiny_trainer("run", spot, logging_strategy="no", **arguments)
            trainer.model_init = lambda: tiny_model()
            trainer.hyperparameter_search(
                hp_space=lambda trial: {"weight_decay": trial.suggest_float("weight_decay", 0.1, 0.1)},
                n_trials=1,
                backend="optuna",
            )
            assert spot._saving.synchronous_because == (None if asynchronous else "asynchronous is False")
            records.append(verify(folder / "run" / "run-0" / "checkpoint-2").files)
        assert records[0] == records[1]

    def test_trainer_state_has_the_log_and_the_best_checkpoint(self, tmp_path):
        states = []
        for asynchronous in (False, True):
            folder = tmp_path / str(asynchronous)
            spot = SpotCheckpointCallback(asynchronous=asynchronous)
            arguments = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
            tiny_trainer(folder, spot, save_strategy="best", max_steps=3, **arguments).train()
            (checkpoint,) = folder.glob("checkpoint-3")
            states.append(json.loads((checkpoint / "trainer_state.json").read_text()))
        for state, name in zip(states, ("False", "True"), strict=True):
            assert state["best_model_checkpoint"] == str(tmp_path / name / "checkpoint-3")
            state["best_model_checkpoint"] = None
            for entry in state["log_history"]:
                for key in [key for key in entry if "runtime" in key or "per_second" in key or "checkpoint/" in key]:
                    del entry[key]
        assert states[0] == states[1]


class SaveAtSteps(TrainerCallback):
    """Asks for a save after step `step`."""

    def __init__(self, *steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save |= state.global_step in self.steps


def saved_steps(folder):
    numbers = (path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*"))
    return sorted(int(number) for number in numbers if number.isdigit())


def test_at_most_one_save_is_in_flight_and_training_waits_for_the_last(tmp_path, monkeypatch):
    with paused_saves(monkeypatch) as (go, spans):
        threading.Timer(0.5, go.set).start()
        tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=1).train()
    assert len(spans) == 4
    assert all(ended <= started for (_, ended), (started, _) in pairwise(spans))
    assert saved_steps(tmp_path) == [1, 2, 3, 4]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_an_output_directory_that_is_removed_is_reported_and_made_again(tmp_path, caplog):
    heard = []
    end = listen(lambda alarm: heard.append((alarm.kind, alarm.level)))
    out = tmp_path / "out"
    removed = CallAtStep(3, lambda: shutil.rmtree(out))
    spot = SpotCheckpointCallback(asynchronous=False)
    tiny_trainer(out, spot, removed, save_strategy="steps", save_steps=2, max_steps=6).train()
    end()
    assert saved_steps(out) == [4, 6]
    assert caplog.text.count("was removed during the run") == 1
    assert heard.count(("disk", "error")) == 1


def test_a_checkpoint_is_invisible_before_its_commit(tmp_path, monkeypatch):
    seen = []
    with paused_saves(monkeypatch) as (go, _):
        look = CallAtStep(3, lambda: (seen.append(get_last_checkpoint(str(tmp_path))), go.set()))
        tiny_trainer(tmp_path, SpotCheckpointCallback(), look, save_strategy="steps", save_steps=2).train()
    assert seen == [None]
    assert saved_steps(tmp_path) == [2, 4]
    assert list((tmp_path / UNFINISHED).iterdir()) == []


def test_the_best_model_is_loaded_after_its_save_has_ended(tmp_path, monkeypatch):
    """Step 2 is the best, and its checkpoint is still being written when training has ended."""
    metric = iter([0.0, 1.0, 0.5])
    weights = {}
    with paused_saves(monkeypatch) as (go, _):
        late = CallAtStep(2, lambda: (go.clear(), threading.Timer(1.5, go.set).start()))
        go.set()
        trainer = tiny_trainer(
            tmp_path,
            SpotCheckpointCallback(),
            late,
            save_strategy="best",
            eval_strategy="steps",
            eval_steps=1,
            max_steps=3,
            load_best_model_at_end=True,
            metric_for_best_model="m",
            greater_is_better=True,
        )
        trainer.compute_metrics = lambda prediction: {"m": next(metric)}
        trainer.add_callback(CallAtStep(2, lambda: weights.update(best=trainer.model.lm_head.weight.detach().clone())))
        save = trainer_saving.TrainerSaving._save
        patch = lambda self, *rest: (go.clear() if trainer.state.global_step == 2 else None, save(self, *rest))  # noqa: E731
        monkeypatch.setattr(trainer_saving.TrainerSaving, "_save", patch)
        trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert torch.equal(trainer.model.lm_head.weight, weights["best"])


def test_a_second_save_of_the_same_step_replaces_the_first(tmp_path):
    spot = SpotCheckpointCallback(every_steps=4)
    tiny_trainer(tmp_path, spot, save_strategy="epoch", max_steps=4, per_device_train_batch_size=16).train()
    assert saved_steps(tmp_path) == [4]
    verify(tmp_path / "checkpoint-4")


def test_saves_are_synchronous_if_another_callback_may_read_the_checkpoint(tmp_path, caplog):
    found = []

    class Reader(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            found.append((tmp_path / f"checkpoint-{state.global_step}" / MANIFEST_NAME).is_file())

    spot = SpotCheckpointCallback()
    tiny_trainer(tmp_path, Reader(), spot, save_strategy="steps", save_steps=2).train()
    assert found == [True, True]
    assert spot._saving.synchronous_because == "Reader.on_save may read the checkpoint"


class WritesMore(Trainer):
    """Writes a file into the checkpoint before, within and after Trainer's own method, on each rank."""

    def path(self, folder, name):
        return Path(folder, f"checkpoint-{self.state.global_step}", f"{name}_{self.args.process_index}.txt")

    def _save_checkpoint(self, model, trial):
        before = self.path(self.args.output_dir, "before")
        before.parent.mkdir(exist_ok=True)
        before.write_text(f"step {self.state.global_step}")
        super()._save_checkpoint(model, trial)
        self.path(self._get_output_dir(trial), "after").write_text("again")
        config = self.path(self.args.output_dir, "after").with_name("config.json")
        if self.args.should_save and config.is_file():  # not under FSDP2
            config.write_text(json.dumps({**json.loads(config.read_text()), "added": 1}))

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        Path(output_dir, f"model_{self.args.process_index}.txt").write_text("model")


MORE = {"before_0.txt", "after_0.txt", "model_0.txt"}


def more_trainer(folder, *callbacks, kind=WritesMore, **overrides):
    arguments = tiny_arguments(folder, **({"save_strategy": "steps", "save_steps": 2} | overrides))
    return kind(
        model=tiny_model(),
        args=arguments,
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(8),
        callbacks=list(callbacks),
    )


class ModelCard(Trainer):
    """Writes a model card before Trainer saves, as the trainers of TRL do, and a file into the checkpoint."""

    def _save_checkpoint(self, model, trial):
        Path(self.args.output_dir, "README.md").write_text(f"step {self.state.global_step}")
        checkpoint = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "card.txt").write_text(f"step {self.state.global_step}")
        super()._save_checkpoint(model, trial)


class OwnFormat(Trainer):
    """Writes the model in a format of its own, as sentence-transformers does."""

    def _save(self, output_dir=None, state_dict=None):
        Path(output_dir).mkdir(exist_ok=True)
        self.model.save_pretrained(output_dir)
        torch.save(self.model.lm_head.weight, Path(output_dir, "head.pt"))


class TestFilesOfOthers:
    @pytest.mark.parametrize("kind", [ModelCard, OwnFormat])
    def test_saves_of_subclasses_are_asynchronous(self, tmp_path, monkeypatch, kind):
        """The save of step 2 is completed when step 5 begins; every file has the bytes of a synchronous save."""
        records = {}
        arguments = {"save_steps": 100, "max_steps": 7, "logging_strategy": "no", "lr_scheduler_type": "linear"}
        for asynchronous in (False, True):
            folder = tmp_path / str(asynchronous)
            folder.mkdir()
            monkeypatch.chdir(folder)
            with paused_saves(monkeypatch) as (go, _):
                if not asynchronous:
                    go.set()
                spot = SpotCheckpointCallback(asynchronous=asynchronous)
                trainer = more_trainer("run", spot, SaveAtSteps(2), CallAtStep(5, go.set), kind=kind, **arguments)
                trainer.train()
                assert spot._saving.synchronous_because == (None if asynchronous else "asynchronous is False")
                assert "save_model" not in vars(trainer)
            records[asynchronous] = verify(folder / "run" / "checkpoint-2").files
        own = {"card.txt"} if kind is ModelCard else {"head.pt"}
        assert own | {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= set(records[True])
        assert records[True] == records[False]
        resumed = more_trainer("run", kind=kind, **(arguments | {"max_steps": 9}))  # without hfscale
        resumed.train(resume_from_checkpoint="run/checkpoint-2")
        assert resumed.state.global_step == 9

    def test_training_waits_for_a_subclass_that_may_read_the_files(self, tmp_path):
        spot = SpotCheckpointCallback()
        more_trainer(tmp_path, spot, max_steps=2).train()
        assert "may read the files" in spot._saving.synchronous_because

    def test_the_files_of_a_subclass_are_part_of_the_checkpoint(self, tmp_path):
        stale = tmp_path / "checkpoint-2"
        stale.mkdir()
        (stale / "of_an_earlier_attempt.txt").write_text("stale")
        more_trainer(tmp_path, SpotCheckpointCallback(every_steps=4), save_strategy="epoch").train()
        more_trainer(tmp_path, SpotCheckpointCallback(), max_steps=6).train(resume_from_checkpoint=True)
        for step in (4, 6):  # step 4 is saved twice
            checkpoint = tmp_path / f"checkpoint-{step}"
            assert not checkpoint.is_symlink()
            assert set(verify(checkpoint).files) >= MORE
            assert (checkpoint / "before_0.txt").read_text() == f"step {step}"
            assert json.loads((checkpoint / "config.json").read_text())["added"] == 1
        assert not list(tmp_path.glob("checkpoint-?/of_an_earlier_attempt.txt"))
        assert (tmp_path / "checkpoint-2.superseded" / "of_an_earlier_attempt.txt").is_file()
        assert list((tmp_path / UNFINISHED).iterdir()) == []

    def test_a_folder_that_appears_during_the_save_is_kept(self, tmp_path, monkeypatch):
        def add():
            (tmp_path / "checkpoint-2").mkdir()
            (tmp_path / "checkpoint-2" / "added.txt").write_text("added")
            (tmp_path / "checkpoint-2" / "config.json").write_text("older than the save")
            go.set()

        with paused_saves(monkeypatch) as (go, _):
            spot = SpotCheckpointCallback()
            tiny_trainer(tmp_path, spot, CallAtStep(3, add), save_strategy="steps", save_steps=2).train()
        assert "added.txt" in verify(tmp_path / "checkpoint-2").files
        assert json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())["model_type"] == "llama"

    def test_an_error_of_a_subclass_leaves_no_link(self, tmp_path):
        class Fails(WritesMore):
            def save_model(self, output_dir=None, _internal_call=False):
                assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
                assert latest_checkpoint(tmp_path) is None
                raise OSError("simulated failure")

        with pytest.raises(StorageError, match="simulated failure"):
            more_trainer(tmp_path, SpotCheckpointCallback(), kind=Fails).train()
        assert get_last_checkpoint(str(tmp_path)) is None


def test_training_can_restart_after_an_exception(tmp_path, monkeypatch):
    """A save of the first training is still in flight, and Trainer has its own method back."""
    with paused_saves(monkeypatch) as (go, _):
        interrupt = Interrupt(3)
        spot = SpotCheckpointCallback()
        trainer = tiny_trainer(tmp_path, spot, interrupt, save_strategy="steps", save_steps=2)
        with pytest.raises(RuntimeError, match="simulated failure"):
            trainer.train()
        assert spot._saving.writer.in_flight
        assert "_save_checkpoint" not in vars(trainer)
        threading.Timer(0.3, go.set).start()
        interrupt.step = -1
        trainer.train()
    assert saved_steps(tmp_path) == [2, 4]
    assert "_save_checkpoint" not in vars(trainer)
    verify(tmp_path / "checkpoint-4")


class TestFailure:
    @pytest.mark.parametrize("last_step", [400, 4])
    def test_a_failed_write_stops_the_run_and_keeps_committed_checkpoints(self, tmp_path, last_step):
        """A file-size limit makes the write of step 4 fail, like a full disk; also if step 4 is the last."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit():
            while not (tmp_path / "checkpoint-2").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))

        trainer = tiny_trainer(
            tmp_path,
            SpotCheckpointCallback(),
            CallAtStep(3, limit),
            SaveAtSteps(2, 4),
            Pause(0.05),
            save_strategy="steps",
            save_steps=100,
            max_steps=last_step,
        )
        try:
            with pytest.raises(StorageError, match="checkpoint-4"):
                trainer.train()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert trainer.state.global_step < 400
        assert saved_steps(tmp_path) == [2]
        assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
        assert list((tmp_path / UNFINISHED).iterdir()) == []

    def test_a_failed_write_of_distributed_checkpointing_is_a_failed_save(self, tmp_path):
        """DCP raises a BaseException, which would end the writer's thread and nothing else."""
        job = CheckpointJob(
            run_dir=tmp_path,
            step=4,
            strategy="parallel",
            global_batch_size=4,
            commits=True,
            write_collectively=functools.partial(write_shards, {"dcp": {"weight": torch.ones(100_000)}}, None),
        )
        writer = CheckpointWriter()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        try:
            writer.start(job)
            with pytest.raises(StorageError, match="checkpoint-4"):
                writer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert saved_steps(tmp_path) == []

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_an_error_of_code_is_raised_as_it_is(self, tmp_path, asynchronous):
        """With the traceback of the code that raised it."""
        spot = SpotCheckpointCallback(asynchronous=asynchronous)
        trainer = tiny_trainer(tmp_path, spot, BrokenState(), save_strategy="steps", save_steps=2, max_steps=40)
        with pytest.raises(AttributeError, match="nothing") as caught:
            trainer.train()
        assert caught.traceback[-1].name == "state"
        assert trainer.state.global_step == 2 or asynchronous
        assert saved_steps(tmp_path) == []
        assert list(tmp_path.glob(f"{UNFINISHED}/*")) == []

    def test_an_error_of_code_on_another_rank_ends_this_one_with_its_traceback(self, tmp_path, monkeypatch):
        rows = [
            {"problem": None, "fix": None},
            {"problem": "TypeError: no", "fix": None, "is_of_another_rank": False, "traceback": "in state_dict"},
        ]
        monkeypatch.setattr(
            SAVING, "combine_outcomes", lambda name, own, judge, error: judge([[row, {}] for row in rows])
        )
        job = CheckpointJob(run_dir=tmp_path, step=4, strategy="single", global_batch_size=4, commits=True)
        with pytest.raises(RuntimeError, match=r"TypeError: no\s+in state_dict"):
            CheckpointWriter().run(job)

    def test_saves_are_synchronous_if_the_copy_does_not_fit_in_memory(self, tmp_path, monkeypatch):
        monkeypatch.setattr(snapshots, "SHARE_OF_FREE_MEMORY", 0.0)
        spot = SpotCheckpointCallback()
        tiny_trainer(tmp_path, spot, save_strategy="steps", save_steps=2).train()
        assert "does not fit" in spot._saving.synchronous_because
        assert saved_steps(tmp_path) == [2, 4]
        verify(tmp_path / "checkpoint-4")


def test_the_thread_that_writes_uses_the_gpu_of_its_rank(tmp_path, monkeypatch):
    """The calls are recorded: the devices themselves are those of test_gpu.py."""
    used = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((threading.current_thread(), device)))
    writer = CheckpointWriter()
    writer.start(
        CheckpointJob(
            run_dir=tmp_path,
            step=4,
            strategy="single",
            global_batch_size=4,
            commits=True,
            write=lambda folder: used.append((threading.current_thread(), "write")),
        )
    )
    writer.wait()
    assert used == [(used[0][0], 5), (used[0][0], "write")]
    assert used[0][0] is not threading.main_thread()


@pytest.mark.parametrize(("is_optional", "expected"), [(False, "saving"), (True, None)])
def test_a_rank_that_waits_for_a_snapshot_in_memory_may_hang(tmp_path, is_optional, expected):
    """Waiting for a checkpoint on the disk may take long: the hang watch gives it more time."""
    main, seen = threading.get_ident(), []

    def write(folder):
        until = time.monotonic() + 60
        while threading.Thread.join.__code__ not in [frame.f_code for frame in frames_of(main)]:
            assert time.monotonic() < until
            time.sleep(0.001)
        seen.append(activity_of(main))

    about = {"run_dir": tmp_path, "step": 4, "strategy": "single", "global_batch_size": 4, "commits": True}
    writer = CheckpointWriter()
    writer.start(CheckpointJob(write=write, is_optional=is_optional, **about))
    writer.wait()
    assert seen == [expected]
    assert writer.optional_failure is None


class TestRepairAfterACrash:
    def leave(self, folder, name, with_manifest):
        checkpoint = folder / UNFINISHED / name
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(b"x")
        if with_manifest:
            (checkpoint / MANIFEST_NAME).write_text("{}")

    def test_incomplete_checkpoints_are_deleted_and_complete_ones_renamed(self, tmp_path):
        self.leave(tmp_path, "checkpoint-2", with_manifest=False)
        self.leave(tmp_path, "replaced-checkpoint-3", with_manifest=True)
        self.leave(tmp_path, "checkpoint-4", with_manifest=True)
        for step in (2, 3, 5):  # left by a subclass's save
            (tmp_path / f"checkpoint-{step}").symlink_to(Path(UNFINISHED, f"checkpoint-{step}"))
        assert sorted(finish_renames(tmp_path)) == [tmp_path / "checkpoint-3", tmp_path / "checkpoint-4"]
        clear_unfinished(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]

    def test_an_existing_checkpoint_is_not_replaced(self, tmp_path):
        self.leave(tmp_path, "checkpoint-4", with_manifest=True)
        (tmp_path / "checkpoint-4").mkdir()
        assert finish_renames(tmp_path) == []

    def test_an_error_between_the_two_renames_keeps_the_earlier_save(self, tmp_path, monkeypatch):
        def job(content):
            return CheckpointJob(
                run_dir=tmp_path,
                step=4,
                strategy="single",
                global_batch_size=4,
                commits=True,
                write=lambda folder: (folder / "model.safetensors").write_bytes(content),
            )

        writer = CheckpointWriter()
        writer.run(job(b"first"))
        second = job(b"second")
        rename = Path.rename

        def fail_at_the_commit(self, target):
            if target == second.target:
                raise OSError(errno.EIO, "Input/output error")
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail_at_the_commit)
            with pytest.raises(StorageError, match="checkpoint-4"):
                writer.run(second)
        assert finish_renames(tmp_path) == [second.target]
        assert (second.target / "model.safetensors").read_bytes() == b"first"
        verify(second.target)


@contextmanager
def one_rank_mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def pinned(monkeypatch):
    """Take all tensors for those of an accelerator; return the sizes of pinned memory that are allocated."""
    sizes = []

    def allocate(size, is_pinned):
        assert is_pinned
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(host_copies, "_is_pinned_for", lambda device: True)
    monkeypatch.setattr(host_copies, "_allocate", allocate)
    return sizes


def saved_bytes(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


class TestHostCopy:
    def test_the_copy_keeps_everything_that_serializers_depend_on(self):
        weight = torch.arange(12.0).reshape(3, 4)
        shared = (0.9, 0.999)
        tree = OrderedDict(weight=weight, tied=weight, turned=weight.t(), row=weight[1], step=torch.tensor(3.0))
        tree["half"] = torch.ones(2, dtype=torch.bfloat16)
        tree["none"] = None
        tree["empty"] = torch.empty(0)
        tree["groups"] = [{"betas": shared}, {"betas": shared}]
        host_copy = HostCopy()
        assert host_copy.bytes_to_allocate(tree) == 48 + 4 + 4
        copied = host_copy.take(tree)
        assert host_copy.bytes_to_allocate(tree) == 0
        weight.add_(100)
        assert type(copied) is OrderedDict
        assert torch.equal(copied["weight"], torch.arange(12.0).reshape(3, 4))
        assert copied["turned"].stride() == (1, 4)
        assert copied["row"].storage_offset() == 4
        pointers = {copied[name].untyped_storage().data_ptr() for name in ("weight", "tied", "turned", "row")}
        assert len(pointers) == 1
        assert copied["groups"][0]["betas"] is copied["groups"][1]["betas"]
        assert copied["groups"] is not tree["groups"]
        assert copied["half"].dtype == torch.bfloat16

    def test_buffers_are_reused_and_unused_ones_are_freed(self):
        host_copy = HostCopy()
        first = torch.zeros(1000)
        second = torch.ones(10)
        one = host_copy.take({"a": first, "b": second})
        pointer = one["a"].data_ptr()
        first.fill_(7)
        two = host_copy.take({"a": first})
        assert two["a"].data_ptr() == pointer
        assert two["a"].eq(7).all()
        assert [block.numel() for block in host_copy._memory[False]._memory] == [4000]

    def test_a_clone_of_a_tensor_gets_the_buffer_of_the_same_size(self):
        """DeepSpeed clones the tensors of model states in each save."""
        host_copy, tensor = HostCopy(), torch.zeros(1000)
        pointer = host_copy.take([tensor.clone()])[0].data_ptr()
        assert host_copy.bytes_to_allocate([tensor.clone(), torch.zeros(10)]) == 40
        assert host_copy.take([tensor.clone()])[0].data_ptr() == pointer

    @pytest.mark.parametrize("dim", [2048, 3584, 5120])
    def test_pinned_storages_share_blocks_of_powers_of_two(self, dim):
        """CUDA's allocator rounds each piece to a power of two: those of 3584 (Qwen2.5 7B) would take 1.9 times as
        much."""
        layer = [dim * dim, 512 * dim, dim * (5 * dim + 1024), dim]
        sizes = sorted(([4 * 19_000 * dim] + [4 * size for size in 6 * layer]) * 3, reverse=True)
        memory = host_copies._Memory(True)
        blocks, _ = memory._place(sizes)
        assert sum(sizes) <= memory.bytes_to_allocate(sizes) <= 1.05 * sum(sizes)
        assert sum(block.size for block in blocks) == memory.bytes_to_allocate(sizes)
        assert all(block.size.bit_count() == 1 and block.size <= 2**32 for block in blocks)
        assert len(blocks) < len(sizes) / 4

    def test_storages_that_share_a_block_are_written_as_if_each_had_its_own(self, pinned):
        """A file has the bytes of a storage, so it must not have those of the whole block."""
        weight = torch.arange(3000.0).reshape(60, 50)
        tree = {"weight": weight, "turned": weight.t(), "half": torch.ones(700, dtype=torch.bfloat16)}
        tree |= {str(size): torch.randn(size) for size in (1, 130, 513, 2000)} | {"empty": torch.empty(0)}
        tree["wrapper"] = TwoTensor(torch.arange(6.0), torch.full((6,), 2.0))
        host_copy = HostCopy()
        expected_bytes = host_copy.bytes_to_allocate(tree)
        copied = host_copy.take(tree)
        assert sum(pinned) == expected_bytes
        assert len(pinned) < len(tree)
        assert saved_bytes(copied) == saved_bytes(tree)
        for tensor in (weight, tree["half"], tree["wrapper"].a):
            tensor.zero_()
        assert torch.equal(copied["weight"], torch.arange(3000.0).reshape(60, 50))
        assert copied["half"].eq(1).all()
        assert copied["wrapper"].a.tolist() == [0, 1, 2, 3, 4, 5]

    def test_blocks_are_reused_for_the_same_state_and_replaced_for_a_larger_one(self, pinned):
        host_copy = HostCopy()
        state = [torch.randn(size) for size in (3000, 700, 700, 90, 5000)]
        pointers = [tensor.data_ptr() for tensor in host_copy.take(state)]
        for copies in (host_copy.take(state), host_copy.take([tensor.clone() for tensor in state])):
            assert [tensor.data_ptr() for tensor in copies] == pointers
            assert all(map(torch.equal, copies, state))
        assert pinned == [2**20]
        larger = [*state, torch.randn(2**18 + 1)]
        assert host_copy.bytes_to_allocate(larger) == 2**21
        assert all(map(torch.equal, host_copy.take(larger), larger))
        assert pinned == [2**20, 2**21]
        assert host_copy.take([larger[-1]])[0].eq(larger[-1]).all()
        assert [block.numel() for block in host_copy._memory[True]._memory] == [2**21]  # the other one is freed

    def test_many_storages_take_time_in_proportion(self, monkeypatch):
        """A full block is not looked at again. Without a GPU each storage has a block of its own."""

        class Counted(host_copies._Block):
            reads = 0
            left = property(lambda self: self.read(), lambda self, value: setattr(self, "space", value))

            def read(self):
                Counted.reads += 1
                return self.space

        monkeypatch.setattr(host_copies, "_Block", Counted)
        state = [torch.zeros(size) for size in range(1, 1001)]
        host_copy = HostCopy()
        for _ in range(2):
            host_copy.take(state)
        assert Counted.reads <= 2 * 6 * len(state)

    @pytest.mark.parametrize("in_a_dtensor", [False, True])
    def test_a_tensor_that_wraps_others_is_copied_with_what_it_wraps(self, in_a_dtensor):
        """torchao's quantized weights and optimizer states are such tensors: they have no storage of their own."""
        inner = torch.arange(6.0), torch.full((6,), 2.0)
        wrapper: torch.Tensor = TwoTensor(*inner)
        with one_rank_mesh() if in_a_dtensor else nullcontext() as mesh:
            if mesh is not None:
                wrapper = DTensor.from_local(wrapper, mesh, [Replicate()])
            host_copy = HostCopy()
            assert host_copy.bytes_to_allocate({"state": wrapper}) == 2 * 6 * 4
            copied = host_copy.take({"state": wrapper})["state"]
            assert host_copy.bytes_to_allocate({"state": wrapper}) == 0
        assert type(copied) is type(wrapper)
        local = copied.to_local() if in_a_dtensor else copied
        assert type(local) is TwoTensor
        for tensor in inner:
            tensor.add_(100)
        assert local.a.tolist() == [0, 1, 2, 3, 4, 5]
        assert local.b.tolist() == [2] * 6

    def test_large_tensors_are_copied_by_several_threads(self, monkeypatch):
        monkeypatch.setattr("hfscale.checkpoint.host_copy._SLICE_BYTES", 1000)
        monkeypatch.setattr("hfscale.checkpoint.host_copy._copy_threads", lambda: 3)
        tensors = {str(size): torch.randn(size) for size in (1, 250, 251, 5003)}
        copied = HostCopy().take(tensors)
        assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_the_quantized_states_of_torchao_are_saved_in_the_background_and_resumed(tmp_path, optim):
    pytest.importorskip("torchao", reason="needs torchao: pip install torchao")

    def trained(steps, **options):
        callback = SpotCheckpointCallback()
        model = tiny_model(hidden_size=64, intermediate_size=128)  # smaller weights keep states of 32 bits
        arguments = {"optim": optim, "save_strategy": "steps", "save_steps": 2, "max_steps": steps}
        trainer = tiny_trainer(tmp_path, callback, model=model, **arguments, **options)
        trainer.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
        return trainer

    unbroken = trained(4)
    states = [value for state in unbroken.optimizer.state_dict()["state"].values() for value in state.values()]
    assert any(type(value).__name__.startswith("OptimState") for value in states)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trained(4)
    assert resumed.state.global_step == 4
    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


def test_each_file_belongs_to_one_rank():
    assert rank_of_file("rng_state_1.pth", 2) == 1
    assert rank_of_file("pytorch_model_fsdp_0/__1_0.distcp", 2) == 1
    assert rank_of_file("global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 2) == 1
    assert rank_of_file("global_step4/mp_rank_00_model_states.pt", 2) == 0
    assert rank_of_file("model-00001-of-00002.safetensors", 2) == 0
    assert rank_of_file("rng_state_7.pth", 2) == 0  # no such rank: rank 0 takes it


def test_trainer_has_the_private_methods_that_are_replaced():
    """If a version of transformers moves one of them, this test names it."""
    import inspect

    assert "self._save_checkpoint(model, trial)" in inspect.getsource(Trainer._maybe_log_save_evaluate)
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "self._get_output_dir(trial=trial)" in source
    for name in WRITING_METHODS:
        assert hasattr(Trainer, name)
    assert list(inspect.signature(Trainer._get_output_dir).parameters) == ["self", "trial"]


def content(value):
    """Return `value` with each tensor as its dtype, shape and bytes, and each object as its attributes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): content(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [content(item) for item in value]
    return content(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else repr(value)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp2", *(pytest.param(name, marks=pytest.mark.faults) for name in ("zero1", "zero2", "zero3"))],
)
@pytest.mark.long
def test_two_ranks_write_the_files_that_trainer_writes(tmp_path, launch, strategy):
    """For full training and LoRA; then rank 1 cannot write, and both ranks end with the same error."""
    shutil.copytree(REPOSITORY / "ds_configs", tmp_path / "ds_configs")
    config = REPOSITORY / "accelerate_configs" / f"{strategy}.yaml"
    done = launch(2, REPOSITORY / "tests" / "workers" / "async_saving.py", config=config)
    assert done.code == 0, done.err[-3000:]
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for kind in ("full",) if strategy.startswith("zero") else ("full", "lora"):
        assert results[0]["modes"][f"{kind}-True"] is None
        folders = [tmp_path / f"{kind}-{mode}" / "run" / "checkpoint-2" for mode in (True, False)]
        ours, trainers = map(verify, folders)
        assert (ours.strategy, ours.world_size) == (strategy, 2)
        assert len(ours.files) >= 7
        assert set(ours.files) == set(trainers.files)
        for name, record in ours.files.items():
            if name.endswith(".metadata"):  # torch writes a random id into it
                assert record.bytes == trainers.files[name].bytes
            elif name.endswith("_states.pt"):  # DeepSpeed's older format of torch.save holds memory addresses
                loaded = [torch.load(folder / name, weights_only=False) for folder in folders]
                assert content(loaded[0]) == content(loaded[1]), name
                assert len(content(loaded[0])) > 1
            else:
                assert record == trainers.files[name], name
    for result, kind in zip(results, ("RuntimeError", "AttributeError"), strict=True):
        assert result["defect"].startswith(f"{kind}: ")
        assert "has no attribute 'nothing'" in result["defect"]
    for step in (2, 4):
        files = verify(tmp_path / "more" / "run" / f"checkpoint-{step}").files
        assert set(files) >= {f"{name}_{rank}.txt" for name in ("before", "after", "model") for rank in (0, 1)}
    assert results[0]["failure"] == results[1]["failure"]
    assert results[0]["failure"].startswith("checkpoint-4 could not be written on rank 1: ")
    assert saved_steps(tmp_path / "failing" / "run") == []
