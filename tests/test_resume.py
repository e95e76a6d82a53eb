"""Where a relaunched command goes on, and with which batch."""

import pytest
from tiny import tiny_arguments, tiny_trainer

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.store import commit
from hfscale.errors import CheckpointError, LayoutError, UsageError
from hfscale.resume import is_finished, keep_global_batch, resume_point


@pytest.fixture
def run(tmp_path):
    """A folder with the checkpoints 2 and 4 of a run of four steps."""
    tiny_trainer(tmp_path, SpotCheckpointCallback(), save_strategy="steps", save_steps=2).train()
    return tmp_path


def point(folder, asked):
    return resume_point(tiny_arguments(folder, resume_from_checkpoint=asked))


@pytest.mark.parametrize("asked", ["true", "True"])
def test_true_is_the_newest_good_one_or_none(run, tmp_path, asked):
    assert point(run, asked) == str(run / "checkpoint-4")
    (run / "checkpoint-4" / "optimizer.pt").write_bytes(b"")
    assert point(run, asked) == str(run / "checkpoint-2")
    assert point(tmp_path / "empty", asked) is None


@pytest.mark.parametrize("asked", ["false", "False"])
def test_false_is_none(run, asked):
    assert point(run, asked) is None


def test_a_path_is_that_one(run):
    assert point(run, str(run / "checkpoint-2")) == str(run / "checkpoint-2")


def test_a_path_that_is_no_checkpoint_is_told(run):
    for path in (run / "nothing", run):
        with pytest.raises(UsageError, match="is not a checkpoint folder"):
            point(run, str(path))


def test_a_path_that_is_damaged_is_told(run):
    (run / "checkpoint-2" / "model.safetensors").write_bytes(b"0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 1 bytes.*name another"):
        point(run, str(run / "checkpoint-2"))


def test_a_plain_trainer_checkpoint_is_used_unverified(run):
    (run / "checkpoint-2" / "hfscale_manifest.json").unlink()
    assert point(run, str(run / "checkpoint-2")) == str(run / "checkpoint-2")


def test_finished_is_when_all_steps_are_in_the_checkpoint(run):
    def finished(checkpoint, **arguments):
        return is_finished(tiny_trainer(run, **arguments), checkpoint)

    last = str(run / "checkpoint-4")
    assert finished(last, max_steps=4)
    assert not finished(last, max_steps=5)
    assert not finished(str(run / "checkpoint-2"), max_steps=4)
    assert not finished(None, max_steps=4)
    assert finished(last, max_steps=-1, num_train_epochs=0.25)  # 16 steps an epoch
    assert not finished(last, max_steps=-1, num_train_epochs=1)


class Arguments:
    """Only what `keep_global_batch` reads: a world of any size needs no processes here."""

    def __init__(self, world_size, per_device, accumulation=1):
        self.world_size = world_size
        self.per_device_train_batch_size = per_device
        self.gradient_accumulation_steps = accumulation


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
def test_another_world_keeps_the_global_batch(of_eight_processes, world_size, per_device, becomes):
    arguments = Arguments(world_size, per_device)
    keep_global_batch(arguments, of_eight_processes)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == becomes
    assert world_size * becomes[0] * becomes[1] == 48


@pytest.mark.parametrize(("world_size", "mend"), [(5, "start 4"), (32, "start 24"), (100, "start 48")])
def test_a_world_that_cannot_keep_it_is_told(of_eight_processes, world_size, mend):
    with pytest.raises(LayoutError, match=mend):
        keep_global_batch(Arguments(world_size, 6), of_eight_processes)


def test_the_same_world_may_change_its_batch(of_eight_processes):
    arguments = Arguments(8, 2, 5)
    keep_global_batch(arguments, of_eight_processes)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 5)
