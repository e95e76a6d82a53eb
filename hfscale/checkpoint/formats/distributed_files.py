"""One distributed checkpoint (torch DCP), read and written without a process group, piece by piece.

What it holds is told by its metadata, which `hfscale.checkpoint.dcp_metadata` reads; the tensors lie in torch's
archives, one for each piece.
"""

import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from hfscale.checkpoint.dcp_metadata import Chunk, Entry
from hfscale.checkpoint.formats.view import TensorRef
from hfscale.errors import CheckpointError


def read_value(folder: Path, chunk: Chunk) -> Any:
    """A tensor's piece, or a value that is no tensor.

    Raises:
        CheckpointError: it is broken or would have to be unpickled.
    """
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        stored = file.read(chunk.length)
    try:
        return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive raises anything
        raise CheckpointError(f"{folder / chunk.file} cannot be read: {str(error).splitlines()[0][:200]}") from None


def tensor_ref(folder: Path, name: str, entry: Entry) -> TensorRef:
    """The tensor `name`, put together from its pieces when it is read."""
    shape, dtype = entry.shape, entry.dtype
    assert shape is not None
    assert dtype is not None

    def read() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for chunk in entry.chunks:
            piece = read_value(folder, chunk)
            if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != chunk.sizes:
                raise CheckpointError(f"{folder / chunk.file}: '{name}' is not the piece that the metadata describes")
            place = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = piece
            covered += piece.numel()
        if covered != whole.numel():
            raise CheckpointError(f"{folder}: {covered} of the {whole.numel()} elements of '{name}' are stored")
        return whole

    return TensorRef(shape=shape, dtype=dtype, read=read)


def save_refs(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write `tree`, nested dictionaries of `TensorRef` and plain values, under names joined by dots; tensors are read
    one at a time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant here
        state_dict_saver.save(
            _without_data(tree),
            storage_writer=filesystem.FileSystemWriter(folder),
            planner=_ReadingPlanner(dict(_flatten(tree, ""))),
            no_dist=True,
        )


def _without_data(tree: Any) -> Any:
    """The same tree with tensors that take no memory, from which DCP plans what to write."""
    if isinstance(tree, TensorRef):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    return {key: _without_data(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(tree, TensorRef):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor when its turn to be written has come."""

    def __init__(self, refs: Mapping[str, TensorRef]) -> None:
        super().__init__()
        self._refs = refs

    def lookup_object(self, index: MetadataIndex) -> Any:
        ref = self._refs.get(index.fqn)
        return super().lookup_object(index) if ref is None else ref.read()
