"""The DeepSpeed part of a checkpoint: its engine gathers and names, its writes of partitions come later.

DeepSpeed's own asynchronous writers (`checkpoint.writer` in its config, 0.19.8) write from another process at a time
of their own and commit inside a later step, so neither a manifest nor a rename can follow them. Instead, for the time
of one save, the engine's `checkpoint_engine` (DeepSpeed's interface for storage) keeps what it is given.
"""

import os
from pathlib import Path
from typing import Any

import psutil
from transformers import Trainer

from hfscale.checkpoint.snapshot import HostSnapshot, tensor_bytes

_SHARE_OF_FREE_MEMORY = 0.8


class DeferredWrites:
    """Stands in for a DeepSpeed checkpoint engine between `begin` and `end`; everything but `save` is the original's.

    What it is given is written later, from copies in host memory: DeepSpeed itself clones the tensors of model states
    only, and nothing else of them. What does not fit into the host's free memory is written at once.
    """

    def __init__(self, trainer: Trainer, snapshot: HostSnapshot) -> None:
        self._deepspeed, self._snapshot = trainer.model_wrapped, snapshot
        self._original = self._deepspeed.checkpoint_engine
        self._given: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> None:
        """In the place of the original's: keeps it in mind."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        wanted = sum(tensor_bytes(given) for given, _ in self._given) + tensor_bytes(state_dict)
        if wanted * ranks_here > psutil.virtual_memory().available * _SHARE_OF_FREE_MEMORY:
            self._original.save(state_dict, path)
        else:
            self._given.append((state_dict, path))

    def begin(self) -> None:
        """Take the original's place."""
        self._given = []
        self._deepspeed.checkpoint_engine = self

    def end(self) -> None:
        """Give the place back, and copy what the next step will change."""
        self._deepspeed.checkpoint_engine = self._original
        copied = self._snapshot.take([state_dict for state_dict, _ in self._given])
        self._given = [(copy, path) for copy, (_, path) in zip(copied, self._given, strict=True)]

    def write(self, folder: Path) -> None:
        """Write what was kept, by the original, to where it was to go."""
        given, self._given = self._given, []
        for state_dict, path in given:
            self._original.save(state_dict, path)


def can_defer(trainer: Trainer) -> bool:
    """Whether this engine writes in the process that trains, when it is told to."""
    engine = getattr(trainer.model_wrapped, "checkpoint_engine", None)
    return engine is not None and not engine.is_decoupled() and type(engine).__name__ == "TorchCheckpointEngine"
