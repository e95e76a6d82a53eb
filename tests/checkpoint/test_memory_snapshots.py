"""Snapshots in host memory under `hfscale run`: the newest is resumed from; they neither end nor change a run."""

import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from transformers import Trainer, TrainerCallback

from hfscale import ScalingCallback, SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint import memory_snapshots
from hfscale.checkpoint.memory_snapshots import MAX_COST, MemorySnapshots
from hfscale.checkpoint.writer import finish_renames
from hfscale.core import rank_link
from hfscale.core.records import read_events
from hfscale.core.recovery_times import RECOVERY_PARTS
from hfscale.core.run_memory import FOLDER_VARIABLE, INTERVAL_VARIABLE, NODES_VARIABLE, RunMemory
from hfscale.errors import StrategyMismatchError, UsageError
from hfscale.recovery.replicas import keep_only


class Killed(BaseException):
    """Ends a training as a signal would, in one process."""


class EndAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The memory of a supervised run whose supervisor takes every message."""
    memory = RunMemory.create(tmp_path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(memory.socket))
    listener.listen()
    monkeypatch.setenv(FOLDER_VARIABLE, str(memory.folder))
    monkeypatch.setenv(INTERVAL_VARIABLE, "1")
    monkeypatch.setattr(rank_link, "_link", None)
    messages = []

    def take():
        connection, _ = listener.accept()
        while text := connection.recv(65536):
            messages.append(text.decode())

    threading.Thread(target=take, daemon=True).start()
    memory.messages = messages
    yield memory
    listener.close()
    memory.delete()


def trainer(output_dir, *callbacks, kind=Trainer, **arguments):
    arguments = {
        "max_steps": 10,
        "save_steps": 4,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "eval_steps": 3,
    } | arguments
    return kind(
        model=tiny_model(attention_dropout=0.1),
        args=tiny_arguments(output_dir, **arguments),
        train_dataset=RandomTokens(64),
        eval_dataset=RandomTokens(8),
        callbacks=[SpotCheckpointCallback(), *callbacks],
    )


def snapshots(memory, output_dir):
    return sorted(path.name for path in memory.snapshots(output_dir).glob("checkpoint-*"))


def logged(run):
    return [{k: v for k, v in row.items() if k in ("step", "loss", "eval_loss")} for row in run.state.log_history]


def test_the_newest_snapshot_is_resumed_from_and_the_losses_are_the_same(memory, tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    broken = trainer(tmp_path / "broken", EndAt(7))
    with pytest.raises(Killed):
        broken.train()
    finish_renames(memory.snapshots(tmp_path / "broken"))  # waits for the thread that a killed process would not have
    found = latest_checkpoint(tmp_path / "broken")
    assert Path(found) == memory.snapshots(tmp_path / "broken") / "checkpoint-7"
    resumed = trainer(tmp_path / "broken")
    resumed.train(resume_from_checkpoint=found)
    assert logged(resumed)[:-1] == logged(whole)[:-1]  # the last record is the average since the resume
    assert resumed.state.best_model_checkpoint == broken.state.best_model_checkpoint


def test_only_the_newest_snapshot_is_kept_and_the_output_directory_has_none(memory, tmp_path):
    trainer(tmp_path / "out").train()
    assert snapshots(memory, tmp_path / "out") == ["checkpoint-10"]
    assert sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-4",
        "checkpoint-8",
    ]


def test_the_next_training_of_the_process_frees_the_memory_of_the_last(memory, tmp_path):
    trainer(tmp_path / "one", max_steps=2).train()
    trainer(tmp_path / "two", max_steps=2).train()
    assert snapshots(memory, tmp_path / "one") == []
    assert snapshots(memory, tmp_path / "two") == ["checkpoint-2"]


def test_without_a_supervisor_there_is_no_snapshot(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    run = trainer(tmp_path / "out", max_steps=1)
    run.train()
    assert "_maybe_log_save_evaluate" not in vars(run)


def test_a_full_memory_pauses_the_snapshots_and_does_not_end_the_training(memory, tmp_path, caplog):
    folder = memory.snapshots(tmp_path / "out")
    folder.mkdir()
    (folder / ".unfinished").write_text("in the way")

    class Block(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:
                (folder / ".unfinished").touch()  # clear_unfinished may have removed it

    run = trainer(tmp_path / "out", Block(), max_steps=5)
    run.train()
    assert run.state.global_step == 5
    assert sum("no snapshots in host memory from step 2 to 18: " in record.message for record in caplog.records) == 1
    assert snapshots(memory, tmp_path / "out") == []
    assert not (folder / ".unfinished").is_dir()


def test_the_supervisor_hears_of_a_rank_whose_trainer_cannot_be_made(memory, tmp_path, monkeypatch):
    """An error that would come back is not to be tried again, and only the rank knows that it is one."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(StrategyMismatchError, match="its launcher started one"):
        tiny_trainer(tmp_path, ScalingCallback())
    assert rank_link._link is not None


