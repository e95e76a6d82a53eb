"""The rectangles of a full tensor that a rank holds of it, and torch's planners of distributed checkpoints for them.

torch describes the shard of a DTensor as one rectangle of the full tensor. That is wrong where tensor parallelism has
packed several matrices into one parameter, such as gate and up of an MLP, and shards each of them: then the shard is
several rectangles, and torch would store them at the place of the first. transformers communicates in each save to
make one rectangle of them (`_redistribute_state_dict`). Here each rectangle is written and read by itself, so nothing
is sent and no memory is needed.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Placement, Shard

from hfscale.core.torch_internals import StridedShard
from hfscale.errors import CheckpointError

Interval = tuple[int, int]
"""Start and end of indices along one dim."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One rectangle of a full tensor."""

    offsets: tuple[int, ...]
    """Its first index along each dim."""
    tensor: torch.Tensor
    """Its values; a view of what the rank holds."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Return the rectangle as torch's checkpoints describe it."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.size())


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a rank holds of a full tensor."""

    shape: torch.Size
    """Shape of the full tensor."""
    pieces: tuple[Piece, ...]
    """Its rectangles; there are none if the rank holds nothing."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Pieces":
        """Return the pieces of a DTensor; of another tensor, one piece that is the full tensor.

        Args:
            tensor (`torch.Tensor`): the tensor, of any shape.

        Raises:
            CheckpointError: the placements of the DTensor do not describe the shard that the rank holds.
        """
        if not isinstance(tensor, DTensor):
            return cls(
                shape=tensor.shape, pieces=(Piece(offsets=(0,) * tensor.ndim, tensor=tensor),)
            )
        return cls.of_local(tensor.to_local(), tensor)

    @classmethod
    def of_local(cls, local: torch.Tensor, tensor: DTensor) -> "Pieces":
        """Return the pieces of what a rank holds of a tensor that is placed as another one, on any device.

        Args:
            local (`torch.Tensor`): what this rank holds, of the shape that its shard of `tensor` has.
            tensor (`DTensor`): the other one.

        Raises:
            CheckpointError: the placements do not describe the shard.
        """
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # every rank is on the meshes of its tensors
        intervals = held_intervals(tensor.shape, tensor.placements, mesh.shape, coordinate)
        held = [sum(end - start for start, end in of_dim) for of_dim in intervals]
        if held != list(local.shape):
            raise CheckpointError(
                f"a tensor of the shape {list(tensor.shape)} with the placements {tensor.placements} over "
                f"{tuple(tensor.device_mesh.shape)} ranks has a shard of the shape {list(local.shape)}, not {held}"
            )
        return cls(shape=tensor.shape, pieces=tuple(_cut(local, intervals)))

    @classmethod
    def of_interval(cls, flat: torch.Tensor, shape: Sequence[int], start: int) -> "Pieces":
        """Return the pieces of a rank that holds an interval of the flattened tensor, as ZeRO's partitions are.

        Args:
            flat (`torch.Tensor`): the values, with one dim; the pieces are views of it.
            shape (`Sequence[int]`): shape of the full tensor.
            start (`int`): position of the first value in the full tensor.
        """
        pieces = tuple(_rectangles(flat, tuple(shape), start))
        return cls(shape=torch.Size(shape), pieces=pieces)

    def narrow(self, dim: int, start: int, length: int) -> "Pieces":
        """Return what the rank holds of a part of the full tensor.

        Args:
            dim (`int`): the dim along which the part is cut out.
            start (`int`): its first index.
            length (`int`): its length.
        """
        shape = list(self.shape)
        shape[dim] = length
        found = []
        for piece in self.pieces:
            first = max(piece.offsets[dim], start)
            last = min(piece.offsets[dim] + piece.tensor.shape[dim], start + length)
            if first < last:
                offsets = (*piece.offsets[:dim], first - start, *piece.offsets[dim + 1 :])
                tensor = piece.tensor.narrow(dim, first - piece.offsets[dim], last - first)
                found.append(Piece(offsets=offsets, tensor=tensor))
        return Pieces(shape=torch.Size(shape), pieces=tuple(found))

    def at(self, offsets: Sequence[int] | None) -> torch.Tensor:
        """Return the values of the piece that begins at `offsets`.

        Args:
            offsets (`Sequence[int]`): its first index along each dim.
        """
        return next(
            piece.tensor
            for piece in self.pieces
            if offsets is not None and piece.offsets == tuple(offsets)
        )


def held_intervals(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> list[list[Interval]]:
    """Return the indices that a rank holds along each dim.

    Args:
        shape (`Sequence[int]`): shape of the full tensor.
        placements (`Sequence[Placement]`): how it is placed along each mesh axis; the first one applies first.
        mesh_shape (`Sequence[int]`): number of ranks along each mesh axis.
        coordinate (`Sequence[int]`): the rank's number along each mesh axis.
    """
    found: list[list[Interval]] = [[(0, size)] for size in shape]
    for placement, ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
        if not isinstance(placement, Shard | StridedShard):
            continue  # it is replicated along this axis
        groups = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        found[placement.dim] = [
            interval
            for group in range(groups)
            for interval in _chunk(_chunk(found[placement.dim], groups, group), ranks, rank)
        ]
    return found


def _chunk(intervals: Sequence[Interval], chunks: int, index: int) -> list[Interval]:
    """Return the chunk that `torch.chunk` makes of the indices; it is empty where torch makes fewer chunks."""
    length = math.ceil(sum(end - start for start, end in intervals) / chunks)
    first = length * index
    found = []
    for start, end in intervals:
        begin = max(start + first, start)
        stop = min(start + first + length, end)
        if begin < stop:
            found.append((begin, stop))
        first -= end - start
    return found


def _cut(local: torch.Tensor, intervals: Sequence[Sequence[Interval]]) -> list[Piece]:
    """Cut the shard of a rank into its rectangles; in the shard they follow each other along each dim."""
    along = []
    for of_dim in intervals:
        lengths = [end - start for start, end in of_dim]
        positions = itertools.accumulate(lengths, initial=0)
        along.append(
            [
                (start, at, length)
                for (start, _), at, length in zip(of_dim, positions, lengths, strict=False)
            ]
        )
    pieces = []
    for rectangle in itertools.product(*along):
        tensor = local
        for dim, (_, at, length) in enumerate(rectangle):
            tensor = tensor.narrow(dim, at, length)
        pieces.append(Piece(offsets=tuple(start for start, _, _ in rectangle), tensor=tensor))
    return pieces


def _rectangles(flat: torch.Tensor, shape: tuple[int, ...], start: int) -> Iterator[Piece]:
    """Cut an interval of a flattened tensor into rectangles: the rest of a row, complete rows, a part of a row."""
    if flat.numel() == 0:
        return
    if len(shape) < 2:
        offsets = (start,) * len(shape)
        yield Piece(offsets=offsets, tensor=flat.view(shape if not shape else -1))
        return
    row = math.prod(shape[1:])
    first, before = divmod(start, row)
    in_first = min((row - before) % row, flat.numel())
    full_rows = (flat.numel() - in_first) // row
    after_rows = in_first + full_rows * row
    if in_first:
        yield from _in_row(flat[:in_first], shape, first, before)
        first += 1
    if full_rows:
        offsets = (first, *(0 for _ in shape[1:]))
        yield Piece(offsets=offsets, tensor=flat[in_first:after_rows].view(full_rows, *shape[1:]))
    yield from _in_row(flat[after_rows:], shape, first + full_rows, 0)


def _in_row(flat: torch.Tensor, shape: tuple[int, ...], row: int, start: int) -> Iterator[Piece]:
    for piece in _rectangles(flat, shape[1:], start):
        yield Piece(offsets=(row, *piece.offsets), tensor=piece.tensor.unsqueeze(0))


class PieceSavePlanner(DefaultSavePlanner):
    """Writes `Pieces`, and each DTensor with a strided shard, in rectangles; torch's planner does everything else."""

    def create_local_plan(self) -> SavePlan:
        """Return what this rank would write."""
        plan = super().create_local_plan()
        self._pieces: dict[str, Pieces] = {}
        for name, value in self.state_dict.items():
            if isinstance(value, Pieces):
                self._pieces[name] = value
            elif _is_strided(value):
                self._pieces[name] = Pieces.of(value)
        others = [item for item in plan.items if item.index.fqn not in self._pieces]
        own = [
            WriteItem(
                index=MetadataIndex(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties.create_from_tensor(piece.tensor),
                    size=pieces.shape,
                ),
            )
            for name, pieces in self._pieces.items()
            for piece in pieces.pieces
        ]
        self.plan = SavePlan([*others, *own], planner_data=plan.planner_data)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of one rectangle."""
        pieces = self._pieces.get(index.fqn)
        return super().lookup_object(index) if pieces is None else pieces.at(index.offset)


def _is_strided(value: Any) -> bool:
    return isinstance(value, DTensor) and any(
        isinstance(placement, StridedShard) for placement in value.placements
    )


class PieceLoadPlanner(DefaultLoadPlanner):
    """Reads the rectangles of this rank, in place, from a distributed checkpoint of any layout.

    Args:
        wanted (`Mapping[str, Pieces]`): what is read, by name in the checkpoint.
    """

    def __init__(self, wanted: Mapping[str, Pieces]) -> None:
        super().__init__()
        self._wanted = wanted

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads."""
        assert self.metadata is not None  # torch sets it before
        items = []
        for name, pieces in self._wanted.items():
            stored: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(
                name, stored, [piece.chunk for piece in pieces.pieces]
            )
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return where the values of one rectangle go."""
        return self._wanted[index.fqn].at(index.offset)
