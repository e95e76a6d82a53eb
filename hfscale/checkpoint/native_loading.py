"""Resumes a model that transformers has distributed while it loaded it, from a checkpoint of any layout.

Its checkpoints are written by `hfscale.checkpoint.captures.native`.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer

from hfscale.checkpoint.captures.native import (
    names_by_group,
    optimized,
    stored_name,
    weights,
)
from hfscale.checkpoint.contents import rng_name
from hfscale.checkpoint.formats.dcp import load_pieces
from hfscale.checkpoint.formats.parallel import FOLDER, PART, read_parallel_metadata, restore_groups
from hfscale.checkpoint.formats.pieces import Pieces
from hfscale.checkpoint.loading import keeps_steps_on_device, readable_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.pickles import Entry, read_dcp_metadata
from hfscale.checkpoint.rng_states import copy_first_rng_state
from hfscale.core.collectives import START
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError
from hfscale.facts.strategies import facts_of
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy


class NativeLoading:
    """Reads checkpoints in place of the methods by which a Trainer resumes.

    A checkpoint of another strategy is converted first.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer whose model is natively distributed.
    """

    def __init__(self, adapter: TrainerAdapter) -> None:
        self._trainer = adapter.trainer
        self._readable: dict[str, Path] = {}
        self._load_rng_of_rank = adapter.checkpoints.replace_loading(
            model=self.load_model,
            optimizer_and_scheduler=self.load_optimizer_and_scheduler,
            rng_state=self.load_rng_state,
            best_model=self.load_best_model,
        )

    def load_model(self, checkpoint: str, model: nn.Module | None = None) -> None:
        """Read this rank's part of the weights, in place. Every rank must call it.

        Args:
            checkpoint (`str`): the folder of the checkpoint.
            model (`nn.Module`, *optional*): not used; Trainer passes it.

        Raises:
            CheckpointError: the checkpoint cannot be converted, is broken, or is of another model.
        """
        folder = self._folder(checkpoint)
        wanted = {f"model.{name}": tensor for name, tensor in weights(self._trainer).items()}
        with START.agreed("native: load the weights"):
            _read(folder, wanted)

    def load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read this rank's part of the optimizer's state, its options and the position of the schedule.

        Every rank must call it.

        Args:
            checkpoint (`str`, *optional*): the folder of the checkpoint; None: nothing is read.

        Raises:
            CheckpointError: the checkpoint is broken, or of another model.
        """
        if checkpoint is None:
            return
        folder = self._folder(checkpoint)
        with START.agreed("native: load the optimizer"):
            _load_optimizer(self._trainer, folder)

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each rank's own random state. In another layout all ranks get that of the first rank.

        They all start a run with one seed, and ranks that share a matrix must drop out the same elements.

        Args:
            checkpoint (`str`, *optional*): the folder of the checkpoint; None: nothing is read.
        """
        if checkpoint is None:
            return
        folder = self._folder(checkpoint)
        if read_parallel_metadata(folder).layout == Strategy.of(self._trainer).manifest_layout():
            self._load_rng_of_rank(str(folder))
            return
        with tempfile.TemporaryDirectory() as copies:
            world_size = self._trainer.args.world_size
            copy_first_rng_state(
                folder, Path(copies) / rng_name(self._trainer), world_size=world_size
            )
            self._load_rng_of_rank(copies)

    def load_best_model(self) -> None:
        """Read the weights of the best checkpoint. Every rank must call it."""
        self.load_model(str(self._trainer.state.best_model_checkpoint))

    def _folder(self, checkpoint: str) -> Path:
        """Return the checkpoint, or its conversion if another strategy has written it. Every rank must call it.

        Raises:
            CheckpointError: it has no manifest and is of another strategy, so that it cannot be converted.
            LayoutError: the conversion failed.
        """
        if checkpoint not in self._readable:
            has_manifest = (Path(checkpoint) / MANIFEST_NAME).is_file()
            own_layout = Strategy.of(self._trainer).facts.file_layout
            is_readable = (
                has_manifest
                and facts_of(read_manifest(checkpoint).strategy).file_layout == own_layout
            )
            readable: str | None = checkpoint
            if not is_readable:
                readable = readable_checkpoint(
                    self._trainer.args, checkpoint, strategy=Strategy.of(self._trainer).name
                )
            self._readable[checkpoint] = Path(str(readable))
        folder = self._readable[checkpoint]
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no state that a model loaded with distributed_config can resume from, and no "
                "manifest: convert it with `hfscale checkpoints convert "
                f"{checkpoint} NEW_FOLDER --to native --global-batch-size N`, or load its weights with from_pretrained"
            )
        return folder


def _read(checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read tensors in place, each rank its own parts, from a checkpoint of any layout.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        tensors (`Mapping[str, torch.Tensor]`): by name in the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or cannot be read.
    """
    # Nothing is unpickled before it has been checked
    entries = read_dcp_metadata(checkpoint / FOLDER)
    packed = read_parallel_metadata(checkpoint).packed
    wanted: dict[str, Pieces] = {}
    for name, tensor in tensors.items():
        wanted |= _pieces_to_read(checkpoint, entries, packed, name, tensor)
    load_pieces(checkpoint / FOLDER, wanted)