def test_snapshots_that_do_not_fit_are_not_taken(memory, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(memory_snapshots, "available_bytes", lambda: 100_000)
    trainer(tmp_path / "out", max_steps=2).train()
    assert snapshots(memory, tmp_path / "out") == []
    assert any("2 of them need" in record.message for record in caplog.records)


@pytest.mark.parametrize("reason", ["no room at the start", "a snapshot that cannot be written"])
def test_snapshots_are_tried_again_after_a_pause(memory, tmp_path, caplog, monkeypatch, reason):
    """There is no room during two steps, at the start or in the middle."""
    folder, first = memory.snapshots(tmp_path / "out"), 0 if reason == "no room at the start" else 5
    monkeypatch.setattr(memory_snapshots, "_FIRST_PAUSE_STEPS", 3)
    available, is_full = memory_snapshots.available_bytes, [first == 0]
    monkeypatch.setattr(memory_snapshots, "available_bytes", lambda: 0 if is_full[0] else available())
    seen = {}

    class Fill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            finish_renames(folder)
            seen[state.global_step] = snapshots(memory, tmp_path / "out")
            if first and state.global_step == first:
                shutil.rmtree(folder / ".unfinished", ignore_errors=True)
                (folder / ".unfinished").write_text("in the way")
                is_full[0] = True
            if state.global_step == first + 5:
                (folder / ".unfinished").unlink(missing_ok=True)
                is_full[0] = False

    run = trainer(tmp_path / "out", Fill(), max_steps=20)
    run.train()
    assert run.state.global_step == 20
    messages = [record.message for record in caplog.records if "snapshots in host memory" in record.message]
    begin = 0 if first == 0 else 7  # the failure of step 6 is noticed after step 7
    paused = [message.partition(": ")[0].rpartition("from step ")[2] for message in messages if "no " in message]
    assert paused == [f"{begin} to {begin + 3}", f"{begin + 3} to {begin + 9}"]  # the second while there is no room
    assert sum("taken again" in message for message in messages) == 1
    kept = ["checkpoint-5"] if first else []
    assert all(found == kept for step, found in seen.items() if first < step < first + 9)
    assert snapshots(memory, tmp_path / "out") == ["checkpoint-20"]


def test_a_start_without_room_keeps_the_snapshot_that_it_resumes_from(memory, tmp_path, monkeypatch):
    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(Killed):
        trainer(tmp_path / "broken", EndAt(7)).train()
    finish_renames(memory.snapshots(tmp_path / "broken"))
    monkeypatch.setattr(memory_snapshots, "available_bytes", lambda: 0)
    resumed = trainer(tmp_path / "broken")
    resumed.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "broken"))
    assert logged(resumed)[:-1] == logged(whole)[:-1]  # also the random states, which are read when training has begun
    assert snapshots(memory, tmp_path / "broken") == ["checkpoint-7"]


def test_the_expected_size_is_about_that_of_a_snapshot(memory, tmp_path):
    run = trainer(tmp_path / "out", max_steps=2)
    run.train()
    (snapshot,) = memory.snapshots(tmp_path / "out").glob("checkpoint-*")
    written = sum(file.stat().st_size for file in snapshot.iterdir() if file.suffix in (".safetensors", ".pt"))
    size = sum(p.numel() * (p.element_size() + 12) for p in run.model.parameters())
    assert 0.7 * size < written < 1.2 * size


def test_a_trainer_that_saves_by_itself_has_no_snapshots(memory, tmp_path, caplog):
    class Own(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)

    trainer(tmp_path / "out", kind=Own, max_steps=2).train()
    assert snapshots(memory, tmp_path / "out") == []
    assert any("Own has its own _save_checkpoint" in record.message for record in caplog.records)


