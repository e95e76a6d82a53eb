"""Every damage to a committed checkpoint is detected, and an undamaged checkpoint always passes."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.manifest import checkpoint_files
from hfscale.checkpoint.store import verify
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError

QUICK = 200
LONG = 2000
CLEAN_QUICK = 100
CLEAN_LONG = 1000


@dataclass
class Target:
    """A checkpoint, the previous checkpoint, and the content of all their files."""

    newest: Path
    previous: Path
    content: dict[str, bytes]
    previous_content: dict[str, bytes]

    def restore(self):
        for name, data in self.content.items():
            (self.newest / name).write_bytes(data)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_trainer(folder, SpotCheckpointCallback(), save_strategy="steps", save_steps=1, max_steps=2).train()
    newest = folder / "checkpoint-2"
    previous = folder / "checkpoint-1"
    contents = [
        {name: (path / name).read_bytes() for name in [*checkpoint_files(path), MANIFEST_NAME]}
        for path in (newest, previous)
    ]
    return Target(newest, previous, *contents)


def flip_a_bit(target, name, rng):
    data = bytearray(target.content[name])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (target.newest / name).write_bytes(data)


def truncate(target, name, rng):
    (target.newest / name).write_bytes(target.content[name][: rng.randrange(len(target.content[name]))])


def empty(target, name, rng):
    (target.newest / name).write_bytes(b"")


def zero_a_block(target, name, rng):
    data = bytearray(target.content[name])
    begin = rng.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    (target.newest / name).write_bytes(data)


def lengthen(target, name, rng):
    (target.newest / name).write_bytes(target.content[name] + b"\0")


def remove(target, name, rng):
    (target.newest / name).unlink()


def replace(target, name, rng):
    """Replace the file by that of the previous checkpoint."""
    (target.newest / name).write_bytes(target.previous_content[name])


def replace_by_link(target, name, rng):
    """Replace the file by a symbolic link to the previous checkpoint."""
    (target.newest / name).unlink()
    (target.newest / name).symlink_to(target.previous / name)


DAMAGES = (flip_a_bit, truncate, empty, zero_a_block, lengthen, remove, replace, replace_by_link)


@pytest.mark.parametrize("trials", [QUICK, pytest.param(LONG, marks=pytest.mark.faults)])
def test_every_damage_is_detected(target, trials):
    rng = random.Random(0)
    damaged = 0
    names = [name for name in target.content if name != MANIFEST_NAME]
    while damaged < trials:
        name = rng.choice(names)
        damage = rng.choice(DAMAGES)
        damage(target, name, rng)
        path = target.newest / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != target.content[name]:
            damaged += 1
            with pytest.raises(CheckpointError, match=rf"checkpoint-2 is corrupt: .*{name}"):
                verify(target.newest)
        if path.is_symlink():
            path.unlink()
        target.restore()


@pytest.mark.parametrize("trials", [20, pytest.param(200, marks=pytest.mark.faults)])
def test_a_checkpoint_with_a_damaged_manifest_is_not_used(target, trials):
    """Some changes of a manifest, such as a space, are harmless; these damages are not.

    Without a manifest it is a checkpoint as plain Trainer leaves it: tests/checkpoint/test_latest_checkpoint.py.
    """
    rng = random.Random(1)
    for _ in range(trials):
        rng.choice((truncate, empty, replace))(target, MANIFEST_NAME, rng)
        with pytest.raises(CheckpointError):
            verify(target.newest)
        assert latest_checkpoint(target.newest.parent) == str(target.previous)
        target.restore()


def test_a_checkpoint_with_the_name_of_another_step_is_corrupt(target, tmp_path):
    shutil.copytree(target.previous, tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is corrupt: .*step 1"):
        verify(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("trials", [CLEAN_QUICK, pytest.param(CLEAN_LONG, marks=pytest.mark.faults)])
def test_an_undamaged_checkpoint_always_passes(target, trials):
    for _ in range(trials):
        assert verify(target.newest).step == 2


def test_control_safetensors_and_torch_load_a_flipped_bit_silently(target, tmp_path):
    """The libraries themselves do not detect the damages above."""
    shutil.copytree(target.newest, tmp_path / "copy")
    for name in ("model.safetensors", "optimizer.pt"):
        path = tmp_path / "copy" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 64
        path.write_bytes(data)
    original, flipped = (load_file(folder / "model.safetensors") for folder in (target.newest, tmp_path / "copy"))
    assert any(not torch.equal(original[name], flipped[name]) for name in original)
    torch.load(tmp_path / "copy" / "optimizer.pt", weights_only=True)
