"""Reads the pickles of a checkpoint without running code that may be hidden in them.

A pickle is a program: loading it imports and calls whatever it names. hfscale therefore never calls `pickle.load`. It
reads the three kinds of pickle that a checkpoint contains like this:

- *Archives of `torch.save`* (`optimizer.pt`, `scheduler.pt`, DeepSpeed's `*_states.pt`): `load_archive` calls
  `torch.load(weights_only=True)` and never retries without it. The few classes that DeepSpeed and NumPy add are
  replaced by the placeholders of this module, so none of their code runs.
- *The metadata of a torch distributed checkpoint (DCP)*: a bare pickle, which torch reads with `pickle.load` and which
  `weights_only=True` cannot read. `read_dcp_metadata` restricts globals as the Python manual describes: each name in
  the pickle must be one of those that torch writes, and is replaced by a placeholder that only stores fields.
- *Pickles that another library loads itself* when it resumes (torch, Accelerate, DeepSpeed): `check_pickles` reads
  each of them with inert placeholders first and rejects the checkpoint if one names anything that these libraries do
  not put into checkpoints.
"""

import contextlib
import io
import pickle
import re
import zipfile
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from hfscale.checkpoint.manifest import checkpoint_files
from hfscale.checkpoint.untrusted import (
    PICKLE_MEMBER,
    HostileFileError,
    check_archive,
    check_links,
    check_no_link,
    check_opcodes,
)
from hfscale.core.text_files import read_text
from hfscale.errors import CheckpointError

METADATA_NAME = ".metadata"
_MAX_VALUE_BYTES = 2**30
"""Longest value of a distributed checkpoint that is not a tensor, such as the position in the data."""
_MAX_LATEST_BYTES = 4096
_MAX_PATH = 4096
_DTYPES = {
    name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
}


_NUMPY_DTYPES = tuple(
    f"{kind}{bits}DType"
    for kind, widths in {
        "Int": (8, 16, 32, 64),
        "UInt": (8, 16, 32, 64),
        "Float": (16, 32, 64),
    }.items()
    for bits in widths
)
"""Names of NumPy's types of numbers in `numpy.dtypes`."""


class _ForbiddenNameError(Exception):
    """A pickle names something that is not on the list of allowed names; the message is that name."""