def _pieces_to_read(
    checkpoint: Path,
    entries: Mapping[str, Entry],
    packed: Mapping[str, int],
    name: str,
    tensor: torch.Tensor,
) -> dict[str, Pieces]:
    """Return what this rank reads of a tensor, by name: `ParallelTrainer` stores a packed matrix in parts.

    Raises:
        CheckpointError: the tensor is missing or has another shape.
    """
    whole = Pieces.of(tensor)
    if name in entries:
        _check_entry(checkpoint, name, entries[name], tensor.shape)
        return {name: whole}
    parts = [part for part in entries if part.startswith(name + PART)]
    own = name.partition(".")[2]
    dim = packed.get(own, packed.get(own.rpartition(".")[0]))
    if not parts or dim is None:
        raise CheckpointError(
            f"{checkpoint} does not hold this model: it has no '{own}'; resume with the model of it"
        )
    found = {}
    start = 0
    for number in range(len(parts)):
        part = f"{name}{PART}{number}"
        shape = list(tensor.shape)
        shape[dim] //= len(parts)
        if part not in entries:
            raise CheckpointError(
                f"{checkpoint}: {len(parts)} parts of '{own}' are stored, and part {number} is not"
            )
        _check_entry(checkpoint, part, entries[part], torch.Size(shape))
        found[part] = whole.narrow(dim, start, shape[dim])
        start += shape[dim]
    return found


def _check_entry(checkpoint: Path, name: str, entry: Entry, shape: torch.Size) -> None:
    """Check the stored shape of a tensor, and that all its elements are stored.

    Raises:
        CheckpointError: the shape is another one, or elements are missing.
    """
    own = name.partition(".")[2]
    if entry.shape is not None and entry.shape != tuple(shape):
        is_of_experts = (
            len(shape) > 2
            and len(entry.shape) == len(shape)
            and entry.shape[1:] == tuple(shape)[1:]
        )
        experts = f" ({entry.shape[0]} experts instead of {shape[0]})" if is_of_experts else ""
        raise CheckpointError(
            f"{checkpoint} does not hold this model: '{own}' has the shape {list(entry.shape)} there and "
            f"{list(shape)} here{experts}; resume with the model that wrote it, or start from scratch in another "
            "output_dir"
        )
    stored = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
    if entry.shape is None or stored != shape.numel():
        raise CheckpointError(
            f"{checkpoint}: {stored} of the {shape.numel()} elements of '{own}' are stored"
        )


def _load_optimizer(trainer: Trainer, checkpoint: Path) -> None:
    """Read states, options and schedule; see `NativeLoading.load_optimizer_and_scheduler`."""
    optimizer = Strategy.of(trainer).torch_optimizer()
    entries = read_dcp_metadata(checkpoint / FOLDER)
    keys = _keys_of_states(entries)
    has_steps_on_device = keeps_steps_on_device(optimizer)
    wanted: dict[str, torch.Tensor] = {}
    for full_name, parameter in optimized(trainer):
        own = stored_name(full_name)
        state: dict[str, torch.Tensor] = {}
        for key in sorted(keys.get(own, ())):
            entry = entries.get(f"optimizer.{own}.{key}")
            if entry is not None and entry.shape == ():
                device = parameter.device if has_steps_on_device else torch.device("cpu")
                state[key] = torch.zeros((), dtype=torch.float32, device=device)
            else:
                state[key] = torch.zeros_like(parameter.data)
            wanted[f"optimizer.{own}.{key}"] = state[key]
        if state:
            optimizer.state[parameter] = state
    _read(checkpoint, wanted)
    assert trainer.lr_scheduler is not None  # Trainer makes it before it loads a checkpoint
    restore_groups(
        checkpoint, optimizer.param_groups, names_by_group(trainer), trainer.lr_scheduler
    )


def _keys_of_states(entries: Mapping[str, Entry]) -> dict[str, set[str]]:
    """Return the keys of the optimizer's states (`exp_avg`, `step`, …) that are stored of each parameter."""
    keys: dict[str, set[str]] = {}
    for name in entries:
        kind, _, rest = name.partition(".")
        parameter, _, key = rest.rpartition(".")
        if kind == "optimizer":
            keys.setdefault(parameter, set()).add(key.partition(PART)[0])
    return keys
