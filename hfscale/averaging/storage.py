"""What checkpoints keep of an average, and how a training reads it, on any number of ranks under any strategy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hfscale.averaging.weights import AveragedWeights, Part, Snapshot, Trained
from hfscale.checkpoint.formats.average import (
    FOLDER,
    METADATA_NAME,
    AverageMetadata,
    read_average_metadata,
    snapshot_group,
    stored_groups,
)
from hfscale.checkpoint.formats.dcp import load_pieces
from hfscale.checkpoint.formats.pieces import Pieces
from hfscale.checkpoint.host_copy import HostCopy
from hfscale.trainer.strategies.tensors import full_shape, is_distributed_tensor


class StoredAverage:
    """Gives what a checkpoint keeps of an average (`hfscale.trainer.announced.SavedShards`).

    Args:
        weights (`AveragedWeights`): the average.
    """

    def __init__(self, weights: AveragedWeights) -> None:
        self._weights = weights
        self._host_copy = HostCopy()

    @property
    def _is_writer(self) -> bool:
        """Whether this rank writes: each rank that holds a part, or the main process where all hold the same."""
        return bool(self._weights.strategy.shards) or self._weights.trainer.args.should_save

    def _parts(self) -> list[list[Part]]:
        return [each.parts for each in self._weights.sets] if self._is_writer else []

    def bytes_to_allocate(self) -> int:
        """Return the host memory in bytes that the next copy would allocate on this rank."""
        return self._host_copy.bytes_to_allocate(self._parts())

    def take(self, *, copies: bool) -> Mapping[str, Any]:
        """Return this rank's parts, as pieces of the complete tensors.

        Args:
            copies (`bool`): whether they must not change with the next update.
        """
        parts = self._parts()
        if copies:
            parts = self._host_copy.take(parts)
        found = {}
        for group, of_set in zip(self._groups(), parts, strict=False):
            for one, part in zip(self._weights.trained, of_set, strict=True):
                if part is not None:
                    found[f"{group}.{one.name}"] = self._pieces(one, part)
        return found

    def files(self) -> Mapping[str, bytes]:
        """Return the file that says how the average was made."""
        return {METADATA_NAME: self._metadata().to_json().encode()}

    def _metadata(self) -> AverageMetadata:
        options = self._weights.options
        is_mean = options.ema_decay is None
        steps = tuple(each.step for each in self._weights.sets) if is_mean else ()
        return AverageMetadata(
            decay=options.ema_decay,
            every_steps=options.every_steps,
            updates=self._weights.updates,
            snapshots=steps,
            evaluated=options.evaluate_average,
        )

    def _groups(self) -> list[str]:
        return self._metadata().groups

    def _pieces(self, one: Trained, part: torch.Tensor) -> Pieces:
        """Return where a part is in the complete tensor."""
        strategy = self._weights.strategy
        parameter = one.parameter
        interval = strategy.interval(parameter)
        if interval is not None:
            start, end = interval
            return Pieces.of_interval(part[: end - start], full_shape(parameter), start)
        if is_distributed_tensor(parameter):
            # It may be on another device than the ranks of the mesh
            return Pieces.of_local(part, parameter)
        return Pieces.of(part)

    # ---- reading

    def load(self, checkpoint: Path) -> str | None:
        """Read this rank's part of the average of a checkpoint. Every rank must call it.

        Args:
            checkpoint (`Path`): the folder of the checkpoint.

        Returns:
            `str` or `None`: why the average starts anew instead, as a clause; None if it continues.

        Raises:
            CheckpointError: the files of the average are broken.
        """
        metadata = read_average_metadata(checkpoint)
        if metadata is None:
            return "it has no average"
        why_not = self._why_not(checkpoint, metadata)
        if why_not is not None:
            return why_not
        kept = self._kept_groups(metadata)
        sets = {group: self._weights.empty_set() for group in kept}
        for group, each in sets.items():
            each.step = kept[group]
        wanted: dict[str, Pieces] = {}
        for group, each in sets.items():
            wanted |= self._wanted(group, each)
        if wanted:
            load_pieces(checkpoint / FOLDER, wanted)
            self._equalize_copies(list(sets.values()))
        self._weights.sets = list(sets.values())
        self._weights.updates = metadata.updates
        return None

    def _kept_groups(self, metadata: AverageMetadata) -> dict[str, int]:
        """Return the groups that are read, with the step of each: of more snapshots than are kept, the last ones."""
        if metadata.decay is not None:
            return dict.fromkeys(metadata.groups, 0)
        steps = {snapshot_group(number): step for number, step in enumerate(metadata.snapshots)}
        limit = self._weights.options.average_last or 0
        return dict(list(steps.items())[-limit:])

    def _why_not(self, checkpoint: Path, metadata: AverageMetadata) -> str | None:
        """Return why the stored average cannot be continued."""
        is_mean = self._weights.options.ema_decay is None
        if is_mean != (metadata.decay is None):
            kinds = ("a moving average", "a mean of snapshots")
            return f"it has {kinds[not is_mean]}, and {kinds[is_mean]} is asked for"
        stored = stored_groups(checkpoint, metadata)
        if not stored:
            return None
        shapes = {name: ref.shape for name, ref in stored[0][1].items()}
        for one in self._weights.trained:
            own = tuple(full_shape(one.parameter))
            if shapes.get(one.name) != own:
                there = shapes.get(one.name, "no such weight")
                return f"'{one.name}' has the shape {list(own)} here, and there {there}"
        return None

    def _wanted(self, group: str, each: Snapshot) -> dict[str, Pieces]:
        wanted = {}
        for one, part in zip(self._weights.trained, each.parts, strict=True):
            if part is not None:
                wanted[f"{group}.{one.name}"] = self._pieces(one, part)
        return wanted

    def _equalize_copies(self, sets: list[Snapshot]) -> None:
        """Give the second copy of a tied weight on this rank what the last one has read."""
        places = {one.name: number for number, one in enumerate(self._weights.trained)}
        for each in sets:
            for number, one in enumerate(self._weights.trained):
                source = each.parts[places[one.name]]
                part = each.parts[number]
                if part is not None and part is not source:
                    assert source is not None
                    part.copy_(source)
