"""The memory of the first copy is allocated while the training runs, and not while it waits for a save."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_trainer
from transformers import TrainerCallback

from hfscale import ScalingCallback, SpotCheckpointCallback
from hfscale.checkpoint import host_copy, saving
from hfscale.checkpoint.host_copy import HostCopy


class Allocations:
    """Records the bytes of each block, and whether the main thread has allocated it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[tuple[int, bool]] = []
        self.may_begin = threading.Event()
        self.may_begin.set()
        monkeypatch.setattr(host_copy, "_allocate", self._allocate)

    def _allocate(self, size: int, is_pinned: bool) -> torch.Tensor:
        self.may_begin.wait(20)
        is_main = threading.current_thread() is threading.main_thread()
        self.blocks.append((size, is_main))
        return torch.empty(size, dtype=torch.uint8)  # memory cannot be pinned without an accelerator

    @property
    def total(self) -> int:
        return sum(size for size, _ in self.blocks)


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    return Allocations(monkeypatch)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_copy_finds_what_was_reserved_and_allocates_nothing(
    is_pinned: bool, allocations: Allocations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "_is_pinned_for", lambda device: is_pinned)
    tree = {"weights": [torch.randn(1000, 700), torch.randn(3)], "moments": torch.randn(1000, 700)}
    wanted = HostCopy().bytes_to_allocate(tree)
    copies = HostCopy()
    allocations.may_begin.clear()
    copies.reserve(tree)
    assert not allocations.blocks  # the caller does not wait
    allocations.may_begin.set()
    assert copies.bytes_to_allocate(tree) == 0
    copied = copies.take(tree)
    assert torch.equal(copied["weights"][0], tree["weights"][0])
    assert torch.equal(copied["moments"], tree["moments"])
    assert allocations.total == wanted  # as much as without the reservation
    assert not any(is_main for _, is_main in allocations.blocks)


def test_a_larger_state_than_was_reserved_is_copied(allocations: Allocations) -> None:
    small = [torch.randn(500)]
    large = [torch.randn(500), torch.randn(900)]
    copies = HostCopy()
    copies.reserve(small)
    assert all(torch.equal(*pair) for pair in zip(copies.take(large), large, strict=True))
    assert allocations.total == HostCopy().bytes_to_allocate(large)


def test_what_cannot_be_allocated_is_the_error_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int, is_pinned: bool) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host_copy, "_allocate", fail)
    copies = HostCopy()
    copies.reserve([torch.randn(500)])
    with pytest.raises(RuntimeError, match="out of memory"):
        copies.take([torch.randn(500)])


def test_no_block_is_allocated_after_the_end(allocations: Allocations) -> None:
    copies = HostCopy()
    allocations.may_begin.clear()
    copies.reserve([torch.randn(500), torch.randn(900)])
    stopper = threading.Thread(target=copies.stop_reserving)
    stopper.start()
    allocations.may_begin.set()
    stopper.join()
    assert len(allocations.blocks) <= 2
    assert not any(thread.name == "hfscale-host-memory" for thread in threading.enumerate())


class Observed(TrainerCallback):
    """Notes what was allocated at the end of each step, before the callbacks of hfscale see it."""

    def __init__(self, allocations: Allocations) -> None:
        self.allocations = allocations
        self.by_step: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "hfscale-host-memory":
                thread.join()  # so that what a later step has allocated is known
        self.by_step.append(self.allocations.total)


def test_a_training_has_the_memory_of_its_first_save_before_it(tmp_path: Path, allocations: Allocations) -> None:
    observed = Observed(allocations)
    trainer = tiny_trainer(tmp_path, ScalingCallback(), observed, max_steps=6, save_strategy="steps", save_steps=4)
    trainer.train()
    before_first_step, *later = observed.by_step
    assert before_first_step == 0
    assert later == [allocations.total] * 5  # from the first step on, and nothing more at the saves
    assert not any(is_main for _, is_main in allocations.blocks)
    state = 3 * sum(parameter.numel() * 4 for parameter in trainer.model.parameters())  # weights and two moments
    assert state <= allocations.total <= 1.05 * state


@pytest.mark.parametrize(("strategy", "asynchronous"), [("no", True), ("steps", False)])
def test_nothing_is_reserved_for_saves_that_copy_nothing(
    strategy: str, asynchronous: bool, tmp_path: Path, allocations: Allocations
) -> None:
    callback = ScalingCallback(spot_checkpoint=SpotCheckpointCallback(asynchronous=asynchronous))
    tiny_trainer(tmp_path, callback, max_steps=3, save_strategy=strategy, save_steps=3).train()
    assert not allocations.blocks


def test_memory_that_is_missing_is_not_reserved(
    tmp_path: Path, allocations: Allocations, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "fits_in_host_memory", lambda wanted, copies: False)
    tiny_trainer(tmp_path, ScalingCallback(), max_steps=3, save_strategy="steps", save_steps=3).train()
    assert not allocations.blocks
    assert "a copy of its state does not fit into the host's free memory" in log.text
