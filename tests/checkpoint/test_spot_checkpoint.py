"""SpotCheckpointCallback in Trainers: cadence, commit, rotation, resume and status."""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import REPOSITORY
from tiny import logged, tiny_model, tiny_trainer
from transformers import TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint import writer
from hfscale.checkpoint.store import verify
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError, StorageError, UsageError


class Pause(TrainerCallback):
    """Makes every step take `seconds`."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(self.seconds)


class Interrupt(TrainerCallback):
    """Raises at the end of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("simulated failure")


class InterruptSave(TrainerCallback):
    """Raises at the end of Trainer's own save."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("simulated failure")


def saved_steps(output_dir):
    numbers = [path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")]
    return sorted(int(number) for number in numbers if number.isdigit())


def status(output_dir):
    return json.loads((Path(output_dir) / "hfscale_status.json").read_text())


def test_checkpoints_follow_save_steps_and_are_committed(tmp_path):
    tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=2, max_steps=5).train()
    assert saved_steps(tmp_path) == [2, 4, 5]
    for step in (2, 4, 5):
        manifest = verify(tmp_path / f"checkpoint-{step}")
        assert (manifest.step, manifest.strategy, manifest.world_size) == (step, "single", 1)
        assert manifest.global_batch_size == 4
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= set(manifest.files)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


def test_save_steps_may_be_a_share_of_all_steps(tmp_path):
    tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=0.5, max_steps=6).train()
    assert saved_steps(tmp_path) == [3, 6]


def test_every_steps_adds_to_another_save_strategy(tmp_path):
    callback = SpotCheckpointCallback(every_steps=3)
    tiny_trainer(tmp_path, callback, save_strategy="epoch", max_steps=7).train()
    assert saved_steps(tmp_path) == [3, 6, 7]  # 7: the end of the epoch


class RecordSaves(TrainerCallback):
    """Records the steps that are saved, and writes a file into each checkpoint."""

    def __init__(self):
        self.steps = []

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        assert {"model.safetensors", "trainer_state.json", MANIFEST_NAME} <= {
            path.name for path in checkpoint.iterdir()
        }
        (checkpoint / "added.txt").write_text("added")


@pytest.mark.timing
def test_minutes_decide_when_steps_are_slow(tmp_path):
    callback = SpotCheckpointCallback(every_steps=1000, every_minutes=0.3 / 60)
    saves = RecordSaves()
    tiny_trainer(tmp_path, callback, Pause(0.1), saves, save_strategy="steps", max_steps=10).train()
    steps = saves.steps
    assert 2 <= len(steps) - 1 <= 4, steps  # Trainer saves the last step
    assert all(2 <= later - earlier <= 5 for earlier, later in pairwise(steps[:-1]))


def test_without_minutes_only_steps_count(tmp_path):
    callback = SpotCheckpointCallback(every_steps=1000, every_minutes=None)
    tiny_trainer(tmp_path, callback, Pause(0.05), save_strategy="epoch", max_steps=4).train()
    assert saved_steps(tmp_path) == [4]  # the end of the epoch


def test_save_strategy_no_saves_nothing(tmp_path):
    tiny_trainer(tmp_path, SpotCheckpointCallback(every_steps=1), save_strategy="no").train()
    assert saved_steps(tmp_path) == []
    assert status(tmp_path) == {"status": "completed", "step": 4, "checkpoint": None, "reason": None}


@pytest.mark.parametrize(
    "bad", [{"every_steps": 0}, {"every_steps": -1}, {"every_minutes": 0}, {"every_minutes": -2.0}]
)
def test_a_cadence_that_is_not_positive_is_an_error(bad):
    with pytest.raises(UsageError, match="must be greater"):
        SpotCheckpointCallback(**bad)


class TestRotation:
    def test_follows_save_total_limit(self, tmp_path):
        trainer = tiny_trainer(
            tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=5
        )
        trainer.train()
        assert saved_steps(tmp_path) == [4, 5]

    @pytest.mark.parametrize(
        ("strategy", "limit"), [("steps", 1), ("steps", 2), ("best", 1), ("best", 2), ("epoch", 2), ("best", None)]
    )
    def test_the_checkpoints_at_the_end_are_those_of_trainer(self, tmp_path, monkeypatch, strategy, limit):
        """A greater loss is "better", so that an early checkpoint is the best; temporary ones are saved between."""
        monkeypatch.setattr("hfscale.checkpoint.cadence.DEFAULT_EVERY_STEPS", 1)
        left = []
        for name in ("plain", "ours"):
            spot = SpotCheckpointCallback(every_minutes=1e-9)
            trainer = tiny_trainer(
                tmp_path / name,
                *([spot] if name == "ours" else []),
                save_strategy=strategy,
                save_steps=2,
                save_total_limit=limit,
                max_steps=8,
                per_device_train_batch_size=16,
                eval_strategy=strategy if strategy != "best" else "steps",
                eval_steps=2,
                metric_for_best_model="loss",
                greater_is_better=True,
                load_best_model_at_end=strategy != "epoch",
                learning_rate=0.1,
            )
            trainer.train()
            # Before transformers 5.4, Trainer notes no best checkpoint with save_strategy best.
            left.append((saved_steps(tmp_path / name), Path(trainer.state.best_model_checkpoint or "none").name))
        assert left[0] == left[1]
        assert status(tmp_path / "ours")["checkpoint"] == f"checkpoint-{left[1][0][-1]}"

    def test_each_trial_of_a_search_obeys_the_limit(self, tmp_path):
        earlier = tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=2)
        earlier.train()
        (tmp_path / "run-0" / "checkpoint-4").mkdir(parents=True)
        (tmp_path / "run-0" / "checkpoint-4" / "stale.txt").write_text("of an earlier search")
        arguments = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "eval_strategy": "epoch"}
        search = tiny_trainer(tmp_path, SpotCheckpointCallback(), **arguments)
        search.model_init = lambda: tiny_model()
        search.hyperparameter_search(
            hp_space=lambda trial: {"weight_decay": trial.suggest_float("weight_decay", 0.0, 0.1)},
            n_trials=2,
            backend="optuna",
        )
        assert [saved_steps(tmp_path / f"run-{trial}") for trial in (0, 1)] == [[3, 4], [3, 4]]
        assert not (tmp_path / "run-0" / "checkpoint-4" / "stale.txt").exists()
        assert saved_steps(tmp_path) == [2, 4]

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_failure_before_the_commit_leaves_the_previous_checkpoint(self, tmp_path, monkeypatch, asynchronous):
        write, names = writer.write_atomically, []

        def fail_second_time(path, text):
            names.append(path.name)
            if len(names) > 1:
                raise OSError("simulated failure")
            write(path, text)

        monkeypatch.setattr(writer, "write_atomically", fail_second_time)
        spot = SpotCheckpointCallback(asynchronous=asynchronous)
        trainer = tiny_trainer(tmp_path, spot, save_strategy="steps", save_steps=1, save_total_limit=1)
        with pytest.raises(StorageError, match="simulated failure"):
            trainer.train()
        assert names == [MANIFEST_NAME] * 2
        assert saved_steps(tmp_path) == [1]
        assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")

    def test_without_the_callback_no_verified_checkpoint_is_left(self, tmp_path):
        """The control: Trainer deletes the old checkpoint inside its save, and cannot tell if the new is complete."""
        trainer = tiny_trainer(tmp_path, InterruptSave(2), save_strategy="steps", save_steps=1, save_total_limit=1)
        with pytest.raises(RuntimeError, match="simulated failure"):
            trainer.train()
        assert saved_steps(tmp_path) == [2]
        with pytest.raises(CheckpointError, match="it has no hfscale_manifest"):
            verify(tmp_path / "checkpoint-2")


class TestResume:
    def test_losses_are_bitwise_those_of_the_uninterrupted_run(self, tmp_path):
        arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "linear"}
        uninterrupted = tiny_trainer(tmp_path / "uninterrupted", SpotCheckpointCallback(), **arguments)
        uninterrupted.train()
        interrupted = tiny_trainer(tmp_path / "run", SpotCheckpointCallback(), Interrupt(5), **arguments)
        with pytest.raises(RuntimeError, match="simulated failure"):
            interrupted.train()
        resumed = tiny_trainer(tmp_path / "run", SpotCheckpointCallback(), **arguments)
        resumed.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "run"))
        assert resumed.state.global_step == 6
        assert logged(resumed, "loss") == logged(uninterrupted, "loss")

    def test_waits_for_a_save_that_an_interrupted_training_left_in_flight(self, tmp_path, monkeypatch):
        write, go = writer.write_atomically, threading.Event()

        def slow(path, text):
            go.wait(120)
            write(path, text)

        arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        interrupted = tiny_trainer(tmp_path, SpotCheckpointCallback(), Interrupt(3), **arguments)
        monkeypatch.setattr(writer, "write_atomically", slow)
        with pytest.raises(RuntimeError, match="simulated failure"):
            interrupted.train()
        assert saved_steps(tmp_path) == []
        threading.Timer(0.5, go.set).start()
        resumed = tiny_trainer(tmp_path, SpotCheckpointCallback(), **arguments)
        assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
        resumed.train(resume_from_checkpoint=True)
        assert (len(logged(resumed, "loss")), saved_steps(tmp_path)) == (
            4,
            [2, 4],
        )  # two records of the log are of the first training

    def test_resumes_from_a_checkpoint_of_a_run_without_the_callback(self, tmp_path):
        """transformers' ExportableState fails here with a KeyError at the next save."""
        tiny_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
        resumed = tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=2, max_steps=6)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")

    def test_checkpoints_of_later_steps_are_archived(self, tmp_path):
        arguments = {"save_strategy": "steps", "save_steps": 2}
        tiny_trainer(tmp_path, SpotCheckpointCallback(), **arguments).train()
        tiny_trainer(tmp_path, SpotCheckpointCallback(), **(arguments | {"max_steps": 3})).train()  # from scratch
        assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
        assert (tmp_path / "checkpoint-4.superseded" / MANIFEST_NAME).is_file()

    def test_without_hfscale_the_checkpoint_still_loads(self, tmp_path):
        tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=2).train()
        plain = tiny_trainer(tmp_path, max_steps=6)
        plain.train(resume_from_checkpoint=True)
        assert plain.state.global_step == 6