class _Fixed(type):
    """Type of placeholder classes: a pickle cannot set their attributes, which would affect the check of the next."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise _ForbiddenNameError(f"an attribute of {cls.__name__}")


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles and calls nothing but the placeholders that it is given.

    Args:
        pickled (`bytes`): the pickle.
        placeholder (`Callable[[str, str], Any]`): returns the object to use for a module and a name in it, or None if
            the name is forbidden.
        persistent_object (`Callable[[], Any]`, *optional*): returns the object to use for each persistent id (which
            `torch.save` writes for a tensor's storage); by default persistent ids are forbidden.
    """

    def __init__(
        self,
        pickled: bytes,
        placeholder: Callable[[str, str], Any],
        persistent_object: Callable[[], Any] | None = None,
    ) -> None:
        check_opcodes(pickled)
        super().__init__(io.BytesIO(pickled))
        self._placeholder = placeholder
        self._persistent_object = persistent_object

    def find_class(self, module: str, name: str) -> Any:
        found = self._placeholder(module, name)
        if found is None:
            raise _ForbiddenNameError(f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_object is None:
            raise _ForbiddenNameError("a persistent object")
        return self._persistent_object()


# ---- Archives of torch.save


class _NumpyPart:
    """Replaces the parts of a NumPy random state; the last element of an array's `state` are its bytes."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _FragmentAddress:
    """Replaces DeepSpeed's `fragment_address`: where a parameter's fragment lies in a flat partition."""

    numel: int
    start: int


class _ZeroStage(int):
    """Replaces DeepSpeed's `ZeroStageEnum`."""


class _LossScaler:
    """Replaces DeepSpeed's loss scalers for fp16."""


def safe_globals() -> list[Any]:
    """Return what torch may load with `weights_only` besides its own list, from pickles that `check_pickles` accepts.

    Trainer loads `optimizer.pt` and `scheduler.pt` so, and their states may have numbers and arrays of NumPy.
    """
    numpy_core = import_module(np.ndarray.__reduce__(np.zeros(0))[0].__module__)
    dtypes = [getattr(np.dtypes, name) for name in ("BoolDType", *_NUMPY_DTYPES)]
    plain = [set, frozenset, list, dict, tuple, int, float, bool, complex]
    return [numpy_core.scalar, numpy_core._reconstruct, np.ndarray, np.dtype, *dtypes, *plain]


RNG_STATE_CLASSES: tuple[tuple[type, str], ...] = tuple(
    (_NumpyPart, name)
    for name in (
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.UInt32DType",
    )
)
"""Placeholders for `load_archive`: what `rng_state*.pth` contains besides tensors and plain values."""

DEEPSPEED_CLASSES: tuple[tuple[type, str], ...] = (
    (_FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
)
"""Placeholders for `load_archive`: what DeepSpeed's files contain besides tensors and plain values."""


def load_archive(path: Path, allowed: Iterable[tuple[type, str]] = ()) -> Any:
    """Load a file of `torch.save` with `weights_only=True`; tensors are memory-mapped and read when they are used.

    Args:
        path (`Path`): the file.
        allowed (`Iterable[tuple[type, str]]`, *optional*): pairs of a placeholder class and the full name that it
            replaces, as `torch.serialization.safe_globals` takes them.

    Returns:
        `Any`: the saved object, with its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, broken, or names a class that is neither torch's own nor in `allowed`.
    """
    try:
        with path.open("rb") as file:
            check_archive(file)
        with (
            torch.serialization.safe_globals(list(allowed)) if allowed else contextlib.nullcontext()
        ):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except Exception as error:  # a broken archive raises exceptions of any type
        first = next(
            (line for line in str(error).splitlines() if "Unsupported" in line),
            str(error).split("\n")[0],
        )
        raise CheckpointError(
            f"{path} cannot be read without unpickling it: {first.strip()[:300]}"
        ) from None


# ---- The metadata of a torch distributed checkpoint


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One stored piece of a tensor, or the complete value of an entry that is not a tensor."""

    offsets: tuple[int, ...]
    """Index of the piece's first element in the full tensor, per dimension."""
    sizes: tuple[int, ...]
    """Elements of the piece per dimension."""
    file: str
    """Name of the file that holds the piece, in the checkpoint's folder."""
    start: int
    """Offset of the piece in that file, in bytes."""
    length: int
    """Length of the piece in that file, in bytes; it is a torch archive of its own."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of a distributed checkpoint."""

    shape: tuple[int, ...] | None
    """Shape of the full tensor; None for a value that is not a tensor."""
    dtype: torch.dtype | None
    """Data type of the tensor; None for a value that is not a tensor."""
    chunks: tuple[Chunk, ...]
    """The stored pieces."""


class _Fields(metaclass=_Fixed):
    """Replaces a dataclass of torch: the pickle sets its fields. It takes no arguments, since torch writes none."""


class _BytesEntry(_Fields):
    """Replaces `BytesStorageMetadata`, the entry of a value that is not a tensor."""


class _TensorProperties(_Fields):
    """Replaces `TensorProperties`, whose state is (dtype, layout, requires_grad, memory format, pin_memory)."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["dtype"] = state[0] if isinstance(state, tuple) and state else None


# A pickle can call these any number of times with the same arguments. So none copies an argument of any length, and
# none returns an object with attributes, which a pickle could change later.


def _ignored(*_: Any) -> None:
    pass


def _memory_format(owner: Any, name: Any) -> None:
    """Stand for `getattr`, by which Python 3.11.2 (that of Debian 12) writes the members of an enum.

    Raises:
        _ForbiddenNameError: it would get anything but one of torch's memory formats.
    """
    if owner is not _ignored or name not in _MEMORY_FORMATS:
        raise _ForbiddenNameError("builtins.getattr")


def _size(sizes: Any) -> Any:
    if type(sizes) is not tuple:
        raise ValueError("a shape is not a tuple")
    return sizes


def _dictionary() -> dict[Any, Any]:
    return {}


def _path(*parts: str) -> str:
    if sum(map(len, parts)) > _MAX_PATH:
        raise ValueError("a path is too long")
    return "/".join(parts)


_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_METADATA_PLACEHOLDERS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Fields,
    (_METADATA, "TensorStorageMetadata"): _Fields,
    (_METADATA, "BytesStorageMetadata"): _BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): _Fields,
    # It is a key of a dictionary. Like every class without __eq__ it is hashable before its fields are set.
    (_METADATA, "MetadataIndex"): _Fields,
    (_METADATA, "TensorProperties"): _TensorProperties,
    (_METADATA, "StorageMeta"): _Fields,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ignored,
    ("builtins", "getattr"): _memory_format,
    (_FILESYSTEM, "_StorageInfo"): _Fields,
    ("torch.serialization", "_get_layout"): _ignored,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _dictionary,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # as Python 3.13 writes it
    ("pathlib._local", "WindowsPath"): _path,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


def _metadata_placeholder(module: str, name: str) -> Any:
    return _METADATA_PLACEHOLDERS.get((module, name))


def read_dcp_metadata(folder: Path) -> dict[str, Entry]:
    """Read from the metadata which tensors and values the distributed checkpoint `folder` holds, and where.

    Call it before torch's own loader reads a checkpoint of unknown origin: a file that passes names nothing but
    torch's metadata classes.

    Returns:
        `dict[str, Entry]`: the entries by flattened name, such as `model.lm_head.weight`.

    Raises:
        CheckpointError: `.metadata` is missing or not the metadata of a checkpoint, or it names anything but torch's
            metadata classes.
    """
    path = folder / METADATA_NAME
    try:
        found = _RestrictedUnpickler(path.read_bytes(), _metadata_placeholder).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete distributed checkpoint: it has no {METADATA_NAME}"
        ) from None
    except _ForbiddenNameError as error:
        raise CheckpointError(
            f"{path} is refused: it would load '{error}', which no checkpoint needs"
        ) from None
    except HostileFileError as error:
        raise CheckpointError(f"{path} is refused: {error}") from None
    except Exception as error:  # a broken pickle raises exceptions of any type
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from None
    try:
        return _entries(found)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {error}") from None


def _entries(found: Any) -> dict[str, Entry]:
    if type(found.state_dict_metadata) is not dict or type(found.storage_data) is not dict:
        raise ValueError("its entries are not in dictionaries")
    stored: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for index, info in found.storage_data.items():
        offset = getattr(index, "offset", None)
        stored.setdefault(_text(index.fqn), []).append(
            (_size(offset) if offset is not None else (), info)
        )
    entries = {}
    for key, entry in found.state_dict_metadata.items():
        name = _text(key)
        if isinstance(entry, _BytesEntry):
            chunks = [_chunk(name, (), (), info) for _, info in stored[name]]
            entries[name] = Entry(shape=None, dtype=None, chunks=tuple(chunks))
            continue
        sizes = {_size(chunk.offsets): _size(chunk.sizes) for chunk in entry.chunks}
        chunks = [_chunk(name, offset, sizes[offset], info) for offset, info in stored[name]]
        if len(chunks) != len(sizes):
            raise ValueError(f"'{name}' has {len(sizes)} pieces, of which {len(chunks)} are stored")
        if not isinstance(entry.properties.dtype, torch.dtype):
            raise ValueError(f"'{name}' has no dtype")
        entries[name] = Entry(
            shape=_size(entry.size), dtype=entry.properties.dtype, chunks=tuple(chunks)
        )
    return entries


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a name is not text")
    return value


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    if info.__dict__.get("transform_descriptors"):
        raise ValueError(f"'{name}' is compressed: save it without DCP extensions")
    file = _text(info.relative_path)
    if PurePosixPath(file).name != file or file.startswith("."):
        raise ValueError(f"'{name}' is stored in '{file}', which is not a plain file name")
    numbers = (info.offset, info.length)
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"'{name}' is not stored at an offset with a length")
    return Chunk(offsets=offsets, sizes=sizes, file=file, start=info.offset, length=info.length)


# ---- Pickles that other libraries load

_SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
_NEVER_LOADED = ("training_args.bin",)  # Trainer writes it and never reads it
_LOADED_BY_TRAINER = ("optimizer.pt", "scheduler.pt")
_LATEST_NAMES = ("latest", "latest_universal")
"""Files of DeepSpeed that contain the name of the folder with its other files."""
FOLDER_NAME = re.compile(r"[A-Za-z0-9_\-]+")
"""Names of folders that may stand in such a file."""
_STORAGE_NAME = re.compile(r"[A-Za-z0-9]*Storage")
_CHECKPOINT_NAMES = {
    "collections": ("OrderedDict", "defaultdict"),
    **dict.fromkeys(
        ("builtins", "__builtin__"),
        (
            "set",
            "frozenset",
            "slice",
            "complex",
            "bytearray",
            "list",
            "dict",
            "tuple",
            "int",
            "float",
            "long",
            "bool",
        ),
    ),  # protocol 2 writes the second name
    "_codecs": ("encode",),  # how older protocols write bytes
    "numpy": ("dtype", "ndarray"),
    "numpy.dtypes": ("BoolDType", *_NUMPY_DTYPES),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "torch": (
        "Size",
        "device",
        "Tensor",
        "strided",
        "preserve_format",
        "contiguous_format",
        *_DTYPES,
    ),
    "torch._utils": (
        "_rebuild_tensor_v2",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        # Allocates nothing; the classes that it may make are listed here too
        "_rebuild_wrapper_subclass",
    ),
    # Tensors and parameters with attributes, as ZeRO-3 has them; torch's own list for `weights_only` has both names.
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.tensor": ("Replicate", "Shard", "Partial"),
    # States of adamw_torch_8bit and adamw_torch_4bit, which torchao itself declares safe for `weights_only`.
    "torchao.optim.subclass_8bit": ("OptimState8bit",),
    "torchao.optim.subclass_4bit": ("OptimState4bit",),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}


class _Inert(metaclass=_Fixed):
    """Replaces everything that a pickle names: it can be called, filled and put into sets, and has no effect."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore `value`; the opcodes that fill lists and sets call this."""

    extend = add = update = append


def _inert_placeholder(module: str, name: str) -> Any:
    is_storage = module == "torch" and _STORAGE_NAME.fullmatch(name) is not None
    is_known = is_storage or name in _CHECKPOINT_NAMES.get(module, ())
    return _Inert if is_known or f"{module}.{name}" in _names_of_torch() else None


def _names_of_torch() -> Container[str]:
    """Return what torch itself builds with `weights_only`, and what the user has added to that."""
    added = {f"{kind.__module__}.{kind.__qualname__}" for kind in _added_by_user()}
    return {*_get_allowed_globals(), *added}


def _added_by_user() -> list[Any]:
    kinds = torch.serialization.get_safe_globals()
    return [kind for kind in kinds if hasattr(kind, "__qualname__")]


def check_pickles(checkpoint: Path, names: Iterable[str] | None = None) -> None:
    """Check that the pickles of `checkpoint` that a library may load build only tensors and plain values.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        names (`Iterable[str]`, *optional*): the files to check; None: all, and the links of the checkpoint
            (`check_links`).

    Raises:
        CheckpointError: a file names something else, cannot be read as a pickle, is not of the only form in which
            torch writes it, or is a symbolic link, or DeepSpeed's `latest` does not name a folder of the checkpoint;
            the message names the first one.
    """
    if names is None:
        check_links(checkpoint)
        names = checkpoint_files(checkpoint)
    for name in names:
        path = checkpoint / name
        if name in _LATEST_NAMES:
            _check_latest(path)
        if path.name.endswith(METADATA_NAME) and path.name != METADATA_NAME:
            what = f"torch unpickles it where it cannot read {METADATA_NAME}, and no training writes it"
            raise CheckpointError(f"{path} is refused: {what}; do not use this checkpoint")
        if path.name in _NEVER_LOADED or not (
            path.suffix in _SUFFIXES or path.name == METADATA_NAME
        ):
            continue
        if path.name == METADATA_NAME:
            _check_distributed(path.parent)
        else:
            _check_archive(path)
            if name in _LOADED_BY_TRAINER:
                _check_loadable(path)


def _check_loadable(path: Path) -> None:
    """Check that torch loads a file of Trainer's as a resume will: its list of names is not all that it demands."""
    try:
        with torch.serialization.safe_globals(safe_globals()):
            torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises errors of several types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        named = [line for line in lines if line.startswith(("Can only", "Unsupported"))]
        reason = (named or lines or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} cannot be loaded again: torch refuses it with weights_only, as Trainer loads it ({reason}); keep "
            "tensors, numbers and plain dictionaries in the state"
        ) from None


def _check_latest(path: Path) -> None:
    if path.stat().st_size > _MAX_LATEST_BYTES:
        raise CheckpointError(f"{path} is refused: it is not the name of a folder")
    name = read_text(path, errors="replace").strip()
    if not FOLDER_NAME.fullmatch(name) or not (path.parent / name).is_dir():
        raise CheckpointError(f"{path} names '{name[:80]}', which is not a folder next to it")


def _check_archive(path: Path, start: int = 0, length: int | None = None) -> None:
    """Check an archive of `torch.save`, which contains one pickle: a file, or `length` bytes of one."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            stored: IO[bytes] = file if length is None else io.BytesIO(file.read(length))
            members = check_archive(stored)
            pickled = next(
                member for member in members if member.filename.partition("/")[2] == PICKLE_MEMBER
            )
            with zipfile.ZipFile(stored) as archive:
                _RestrictedUnpickler(archive.read(pickled), _inert_placeholder, _Inert).load()
    except _ForbiddenNameError as error:
        raise CheckpointError(
            f"{path} is refused: loading it would run '{error}', which is neither on torch's list for weights_only "
            "nor written by the libraries of a training; use a checkpoint whose states are tensors and plain values, "
            "or allow it with torch.serialization.add_safe_globals"
        ) from None
    except HostileFileError as error:
        raise CheckpointError(f"{path} is refused: {error}; do not use this checkpoint") from None
    except Exception as error:  # a broken pickle raises exceptions of any type
        reason = f"{type(error).__name__} {error}"
        raise CheckpointError(
            f"{path} cannot be read as a {path.suffix or path.name} file: {reason}"
        ) from None


def _check_distributed(folder: Path) -> None:
    """Check the pickled values of a distributed checkpoint.

    They are stored between the tensors, and torch unpickles them without restriction. (It reads the tensors with
    `weights_only`.)
    """
    for name, entry in read_dcp_metadata(folder).items():
        if entry.shape is None:
            for chunk in entry.chunks:
                check_no_link(folder, chunk.file)
                if chunk.length > _MAX_VALUE_BYTES:
                    what = f"its value '{name}' has {chunk.length} bytes and is no tensor"
                    raise CheckpointError(f"{folder / chunk.file} is refused: {what}")
                _check_archive(folder / chunk.file, chunk.start, chunk.length)
