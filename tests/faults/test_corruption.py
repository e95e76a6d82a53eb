"""Every damage to a committed checkpoint is found, and no whole one is suspected."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_trainer

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.manifest import MANIFEST_NAME, checkpoint_files
from hfscale.checkpoint.store import verify
from hfscale.errors import CheckpointError

QUICK, LONG = 200, 2000
CLEAN_QUICK, CLEAN_LONG = 100, 1000


@dataclass
class Victim:
    """A checkpoint, the one of the step before, and every byte of both."""

    newest: Path
    before: Path
    content: dict[str, bytes]
    older: dict[str, bytes]

    def restore(self):
        for name, data in self.content.items():
            (self.newest / name).write_bytes(data)


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("victim")
    tiny_trainer(folder, SpotCheckpointCallback(), save_strategy="steps", save_steps=1, max_steps=2).train()
    newest, before = folder / "checkpoint-2", folder / "checkpoint-1"
    contents = [
        {name: (path / name).read_bytes() for name in [*checkpoint_files(path), MANIFEST_NAME]}
        for path in (newest, before)
    ]
    return Victim(newest, before, *contents)


def flip_a_bit(victim, name, chance):
    data = bytearray(victim.content[name])
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    (victim.newest / name).write_bytes(data)


def cut(victim, name, chance):
    (victim.newest / name).write_bytes(victim.content[name][: chance.randrange(len(victim.content[name]))])


def empty(victim, name, chance):
    (victim.newest / name).write_bytes(b"")


def zero_a_block(victim, name, chance):
    data = bytearray(victim.content[name])
    begin = chance.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    (victim.newest / name).write_bytes(data)


def lengthen(victim, name, chance):
    (victim.newest / name).write_bytes(victim.content[name] + b"\0")


def remove(victim, name, chance):
    (victim.newest / name).unlink()


def exchange(victim, name, chance):
    """The same file of the step before."""
    (victim.newest / name).write_bytes(victim.older[name])


def link_out(victim, name, chance):
    """The right content, but somewhere else."""
    (victim.newest / name).unlink()
    (victim.newest / name).symlink_to(victim.before / name)


DAMAGES = (flip_a_bit, cut, empty, zero_a_block, lengthen, remove, exchange, link_out)


@pytest.mark.parametrize("trials", [QUICK, pytest.param(LONG, marks=pytest.mark.faults)])
def test_every_damage_is_found(victim, trials):
    chance, struck = random.Random(0), 0
    names = [name for name in victim.content if name != MANIFEST_NAME]
    while struck < trials:
        name, damage = chance.choice(names), chance.choice(DAMAGES)
        damage(victim, name, chance)
        path = victim.newest / name
        if path.is_symlink() or not path.is_file() or path.read_bytes() != victim.content[name]:
            struck += 1
            with pytest.raises(CheckpointError, match=rf"checkpoint-2 is corrupt: .*{name}"):
                verify(victim.newest)
        if path.is_symlink():
            path.unlink()
        victim.restore()


@pytest.mark.parametrize("trials", [20, pytest.param(200, marks=pytest.mark.faults)])
def test_a_damaged_manifest_commits_nothing(victim, trials):
    """Not every changed bit of a manifest makes it false (a space, say), but none makes another checkpoint true."""
    chance = random.Random(1)
    for _ in range(trials):
        chance.choice((cut, empty, exchange, remove))(victim, MANIFEST_NAME, chance)
        with pytest.raises(CheckpointError):
            verify(victim.newest)
        assert latest_checkpoint(victim.newest.parent) == str(victim.before)
        victim.restore()


def test_the_checkpoint_of_another_step_is_found_by_its_name(victim, tmp_path):
    shutil.copytree(victim.before, tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match="checkpoint-2 is corrupt: its manifest is for step 1"):
        verify(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("trials", [CLEAN_QUICK, pytest.param(CLEAN_LONG, marks=pytest.mark.faults)])
def test_a_whole_one_is_never_suspected(victim, trials):
    for _ in range(trials):
        assert verify(victim.newest).step == 2


def test_the_control_a_flipped_bit_is_loaded_without_a_word(victim, tmp_path):
    """What safetensors and torch do by themselves: the damages above are real."""
    shutil.copytree(victim.newest, tmp_path / "copy")
    for name in ("model.safetensors", "optimizer.pt"):
        path = tmp_path / "copy" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 64
        path.write_bytes(data)
    whole, flipped = (load_file(folder / "model.safetensors") for folder in (victim.newest, tmp_path / "copy"))
    assert any(not torch.equal(whole[name], flipped[name]) for name in whole)
    torch.load(tmp_path / "copy" / "optimizer.pt", weights_only=True)
