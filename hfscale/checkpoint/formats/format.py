"""`Format`: how the files of a checkpoint are recognised, read and written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hfscale.checkpoint.formats.view import CheckpointView
from hfscale.facts.strategies import StrategyFacts


class Writer(Protocol):
    """Writes a view into an existing folder, in one format."""

    def __call__(
        self, view: CheckpointView, folder: Path, *, step: int, world_size: int
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What the files of a checkpoint without a manifest tell about the training that wrote them."""

    strategy: str
    """Its name, as a manifest would have it."""
    global_batch_size: int | None = None
    """Sequences per optimizer step; None: the files do not contain it."""


def _accept_all(view: CheckpointView, facts: StrategyFacts) -> None:
    """Accept every view."""


def _are_kept(checkpoint: Path) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Format:
    """One of the ways in which strategies write a checkpoint."""

    name: str
    """As `StrategyFacts.file_format` has it."""
    label: str
    """What messages call it."""
    wrote: Callable[[Path], bool]
    """Whether the files of a checkpoint are of this format."""
    origin: Callable[[Path, int], Origin]
    """Called with a checkpoint without a manifest and its number of ranks; returns what its files tell."""
    read: Callable[[Path], CheckpointView]
    """Reads a checkpoint."""
    write: Writer
    """Writes one."""
    check: Callable[[CheckpointView, StrategyFacts], None] = _accept_all
    """Raises a `CheckpointError` if a strategy of this format cannot load a view."""
    keeps_tensor_files: Callable[[Path], bool] = _are_kept
    """Whether another number of ranks, or another strategy of this format, reads the tensor files of a checkpoint."""
    drops_empty_groups: bool = False
    """Whether an optimizer that is read from it has no empty parameter groups."""
