"""Where a relaunched command resumes, and with which batch."""

import json
import math
import os
import re
import signal
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from attacks import RunsCode, link_a_folder, link_another_file
from forked_ranks import run_ranks
from safetensors.torch import load_file
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainerCallback, set_seed

from hfscale import ScalingCallback, SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint import store
from hfscale.checkpoint.loading import _earlier_data_ranks, readable_checkpoint
from hfscale.checkpoint.manifest import FileRecord, Manifest, read_manifest
from hfscale.checkpoint.preemption.stop import PreemptionStop
from hfscale.checkpoint.store import commit, list_archives, list_checkpoints, update_manifest, wait_until_visible
from hfscale.core.run_memory import FOLDER_VARIABLE, RunMemory
from hfscale.errors import CheckpointError, LayoutError, UsageError
from hfscale.recipe.resume import RESULTS_NAME, is_finished, keep_global_batch, resume_point
from hfscale.trainer.state import data_ranks, micro_batch_size


@pytest.fixture
def run(tmp_path):
    """Return a folder with the checkpoints 2 and 4 of a run of four steps."""
    tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=2).train()
    return tmp_path


def point(folder, asked):
    return resume_point(tiny_arguments(folder, resume_from_checkpoint=asked))


@pytest.mark.parametrize("asked", ["true", "True"])
def test_true_is_the_newest_verified_checkpoint_or_none(run, tmp_path, asked):
    assert point(run, asked) == str(run / "checkpoint-4")
    (run / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    assert point(run, asked) == str(run / "checkpoint-2")
    assert point(tmp_path / "empty", asked) is None


def spoil(checkpoint):
    (checkpoint / "optimizer.pt").unlink()


def test_it_stops_where_no_checkpoint_is_usable(run):
    for step in (2, 4):
        spoil(run / f"checkpoint-{step}")
    with pytest.raises(
        CheckpointError, match=r"optimizer\.pt is missing \(and 1 more\).*resume_from_checkpoint false"
    ):
        point(run, "true")
    assert point(run, "false") is None


def test_a_training_after_latest_checkpoint_does_not_archive_what_it_skipped(run, tmp_path):
    for step in (2, 4):
        spoil(run / f"checkpoint-{step}")
    resumed = tiny_trainer(run, SpotCheckpointCallback())
    with pytest.raises(CheckpointError, match="none of them is verified"):
        resumed.train(resume_from_checkpoint=latest_checkpoint(run))
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-2", "checkpoint-4"]
    (run / "checkpoint-4").rename(tmp_path / "elsewhere")
    (run / "checkpoint-2").rename(tmp_path / "moved")
    resumed.train(resume_from_checkpoint=latest_checkpoint(run))


@pytest.fixture
def plain_run(tmp_path):
    """Return a folder with the checkpoints 2 and 4 of a run of plain Trainer."""
    tiny_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    return tmp_path


def test_checkpoints_of_plain_trainer_are_used_with_a_warning(plain_run, caplog):
    found = point(plain_run, "true")
    assert found == str(plain_run / "checkpoint-4")
    assert "without hashes" in caplog.text
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    tiny_trainer(plain_run, SpotCheckpointCallback(), **arguments).train(resume_from_checkpoint=found)
    assert point(plain_run, "true") == str(plain_run / "checkpoint-6")
    assert not list_archives(plain_run)


def shorten(path):
    os.truncate(path, path.stat().st_size - 50)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: (c / "trainer_state.json").unlink(), "no trainer_state"),
        (lambda c: (c / "trainer_state.json").write_text("{"), "cannot be read"),
        (lambda c: (c / "trainer_state.json").write_text('{"global_step": 3}'), "of step 3"),
        (lambda c: shorten(c / "model.safetensors"), "not a safetensors file"),
        (lambda c: (c / "model.safetensors").unlink(), "no weights"),
        (lambda c: shorten(c / "optimizer.pt"), "not a complete file"),
        (lambda c: (c / "scheduler.pt").unlink(), "no scheduler"),
        (lambda c: (c / "latest").write_text("global_step4"), "names 'global_step4'"),
    ],
)
def test_an_incomplete_checkpoint_of_plain_trainer_is_skipped(plain_run, caplog, damage, reason):
    damage(plain_run / "checkpoint-4")
    assert point(plain_run, "true") == str(plain_run / "checkpoint-2")
    assert reason in caplog.text
    damage(plain_run / "checkpoint-2")
    if "of step 3" not in reason:
        with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be resumed from"):
            point(plain_run, "true")