def test_a_temporary_checkpoint_is_replaced_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("hfscale.checkpoint.cadence.DEFAULT_EVERY_STEPS", 1)
    arguments = {"save_strategy": "epoch", "max_steps": 8, "per_device_train_batch_size": 16}
    saves, seen = RecordSaves(), []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(saved_steps(tmp_path))

    spot = SpotCheckpointCallback()
    interrupted = tiny_trainer(tmp_path, spot, Look(), saves, Interrupt(7), **arguments)
    with pytest.raises(RuntimeError, match="simulated failure"):
        interrupted.train()
    assert saves.steps == [1, 2, 3, 4, 4, 5, 6]  # an epoch has 4 steps
    assert seen == [[], [1], [2], [3], [4], [4, 5], [4, 6]]
    assert "added.txt" in verify(tmp_path / "checkpoint-6").files
    resumed = tiny_trainer(tmp_path, SpotCheckpointCallback(), **arguments)
    resumed.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
    assert saved_steps(tmp_path) == [4, 8]


class Release(TrainerCallback):
    """Lets the saves of steps 2, 4 and 5 end when training has gone on, and waits for their end."""

    def __init__(self, event, spot):
        self.event, self.spot = event, spot

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step in (2, 4):
            self.event.set()
            self.spot._wait()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.event.set()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_cost_of_a_save_is_logged_once(tmp_path, monkeypatch, asynchronous):
    commit, goes_on, took_s = writer._commit, threading.Event(), 0.2

    def slowly(*args, **kwargs):
        if asynchronous:
            assert goes_on.wait(60)
            goes_on.clear()
        time.sleep(took_s)
        return commit(*args, **kwargs)

    monkeypatch.setattr(writer, "_commit", slowly)
    spot = SpotCheckpointCallback(asynchronous=asynchronous)
    trainer = tiny_trainer(tmp_path, Release(goes_on, spot), spot, save_strategy="steps", save_steps=2, max_steps=5)
    trainer.train()
    stalls, sizes = logged(trainer, "checkpoint/stall_s"), logged(trainer, "checkpoint/bytes")
    assert len(stalls) == len(sizes) == 3  # steps 2 and 4 in the logs of 3 and 5, step 5 in the final record
    folder = tmp_path / "checkpoint-5"
    assert sizes[-1] == sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST_NAME)
    assert all(took_s < write < 30 for write in logged(trainer, "checkpoint/write_s"))
    # In the background, a commit begins only when training has gone on: with it, a stall would last 60 s.
    assert all((0 if asynchronous else took_s) < stall < 30 for stall in stalls)


