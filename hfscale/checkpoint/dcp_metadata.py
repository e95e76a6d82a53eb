"""The `.metadata` of a torch distributed checkpoint, read without running anything that may be hidden in it.

torch writes it as a bare pickle and loads it with `pickle.load`, which runs what the file says. `torch.load` with
`weights_only=True` reads torch's own archives only, not a bare pickle; so this reader does what the Python manual
calls restricting globals: every name in the pickle must be one of the few that torch writes, and each of those is
built as a stand-in that only keeps its fields. No class or function of torch is called.
"""

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from hfscale.errors import CheckpointError

METADATA_NAME = ".metadata"
_LARGEST_BYTES = 2**30  # 10,000 tensors on 1,000 ranks take a tenth of it


class _Fields:
    """A stand-in for a dataclass of torch: whatever the pickle sets ends in `__dict__`."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.__dict__.update(fields, args=args)


class _TensorEntry(_Fields):
    pass


class _BytesEntry(_Fields):
    pass


class _Index(_Fields):
    """Where in the storage: a key, so it needs a hash before its fields are set."""


class _Properties(_Fields):
    def __setstate__(self, state: Any) -> None:
        # torch writes (dtype, layout, requires_grad, memory format, pin_memory)
        self.__dict__["dtype"] = state[0] if isinstance(state, tuple) and state else None


def _named(*args: Any) -> str:
    return str(args[0]) if args else ""


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_DTYPES = {name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Fields,
    (_METADATA, "TensorStorageMetadata"): _TensorEntry,
    (_METADATA, "BytesStorageMetadata"): _BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): _Fields,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "StorageMeta"): _Fields,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _named,
    (_FILESYSTEM, "_StorageInfo"): _Fields,
    ("torch.serialization", "_get_layout"): _named,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # as Python 3.13 writes it
    ("pathlib._local", "WindowsPath"): _path,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One piece of a tensor, or the whole of a value that is no tensor."""

    offsets: tuple[int, ...]
    """Where the piece begins in the whole tensor, per dimension."""
    sizes: tuple[int, ...]
    """Its size per dimension."""
    file: str
    """Name of the file that holds it, in the checkpoint's folder."""
    start: int
    """First byte in that file."""
    length: int
    """Bytes there: a torch archive of this one piece."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name of a distributed checkpoint."""

    shape: tuple[int, ...] | None
    """Of the whole tensor; None for a value that is no tensor."""
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


def read_dcp_metadata(folder: Path) -> dict[str, Entry]:
    """What lies where in the distributed checkpoint `folder`, by flattened name such as `model.lm_head.weight`.

    Call it before torch's own loader is let at a checkpoint that may come from somewhere else: a file that passes
    here holds no name but those of torch's metadata classes.

    Raises:
        CheckpointError: there is no `.metadata`, it is not one, or it names anything else.
    """
    path = folder / METADATA_NAME
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise CheckpointError(f"{path} is larger than 1 GiB: it is not the metadata of a checkpoint")
        found = _Reader(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a whole distributed checkpoint: it has no {METADATA_NAME}") from None
    except _ForbiddenName as error:
        raise CheckpointError(f"{path} is refused: it would load {error}, which no checkpoint needs") from None
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from None
    try:
        return _entries(found)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {error}") from None


class _ForbiddenName(Exception):  # noqa: N818 - private, and never seen
    pass


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise _ForbiddenName(f"'{module}.{name}'")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _ForbiddenName("a persistent object")


def _entries(found: Any) -> dict[str, Entry]:
    places: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for index, info in found.storage_data.items():
        offset = getattr(index, "offset", None)
        places.setdefault(index.fqn, []).append((tuple(offset) if offset is not None else (), info))
    entries = {}
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, _BytesEntry):
            chunks = [_chunk(name, (), (), info) for _, info in places[name]]
            entries[name] = Entry(shape=None, dtype=None, chunks=tuple(chunks))
            continue
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        chunks = [_chunk(name, offset, sizes[offset], info) for offset, info in places[name]]
        if len(chunks) != len(sizes):
            raise ValueError(f"'{name}' has {len(sizes)} pieces, of which {len(chunks)} are stored")
        if not isinstance(entry.properties.dtype, torch.dtype):
            raise ValueError(f"'{name}' has no dtype")
        entries[name] = Entry(shape=tuple(entry.size), dtype=entry.properties.dtype, chunks=tuple(chunks))
    return entries


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    if info.__dict__.get("transform_descriptors"):
        raise ValueError(f"'{name}' is compressed: save it without DCP extensions")
    file = str(info.relative_path)
    if PurePosixPath(file).name != file or file.startswith("."):
        raise ValueError(f"'{name}' lies in '{file}', which is not a plain file name")
    return Chunk(offsets=offsets, sizes=sizes, file=file, start=int(info.offset), length=int(info.length))