def link_a_file(checkpoint):
    (checkpoint / "optimizer.pt").rename(checkpoint.with_name("elsewhere.pt"))
    (checkpoint / "optimizer.pt").symlink_to(checkpoint.with_name("elsewhere.pt"))


@pytest.mark.parametrize("kind", ["run", "plain_run"])
@pytest.mark.parametrize("link", [link_a_file, link_another_file, link_a_folder])
def test_a_link_inside_a_checkpoint_is_refused(request, kind, link):
    folder = request.getfixturevalue(kind)
    link(folder / "checkpoint-4")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        point(folder, str(folder / "checkpoint-4"))
    if kind == "run":
        assert point(folder, "true") == str(folder / "checkpoint-2")
        assert latest_checkpoint(folder) == str(folder / "checkpoint-2")
    else:
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            point(folder, "true")


def test_the_pickles_of_the_best_checkpoint_are_checked_if_it_will_be_loaded(run):
    best, newest = run / "checkpoint-2", run / "checkpoint-4"
    state = json.loads((newest / "trainer_state.json").read_text())
    (newest / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": str(best)}))
    update_manifest(newest)
    torch.save(RunsCode(run / "ran"), best / "optimizer.pt")
    update_manifest(best)
    assert point(run, "true") == str(newest)
    arguments = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
    for asked in ("true", str(newest)):
        with pytest.raises(CheckpointError, match=r"checkpoint-2/optimizer\.pt is refused"):
            resume_point(tiny_arguments(run, resume_from_checkpoint=asked, **arguments))
    assert not (run / "ran").exists()


def test_a_plain_checkpoint_of_another_strategy_is_refused(plain_run):
    (plain_run / "checkpoint-4" / "latest_universal").write_text("global_step4")
    resumed = tiny_trainer(plain_run, SpotCheckpointCallback(), max_steps=5)
    with pytest.raises(LayoutError, match=r"files of ZERO.*--to single"):
        resumed.train(resume_from_checkpoint=str(plain_run / "checkpoint-4"))


@pytest.mark.parametrize("by_hfscale", [True, False])
def test_a_checkpoint_of_fsdp2_is_refused_in_one_process_before_trainer_looks_for_its_weights(run, by_hfscale):
    """Trainer's own error says that it is supported with FSDP only, and names no way out."""
    checkpoint = run / "checkpoint-4"
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model_fsdp_0").mkdir()
    manifest = checkpoint / "hfscale_manifest.json"
    if by_hfscale:
        manifest.write_text(manifest.read_text().replace('"single"', '"fsdp2"'))
    else:
        manifest.unlink()
    trainer = tiny_trainer(run, SpotCheckpointCallback(), max_steps=5)
    with pytest.raises(LayoutError, match=r"FSDP2?.*SINGLE.*--to single"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def _resume_late(folder, appears, limit_s):
    """Resume on two ranks; on rank 1 the folder appears late or never."""
    if os.environ["RANK"] == "1":
        folder = folder.with_name("late")
        if appears:
            threading.Timer(1.0, folder.symlink_to, [folder.with_name("run")]).start()
    with patch("hfscale.checkpoint.resumable.wait_until_visible", partial(wait_until_visible, timeout_s=limit_s)):
        sys.stdout.write(f"found {point(folder, 'true')}\n")


@pytest.mark.world(2)
@pytest.mark.parametrize("appears", [True, False])
@pytest.mark.long
def test_a_rank_that_sees_the_checkpoint_late_waits_for_it(tmp_path, appears):
    """As on NFS, whose clients cache a folder's content for up to a minute."""
    run = tmp_path / "run"
    tiny_trainer(run, SpotCheckpointCallback(), save_strategy="steps", save_steps=2).train()
    codes = run_ranks(2, _resume_late, run, appears, 30.0 if appears else 1.5, log=tmp_path / "log")
    told = [(tmp_path / "log" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    if appears:
        assert codes == [0, 0], told
        assert f"found {tmp_path / 'late' / 'checkpoint-4'}" in told[1]
    else:
        assert all(codes), "a rank went on without its checkpoint"
        assert all("rank 1 does not see" in text for text in told)


@pytest.mark.parametrize("asked", ["false", "False"])
def test_false_is_none(run, asked):
    assert point(run, asked) is None


def test_a_path_is_that_checkpoint(run):
    assert point(run, str(run / "checkpoint-2")) == str(run / "checkpoint-2")


def test_a_restart_before_the_first_checkpoint_begins_at_the_path_again(run, tmp_path, monkeypatch):
    memory, folder = RunMemory(tmp_path / "memory"), tmp_path / "other"
    memory.snapshots(folder).mkdir(parents=True)
    monkeypatch.setenv(FOLDER_VARIABLE, str(memory.folder))
    assert point(folder, str(run / "checkpoint-2")) == str(run / "checkpoint-2")
    folder.mkdir()
    (run / "checkpoint-4").rename(folder / "checkpoint-4")
    assert point(folder, str(run / "checkpoint-2")) == str(folder / "checkpoint-4")


def test_a_path_that_trainer_would_ignore_is_refused(run, tmp_path):
    given = str(run / "checkpoint-2")
    trainer = tiny_trainer(tmp_path / "other", SpotCheckpointCallback(), resume_from_checkpoint=given)
    with pytest.raises(UsageError, match=r"checkpoint-2.*does not read it from its arguments"):
        trainer.train()
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    assert trainer.state.global_step == trainer.args.max_steps


def test_a_path_that_is_no_checkpoint_is_refused(run):
    for path in (run / "nothing", run):
        with pytest.raises(UsageError, match="is not a checkpoint folder"):
            point(run, str(path))


def test_a_damaged_checkpoint_is_refused(run):
    (run / "checkpoint-2" / "model.safetensors").write_bytes(b"0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 1 bytes.*name another"):
        point(run, str(run / "checkpoint-2"))


def test_a_plain_trainer_checkpoint_is_used_unverified(run):
    (run / "checkpoint-2" / "hfscale_manifest.json").unlink()
    assert point(run, str(run / "checkpoint-2")) == str(run / "checkpoint-2")


def test_a_run_is_finished_if_the_checkpoint_has_all_steps(run):
    def finished(checkpoint, **arguments):
        return is_finished(tiny_trainer(run, **arguments), checkpoint)

    last = str(run / "checkpoint-4")
    (run / RESULTS_NAME).write_text("{}")
    assert finished(last, max_steps=4)
    assert not finished(last, max_steps=5)
    assert not finished(str(run / "checkpoint-2"), max_steps=4)
    assert not finished(None, max_steps=4)
    assert finished(last, max_steps=-1, num_train_epochs=0.25)  # 16 steps an epoch
    assert not finished(last, max_steps=-1, num_train_epochs=1)


def test_a_run_without_results_computes_them_without_a_step(run):
    last = str(run / "checkpoint-4")
    for stale in (False, True):  # of a shorter run before
        if stale:
            (run / RESULTS_NAME).write_text("{}")
            os.utime(run / RESULTS_NAME, (1, 1))
        trainer = tiny_trainer(run, SpotCheckpointCallback(), save_strategy="steps", save_steps=2)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()
        assert not is_finished(trainer, last)
        metrics = trainer.train(resume_from_checkpoint=last).metrics
        assert (metrics, trainer.state.global_step) == ({}, 4)
        assert not [record for record in trainer.state.log_history if "train_loss" in record][1:]
        stored = load_file(run / "checkpoint-4" / "model.safetensors")
        assert all(torch.equal(trainer.model.state_dict()[name], tensor) for name, tensor in stored.items())
        metrics |= trainer.evaluate()
        trainer.save_metrics("all", metrics, combined=False)
        assert is_finished(trainer, last)
    assert json.loads((run / "hfscale_status.json").read_text())["status"] == "completed"
    assert trainer.train(resume_from_checkpoint=last).metrics["train_loss"] >= 0, (
        "nothing of the trainer is left changed"
    )


class Arguments:
    """The arguments that `keep_global_batch` reads, for a world of any size without processes."""

    def __init__(self, world_size, per_device, accumulation=1):
        self.world_size = world_size
        self.per_device_train_batch_size = per_device
        self.gradient_accumulation_steps = accumulation
        self.deepspeed = self.fsdp = None


@pytest.fixture
def of_eight_processes(tmp_path):
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    commit(checkpoint, step=1, strategy="ddp", world_size=8, global_batch_size=48)
    return str(checkpoint)


@pytest.mark.parametrize(
    ("world_size", "per_device", "becomes"),
    [(4, 6, (6, 2)), (2, 6, (6, 4)), (16, 6, (3, 1)), (12, 6, (4, 1)), (1, 5, (4, 12)), (48, 6, (1, 1))],
)
def test_another_number_of_processes_keeps_the_global_batch(of_eight_processes, world_size, per_device, becomes):
    arguments = Arguments(world_size, per_device)
    keep_global_batch(arguments, of_eight_processes)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == becomes
    assert world_size * becomes[0] * becomes[1] == 48


@pytest.mark.parametrize(("world_size", "fix"), [(5, "start 4"), (32, "start 24"), (100, "start 48")])
def test_a_number_of_processes_that_cannot_keep_it_is_refused(of_eight_processes, world_size, fix):
    with pytest.raises(LayoutError, match=fix):
        keep_global_batch(Arguments(world_size, 6), of_eight_processes)


def test_the_same_number_of_processes_may_change_its_batch(of_eight_processes):
    arguments = Arguments(8, 2, 5)
    keep_global_batch(arguments, of_eight_processes)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 5)


@pytest.mark.parametrize(
    ("wrote", "data_ranks", "becomes"), [("ddp", 2, (6, 4)), ("parallel", None, (6, 1)), ("parallel", 4, (6, 2))]
)
def test_another_data_parallel_size_keeps_it_too(tmp_path, wrote, data_ranks, becomes):
    commit(tmp_path, step=1, strategy=wrote, world_size=8, global_batch_size=48)
    arguments = Arguments(8, 6, 3)
    keep_global_batch(arguments, str(tmp_path), data_parallel_size=data_ranks)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == becomes


class Counted(RandomTokens):
    """A dataset that records which samples are read."""

    def __init__(self, size):
        super().__init__(size)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return index


def steps_of(size, world_size, *, epochs, skip_steps=0):
    """What each step of so many ranks reads: sets of samples, by the pieces that Trainer puts together, and how many
    samples were read in all."""
    per_device, steps, reads = 12 // world_size, {}, 0
    batches_of_a_step = 1
    if per_device % 2 == 0:
        per_device, batches_of_a_step = per_device // 2, 2
    per_epoch = math.ceil(size / 12)
    for rank in range(world_size):
        dataset = Counted(size)
        set_seed(7)
        sampler = RandomSampler(dataset)
        loader = prepare_data_loader(
            DataLoader(dataset, batch_size=per_device, sampler=sampler),
            num_processes=world_size,
            process_index=rank,
            put_on_device=False,
            use_seedable_sampler=True,
            rng_types=[],
        )
        for epoch in range(skip_steps // per_epoch, epochs):
            skipped = skip_steps % per_epoch if epoch == skip_steps // per_epoch else 0
            current = skip_first_batches(loader, skipped * batches_of_a_step) if skipped else loader
            current.set_epoch(epoch)
            for number, batch in enumerate(current):
                step = epoch * per_epoch + skipped + number // batches_of_a_step
                steps.setdefault(step, []).extend(batch.tolist())
        reads += len(dataset.read)
    return {step: Counter(samples) for step, samples in sorted(steps.items())}, reads


@pytest.mark.parametrize(("before", "after"), [(n, m) for n in (1, 2, 3, 4) for m in (1, 2, 3, 4)])
def test_another_number_of_processes_continues_with_the_same_samples(before, after):
    """It resumes in the middle of the second epoch; earlier samples are skipped without being read."""
    whole, _ = steps_of(60, before, epochs=3)
    resumed, reads = steps_of(60, after, epochs=3, skip_steps=7)
    assert resumed == {step: samples for step, samples in whole.items() if step >= 7}
    assert reads == 8 * 12
    for epoch in range(3):
        assert sum((whole[step] for step in range(5 * epoch, 5 * epoch + 5)), Counter()) == Counter(range(60))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_only_the_last_step_of_an_epoch_differs_if_the_data_do_not_divide(world_size):
    """Accelerate fills it with samples from the start of the epoch; each sample is still seen, in as many steps."""
    control, _ = steps_of(56, 1, epochs=2)
    steps, _ = steps_of(56, world_size, epochs=2)
    assert len(steps) == len(control) == 10
    for step in range(10):
        if step % 5 == 4:
            assert set(control[step]) <= set(steps[step])
        else:
            assert steps[step] == control[step]


def test_plain_trainer_reports_what_it_would_drop_silently(run, tmp_path, caplog):
    """It would drop the optimizer under another strategy and lose its position in the data with another batch."""
    arguments = {"max_steps": 5, "save_strategy": "steps", "save_steps": 5}
    spot = SpotCheckpointCallback()
    with caplog.at_level("WARNING", logger="hfscale"):
        trainer = tiny_trainer(run, spot, per_device_train_batch_size=2, **arguments)
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert "at sequence 8 instead of 16" in caplog.text
    manifest = run / "checkpoint-4" / "hfscale_manifest.json"
    manifest.write_text(manifest.read_text().replace('"single"', '"zero3"'))
    trainer = tiny_trainer(run, SpotCheckpointCallback(), **arguments)
    with pytest.raises(LayoutError, match=r"under ZERO3.*under SINGLE.*--to single --world-size 1"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))


@pytest.mark.world(3)
@pytest.mark.parametrize("damaged", [False, True])
def test_every_file_is_verified_by_one_rank_and_all_resume_alike(run, tmp_path, damaged):
    """Rank 0 alone would need 33 minutes for 2 TB at 1 GB/s; 1,000 ranks need two seconds."""
    if damaged:
        shorten(run / "checkpoint-4" / "rng_state.pth")
    real = store.FileRecord.of

    def resume():
        with (tmp_path / f"read-{os.environ['RANK']}").open("w") as log, patch.object(store.FileRecord, "of") as of:
            of.side_effect = lambda path: (print(path.relative_to(run), file=log), real(path))[1]
            found = point(run, "true")
        (tmp_path / f"found-{os.environ['RANK']}").write_text(Path(found).name)

    assert run_ranks(3, resume, log=tmp_path / "logs") == [0, 0, 0], (tmp_path / "logs" / "rank-0.log").read_text()
    found = {(tmp_path / f"found-{rank}").read_text() for rank in range(3)}
    assert found == {"checkpoint-2" if damaged else "checkpoint-4"}
    read = [(tmp_path / f"read-{rank}").read_text().split() for rank in range(3)]
    if not damaged:
        files = manifest_files(run / "checkpoint-4")
        assert Counter(name for names in read for name in names) == dict.fromkeys(files, 1)
        assert all(read)


@pytest.mark.world(3)
@pytest.mark.parametrize("damaged", [False, True])
def test_each_rank_verifies_a_part_of_an_earlier_conversion(run, tmp_path, damaged):
    """A checkpoint of one process is converted for three; they are launched again before the next checkpoint."""
    real = store.FileRecord.of
    source = str(run / "checkpoint-4")

    def resume():
        args = tiny_arguments(tmp_path)
        converted = Path(readable_checkpoint(args, source))
        rank = os.environ["RANK"]
        files = list(read_manifest(converted).files)
        dist.barrier()
        if damaged and rank == "0":
            shorten(converted / "rng_state_0.pth")
        dist.barrier()
        with (tmp_path / f"read-{rank}").open("w") as log, patch.object(store.FileRecord, "of") as of:
            of.side_effect = lambda path: (print(path, file=log), real(path))[1]
            assert readable_checkpoint(args, source) == str(converted)
        assert list(store.verify(converted).files) == files
        (tmp_path / f"files-{rank}").write_text("\n".join(str(converted / name) for name in files))

    assert run_ranks(3, resume, log=tmp_path / "logs") == [0, 0, 0], (tmp_path / "logs" / "rank-0.log").read_text()
    read = [(tmp_path / f"read-{rank}").read_text().split() for rank in range(3)]
    if not damaged:
        assert all(read)
        assert sorted(name for names in read for name in names) == sorted((tmp_path / "files-0").read_text().split())


def manifest_files(checkpoint):
    return [f"{checkpoint.name}/{name}" for name in read_manifest(checkpoint).files]


def test_shares_of_a_manifest_are_complete_and_even():
    files = {f"{n}": FileRecord(bytes=2**30 * (1 + n % 5), xxh3_128="") for n in range(4096)}
    manifest = Manifest(step=1, strategy="fsdp2", world_size=1, global_batch_size=1, files=files)
    shares = [manifest.share(reader, 64) for reader in range(64)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].bytes for name in share) for share in shares]
    assert max(loads) < 1.05 * min(loads)


def trainer_of(folder, rows, **arguments):
    """Return a Trainer with batches of eight sequences of all processes."""
    per_device = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    trainer = tiny_trainer(folder, SpotCheckpointCallback(), per_device_train_batch_size=per_device, **arguments)
    trainer.train_dataset = RandomTokens(rows)
    return trainer


def train_on_rank(folder, rows):
    """Train for a step, and save."""
    torch.set_num_threads(1)
    trainer_of(folder, rows, max_steps=1, save_strategy="steps", save_steps=1).train()


@pytest.mark.parametrize(
    ("earlier", "ranks", "processes", "expected"),
    [(1, 2, 4, 1), (2, 2, 4, 1), (8, 2, 4, 4), (4, 4, 4, 4), (2, 1, 1, 2), (3, 2, 4, None)],
)
def test_ranks_that_shared_a_sequence_are_counted_once(earlier, ranks, processes, expected):
    """One process without tensor parallelism continues on four with it: a division by zero ended such a run."""
    manifest = Manifest(step=2, strategy="parallel", world_size=earlier, global_batch_size=8, files={})
    assert _earlier_data_ranks(manifest, ranks, processes) == expected


class SavesAdapters(Trainer):
    """Writes adapters from inside of its model, as LLaMA-Factory does for TRL's model with a value head."""

    def _save(self, output_dir=None, state_dict=None):
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        (Path(output_dir) / "adapter_model.safetensors").write_bytes(b"")


class MovesThem(TrainerCallback):
    """Puts them in place of the weights after each save."""

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


class LoadsThem(SavesAdapters):
    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        pass


@pytest.mark.parametrize(
    ("kind", "others", "is_named"),
    [(SavesAdapters, (), True), (LoadsThem, (), False), (Trainer, (MovesThem,), True)],
)
def test_checkpoints_without_the_weights_of_a_model_are_named_at_the_first_save(
    tmp_path, caplog, kind, others, is_named
):
    arguments = tiny_arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    parts = {"args": arguments, "train_dataset": RandomTokens(8)}
    kind(tiny_model(), **parts, callbacks=[SpotCheckpointCallback(), *others]).train()
    assert caplog.text.count("no run will be able to resume") == int(is_named)
    again = kind(tiny_model(), **parts, callbacks=[SpotCheckpointCallback()])
    expected = pytest.raises(CheckpointError, match=r"no model\.safetensors, which Trainer loads into Llama")
    with expected if is_named else nullcontext():
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_batch_that_was_found_is_the_one_that_a_resume_counts(tmp_path, caplog):
    """With another batch per device in the arguments a division by zero ended the run."""
    found = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 1}
    trainer_of(tmp_path, 64, max_steps=1, gradient_accumulation_steps=2, **found).train()
    trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), per_device_train_batch_size=16, max_steps=2, **found)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    # Trainer takes the 8 per device of the checkpoint
    assert "the global batch was 16 sequences and is now 8" in caplog.text
    assert (micro_batch_size(trainer), data_ranks(trainer)) == (8, 1)


