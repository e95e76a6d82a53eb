"""What is pickled inside a checkpoint, followed without running it.

A pickle is a program: loading one runs what it names. hfscale itself loads none, but torch, Accelerate and DeepSpeed
load some when they resume (`optimizer.pt`, ZeRO's `*_states.pt`, the values in a distributed checkpoint). So before
they may, every pickle is followed with stand-ins for all that it names, and refused where it names anything but what
these libraries themselves put into checkpoints.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from hfscale.checkpoint.dcp_metadata import METADATA_NAME, read_dcp_metadata
from hfscale.checkpoint.manifest import checkpoint_files
from hfscale.errors import CheckpointError

_SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
_NEVER_LOADED = ("training_args.bin",)  # Trainer writes it and reads it back nowhere
_ALLOWED = {
    "collections": ("OrderedDict", "defaultdict"),
    **dict.fromkeys(
        ("builtins", "__builtin__"),
        ("set", "frozenset", "slice", "complex", "bytearray", "list", "dict", "tuple", "int", "float", "bool"),
    ),  # the second: as protocol 2 writes it
    "_codecs": ("encode",),  # how older protocols write bytes
    "numpy": ("dtype", "ndarray"),
    "numpy.dtypes": ("UInt32DType", "Int64DType", "Float64DType", "BoolDType"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state"),
    # Tensors and parameters with attributes, as ZeRO-3's have; torch's own list for `weights_only` names both.
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.tensor": ("Replicate", "Shard", "Partial"),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
_TORCH_VALUES = ("Size", "device", "Tensor", "strided", "preserve_format", "contiguous_format")


def check_pickles(checkpoint: Path) -> None:
    """Read every pickle of `checkpoint` that a library may load, and make sure that it only builds tensors and plain
    values.

    Raises:
        CheckpointError: naming the first file that names something else, or that cannot be read as a pickle.
    """
    for name in checkpoint_files(checkpoint):
        path = checkpoint / name
        if path.name in _NEVER_LOADED or not (path.suffix in _SUFFIXES or path.name == METADATA_NAME):
            continue
        try:
            _check_file(path)
        except _ForeignNameError as error:
            raise CheckpointError(
                f"{path} is refused: loading it would run {error}, which no training writes into a checkpoint; do not "
                "use this checkpoint"
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # a broken pickle raises anything
            raise CheckpointError(f"{path} cannot be read as what its name says: {error}") from None


def _check_file(path: Path) -> None:
    if path.name == METADATA_NAME:
        _check_distributed(path.parent)
        return
    with path.open("rb") as file:
        _check_archive(file)


def _check_archive(file: IO[bytes]) -> None:
    """A file of `torch.save`: a zip archive with one pickle in it."""
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith(".pkl"):
                with archive.open(name) as stream:
                    _Reader(stream).load()


def _check_distributed(folder: Path) -> None:
    """Values that are no tensors lie pickled between the tensors of a distributed checkpoint, and torch unpickles
    them whole. (Its tensors it reads with `weights_only`.)"""
    for entry in read_dcp_metadata(folder).values():
        if entry.shape is None:
            for chunk in entry.chunks:
                with (folder / chunk.file).open("rb") as file:
                    file.seek(chunk.start)
                    _check_archive(io.BytesIO(file.read(chunk.length)))


class _Inert:
    """Stands for everything that a pickle names: it can be called, filled and put into sets, and does nothing."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """As the opcodes that fill lists and sets call it."""

    extend = add = update = append


class _Reader(pickle.Unpickler):
    """Follows a pickle with stand-ins for all that it names, so that no name hides behind another."""

    def find_class(self, module: str, name: str) -> Any:
        is_torch_value = module == "torch" and (name in _TORCH_VALUES or name.endswith("Storage"))
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_torch_value or is_dtype or name in _ALLOWED.get(module, ())):
            raise _ForeignNameError(f"{module}.{name}")
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


class _ForeignNameError(Exception):
    pass