def test_the_best_checkpoint_is_one_of_the_output_directory(memory, tmp_path):
    run = trainer(
        tmp_path / "out", EndAt(7), save_steps=3, load_best_model_at_end=True, metric_for_best_model="eval_loss"
    )
    with pytest.raises(Killed):
        run.train()
    assert Path(run.state.best_model_checkpoint).parent == tmp_path / "out"


def test_the_interval_of_the_callback_holds_unless_the_supervisor_has_one(memory, tmp_path, monkeypatch):
    class Steps(TrainerCallback):
        def __init__(self):
            self.seen = set()

        def on_step_end(self, *args, **kwargs):
            self.seen.update(snapshots(memory, args[0].output_dir))

    def run(output_dir):
        steps = Steps()
        callbacks = [SpotCheckpointCallback(asynchronous=False, memory_interval_steps=4), steps]
        arguments = tiny_arguments(output_dir, max_steps=10, save_strategy="steps", save_steps=100)
        Trainer(model=tiny_model(), args=arguments, train_dataset=RandomTokens(64), callbacks=callbacks).train()
        return steps.seen

    assert len(run(tmp_path / "supervisor")) > 5
    monkeypatch.delenv(INTERVAL_VARIABLE)
    assert run(tmp_path / "callback") == {"checkpoint-4", "checkpoint-8"}


def train_supervised(folder, intervals):
    """Train on one rank of each of two nodes, whose supervisors give them these intervals."""
    rank = os.environ["RANK"]
    memory = RunMemory.create(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(memory.socket))
        listener.listen()
        os.environ |= {FOLDER_VARIABLE: str(memory.folder), NODES_VARIABLE: "2", "LOCAL_RANK": "0"}
        os.environ |= {"LOCAL_WORLD_SIZE": "1", INTERVAL_VARIABLE: intervals[int(rank)]}
        trainer(folder / "out", max_steps=4).train()


@pytest.mark.world(2)
def test_intervals_that_differ_between_nodes_are_refused_on_all_ranks(tmp_path):
    codes = run_ranks(2, train_supervised, tmp_path, ["1", "3"], log=tmp_path / "logs", ends_all=False)
    logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert 0 not in codes
    assert all("--memory-interval-steps differs: 1 on rank 0, 3 on rank 1" in log for log in logs), logs


@pytest.mark.world(2)
def test_a_snapshot_that_has_not_been_copied_is_not_replaced(tmp_path):
    """No supervisor copies the first one to the other node, which a restart after the loss of a node needs."""
    assert run_ranks(2, train_supervised, tmp_path, ["1", "1"], log=tmp_path / "logs") == [0, 0]
    kept = [path.name for path in tmp_path.rglob("checkpoint-*") if not path.is_relative_to(tmp_path / "out")]
    assert kept == ["checkpoint-1", "checkpoint-1"]


@pytest.mark.parametrize("value", ["0", "-1", "often"])
def test_an_interval_in_the_environment_that_is_no_number_of_steps_is_refused(monkeypatch, value):
    monkeypatch.setenv(INTERVAL_VARIABLE, value)
    with pytest.raises(UsageError, match=f"{INTERVAL_VARIABLE} is '{value}'"):
        MemorySnapshots()._forced_interval()


def test_an_interval_below_one_step_is_refused():
    with pytest.raises(UsageError, match="memory_interval_steps is 0"):
        SpotCheckpointCallback(memory_interval_steps=0)


class SeenSamples(Trainer):
    """Compares the samples that are recorded for each step with those that the model gets."""

    def get_batch_samples(self, *args, **kwargs):
        self.got = []
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model, inputs, *args, **kwargs):
        self.got.append(inputs["input_ids"])
        return super().training_step(model, inputs, *args, **kwargs)


class CompareSamples(TrainerCallback):
    def __init__(self, memory):
        self.memory, self.steps = memory, []

    def on_step_end(self, args, state, control, **kwargs):
        recorded = self.memory.samples_of(state.global_step)
        got, rows = torch.cat(self.run.got), self.run.train_dataset.rows
        assert torch.equal(rows[recorded["0"]], got)
        self.steps.append(state.global_step)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.long
