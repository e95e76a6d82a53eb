"""States of random number generators for other ranks than those that saved them; those of GPUs are made up here."""

import random
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Trainer
from transformers.trainer_pt_utils import safe_globals

from hfscale.checkpoint.rng_states import derived_rng_state, write_rng_states
from hfscale.errors import CheckpointError
from hfscale.facts.layout import ParallelLayout
from hfscale.parallel import checkpoints


def gpu_state(offset):
    return torch.tensor([7, offset], dtype=torch.int64).view(torch.uint8).clone()


def state(seed, **gpu):
    return {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed).get_state(),
        "cpu": torch.Generator().manual_seed(seed).get_state(),
    } | gpu


def loaded(path):
    """What Trainer loads."""
    with safe_globals():
        return torch.load(path, weights_only=True)


def offsets(found):
    """The offsets in the states of GPUs: a number, or a list."""
    if isinstance(found, list):
        return [offsets(one) for one in found]
    return int(found.view(torch.int64)[1])


@pytest.fixture
def two_ranks(tmp_path):
    """A checkpoint of two ranks; each has drawn from its own GPU only."""
    source = tmp_path / "source"
    source.mkdir()
    for rank in range(2):
        gpus = [gpu_state(100 * (gpu == rank) + rank) for gpu in range(2)]
        torch.save(state(rank, cuda=gpus), source / f"rng_state_{rank}.pth")
    return source


@pytest.fixture
def one_rank(tmp_path):
    source = tmp_path / "one"
    source.mkdir()
    torch.save(state(0, cuda=gpu_state(100)), source / "rng_state.pth")
    return source


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def assert_same_but_for_gpus(path, seed):
    found, expected = loaded(path), state(seed)
    assert found["python"] == expected["python"]
    assert torch.equal(found["cpu"], expected["cpu"])
    restored = np.random.RandomState()
    restored.set_state(found["numpy"])
    assert restored.rand() == np.random.RandomState(seed).rand()


def test_ranks_keep_the_state_of_their_own_gpu_on_whatever_gpu_they_run(two_ranks, target):
    write_rng_states(two_ranks, target, world_size=3)
    files = [loaded(target / f"rng_state_{rank}.pth") for rank in range(3)]
    assert offsets(files[0]["cuda"]) == [100, 100]
    assert offsets(files[1]["cuda"]) == [101, 101]
    assert torch.equal(*files[2]["cuda"])
    assert not torch.equal(files[2]["cuda"][0][:8], gpu_state(0)[:8]), "a new rank has a seed of its own"
    for rank in range(2):
        assert_same_but_for_gpus(target / f"rng_state_{rank}.pth", rank)


def test_the_form_is_that_of_the_launch(two_ranks, one_rank, target):
    write_rng_states(two_ranks, target, world_size=1)
    assert offsets(loaded(target / "rng_state.pth")["cuda"]) == 100
    write_rng_states(one_rank, target, world_size=2)
    assert offsets(loaded(target / "rng_state_0.pth")["cuda"]) == [100, 100]
    assert_same_but_for_gpus(target / "rng_state_0.pth", 0)
    assert len(loaded(target / "rng_state_1.pth")["cuda"]) == 2


def test_there_is_a_state_for_each_gpu_of_this_machine(two_ranks, target, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    write_rng_states(two_ranks, target, world_size=3)
    assert [len(loaded(target / f"rng_state_{rank}.pth")["cuda"]) for rank in range(3)] == [4, 4, 4]


def test_ranks_that_share_a_matrix_get_the_state_of_the_first_ranks_gpu(two_ranks, target):
    write_rng_states(two_ranks, target, world_size=4, same_on_all_ranks=True)
    for rank in range(4):
        assert offsets(loaded(target / f"rng_state_{rank}.pth")["cuda"]) == [100, 100]
        assert_same_but_for_gpus(target / f"rng_state_{rank}.pth", 0)


@pytest.mark.parametrize("is_same", [True, False])
def test_parallel_trainer_in_another_layout_gives_all_gpus_the_first_ranks_state(two_ranks, monkeypatch, is_same):
    saved, launched = ParallelLayout(tp=2), ParallelLayout(tp=2) if is_same else ParallelLayout(tp=2, pp=2)
    metadata = SimpleNamespace(layout=asdict(saved))
    monkeypatch.setattr(checkpoints, "read_parallel_metadata", lambda folder: metadata)
    found = []
    monkeypatch.setattr(
        Trainer, "_load_rng_state", lambda self, folder: found.append(loaded(f"{folder}/rng_state_1.pth"))
    )
    trainer = object.__new__(checkpoints.ParallelCheckpointTrainer)
    trainer.layout, trainer.args = launched, SimpleNamespace(world_size=launched.world_size, process_index=1)
    trainer._load_rng_state(str(two_ranks))
    assert offsets(found[0]["cuda"]) == ([1, 101] if is_same else [100, 100])


def test_new_ranks_draw_their_own_random_numbers_reproducibly(two_ranks):
    states = [derived_rng_state(two_ranks / "rng_state_0.pth", rank, world_size=4) for rank in (2, 2, 3)]
    drawn = []
    for found in states:
        generator = torch.Generator()
        generator.set_state(found["cpu"])
        numpy = np.random.RandomState()
        numpy.set_state(found["numpy"])
        drawn.append((torch.rand(1, generator=generator).item(), numpy.rand(), found["python"][1][:3]))
        assert found["cuda"][0].shape == (16,)
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_without_gpus_the_files_are_copied(tmp_path, target):
    torch.save(state(0), tmp_path / "rng_state.pth")
    write_rng_states(tmp_path, target, world_size=2)
    assert (target / "rng_state_0.pth").read_bytes() == (tmp_path / "rng_state.pth").read_bytes()
    assert "cuda" not in loaded(target / "rng_state_1.pth")


def test_a_file_without_numpys_state_is_refused(tmp_path, target):
    torch.save(state(0, cuda=gpu_state(1)) | {"numpy": "none"}, tmp_path / "rng_state.pth")
    with pytest.raises(CheckpointError, match="NumPy's generator"):
        write_rng_states(tmp_path, target, world_size=2)