@pytest.mark.world(2)
@pytest.mark.parametrize(("rows", "passes"), [(34, (40, 34)), (32, None)])
def test_a_pass_of_another_length_after_a_change_of_processes_is_logged(rows, passes, tmp_path, caplog):
    """Accelerate fills the last batch of two processes up, and one process has nothing to fill up."""
    codes = run_ranks(2, train_on_rank, tmp_path / "out", rows, log=tmp_path / "log", timeout_s=100)
    assert codes == [0, 0], [path.read_text()[-2000:] for path in (tmp_path / "log").iterdir()]
    trainer = trainer_of(tmp_path / "out", rows, max_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    found = re.findall(r"a pass over the (\d+) trained on (\d+), and with 1 of 8 it trains on (\d+)", caplog.text)
    assert found == ([] if passes is None else [(str(rows), *map(str, passes))])


class OutOfMemoryOnce(Trainer):
    """Has not enough memory for the second step with more than two rows."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step == 1 and len(inputs["labels"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().compute_loss(model, inputs, *args, **kwargs)


class CountsCallbacks(TrainerCallback):
    """Counts the callbacks of a Trainer and the methods that are replaced on it, in each of its loops."""

    def __init__(self):
        self.counts = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            replaced = [name for name in vars(self.trainer) if callable(getattr(type(self.trainer), name, None))]
            self.counts.append((len(self.trainer.callback_handler.callbacks), sorted(replaced)))


def test_a_loop_with_a_smaller_batch_begins_without_what_the_first_one_has_changed(tmp_path, monkeypatch):
    """All hooks were there twice: the checkpoint of a stop counted as one that others had asked for, and was left."""
    monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)
    counts = CountsCallbacks()
    found = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    arguments = tiny_arguments(tmp_path, per_device_train_batch_size=4, **found)
    callbacks = [ScalingCallback(spot_checkpoint=SpotCheckpointCallback(on_preemption="return")), counts]
    parts = {"args": arguments, "train_dataset": RandomTokens(32)}
    counts.trainer = OutOfMemoryOnce(tiny_model(), callbacks=[*callbacks, StopsAt(6)], **parts)
    counts.trainer.train()
    assert len(counts.counts) == 3  # with 4, 3 and 2 rows
    assert all(count == counts.counts[0] for count in counts.counts)
    assert (tmp_path / "checkpoint-6").is_dir()
    counts.trainer = OutOfMemoryOnce(tiny_model(), callbacks=callbacks, **parts)
    counts.trainer.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-?")) == ["checkpoint-4", "checkpoint-8"]


class StopsAt(TrainerCallback):
    """Asks for a stop in a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