def test_the_samples_of_each_step_are_recorded_also_after_a_resume(memory, tmp_path, workers):
    for resume in (None, True):
        compare = CompareSamples(memory)
        options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
        end = 8 if resume is None else 14  # a pass has 11 steps, and its last step one batch of 3 and one of 1
        run = trainer(
            tmp_path / "out",
            EndAt(end),
            compare,
            kind=SeenSamples,
            max_steps=15,
            dataloader_num_workers=workers,
            **options,
        )
        compare.run = run
        with pytest.raises(Killed):
            run.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "out") if resume else None)
        finish_renames(memory.snapshots(tmp_path / "out"))
        assert compare.steps == list(range(1, 9) if resume is None else range(9, 15))
        sampler = run.callback_handler.train_dataloader.base_dataloader.batch_sampler
        assert type(sampler).__module__.startswith(("torch", "accelerate"))  # its class is put back


def test_the_samples_of_an_iterable_dataset_are_unknown(memory, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from map(RandomTokens(64).__getitem__, range(64))

    run = trainer(tmp_path / "out", max_steps=2)
    run.train_dataset = Stream()
    run.train()
    assert memory.samples_of(2) == {}


def test_the_supervisor_hears_of_the_training(memory, tmp_path):
    trainer(tmp_path / "out", max_steps=2).train()
    until = time.monotonic() + 60
    while "trained" not in (memory.messages or [""])[-1] and time.monotonic() < until:
        time.sleep(0.01)  # another thread reads them
    events = [text.split('"')[3] for text in memory.messages]
    assert events == ["hello", "training", "stepped", "trained"]
    assert memory.furthest() == (2, 2)


def test_the_timeline_and_the_first_log_have_the_recovery_that_the_supervisor_hears_of(memory, tmp_path):
    now = time.monotonic()
    failed = {"failed_monotonic": now - 3.0, "ended_monotonic": now - 2.0, "completed_step": 4, "rank": 1}
    memory.write_failure(failed | {"reason": "a bad day"})
    run = trainer(tmp_path / "out", max_steps=4, logging_steps=2)
    run.train()
    until = time.monotonic() + 60
    while not any('"stepped"' in text for text in memory.messages) and time.monotonic() < until:
        time.sleep(0.01)  # another thread reads them
    (recovery,) = [json.loads(text)["recovery"] for text in memory.messages if '"stepped"' in text]
    (event,) = [event for event in read_events(tmp_path / "out") if event["event"] == "recovery"]
    assert {name: event[name] for name in event if name not in ("event", "time", "step")} == recovery
    assert (event["step"], event["steps_lost"], event["rank"], event["reason"]) == (1, 4, 1, "a bad day")
    (keys,) = [log for log in run.state.log_history if "recovery/total_s" in log]
    assert keys["step"] == 2
    assert {part: keys[f"recovery/{part}"] for part in RECOVERY_PARTS} == {p: recovery[p] for p in RECOVERY_PARTS}
    assert keys["recovery/total_s"] == pytest.approx(sum(recovery[part] for part in RECOVERY_PARTS))
    assert keys["recovery/steps_lost"] == 4


@pytest.mark.parametrize(("cost_s", "write_s", "steps"), [(0.001, 0.1, 1), (0.01, 0.1, 10), (0.001, 7.3, 73)])
def test_the_interval_keeps_the_cost_low_and_leaves_time_to_write(cost_s, write_s, steps):
    memory = MemorySnapshots()
    memory._taken = 2
    assert memory._affordable(cost_s, write_s, 0.1) == steps
    assert cost_s / (steps * 0.1) <= MAX_COST * 1.0001


def test_training_waits_for_the_copies_of_a_snapshot_but_not_for_ever(tmp_path):
    snapshots = MemorySnapshots()
    snapshots._nodes, snapshots._folder, snapshots._last_step = 2, tmp_path, 7
    snapshots._wait_for_copies(time.monotonic() + 0.05)
    assert not snapshots._is_copied
    (tmp_path / "parts" / "checkpoint-7").mkdir(parents=True)
    copied = threading.Timer(0.2, keep_only, [tmp_path, 7])
    copied.start()
    snapshots._wait_for_copies(time.monotonic() + 60)
    assert snapshots._is_copied
    copied.join()
