"""What DeepSpeed writes: the engine collects its partitions, and the writing of them is deferred."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer

from hfscale.checkpoint.captures.capture import Capture, LiveState
from hfscale.checkpoint.captures.unsharded import why_adapters_are_computed
from hfscale.checkpoint.contents import fits_in_host_memory, processes_on_this_host
from hfscale.checkpoint.host_copy import HostCopy


class ZeroCapture(Capture):
    """Has Trainer's own method write, except for what DeepSpeed's engine is given to write."""

    trainer_writes = True
    _deferred: "DeferredWrites | None" = None

    def why_synchronous(self) -> str | None:
        if not _can_defer(self._trainer):
            return "DeepSpeed's own engine writes"
        return why_adapters_are_computed(self._trainer)

    def prepare(self) -> None:
        self._deferred = DeferredWrites(self._trainer, self._host_copy)

    def live(self) -> LiveState:
        """Return nothing: how much the engine has to write is known when it writes, and then checked."""
        return LiveState()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        if self._deferred is None:  # training waits for each save
            yield
            return
        with self._deferred.collecting():
            yield

    def additions(self) -> Callable[[Path], None] | None:
        return None if self._deferred is None else self._deferred.write


class DeferredWrites:
    """Takes the place of DeepSpeed's checkpoint engine during a save, and writes later what the engine was given.

    DeepSpeed's engine gathers the tensors and names the files; only the writing is deferred, with copies in host
    memory. DeepSpeed itself clones the tensors of model states only. What does not fit into the host's free memory is
    written at once. Everything but `save` is answered by the original checkpoint engine.

    DeepSpeed's own asynchronous writers (`checkpoint.writer` in its config, 0.19.8) are not used: they write from
    another process at a time of their own and commit inside a later step, so that neither a manifest nor a rename can
    follow them.

    Args:
        trainer (`Trainer`): prepared for training under DeepSpeed.
        host_copy (`HostCopy`): keeps the buffers for the copies.
    """

    def __init__(self, trainer: Trainer, host_copy: HostCopy) -> None:
        self._deepspeed: Any = trainer.model_wrapped
        self._host_copy = host_copy
        self._original: Any = self._deepspeed.checkpoint_engine
        self._given: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file for later, or write it at once if it does not fit into memory. DeepSpeed calls it for each file.

        Args:
            state_dict (`Any`): the content, with live tensors.
            path (`str`): the path of the file.
        """
        wanted = self._host_copy.bytes_to_allocate(
            [*(given for given, _ in self._given), state_dict]
        )
        if fits_in_host_memory(wanted, copies=processes_on_this_host()):
            # It may lead through a link that is removed
            self._given.append((state_dict, os.path.realpath(path)))
        else:
            self._original.save(state_dict, path)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Have DeepSpeed save to this object within the `with` block, at whose end the tensors are copied."""
        self._given = []
        self._deepspeed.checkpoint_engine = self
        try:
            yield
        finally:
            self._deepspeed.checkpoint_engine = self._original
            copied = self._host_copy.take([state_dict for state_dict, _ in self._given])
            self._given = [
                (copy, path) for copy, (_, path) in zip(copied, self._given, strict=True)
            ]

    def write(self, folder: Path) -> None:
        """Write the copies, by the original engine, to the paths that DeepSpeed gave.

        Args:
            folder (`Path`): the folder of the checkpoint; it is not used, because the paths contain it.
        """
        given, self._given = self._given, []
        for state_dict, path in given:
            self._original.save(state_dict, path)


def _can_defer(trainer: Trainer) -> bool:
    """Return whether the DeepSpeed engine writes in the training process, at the moment when it is told to save."""
    engine = getattr(trainer.model_wrapped, "checkpoint_engine", None)
    return (
        engine is not None
        and not engine.is_decoupled()
        and type(engine).__name__ == "TorchCheckpointEngine"
    )
