"""`Capture`: what this rank writes of a checkpoint, in parts that can be copied now and written later.

    live  ->  take  ->  Captured.write, Captured.write_collectively

A save takes a capture between two steps. What it returns does not change any more, so that a thread can write it while
the training goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import Trainer

from hfscale.checkpoint.contents import write_files
from hfscale.checkpoint.formats.dcp import save_shards
from hfscale.checkpoint.host_copy import HostCopy
from hfscale.core import distributed
from hfscale.core.collectives import SAVING
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy

_OPTIMIZER_BYTES = 12
"""Bytes for each trained weight in mixed precision: AdamW's two moments and a master copy in fp32 (Rajbhandari et al.,
arXiv 1910.02054, section 3.1)."""


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """What this rank writes of a checkpoint and the next step changes. It shares the training's memory."""

    weights: dict[str, Any] | None = None
    """The weights from which `save_pretrained` chooses; None if this rank writes no such file."""
    pickles: Mapping[str, Any] = field(default_factory=dict)
    """What `torch.save` writes, by the name of the file."""
    shards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """This rank's part of torch's distributed checkpoints, by the name of their folder."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What this rank writes of a checkpoint, which no later step changes."""

    write: Callable[[Path], None] | None = None
    """Writes this rank's own files into the folder of the checkpoint; None: there are none."""
    write_collectively: Callable[[Path], None] | None = None
    """Writes what needs exchanges between the ranks; every rank must call it. None: there is nothing."""


class Capture:
    """Collects what the checkpoints of a Trainer consist of, under one strategy.

    Its buffers in host memory are reused: what `take` returns is valid until the next `take`.

    Args:
        trainer (`Trainer`): prepared for training.
        own_methods (`Sequence[str]`): the methods by which a checkpoint is written and that the Trainer's class
            overrides.
    """

    trainer_writes: ClassVar[bool] = False
    """Whether Trainer's own method runs in each save, because only the engine can collect what it holds."""
    replaces_trainer: ClassVar[bool] = False
    """Whether the capture writes also where training waits: Trainer's own method leaves out what a training resumes
    from."""
    is_on_each_rank: ClassVar[bool] = True
    """Whether each rank has something to copy, and not the main process only."""

    def __init__(self, trainer: Trainer, own_methods: Sequence[str] = ()) -> None:
        self._trainer = trainer
        self._strategy = Strategy.of(trainer)
        self._own_methods = own_methods
        self._host_copy = HostCopy()

    @property
    def is_complete(self) -> bool:
        """Whether a checkpoint has all that a training resumes from."""
        return self.replaces_trainer or not self._trainer.args.save_only_model

    def why_synchronous(self) -> str | None:
        """Return why this strategy's state cannot be written in the background.

        Returns:
            `str` or `None`: the reason, as a clause for a log line; None if it can.
        """
        raise NotImplementedError

    def live(self) -> LiveState:
        """Collect what this rank has to copy, without copying it. It must not depend on other ranks."""
        raise NotImplementedError

    def exchange(self) -> None:
        """Collect from the other ranks what the next save needs of them. Every rank must call it, before each save."""

    def prepare(self) -> None:
        """Make what every background save needs and no step changes. Call it once, before the first save."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take from the engine what it would write within the `with` block, in which Trainer's own method runs."""
        yield

    def files(self) -> Mapping[str, bytes]:
        """Return small files that the main process writes, by their path in the checkpoint, from the current state."""
        return {}

    def additions(self) -> Callable[[Path], None] | None:
        """Take what is written in addition to what Trainer's own methods write.

        Returns:
            `Callable` or `None`: writes it into the folder of the checkpoint; None if this rank adds nothing.
        """
        return None

    def bytes_to_allocate(self) -> int:
        """Return the host memory in bytes that the next copy would allocate on this rank."""
        return self._host_copy.bytes_to_allocate(vars(self.live()))

    def reserve(self) -> None:
        """Start to allocate in the background the host memory that the next copy needs on this rank."""
        self._host_copy.reserve(vars(self.live()))

    def stop_reserving(self) -> None:
        """End what `reserve` has started."""
        self._host_copy.stop_reserving()

    def expected_bytes(self) -> int:
        """Return about how many bytes this rank writes, which is too much where there is no master copy.

        Sharded or replicated, all ranks together write each weight once.
        """
        total = 0
        for parameter in model_of(self._trainer).parameters():
            total += self._strategy.full_numel(parameter) * bytes_of_weight(parameter)
        return total // distributed.world_size()

    def take(self, *, copies: bool, ranks_per_node: int | None = None) -> Captured:
        """Copy what the next step changes.

        Args:
            copies (`bool`): False if training waits until it has been written, so that it does not change.
            ranks_per_node (`int`, *optional*): as for `save_shards`.
        """
        files = self.files() if self._trainer.args.should_save else {}
        state = self.live()
        if copies:
            state = LiveState(**self._host_copy.take(vars(state)))

        def write(folder: Path) -> None:
            if state.weights is not None:
                self.write_weights(folder, state.weights)
            for name, value in state.pickles.items():
                torch.save(value, folder / name)
            write_files(folder, files)

        if not state.shards:
            return Captured(write=write)
        collectively = partial(write_shards, state.shards, ranks_per_node)
        return Captured(write=write, write_collectively=collectively)

    def write_weights(self, folder: Path, weights: dict[str, Any]) -> None:
        """Write the weights that `live` returned, as Trainer writes them.

        Args:
            folder (`Path`): the folder of the checkpoint.
            weights (`dict[str, Any]`): a copy of them.
        """
        raise NotImplementedError


def bytes_of_weight(parameter: torch.Tensor) -> int:
    """Return about how many bytes a checkpoint has for each element of a parameter.

    Args:
        parameter (`torch.Tensor`): a parameter of the model.
    """
    return parameter.element_size() + _OPTIMIZER_BYTES * parameter.requires_grad


def write_shards(
    shards: Mapping[str, Mapping[str, Any]], ranks_per_node: int | None, folder: Path
) -> None:
    """Write torch's distributed checkpoints, one after the other; every rank must call it.

    Args:
        shards (`Mapping`): this rank's part of each, by the name of its folder.
        ranks_per_node (`int`, *optional*): as for `save_shards`.
        folder (`Path`): the folder of the checkpoint.
    """
    for name, part in shards.items():
        save_shards(part, folder / name, SAVING, ranks_per_node=ranks_per_node)