class TestStatus:
    def test_contains_no_checkpoint_of_another_folder(self, tmp_path):
        tiny_trainer(tmp_path / "a", SpotCheckpointCallback(), save_strategy="steps", save_steps=2).train()
        seen = []

        class Look(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(status(tmp_path / "b")["checkpoint"])

        resumed = tiny_trainer(tmp_path / "b", SpotCheckpointCallback(), Look(), save_strategy="steps", save_steps=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
        assert seen == [None, None]

    def test_completed(self, tmp_path):
        tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=3).train()
        assert status(tmp_path) == {"status": "completed", "step": 4, "checkpoint": "checkpoint-4", "reason": None}

    def test_running_contains_the_last_commit(self, tmp_path):
        seen = []

        class Look(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(status(tmp_path))

        spot = SpotCheckpointCallback(asynchronous=False)
        tiny_trainer(tmp_path, spot, Look(), save_strategy="steps", save_steps=2).train()
        assert [entry["status"] for entry in seen] == ["running"] * 4
        assert [entry["checkpoint"] for entry in seen] == [None, None, "checkpoint-2", "checkpoint-2"]

    def test_failed_contains_the_reason(self, tmp_path, python):
        done = python(REPOSITORY / "tests" / "workers" / "failing.py")
        assert done.code == 1
        assert status(tmp_path / "out") == {
            "status": "failed",
            "step": 3,
            "checkpoint": "checkpoint-2",
            "reason": "RuntimeError: simulated failure",
        }

    def test_failed_before_the_process_ends(self, tmp_path):
        trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), Interrupt(3))
        with pytest.raises(RuntimeError, match="simulated"):
            trainer.train()
        expected = {"status": "failed", "step": 3, "checkpoint": None, "reason": "RuntimeError: simulated failure"}
        assert status(tmp_path) == expected

    def test_failed_during_a_save_stays_failed_when_the_save_is_committed(self, tmp_path, monkeypatch):
        commit, go = writer._commit, threading.Event()

        def slowly(*args, **kwargs):
            go.wait(120)
            return commit(*args, **kwargs)

        monkeypatch.setattr(writer, "_commit", slowly)
        spot = SpotCheckpointCallback()
        trainer = tiny_trainer(tmp_path, spot, Interrupt(3), save_strategy="steps", save_steps=2)
        with pytest.raises(RuntimeError, match="simulated"):
            trainer.train()
        assert (status(tmp_path)["status"], status(tmp_path)["checkpoint"]) == ("failed", None)
        go.set()
        spot._wait()
        assert status(tmp_path) == {
            "status": "failed",
            "step": 3,
            "checkpoint": "checkpoint-2",
            "reason": "RuntimeError: simulated failure",
        }

    @pytest.mark.long
    def test_a_failure_does_not_overwrite_the_status_of_a_later_training(self, tmp_path, python):
        done = python(REPOSITORY / "tests" / "workers" / "failing.py", "again")
        assert done.code == 0
        assert status(tmp_path / "out")["status"] == "completed"
